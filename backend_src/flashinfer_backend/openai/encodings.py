# SPDX-License-Identifier: Apache-2.0
"""Bodies that a client has compressed."""

from __future__ import annotations

import zlib

from flashinfer_backend.openai.errors import ApiError

ENCODINGS = ("gzip", "deflate")
_EITHER = zlib.MAX_WBITS | 32  # zlib tells gzip and zlib by their first bytes


def encoding_of(header: str) -> str | None:
    """The encoding that a Content-Encoding names, None without any. Raises ApiError for others."""
    name = header.strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return None
    if name not in ENCODINGS:
        raise ApiError(
            f"the body's Content-Encoding is {header.strip()[:60]}; it should be {', '.join(ENCODINGS)} or"
            " identity",
            415,
        )
    return name


def decompressed(body: bytes, encoding: str, most: int) -> bytes | None:
    """The body; None where it has more than `most` bytes. Raises ApiError where it cannot be read."""
    # RFC 9110: deflate is in zlib's format; some clients leave that away.
    bits = -zlib.MAX_WBITS if encoding == "deflate" and not _has_header(body) else _EITHER
    reader = zlib.decompressobj(bits)
    try:
        whole = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise ApiError(f"the body is not in {encoding}, as its Content-Encoding says: {error}") from None
    if len(whole) > most:
        return None
    if not reader.eof:
        raise ApiError(f"the body's {encoding} ends too early")
    if reader.unused_data:
        raise ApiError(f"the body's {encoding} has {len(reader.unused_data)} bytes behind its end")
    return whole


def _has_header(body: bytes) -> bool:
    """Of zlib: RFC 1950, 2.2."""
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
