# SPDX-License-Identifier: Apache-2.0
"""Text to the llm step's tensors, and the tokenizer folder it starts from."""

import json

import numpy as np
import pytest
from small_tokenizers import byte_level, word_level

from flashinfer_backend.core.bounds import ALL_PROMPTS, FIELDS, MOST_IDS, MOST_WORD
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.triton_server.parameters import knob_value, read_parameters, read_tokenizer
from flashinfer_backend.triton_server.preprocessing import Preprocessor

MOST_PADDED_IDS = FIELDS["input_ids"].all_values


def write_folder(folder, tokenizer=None, **files):
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    return TextTokenizer(write_folder(tmp_path_factory.mktemp("tokenizer"), tokenizer_config=config))


@pytest.fixture(scope="module")
def preprocessor(tokenizer):
    return Preprocessor(tokenizer)


def strings(*rows):
    return np.array(
        [[w if isinstance(w, bytes) else w.encode() for w in row] for row in rows], dtype=np.object_
    )


def request(*texts, **more):
    texts = texts or ("hello",)
    inputs = {"QUERY": strings(*[[t] for t in texts])}
    inputs["REQUEST_OUTPUT_LEN"] = np.full((len(texts), 1), 7, dtype=np.int32)
    return {name: value for name, value in (inputs | more).items() if value is not None}


def run_one(preprocessor, inputs):
    (result,) = preprocessor.run([inputs])
    if isinstance(result, ValueError):
        raise result
    return result


def ids_of(text, special=False):
    return byte_level().encode(text, add_special_tokens=special).ids


def test_one_prompt(preprocessor, tokenizer):
    out = run_one(preprocessor, request("The fox, 東京 😀"))
    assert out["INPUT_ID"].tolist() == [ids_of("The fox, 東京 😀", special=True)]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[out["INPUT_ID"].shape[1]]]
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[7]]
    assert out["OUT_END_ID"].tolist() == [[tokenizer.eos_id]] == [[1]]
    assert out["OUT_PAD_ID"].tolist() == [[tokenizer.pad_id]] == [[2]]
    assert out["STOP_WORDS_IDS"].shape == out["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert out["EMBEDDING_BIAS"].shape == (1, 0)
    for name, tensor in out.items():
        assert tensor.dtype == (np.float32 if name == "EMBEDDING_BIAS" else np.int32), name


def test_without_special_tokens(tokenizer):
    out = run_one(Preprocessor(tokenizer, add_special_tokens=False), request("fox"))
    assert out["INPUT_ID"].tolist() == [ids_of("fox")]


def test_end_id_and_pad_id_of_the_request(preprocessor):
    given = {"END_ID": np.array([[1048576], [5]], np.int32), "PAD_ID": np.array([[9], [8]], np.int32)}
    out = run_one(preprocessor, request("a", "the lazy dog", **given))
    assert out["OUT_END_ID"].tolist() == [[1048576], [5]]
    assert out["OUT_PAD_ID"].tolist() == [[9], [8]]
    assert set(out["INPUT_ID"][0, out["REQUEST_INPUT_LEN"][0, 0] :].tolist()) == {9}


WORD_LISTS = {"STOP_WORDS_DICT": "STOP_WORDS_IDS", "BAD_WORDS_DICT": "BAD_WORDS_IDS"}


@pytest.mark.parametrize(("name", "output"), WORD_LISTS.items())
def test_word_lists(preprocessor, name, output):
    words = {name: strings(["stop", "", " quick brown"], ["x", "", ""])}
    lists = run_one(preprocessor, request("a", "b", **words))[output]
    stop, quick, x = ids_of("stop"), ids_of(" quick brown"), ids_of("x")
    width = len(stop) + len(quick)
    assert lists.shape == (2, 2, width)
    assert lists[0, 0].tolist() == stop + quick
    assert lists[0, 1].tolist() == [len(stop), width] + [-1] * (width - 2)
    assert lists[1, 0].tolist() == x + [0] * (width - len(x))
    assert lists[1, 1].tolist() == [len(x)] + [-1] * (width - 1)


def test_only_empty_words_are_no_words(preprocessor):
    out = run_one(preprocessor, request("a", STOP_WORDS_DICT=strings([""])))
    assert out["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]]


def test_words_of_which_the_tokenizer_leaves_nothing_are_no_words(tmp_path):
    """This one knows no whitespace."""
    preprocessor = Preprocessor(TextTokenizer(write_folder(tmp_path, word_level())))
    fox = word_level().encode("fox").ids
    words = {name: strings(["\n", "fox", " "]) for name in (*WORD_LISTS, "EMBEDDING_BIAS_WORDS")}
    weights = np.array([[7.0, 2.0, 7.0]], np.float32)
    given = {**words, "EMBEDDING_BIAS_WEIGHTS": weights, "END_ID": np.array([[0]], np.int32)}
    out = run_one(preprocessor, request("the fox", **given))
    for name in WORD_LISTS.values():
        assert out[name].tolist() == [[fox, [len(fox)] + [-1] * (len(fox) - 1)]]
    assert np.flatnonzero(out["EMBEDDING_BIAS"]).tolist() == sorted(set(fox))


def test_embedding_bias(preprocessor, tokenizer):
    bias = {
        "EMBEDDING_BIAS_WORDS": strings(["quick", ""], ["a", "a"]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0, 5.0], [0.5, -1.5]], np.float32),
    }
    out = run_one(preprocessor, request("x", "y", **bias))["EMBEDDING_BIAS"]
    expected = np.zeros((2, tokenizer.vocab_size), np.float32)
    for i in ids_of("quick"):
        expected[0, i] += 2.0
    expected[1, ids_of("a")] = -1.0
    assert (out == expected).all()


