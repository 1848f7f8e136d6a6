# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, whole or chunk by chunk without state.

Both kinds of vocabularies that language models use write a stream of bytes: a byte-level BPE token
is some bytes, a SentencePiece token is the UTF-8 of its text or, as `<0xE2>`, a single byte. So an
id is looked up in a table of bytes, and the only state between two chunks is the incomplete
character at the end of the text sent so far. UTF-8 resynchronises at every lead byte and a character
has at most four bytes, so the last three bytes sent determine that state.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile

from tokenizers import Tokenizer

CONTEXT_IDS = 8
MOST_ID = (1 << 32) - 1
REPLACEMENT = "\ufffd"
MAX_PENDING_BYTES = 3
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTINEL = "x"  # a token for the text before a context that was cut
PER_BYTE = "flashinfer_backend.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(PER_BYTE, _replace_each_byte)


class DeltaDecoder:
    """Text of token ids, exactly as `Tokenizer.decode` writes it.

    The deltas of any split of a sequence into chunks, each with the last <= 8 ids before it as
    context, concatenate to the text of the whole sequence. Exceptions:

    * A context of 8 ids that write nothing (skipped special tokens, ids outside the vocabulary)
      says nothing about the text before: a character interrupted by 8 of them in a row is lost, and
      after 8 of them at the very start a leading space is kept. A context of the last 3 ids that
      write something would do.
    * SentencePiece spells unusual characters as runs of byte tokens. `Tokenizer.decode` replaces
      every byte of a run that is not valid UTF-8 as a whole, including its valid characters before
      the fault, which a stream has already sent. The deltas replace only the bytes at fault.
    * ByteLevel, Metaspace and SentencePiece's usual decoder (Replace, ByteFallback, Fuse, Strip of at most
      one leading character) are read from a table. The text of other decoders is the difference of two
      decodes: where a Replace finds what two chunks write together, the first has sent its part unreplaced.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pieces: list[bytes] | None = None  # id -> bytes; None: the decoder is of another kind
        # Id -> token, None: it writes nothing; for decoders of another kind.
        self._tokens: list[str | None] = []
        self._spells_bytes = self._is_byte_level = False  # of these
        self._first: dict[int, bytes] = {}  # where a piece differs as the first one of a sequence
        self._errors = "replace"
        self._fill_tables()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a whole sequence. Raises ValueError for an id outside 0..MOST_ID, and where the tokenizer
        fails."""
        _check_ids(ids)
        if not any(map(self._writes, ids)):
            return ""  # some decoders panic here
        with panics_are_errors():
            # As a batch other threads run meanwhile.
            (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=self._skip_special_tokens)
            return str(text)

    def context(self, ids: Sequence[int]) -> list[int]:
        """The context that `delta` needs to continue `ids`: the last 8 that write text."""
        found: list[int] = []
        for i in reversed(ids):
            if self._writes(i):
                found.append(i)
                if len(found) == CONTEXT_IDS:
                    break
        return found[::-1]

    def delta(self, context_ids: Sequence[int], new_ids: Sequence[int], last: bool) -> str:
        """Text that `new_ids` add after `context_ids`, the last ids before them (all, if fewer than 8).

        An incomplete character at the end is held back for the next chunk unless `last`. Raises
        ValueError for an id outside 0..MOST_ID.
        """
        _check_ids(context_ids)
        _check_ids(new_ids)
        pieces = self._pieces
        if pieces is None:
            return self._difference(context_ids, new_ids, last)
        size = len(pieces)
        new = [pieces[i] for i in new_ids if i < size]
        if self._first and len(context_ids) < CONTEXT_IDS and not self._writing(context_ids):
            written = self._writing(new_ids)
            if written:
                new = [self._first.get(written[0], pieces[written[0]]), *[pieces[i] for i in written[1:]]]
        data = b"".join(new)
        if context_ids:
            data = self._pending(context_ids) + data
        return codecs.utf_8_decode(data, self._errors, last)[0]

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which can be part of a character."""
        if not self._writes(token):
            return b""
        if self._pieces is not None:
            return self._pieces[token]
        text = self._shown([token])[0]
        if self._spells_bytes and (byte := _byte_of(text)):
            return byte
        return self._written([SENTINEL, text], whole=True)[len(SENTINEL) :].encode()

    def writes_all(self, ids: Sequence[int]) -> bool:
        """Whether every one of `ids` shows in the text: none is a skipped special or unknown token."""
        return len(self._writing(ids)) == len(ids)

    def _writing(self, ids: Sequence[int]) -> list[int]:
        """Those of `ids` that write something."""
        return [i for i in ids if self._writes(i)]

    def _writes(self, token: int) -> bool:
        table: Sequence[bytes | str | None] = self._tokens if self._pieces is None else self._pieces
        return 0 <= token < len(table) and bool(table[token])

    def _pending(self, context_ids: Sequence[int]) -> bytes:
        """The bytes of an incomplete character at the end of the context."""
        pieces = self._pieces
        assert pieces is not None
        tail = b""
        for i in reversed(context_ids):
            if i < len(pieces):
                tail = pieces[i] + tail
                if len(tail) >= MAX_PENDING_BYTES:
                    break
        if not tail or tail[-1] < 0x80:
            return b""
        tail = tail[-MAX_PENDING_BYTES:]
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]

    def _difference(self, context_ids: Sequence[int], new_ids: Sequence[int], last: bool) -> str:
        before = [] if len(context_ids) < CONTEXT_IDS else [SENTINEL]
        before += self._shown(context_ids)
        sent = self._written(before, whole=False)
        return self._written(before + self._shown(new_ids), whole=last)[len(sent) :]

    def _shown(self, ids: Sequence[int]) -> list[str]:
        return [token for i in ids if i < len(self._tokens) and (token := self._tokens[i])]

    def _written(self, tokens: list[str], whole: bool) -> str:
        """Their text, without an incomplete character at its end unless `whole`."""
        if self._spells_bytes:
            tokens = _without_faults(tokens, whole)
        elif self._is_byte_level and not whole:
            tokens = _without_incomplete(tokens)
        if not tokens:
            return ""
        decoder = self._tokenizer.decoder
        with panics_are_errors():
            return decoder.decode(tokens) if decoder is not None else " ".join(tokens)

    def _fill_tables(self) -> None:
        tokenizer = self._tokenizer
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        tokens = [tokenizer.id_to_token(i) for i in range(vocabulary_size(tokenizer))]
        if self._skip_special_tokens:
            special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
            tokens = [None if token in special else token for token in tokens]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            self._pieces = [b"" if token is None else _byte_level_piece(token) for token in tokens]
        elif kinds == ["Metaspace"]:
            mark = steps[0]["replacement"]
            self._pieces = [(token or "").replace(mark, " ").encode() for token in tokens]
            if steps[0]["prepend_scheme"] != "never":
                marked = [(i, token) for i, token in enumerate(tokens) if token and mark in token]
                self._first = {i: token.replace(mark, "").encode() for i, token in marked}
        elif _is_sentencepiece(steps):
            self._errors = PER_BYTE
            replaced = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
            spells_bytes = "ByteFallback" in kinds
            self._pieces = [_sentencepiece_piece(token or "", replaced, spells_bytes) for token in tokens]
            if kinds[-1] == "Strip" and steps[-1]["start"]:
                strip = steps[-1]["content"].encode()
                self._first = {
                    i: piece[len(strip) :] for i, piece in enumerate(self._pieces) if piece.startswith(strip)
                }
        else:
            self._tokens = tokens
            # Behind Fuse there are no tokens left that are bytes.
            self._spells_bytes = "ByteFallback" in kinds[: [*kinds, "Fuse"].index("Fuse")]
            self._is_byte_level = kinds[:1] == ["ByteLevel"]


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """1 + the largest token id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """The tokenizers library's panics, which are no Exception, raised as ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"the tokenizer failed (a panic of the tokenizers library): {error}") from None


def _byte_of(token: str) -> bytes:
    """The byte that a token as `<0xE2>` spells; of another token none."""
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(found[1]) if found else b""


def _without_faults(tokens: list[str], whole: bool) -> list[str]:
    """Tokens with invalid bytes separated. Some tokens are bytes, `<0xE2>`, and ByteFallback replaces a whole
    run of these if any is invalid: here the invalid bytes become separate tokens, and those of an incomplete
    character at the end are left out unless `whole`."""
    result: list[str] = []
    run = bytearray()
    for token in [*tokens, ""]:
        if byte := _byte_of(token):
            run += byte
            continue
        text = codecs.utf_8_decode(run, "surrogateescape", whole or bool(token))[0]
        for char in text:
            is_fault = "\udc80" <= char <= "\udcff"
            result += [REPLACEMENT] if is_fault else [f"<0x{byte:02X}>" for byte in char.encode()]
        run.clear()
        result.append(token)
    return result[:-1]


def _without_incomplete(tokens: list[str]) -> list[str]:
    """Byte-level tokens (each character is a byte) without an incomplete character at the end."""
    data = b"".join(map(_byte_level_piece, tokens[-MAX_PENDING_BYTES:]))
    left_out = len(data) - codecs.utf_8_decode(data, "replace", False)[1]
    tokens = list(tokens)
    while left_out:
        token = tokens.pop()
        if len(token) > left_out:
            tokens.append(token[:-left_out])
        left_out -= min(left_out, len(token))
    return tokens


def _check_ids(ids: Sequence[int]) -> None:
    """Raises ValueError for a number that is no id; the library that decodes has ids of 32 bits."""
    for outermost in (min(ids), max(ids)) if ids else ():
        if not 0 <= outermost <= MOST_ID:
            raise ValueError(f"token id {outermost} should lie in 0..{MOST_ID}")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict]:
    """The decoder's steps in order, nested sequences flattened; none for a tokenizer without decoder."""
    if tokenizer.decoder is None:
        return []
    todo = [json.loads(tokenizer.decoder.__getstate__())]
    steps = []
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step["decoders"] + todo
        else:
            steps.append(step)
    return steps


