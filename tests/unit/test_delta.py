# SPDX-License-Identifier: Apache-2.0
"""Deltas of any split of a sequence concatenate to the tokenizers library's own decode."""

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, OTHER_DECODERS, TEXT, byte_level, other_decoder, sentencepiece, word_level
from tokenizers import Tokenizer, decoders

from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder, vocabulary_size
from thinned import examples

REPLACEMENT = "\ufffd"
PER_KIND = pytest.mark.parametrize("kind", sorted(KINDS))


def decoder_of(kind: str, skip: bool = True) -> DeltaDecoder:
    return DeltaDecoder(KINDS[kind](), skip_special_tokens=skip)


DECODERS = {(kind, skip): decoder_of(kind, skip) for kind in KINDS for skip in (True, False)}


def streamed(decoder: DeltaDecoder, ids: list[int], cuts: list[int], flush_alone: bool = False) -> str:
    """The concatenated deltas of `ids` cut before the given positions. With flush_alone an empty
    last chunk ends the stream, as when it ends with the end token."""
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    text = ""
    for begin, end in itertools.pairwise(edges):
        last = end == len(ids) and not flush_alone
        text += decoder.delta(ids[max(0, begin - CONTEXT_IDS) : begin], ids[begin:end], last)
    if flush_alone or not ids:
        text += decoder.delta(ids[-CONTEXT_IDS:], [], True)
    return text


def no_long_gap(ids: list[int], decoder: DeltaDecoder) -> bool:
    """Whether fewer than 6 ids in a row write nothing: what a context of 8 is promised to bridge."""
    shown = [decoder.writes_all([i]) for i in ids]
    return all(any(shown[n : n + 6]) for n in range(len(ids) - 5))


words = st.sampled_from(sorted({word for line in TEXT for word in line.split()}))
any_text = st.one_of(st.text(max_size=60), st.lists(words, max_size=15).map(" ".join))
cut_lists = st.lists(st.integers(1, 200), max_size=40)


@PER_KIND
@settings(max_examples=examples(150), deadline=None)
@given(text=any_text, cuts=cut_lists, skip=st.booleans(), special=st.booleans(), flush_alone=st.booleans())
def test_deltas_of_text(kind, text, cuts, skip, special, flush_alone):
    decoder = DECODERS[kind, skip]
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=special).ids
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoder.decode(ids) == full
    assert streamed(decoder, ids, cuts, flush_alone) == full
    assert streamed(decoder, ids, list(range(len(ids))), flush_alone) == full


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), cuts=cut_lists, skip=st.booleans(), flush_alone=st.booleans())
def test_deltas_of_random_ids(kind, data, cuts, skip, flush_alone):
    decoder = DECODERS[kind, skip]
    size = vocabulary_size(KINDS[kind]())
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40).filter(lambda x: no_long_gap(x, decoder)))
    assert streamed(decoder, ids, cuts, flush_alone) == KINDS[kind]().decode(ids, skip_special_tokens=skip)


def reference_with_byte_tokens(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[str, bool]:
    """What a SentencePiece stream should say for any ids: as the full decode, but within a run of
    byte tokens only the bytes at fault are replaced. And whether some run is not valid UTF-8."""
    text, run, invalid = "", b"", False
    shown = []
    for i in ids:
        token = tokenizer.id_to_token(i)
        if token is not None and not (skip and token in ("<s>", "</s>", "<pad>", "<|turn|>", "<unk>")):
            shown.append(token)
    for token in [*shown, None]:
        if token is not None and len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        while run:
            for length in (1, 2, 3, 4):
                try:
                    text += run[:length].decode()
                    run = run[length:]
                    break
                except UnicodeDecodeError:
                    pass
            else:
                text, run, invalid = text + REPLACEMENT, run[1:], True
        text += (token or "").replace("▁", " ")
    return text, invalid


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), cuts=cut_lists, skip=st.booleans(), strip=st.booleans())
def test_deltas_of_random_byte_tokens(data, cuts, skip, strip):
    tokenizer = sentencepiece(strip)
    decoder = DECODERS["sentencepiece" if strip else "sentencepiece_no_strip", skip]
    byte_ids = st.sampled_from(
        [tokenizer.token_to_id(f"<0x{b:02X}>") for b in bytes.fromhex("20 41 80 9F C3 E2 ED F0 FF")]
    )
    some = st.one_of(byte_ids, byte_ids, st.integers(0, vocabulary_size(tokenizer) + 3))
    ids = data.draw(st.lists(some, max_size=30).filter(lambda x: no_long_gap(x, decoder)))
    expected, invalid = reference_with_byte_tokens(tokenizer, ids, skip)
    if strip:
        expected = expected.removeprefix(" ")
    assert streamed(decoder, ids, cuts) == expected
    if not invalid:
        assert expected == tokenizer.decode(ids, skip_special_tokens=skip)


OTHERS = {
    (name, skip): DeltaDecoder(other_decoder(name), skip) for name in OTHER_DECODERS for skip in (True, False)
}


