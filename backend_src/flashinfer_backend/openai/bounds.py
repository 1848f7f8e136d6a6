# SPDX-License-Identifier: Apache-2.0
"""Bodies are compared with the table of bounds (core/bounds.py) before JSON becomes objects, which take many
times its bytes, and seconds for millions of values."""

from functools import cache

import msgspec
from msgspec import Raw

from flashinfer_backend.core.bounds import FIELDS, NUMBER, Bound, check
from flashinfer_backend.openai.errors import ApiError


@cache
def _fields(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A kind of body whose fields stay JSON."""
    names = [(field.name, Raw, Raw()) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__, names, forbid_unknown_fields=True)


def bounded(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """The body, each of its fields once. Raises ApiError where one holds too much, and msgspec's errors for
    what is no object of these fields."""
    fields = msgspec.json.decode(body, type=_fields(kind))
    found = {name: raw for name in fields.__struct_fields__ if (raw := bytes(getattr(fields, name)))}
    for name, raw in found.items():
        bound = bound_of(kind, name)
        check_field(name, len(raw), bound.size, "bytes of JSON")
        if raw.count(b",") >= bound.values:
            check_field(name, values(raw, bound.values), bound.values, bound.of)
    # Of a field that is there several times the last one counts; the others would become objects as well.
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), raw) for name, raw in found.items()) + b"}"


def bound_of(kind: type[msgspec.Struct], name: str) -> Bound:
    return FIELDS.get(f"{kind.__name__}.{name}") or FIELDS.get(name, NUMBER)


def check_items(body: msgspec.Struct) -> None:
    """Raises ApiError for a list of a body that has too many elements."""
    for name in body.__struct_fields__:
        bound, value = bound_of(type(body), name), getattr(body, name)
        if bound.items is not None and isinstance(value, list):
            check_field(name, len(value), bound.items, "elements")


def check_field(name: str, found: int, most: int | None, of: str) -> None:
    """Raises ApiError where a field of the request has found more than `most`."""
    try:
        check(name, found, most, of)
    except ValueError as error:
        raise ApiError(str(error), param=name) from None


def values(raw: bytes, most: int) -> int:
    """How many values JSON has, elements and members, however deep; some number beyond `most` where its texts
    alone are too many."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    if texts > 4 * most:  # a value has a name and a text, and what holds it a name
        return texts
    return sum(part.count(b",") for part in plain.split(b'"')[::2]) + 1