BAD_UTF8 = strings([b"ab\xff"])
WRONG = [
    ({"QUERY": BAD_UTF8}, r"QUERY \(text_input\) row 0 is not UTF-8: .* byte 2"),
    ({"QUERY": strings(["a", "b"])}, r"QUERY .*shape \[1, 2\]; it should be \[batch, 1\]"),
    ({"QUERY": None}, "QUERY .*missing"),
    ({"REQUEST_OUTPUT_LEN": None}, "REQUEST_OUTPUT_LEN .*missing"),
    ({"REQUEST_OUTPUT_LEN": np.ones((1, 2), np.int32)}, r"REQUEST_OUTPUT_LEN has shape \[1, 2\]"),
    ({"END_ID": np.ones((2, 1), np.int32)}, r"END_ID has shape \[2, 1\]; it should be \[1, 1\]"),
    ({"STOP_WORDS_DICT": BAD_UTF8}, r"STOP_WORDS_DICT \(stop_words\) row 0 is not UTF-8"),
    ({"BAD_WORDS_DICT": strings(["a"], ["b"])}, r"BAD_WORDS_DICT \(bad_words\) has shape \[2, 1\]"),
    ({"EMBEDDING_BIAS_WORDS": strings(["a"])}, "belong together"),
    ({"EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)}, "belong together"),
    ({"EMBEDDING_BIAS_WORDS": strings(["a", "a"]),
      "EMBEDDING_BIAS_WEIGHTS": np.full((1, 2), 3e38, np.float32)},
     "of one token add up to more than a float32 holds"),
    ({"EMBEDDING_BIAS_WORDS": strings(["a"]), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 2), np.float32)},
     r"EMBEDDING_BIAS_WEIGHTS has shape \[1, 2\]; it should be \[1, 1\]"),
    ({"EMBEDDING_BIAS_WORDS": strings(["a"]), "EMBEDDING_BIAS_WEIGHTS": np.full((1, 1), np.nan, np.float32)},
     "finite"),
    *[
        ({name: strings(["a"])}, f"^{name}.* is not supported")
        for name in ("DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "PROMPT_TABLE_EXTRA_ID")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_request_fails_alone(preprocessor, change, message):
    good = request("the fox")
    before, wrong, after = preprocessor.run([good, request(**change), good])
    assert isinstance(wrong, ValueError)
    with pytest.raises(ValueError, match=message):
        raise wrong
    for result in (before, after):
        assert result["INPUT_ID"].tolist() == [ids_of("the fox", special=True)]


def test_a_prompt_without_tokens_is_refused(tokenizer):
    bare = Preprocessor(tokenizer, add_special_tokens=False)
    with pytest.raises(ValueError, match="row 1 gives no tokens"):
        run_one(bare, request("a", ""))


class CountingTokenizer(TextTokenizer):
    """Counts the calls, and refuses one text, as a tokenizer without an unknown token does."""

    def __init__(self, folder):
        super().__init__(folder)
        self.calls = []

    def encoded(self, texts, add_special_tokens):
        self.calls.append(len(texts))
        if "refused" in texts:
            raise Exception("missing [UNK] token")
        return super().encoded(texts, add_special_tokens)


def test_all_prompts_are_encoded_in_one_call(tmp_path):
    tokenizer = CountingTokenizer(write_folder(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    results = Preprocessor(tokenizer).run([request("a", "b"), request("c"), request("the lazy dog")])
    assert tokenizer.calls == [4]
    assert [r["INPUT_ID"].shape[0] for r in results] == [2, 1, 1]
    assert results[2]["INPUT_ID"].tolist() == [ids_of("the lazy dog", special=True)]


def test_long_texts_are_encoded_one_after_another(tmp_path, monkeypatch):
    """The library took 14 GB for a hundred of the longest prompts at a time."""
    monkeypatch.setattr("flashinfer_backend.text.tokenizer.AT_ONCE", 20)
    tokenizer = TextTokenizer(write_folder(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    encode, groups = tokenizer._encode_batch, []
    tokenizer._encode_batch = lambda texts, **options: groups.append(texts) or encode(texts, **options)
    texts = ["the", "", "lazy", "dog " * 30, "fox " * 5, "a", "the quick brown fox"]
    assert tokenizer.encode_batch(texts, True) == [ids_of(text, special=True) for text in texts]
    assert [text for group in groups for text in group] == texts and tokenizer.encode_batch([], True) == []
    assert all(sum(map(len, group[1:])) < 20 for group in groups) and len(groups[0]) == 3


def test_a_text_that_the_tokenizer_refuses_fails_alone(tmp_path):
    tokenizer = CountingTokenizer(write_folder(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    good, wrong = Preprocessor(tokenizer).run([request("a"), request("refused")])
    assert good["INPUT_ID"].tolist() == [ids_of("a", special=True)]
    assert "cannot encode the text: missing" in str(wrong)


def test_a_long_text_is_not_cut(tmp_path):
    from tokenizers import Tokenizer

    cutting = Tokenizer.from_str(byte_level().to_str())
    cutting.enable_truncation(4)
    cutting.enable_padding(length=8)
    tokenizer = TextTokenizer(write_folder(tmp_path, cutting))
    text = "the quick brown fox " * 50
    assert tokenizer.encode_batch([text, "a"], True) == [ids_of(text, True), ids_of("a", True)]


def test_roles_of_tokens(tmp_path):
    folder = write_folder(tmp_path, generation_config={"eos_token_id": [3, 1]})
    tokenizer = TextTokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (3, 3)
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "</s>"}, "pad_token": "<pad>"}'
    )
    tokenizer = TextTokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 2)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|turn|>", "pad_token": "not a token"}')
    tokenizer = TextTokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (byte_level().token_to_id("<|turn|>"), 2)


def test_without_an_eos_token_the_request_names_the_end(tmp_path):
    preprocessor = Preprocessor(TextTokenizer(write_folder(tmp_path)))
    with pytest.raises(ValueError, match=r"END_ID .*no eos token"):
        run_one(preprocessor, request("a"))
    out = run_one(preprocessor, request("a", END_ID=np.array([[4]], np.int32)))
    assert out["OUT_PAD_ID"].tolist() == [[4]]


def test_without_tokenizer_json_transformers_reads_the_folder(tmp_path):
    content = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode_batch(["The quick fox"], False) == [ids_of("The quick fox")]
    assert tokenizer.eos_id == 1


def test_folders_that_hold_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*bundled"):
        resolve_model_dir(str(tmp_path / "nowhere"))
    assert resolve_model_dir("bundled").name == "bundled_model"
    with pytest.raises(FileNotFoundError, match="no tokenizer folder"):
        TextTokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(ValueError, match="exists in Python only"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        TextTokenizer(tmp_path)


def test_parameters():
    def config(**parameters):
        return json.dumps({"parameters": {name: {"string_value": text} for name, text in parameters.items()}})

    texts = {"tokenizer_dir": " x ", "max_prompt_bytes": "${b}", "engine_dir": "", "gpt_model_path": " "}
    parameters = read_parameters(config(**texts, add_special_tokens="maybe"), "preprocessing")
    assert parameters == {"tokenizer_dir": "x", "add_special_tokens": "maybe"}
    assert knob_value({"add_special_tokens": "False"}, "add_special_tokens") is False
    assert knob_value({}, "add_special_tokens") is True
    assert knob_value({"max_prompt_bytes": "7"}, "max_prompt_bytes") == 7
    assert knob_value({}, "streamed_log_probs") == "auto"
    with pytest.raises(ValueError, match="add_special_tokens is 'maybe'; it should be true or false"):
        knob_value(parameters, "add_special_tokens")
    with pytest.raises(ValueError, match="tokenizer_dir is not set; it should be the folder"):
        read_tokenizer({})


def test_what_is_too_large_is_refused_before_it_is_tokenised(tokenizer):
    class Untouched(TextTokenizer):
        def encoded(self, texts, add_special_tokens):
            assert not any(len(text) > 1000 for text in texts)
            return super().encoded(texts, add_special_tokens)

    untouched = Untouched.__new__(Untouched)
    untouched.__dict__.update(tokenizer.__dict__)
    bounded = Preprocessor(untouched, max_prompt_bytes=1000)
    fits, long = bounded.run([request("a" * 1000), request("a" * 1001)])
    assert fits["REQUEST_INPUT_LEN"] > 0
    assert "has 1001 bytes; it should have at most 1000" in str(long)
    with pytest.raises(ValueError, match=f"{MOST_WORD + 1} bytes in a word; it should have at most"):
        run_one(bounded, request("a", STOP_WORDS_DICT=strings(["b" * (MOST_WORD + 1)])))


def test_all_prompts_of_a_request_together_are_bounded(tokenizer):
    """Each of them is within the bounds of one: nobody else's prompt is tokenised meanwhile."""
    bounded = Preprocessor(tokenizer, max_prompt_bytes=100)
    assert run_one(bounded, request(*["a" * 100] * ALL_PROMPTS))["REQUEST_INPUT_LEN"].size == ALL_PROMPTS
    with pytest.raises(ValueError, match="901 bytes in 10 rows; it should have at most 800 in a request"):
        run_one(bounded, request(*["a" * 100] * 9, "b"))


def test_one_long_row_does_not_make_all_others_as_long(preprocessor):
    """256 rows of which one has a million ids were a GB, which shared memory never gives back."""
    long = "1" * (MOST_PADDED_IDS // 256 + 1)  # a token each
    with pytest.raises(ValueError, match=r"256 rows, the longest of (\d+) ids: padded to it they are"):
        run_one(preprocessor, request(long, *["a"] * 255))
    words = strings(["1" * (MOST_IDS // 256 + 1)], *[["b"]] * 255)
    with pytest.raises(ValueError, match=r"\(stop_words\) has \d+ ids in 256 rows; it should have"):
        run_one(preprocessor, request(*["a"] * 256, STOP_WORDS_DICT=words))
    # By themselves they are well.
    assert run_one(preprocessor, request(long))["INPUT_ID"].shape[1] > MOST_PADDED_IDS // 256