@settings(max_examples=examples(320), deadline=None)
@given(data=st.data(), cuts=cut_lists, skip=st.booleans(), flush_alone=st.booleans())
@pytest.mark.parametrize("name", OTHER_DECODERS)
def test_deltas_of_other_decoders(name, data, cuts, skip, flush_alone):
    tokenizer, decoder = other_decoder(name), OTHERS[name, skip]
    byte_ids = {b: tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    ids_of_bytes = frozenset(byte_ids.values())
    # Of the first token Metaspace drops every mark, and a run of bytes is one token, longer than a context.
    mark = "é" if "metaspace" in name else "▁"
    spelled = st.sampled_from(["é", "😀", " ", mark, "京"]).map(
        lambda char: [byte_ids[b] for b in char.encode()]
    )
    marks = st.sampled_from(["▁", "▁the", "<s>", "d"]).map(lambda token: [tokenizer.token_to_id(token)])
    some = st.integers(0, vocabulary_size(tokenizer) + 3).filter(lambda i: i not in ids_of_bytes)
    parts = data.draw(st.lists(st.one_of(spelled, marks, some.map(lambda i: [i])), max_size=14))
    ids = [i for part in parts for i in part]
    assume(no_long_gap(ids, decoder) and decoder.context(ids))
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(decoder, ids, cuts, flush_alone) == full
    assert streamed(decoder, ids, list(range(len(ids))), flush_alone) == full


def test_characters_of_several_tokens_come_once():
    tokenizer, decoder = other_decoder("replace last"), OTHERS["replace last", True]
    ids = tokenizer.encode("dé 😀é", add_special_tokens=False).ids
    pieces = [decoder.delta(ids[max(0, n - CONTEXT_IDS) : n], [ids[n]], False) for n in range(len(ids))]
    assert "".join(pieces) == tokenizer.decode(ids) and pieces.count("😀") == 1 and pieces.count("") == 3
    assert b"".join(map(decoder.piece, ids)).decode() == tokenizer.decode(ids)


def test_a_panic_of_the_tokenizer_is_an_error_in_words():
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
    )
    decoder = DeltaDecoder(tokenizer)
    blank = tokenizer.token_to_id("▁")
    for call in (lambda: decoder.decode([blank]), lambda: decoder.delta([], [blank], False)):
        with pytest.raises(ValueError, match="the tokenizer failed"):
            call()


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace", *OTHER_DECODERS])
def test_an_answer_behind_its_prompt_keeps_its_first_space(name):
    tokenizer = other_decoder(name) if name in OTHER_DECODERS else KINDS[name]()
    decoder = DeltaDecoder(tokenizer)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog").ids
    for n in (1, 2, 3, 9, len(ids) - 1):
        before = [*[tokenizer.token_to_id("<|turn|>")] * 9, *ids[:n]]
        context = decoder.context(before)
        assert len(context) <= CONTEXT_IDS
        text = decoder.delta([], before, False) + decoder.delta(context, ids[n:], True)
        assert text == tokenizer.decode(ids)


def test_every_utf8_fault_is_replaced_as_the_library_does():
    tokenizer = byte_level()
    decoder = DECODERS["byte_level", True]
    byte_id = {decoder._pieces[i]: i for i in range(3, 259)}
    edges = bytes.fromhex("41 80 8F 90 9F A0 BF C1 C2 E0 E1 ED EF F0 F1 F4 F5")
    for row in itertools.product(edges, repeat=3):
        ids = [byte_id[bytes([b])] for b in row]
        assert streamed(decoder, ids, [1, 2]) == tokenizer.decode(ids)


def test_another_decoder_is_streamed_by_difference():
    tokenizer = word_level()
    decoder = DeltaDecoder(tokenizer)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, voilà").ids
    assert decoder.delta([], ids, False) == tokenizer.decode(ids)
    generator = random.Random(0)
    for _ in range(20):
        cuts = sorted(generator.sample(range(1, len(ids)), 3))
        assert streamed(decoder, ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_numbers_that_are_no_ids_are_refused(wrong):
    decoder = DECODERS["byte_level", True]
    for call in (
        lambda: decoder.delta([], [5, wrong], False),
        lambda: decoder.delta([wrong], [5], True),
        lambda: decoder.decode([5, wrong]),
    ):
        with pytest.raises(ValueError, match=f"token id {wrong} should lie in 0..4294967295"):
            call()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ids_behind_the_vocabulary_write_nothing(kind):
    decoder, tokenizer = DECODERS[kind, True], KINDS[kind]()
    assert (decoder._pieces is None) == (kind == "byte_level_replace"), "the usual ones are read from a table"
    beyond, ids = vocabulary_size(tokenizer), tokenizer.encode("the fox", add_special_tokens=False).ids
    assert decoder.decode([ids[0], beyond, *ids[1:]]) == tokenizer.decode(ids)
    assert decoder.delta([ids[0], beyond], ids[1:], True) == decoder.delta(ids[:1], ids[1:], True)
