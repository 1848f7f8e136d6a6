# SPDX-License-Identifier: Apache-2.0
"""Bodies that a client has compressed."""

import zlib

from flashinfer_backend.openai.errors import ApiError

ENCODINGS = ("gzip", "deflate")
# A gzip's members begin so (RFC 1952, 2.3); hardly anything else in one does. Each takes time, even an empty
# one.
MEMBER, MOST_MEMBERS = b"\x1f\x8b\x08", 4096
GZIP, PIECE = zlib.MAX_WBITS + 16, 1 << 16


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
    try:
        whole = _gunzipped(body, most) if encoding == "gzip" else _inflated(body, most)
    except zlib.error as error:
        raise ApiError(f"the body is not in {encoding}, as its Content-Encoding says: {error}") from None
    except EOFError:
        raise ApiError(f"the body's {encoding} ends too early") from None
    return None if len(whole) > most else whole


def _gunzipped(body: bytes, most: int) -> bytes:
    """At most one byte more than `most`. Raises ApiError, zlib.error or EOFError. Reads a piece at a time, as
    zlib copies what lies behind a member."""
    if (members := body.count(MEMBER)) > MOST_MEMBERS:
        raise ApiError(
            f"the body's gzip has {members} members; it should have at most {MOST_MEMBERS}: compress the"
            " whole body at once"
        )
    whole, reader, begun = bytearray(), None, False
    for start in range(0, len(body), PIECE):
        piece = body[start : start + PIECE]
        while piece and len(whole) <= most:
            if reader is None:
                if not (piece := piece.lstrip(b"\0") if begun else piece):
                    break  # only padding is left of it
                reader, begun = zlib.decompressobj(GZIP), True
            whole += reader.decompress(piece, most + 1 - len(whole))
            piece = reader.unused_data
            if reader.eof:
                reader = None
    if reader is not None and len(whole) <= most:
        raise EOFError
    return bytes(whole)


def _inflated(body: bytes, most: int) -> bytes:
    """The same of deflate, which is in zlib's format (RFC 9110); some clients leave that away."""
    # zlib's header (RFC 1950, 2.2).
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    reader = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    whole = reader.decompress(body, most + 1)
    if len(whole) <= most and not reader.eof:
        raise EOFError
    if reader.unused_data:
        raise ApiError(f"the body's deflate has {len(reader.unused_data)} bytes behind its end")
    return whole
