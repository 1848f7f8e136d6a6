# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings of an embedding model; /v1/rerank and /v1/score of a reranker."""

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai_server import OpenAiServer, openai_running
from running import wait_for
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from editing import edit_tensors
from embedding_checkpoints import ANSWERS, PROMPTS, make_embedder, make_reranker

TEXTS = ["Once upon a time", "The king and the queen had a son. " * 20, "a", "Once upon a time there was"]
BROKEN = 2047  # the token of which the embedder computes no numbers
QUERY, DOCUMENTS = (
    "Who is the king?",
    ["The king is old.", "A tree", "The queen has a dog.", "The king is old!"],
)
RUNNING, WAITING = "engine_requests_running", "engine_requests_waiting"
ABORTED = 'sequences_finished_total{finish_reason="aborted"}'
LIMITS = ("max_num_tokens=64", "max_num_tokens_while_decoding=64", "max_seq_len=512")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_embedder(tmp_path_factory.mktemp("models") / "tiny-embed")
    edit_tensors(folder, lambda tensors: tensors["embed_tokens.weight"][BROKEN].fill_(math.nan))
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("models") / "tiny-rerank")


@pytest.fixture(scope="module")
def embedding(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    with openai_running(embedder, tmp_path_factory.mktemp("run"), *LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def reranking(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    with openai_running(reranker, tmp_path_factory.mktemp("run"), *LIMITS) as started:
        yield started


def theirs(folder: Path, texts: list[str]) -> tuple[np.ndarray, list[list[int]]]:
    """Normalised embeddings by transformers, and the ids of the texts."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts]
    with torch.inference_mode():
        found = [model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    return torch.nn.functional.normalize(torch.stack(found), dim=1).numpy(), ids


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=1e-5)


def test_the_openai_package_gets_embeddings_of_all_kinds_of_input(
    embedding: OpenAiServer, embedder: Path
) -> None:
    expected, ids = theirs(embedder, TEXTS)
    assert all(each[-1] == 1 for each in ids)  # the tokenizer's last token, which is pooled
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0) as client:
        for given in (TEXTS, ids):
            answer = client.embeddings.create(model="tiny-embed", input=given)  # which asks for base64
            assert [each.index for each in answer.data] == [0, 1, 2, 3]
            close([each.embedding for each in answer.data], expected)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        for given in (TEXTS[0], ids[0]):
            answer = client.embeddings.create(model="tiny-embed", input=given, encoding_format="float")
            close([each.embedding for each in answer.data], expected[:1])
        short = client.embeddings.create(model="tiny-embed", input=TEXTS, dimensions=16)
        cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
        close([each.embedding for each in short.data], cut)
    body = {"input": TEXTS[:1], "prompt_name": "query", "encoding_format": "base64"}
    answer = embedding.call("/v1/embeddings", body)[2]
    (one,) = answer["data"]
    assert answer["id"].startswith("embd-") and embedding.metric("completion_tokens_sum") == 0
    prompted = theirs(embedder, [PROMPTS["query"] + TEXTS[0]])[0][0]
    close(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), prompted)


def test_numbers_that_are_not_finite_are_an_error_of_their_request(
    embedding: OpenAiServer, embedder: Path
) -> None:
    for form in ("float", "base64"):
        body = {"input": [[5, 6], [BROKEN]], "encoding_format": form}
        status, message, place = embedding.error("/v1/embeddings", body)[:3]
        assert (status, place) == (500, "input[1]") and "not finite" in message
    found = embedding.call("/v1/embeddings", {"input": TEXTS})[2]["data"]
    close([each["embedding"] for each in found], theirs(embedder, TEXTS)[0])
    assert embedding.call("/v1/models")[2]["data"][0]["task"] == "embed"


def test_a_flood_of_inputs_is_overtaken_and_ends_with_its_client(embedding: OpenAiServer) -> None:
    def ask(**more: Any) -> tuple[int, Any]:
        status, _, answer = embedding.call("/v1/embeddings", {"input": "a", **more})
        return status, answer

    before = embedding.metric(ABORTED)
    with embedding.asked("/v1/embeddings", {"input": [[i] * 500 for i in range(1, 2001)]}):
        wait_for(lambda: embedding.metric(WAITING) > 1000, "the inputs to wait")
        status, answer = ask(queue_timeout=0.001)
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert ask(priority=-1)[0] == 200 and embedding.metric(WAITING) > 500
    wait_for(lambda: embedding.metric(RUNNING) == 0, "the inputs to be cancelled")
    assert embedding.metric(ABORTED) - before > 500
    assert ask()[0] == 200


def scores(folder: Path, instruction: str | None = None) -> list[float]:
    """By transformers, with the prompt as Qwen3-Reranker's page puts it together."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    task = usual if instruction is None else instruction
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
        ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    found = []
    for document in DOCUMENTS:
        text = f"{before}<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}{after}"
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[
                0, -1, list(ANSWERS)
            ]
        found.append(float(logits.softmax(0)[0]))
    return found


def test_documents_are_scored_and_ranked(reranking: OpenAiServer, reranker: Path) -> None:
    expected = scores(reranker)
    order = sorted(range(4), key=lambda i: -expected[i])
    body = {"query": QUERY, "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = reranking.call(path, body)[2]
        assert set(answer) == {"id", "model", "results", "usage"} and answer["model"] == "tiny-rerank"
        assert answer["id"].startswith("rerank-")
        assert [each["index"] for each in answer["results"]] == order
        close([each["relevance_score"] for each in answer["results"]], sorted(expected, reverse=True))
        assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[i] for i in order]
    few = reranking.call("/rerank", {**body, "top_n": 2, "return_documents": False})[2]["results"]
    assert [set(each) for each in few] == [{"index", "relevance_score"}] * 2
    for instruction in ("Find", ""):
        asked = {**body, "documents": [{"text": DOCUMENTS[0]}], "instruction": instruction}
        told = reranking.call("/rerank", asked)[2]
        close(told["results"][0]["relevance_score"], scores(reranker, instruction)[0])
    for sides in ({"queries": QUERY, "documents": DOCUMENTS}, {"text_1": [QUERY] * 4, "text_2": DOCUMENTS}):
        answer = reranking.call("/v1/score", sides)[2]
        assert answer["id"].startswith("score-")
        assert answer["object"] == "list" and {each["object"] for each in answer["data"]} == {"score"}
        close([each["score"] for each in answer["data"]], expected)
    long = {"query": QUERY, "documents": ["a", "word " * 600]}
    assert reranking.error("/rerank", long)[2:] == ("documents[1]", "context_length_exceeded")
    titled = {"query": QUERY, "documents": ["a", {"text": "b", "title": "c"}]}
    status, message, place, _ = reranking.error("/rerank", titled)
    assert (status, place) == (400, "documents[1]") and 'the key "title"' in message
