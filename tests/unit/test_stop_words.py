# SPDX-License-Identifier: Apache-2.0
"""Stop words in text, cut by tokens and chunks in any way."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, byte_level, sentencepiece

from flashinfer_backend.core.bounds import MOST_WORD
from flashinfer_backend.text import stop_words
from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder
from flashinfer_backend.text.stop_words import StopMatch, StopWordMatcher, StopWords, stop_word_texts

DECODERS = {kind: DeltaDecoder(make()) for kind, make in KINDS.items()}
BYTES = DECODERS["byte_level"]


def ids_of(text: str, kind: str = "byte_level") -> list[int]:
    return KINDS[kind]().encode(text, add_special_tokens=False).ids


def letters(text: str) -> list[int]:
    """Byte-level ids of ASCII text, one a character."""
    return [byte_level().token_to_id(letter.replace(" ", "Ġ")) for letter in text]


def matcher_of(
    words: list[str],
    decoder: DeltaDecoder,
    context_ids: Sequence[int] = (),
    hold_back: bool = False,
    id_words: Sequence[Sequence[int]] = (),
    free: int = 0,
) -> StopWordMatcher:
    return StopWordMatcher(StopWords(words, hold_back, id_words), decoder, context_ids, free)


def feed_all(matcher: StopWordMatcher, chunks: list[list[int]]) -> StopMatch | None:
    for chunk in chunks:
        match = matcher.feed(chunk)
        if match is not None:
            return match
    return None


def first_match(text: str, words: list[str], after: int = 0) -> tuple[int, int, int] | None:
    """(begin, end, word), by trying every end beyond `after`: the definition."""
    for end in range(after + 1, len(text) + 1):
        ending = [(end - len(w), end, n) for n, w in enumerate(words) if w and text[:end].endswith(w)]
        if ending:
            return min(ending)
    return None


def sent_text(words: list[str], kind: str, ids: list[int], cuts: list[int], hold_back: bool, **more) -> str:
    """What a client reads: each chunk through a stateless decoder, cut where a stop word says so. Also that a
    match says where its word is, and that no id is held which can begin none."""
    decoder = DECODERS[kind]
    matcher = matcher_of(words, decoder, hold_back=hold_back, **more)
    every = [*words, *more.get("id_words", ())]
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    text, sent = "", 0
    for begin, end in itertools.pairwise(edges):
        match = matcher.feed(ids[begin:end])
        stop = end - matcher.held if match is None else end
        last = match is not None
        piece = decoder.delta(ids[max(0, sent - CONTEXT_IDS) : sent], ids[sent:stop], last)
        if match is not None:
            assert 0 < match.ids <= end - begin
            assert match.end <= len(piece)
            assert (match.text_begin, match.text_end) == (len(text) + match.begin, len(text) + match.end)
            word, known = every[match.word], ids[: begin + match.ids]
            if isinstance(word, str):
                assert (text + piece)[match.text_begin : match.text_end] == word
            else:
                assert known[-len(word) :] == word
            return text + piece[: match.begin if hold_back else match.end]
        text, sent = text + piece, stop
        if matcher.held:
            assert hold_back and any(begins(word, ids[:end], decoder, sent) for word in every)
    return text + decoder.delta(ids[max(0, sent - CONTEXT_IDS) : sent], ids[sent:], True)


def begins(word: str | list[int], ids: list[int], decoder: DeltaDecoder, held: int) -> bool:
    """Whether the word may have begun within the id at `held`."""
    if not isinstance(word, str):
        return ids[held:] == word[: len(ids) - held]
    text, begin, end = (sum_of_deltas(decoder, ids[:n]) for n in (len(ids), held, held + 1))
    places = range(len(begin), max(len(end), len(begin) + 1))
    return any(text[at:] and word.startswith(text[at:]) for at in places)


def sum_of_deltas(decoder: DeltaDecoder, ids: list[int]) -> str:
    return "".join(decoder.delta(ids[max(0, n - CONTEXT_IDS) : n], [i], False) for n, i in enumerate(ids))


small_text = st.text(alphabet="ab é京", max_size=25)
small_words = st.lists(st.text(alphabet="ab é京", max_size=4), max_size=4)
cut_lists = st.lists(st.integers(1, 40), max_size=20)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=200, deadline=None)
@given(text=small_text, words=small_words, cuts=cut_lists, hold_back=st.booleans(), free=st.integers(0, 8))
def test_a_client_reads_up_to_the_first_stop_word(kind, text, words, cuts, hold_back, free):
    ids, decoder = ids_of(text, kind), DECODERS[kind]
    full = decoder.decode(ids)
    after = sum(len(decoder.delta(ids[:n], [token], last=False)) for n, token in enumerate(ids[:free]))
    # Within one feed the first word counts; a later feed cannot bring an earlier one.
    expected = first_match(full, words, after)
    if expected is not None:
        full = full[: expected[0] if hold_back else expected[1]]
    assert sent_text(words, kind, ids, cuts, hold_back, free=free) == full


def test_behind_a_prompt_the_leading_space_stays():
    tokenizer = sentencepiece()
    the = tokenizer.token_to_id("▁the")
    decoder = DECODERS["sentencepiece"]
    assert matcher_of([" the"], decoder).feed([the]) is None
    assert matcher_of([" the"], decoder, context_ids=[the]).feed([the]) == StopMatch(0, 0, 4, 0, 4, 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), cuts=cut_lists)
def test_a_client_reads_up_to_the_first_id_word(data, cuts):
    """The same as for texts, of ids among which there is one that writes nothing."""
    turn = byte_level().token_to_id("<|turn|>")
    alphabet = st.sampled_from([turn, *letters("ab")])
    ids = data.draw(st.lists(alphabet, max_size=20))
    words = data.draw(st.lists(st.lists(alphabet, min_size=1, max_size=4), min_size=1, max_size=3))
    texts = data.draw(st.lists(st.text(alphabet="ab", min_size=2, max_size=4), max_size=1))
    found = [
        (end, len(BYTES.decode(ids[: end - len(word)])))
        for end in range(1, len(ids) + 1)
        for word in words
        if ids[:end][-len(word) :] == word
    ]
    for end in range(1, len(ids) + 1):
        shown = BYTES.decode(ids[:end])
        found += [(end, len(shown) - len(text)) for text in texts if shown.endswith(text)]
    full = BYTES.decode(ids)
    expected = full[: min(found)[1]] if found else full
    assert sent_text(texts, "byte_level", ids, cuts, hold_back=True, id_words=words) == expected


def test_texts_of_words_given_as_ids():
    turn = byte_level().token_to_id("<|turn|>")
    words = [ids_of("stop"), [turn], [*ids_of("x"), turn], ids_of("\n\n")]
    assert stop_word_texts(words, BYTES) == ["stop", "", "", "\n\n"]
    shown = DeltaDecoder(byte_level(), skip_special_tokens=False)
    assert stop_word_texts(words, shown) == ["stop", "<|turn|>", "x<|turn|>", "\n\n"]


def test_thousands_of_words_are_found_like_few() -> None:
    """Each id costs the same, however many words there are: a scan of all of them would take minutes here."""
    words = [f"{n:05d}!" for n in range(20_000)]
    ids = letters("a 123" * 400 + "00777!")
    for hold_back in (False, True):
        match = feed_all(matcher_of(words, BYTES, hold_back=hold_back), [[i] for i in ids])
        assert match is not None and match.word == 777
        by_ids = matcher_of([], BYTES, hold_back=hold_back, id_words=[letters(word) for word in words])
        match = feed_all(by_ids, [[i] for i in ids])
        assert match is not None and match.word == 777


def test_a_long_word_of_ids_is_not_looked_for_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token would take as long as the square of all tokens before it."""
    looks = []
    begins = stop_words._Words._begins
    monkeypatch.setattr(stop_words._Words, "_begins", lambda *args: looks.append(1) or begins(*args))
    a, b, c = letters("abc")
    matcher = matcher_of([], BYTES, hold_back=True, id_words=[[a] * 40 + [b] * 200])
    for count, token in enumerate([c] * 100 + [a] * 30 + [c] + [a] * 42 + [b] * 3):
        matcher.feed([token])
        assert len(looks) <= 3 * (count + 1) + 30
    assert matcher.held == 43  # 40 of a and 3 of b, of the 45 last ones