def _is_sentencepiece(steps: list[dict]) -> bool:
    kinds = [step["type"] for step in steps]
    rest = list(dropwhile("Replace".__eq__, kinds))
    if not kinds or any("String" not in step["pattern"] for step in steps if step["type"] == "Replace"):
        return False
    if rest[:1] == ["ByteFallback"]:
        rest = rest[1:]
    if rest == ["Fuse", "Strip"]:
        return steps[-1]["start"] <= 1 and steps[-1]["stop"] == 0
    return rest in ([], ["Fuse"])


def _sentencepiece_piece(token: str, replaced: list[tuple[str, str]], spells_bytes: bool) -> bytes:
    for pattern, content in replaced:
        token = token.replace(pattern, content)
    return (spells_bytes and _byte_of(token)) or token.encode()


def _byte_characters() -> dict[int, str]:
    """Translation of byte-level BPE's printable characters to the characters U+0000..U+00FF of their
    bytes (GPT-2's bytes_to_unicode, inverted). Other Latin-1 characters go outside Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: REPLACEMENT for b in range(0x100)}
    table.update({b: chr(b) for b in printable})
    unprintable = [b for b in range(0x100) if b not in printable]
    table.update({0x100 + n: chr(b) for n, b in enumerate(unprintable)})
    return table


_BYTE_CHARACTERS = _byte_characters()


def _byte_level_piece(token: str) -> bytes:
    # An added token may hold characters that stand for no byte; then all of it is plain text.
    try:
        return token.translate(_BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
