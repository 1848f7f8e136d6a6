# SPDX-License-Identifier: Apache-2.0
"""Bodies that a client has compressed."""

import zlib

from flashinfer_backend.openai.errors import ApiError

ENCODINGS = ("gzip", "deflate")


def encoding_of(header: str, transfer: str) -> str | None:
    """The encoding that a Content-Encoding names, None without any. Raises ApiError for others, and for a
    Transfer-Encoding with another coding than chunked."""
    if transfer.strip().lower() not in ("", "chunked"):
        raise ApiError(f"the body's Transfer-Encoding is {transfer.strip()[:60]}; it should be chunked", 501)
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
    reader = zlib.decompressobj(_format(body, encoding))
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


def _format(body: bytes, encoding: str) -> int:
    """zlib's number of the format. deflate is zlib's own (RFC 9110), whose header some clients leave away."""
    if encoding == "gzip":
        return zlib.MAX_WBITS + 16
    # zlib's header (RFC 1950, 2.2).
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