def test_sequences_of_the_same_words_are_followed_each_on_its_own() -> None:
    words = StopWords(["bcd"], True, [letters("xy")])
    first, second = (StopWordMatcher(words, BYTES) for _ in range(2))
    assert first.feed(letters("abc")) is None and second.feed(letters("x")) is None
    assert (first.held, second.held) == (2, 1)
    assert second.feed(letters("d")) is None and second.held == 0
    assert first.feed(letters("d")) == StopMatch(0, 0, 3, 1, 4, 1)
    assert feed_all(second, [letters("x"), letters("y")]).word == 1


def test_words_are_prepared_with_the_first_text() -> None:
    """Thousands of sequences can wait for a slot, each with words of 256 KiB."""
    words = StopWords(["bc"], False, [letters("xy")])
    matcher = StopWordMatcher(words, BYTES)
    assert "_reversed" not in {*vars(words.texts), *vars(words.ids)}
    assert matcher.feed(letters("abc")) == StopMatch(0, 1, 3, 1, 3, 3)
    assert "_reversed" in vars(words.texts)


def test_text_that_is_like_a_word_costs_no_more_than_other_text() -> None:
    """A token took 0.2 s where the text was one character over and over, and so was the longest word but for
    its end: the square of the word's length."""
    word = "a" * (MOST_WORD - 1)
    matcher = matcher_of([word + "b", *("a" * n + "cb" for n in range(1, 700))], BYTES, hold_back=True)
    tokens = letters("a" * 1000)
    assert feed_all(matcher, [tokens] * 17 + [[token] for token in tokens]) is None
    assert matcher.held == len(word)
    assert feed_all(matcher, [letters("b")]) == StopMatch(0, 0, len(word) + 1, 18_000 - len(word), 18_001, 1)
