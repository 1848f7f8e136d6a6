# SPDX-License-Identifier: Apache-2.0
"""Requests that the llm model cannot hand to an engine. Triton and the engines are the test."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from responder_bench import OUTPUTS, TIMEOUT_S, Bench, Error, Sender, bench, row

from flashinfer_backend.config_tools.trt_names import FOREIGN
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.serving import generation
from flashinfer_backend.transport.endpoint import ENGINE_DOWN, EngineDown
from flashinfer_backend.triton_server import llm
from flashinfer_backend.triton_server.adapters import TaskThread
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard
from flashinfer_backend.triton_server.llm import TritonPythonModel
from flashinfer_backend.triton_server.requests import LlmLimits
from flashinfer_backend.triton_server.sequence import OpenRequest


class Counts:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.requests, self.sequences = 0, 0

    def refused(self) -> None:
        self.requests += 1

    def ended(self, *_: Any) -> None:
        self.sequences += 1


def execute(
    bench: Bench, folder: Path, submit: Callable[[Any], int], **inputs: np.ndarray
) -> tuple[Error, Counts]:
    """The error of a request. submit: the engines', as far as it is about a sequence."""
    counts = Counts()
    bench.responder.metrics = counts  # type: ignore[assignment]
    model, sender = make_model(bench, folder, submit), Sender()
    try:
        model.execute([request(sender, inputs)])
    finally:
        model._freeze_guard.close()
    ((_, _, error),) = sender.sent
    assert error is not None and not bench.responder.open_requests()
    return error, counts


def make_model(bench: Bench, folder: Path, submit: Callable[[Any], int]) -> TritonPythonModel:
    model = TritonPythonModel()
    model._pb = bench.responder._pb
    model._adapters = model._storing = None
    model._submitting = threading.Lock()
    model._responder, model._limits = bench.responder, LlmLimits(vocab_size=100, max_input_len=100)
    model._engines = SimpleNamespace(  # type: ignore[assignment]
        refusal=lambda count: None, submit=lambda sequence, *_: submit(sequence)
    )
    model._tokenizer_folder, model._skip_special_tokens = folder, True
    model._freeze_guard = FreezeGuard(folder / "runs" / "processes")
    return model


def request(sender: Sender, inputs: dict[str, np.ndarray]) -> SimpleNamespace:
    tensors = {
        "input_ids": np.array([[1, 2]], np.int32),
        "input_lengths": np.array([[2]], np.int32),
        "request_output_len": np.array([[4]], np.int32),
    } | inputs
    return SimpleNamespace(
        inputs=lambda: [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: value)
            for name, value in tensors.items()
        ],
        get_response_sender=lambda: sender,
        parameters=lambda: "",
        timeout=lambda: 0,
        request_id=lambda: "",
        requested_output_names=lambda: list(OUTPUTS - {"chunk"}),
    )


def test_weights_of_adapters_are_stored_next_to_other_requests(bench: Bench, tmp_path: Path) -> None:
    """A request with the same task id comes behind them."""
    submitted: list[str] = []
    stored, going_on = threading.Event(), threading.Event()

    def submit(sequence: Any) -> int:
        submitted.append(sequence.row.params.adapter)
        raise EngineDown(ENGINE_DOWN)

    def keep_task(number: int, *_: Any) -> str:
        going_on.wait(TIMEOUT_S)
        stored.set()
        return f"stored {number}"

    def task(number: int) -> str:
        assert number != 7 or stored.is_set()
        return f"task {number}"

    bench.responder.metrics = Counts()  # type: ignore[assignment]
    model, senders = make_model(bench, tmp_path, submit), [Sender() for _ in range(5)]
    model._adapters = SimpleNamespace(keep_task=keep_task, task=task)  # type: ignore[assignment]
    model._storing = TaskThread(100)
    sent = {
        "lora_weights": np.zeros((1, 1, 30), np.float16), "lora_config": np.zeros((1, 1, 3), np.int32),
    }  # fmt: skip
    ids = [{"lora_task_id": np.array([[number]], np.uint64)} for number in (7, 7, 8, 9)]
    asked = [ids[0] | sent, ids[1], ids[2], {}, ids[3] | sent]
    model.execute([request(*each) for each in zip(senders, asked, strict=True)])
    assert submitted == ["task 8", ""]
    assert "60 of other adapters wait" in senders[4].sent[0][2].message
    going_on.set()
    model._storing.close()
    model._freeze_guard.close()
    assert submitted == ["task 8", "", "stored 7", "task 7"]


def engines_for(sequences: int) -> Callable[[Any], int]:
    """Engines that take so many sequences before there is none."""
    left = iter(range(1, 1 + sequences))

    def submit(sequence: Any) -> int:
        if (handle := next(left, 0)) == 0:
            raise EngineDown(ENGINE_DOWN)
        sequence.handle = handle
        return handle

    return submit


@pytest.mark.parametrize("field", ["request_id", "parameters"])
def test_an_id_and_parameters_that_are_no_utf8_are_refused_in_words(
    bench: Bench, tmp_path: Path, field: str
) -> None:
    bench.responder.metrics = Counts()  # type: ignore[assignment]
    model, sender = make_model(bench, tmp_path, Mock()), Sender()
    asked = request(sender, {})
    setattr(asked, field, lambda: b'{"a":"\xff"}'.decode())
    model.execute([asked])
    model._freeze_guard.close()
    words = "the request's id or a parameter is not UTF-8: invalid start byte at byte 6"
    assert [error.message for _, _, error in sender.sent] == [words]


def test_without_an_engine_a_request_is_refused_and_counted_once(bench: Bench, tmp_path: Path) -> None:
    two = np.array([[2]], np.int32)
    error, counts = execute(bench, tmp_path, engines_for(0), num_return_sequences=two)
    assert (error.message, error.code) == (ENGINE_DOWN, Error.UNAVAILABLE)
    assert (counts.requests, counts.sequences, bench.cancelled) == (1, 0, [])
    error, counts = execute(bench, tmp_path, engines_for(1), num_return_sequences=two)
    assert (counts.requests, counts.sequences, bench.cancelled) == (0, 2, [1])


def test_nothing_more_is_submitted_of_a_request_that_has_been_refused(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end it, nor give the room for its logits back."""
    submitted, submit = [], OpenRequest.submit

    def refuse(sequence: Any) -> int:
        submitted.append(sequence.indices.sequence_index)
        sequence.handle = 1 + len(submitted)
        sequence.on_failure("out of luck", True)
        return 1

    def slowly(request: OpenRequest, sequence: Any, how: Callable[[], int]) -> bool:
        try:
            return submit(request, sequence, how)
        finally:
            assert request.sender.ended.wait(TIMEOUT_S)

    monkeypatch.setattr(OpenRequest, "submit", slowly)
    error, _ = execute(bench, tmp_path, refuse, num_return_sequences=np.array([[3]], np.int32))
    assert error.message == "out of luck" and submitted == [0]


def test_stop_words_are_prepared_once_for_all_sequences_of_a_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of words take a part of a second, in which no other request is accepted."""
    made: list[list[str]] = []
    monkeypatch.setattr(generation, "StopWords", lambda words, *_: made.append(words))
    monkeypatch.setattr(generation, "StopWordMatcher", lambda *_: None)
    two_rows = {
        "input_ids": np.array([[1, 2], [3, 4]], np.int32),
        "input_lengths": np.array([[2], [2]], np.int32),
        "request_output_len": np.array([[4], [4]], np.int32),
        "num_return_sequences": np.array([[3], [3]], np.int32),
        "stop_words_text": np.array([[b"one"], [b"two"]], object),
    }
    execute(bench, resolve_model_dir("bundled"), engines_for(5), **two_rows)
    assert made == [["one"], ["two"]]


def test_what_is_submitted_after_a_stop_ends_as_well(bench: Bench) -> None:
    _, request = bench.open(row(), row(), request_id="a")
    late = request.sequences[1]
    late.handle = 0

    def submit() -> int:
        late.handle = 101
        return 101

    bench.responder.stop("a")
    assert bench.cancelled == [100]
    assert request.submit(late, submit) and bench.cancelled == [100, 101]


def test_what_cannot_be_submitted_is_not_left_open(bench: Bench, tmp_path: Path) -> None:
    """Stop words need the tokenizer, which is not there."""
    error, counts = execute(
        bench, tmp_path / "gone", engines_for(9), stop_words_text=np.array([[b"stop"]], object)
    )
    assert error.message.startswith("internal error: ") and error.code == Error.INTERNAL
    assert (counts.requests, counts.sequences) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("exclude_input_in_output", "maybe", "it should be true or false"),
        ("fold_input_ids", "2", "it should be true or false"),
        ("skip_special_tokens", "no", "it should be true or false"),
        ("streamed_log_probs", "some", "it should be auto, chunk or all"),
        ("cancellation_check_period_ms", "1e3", "it should be an integer 0..60000"),
        ("cancellation_check_period_ms", "-1", "it should be an integer 0..60000"),
        ("max_num_seqs", "0", "it should be an integer 1..4096"),
        ("tokenizer_dir", "/nowhere", "no folder /nowhere"),
        ("max_beam_width", "4", "model is '4': beam search is not supported"),
        ("gpt_model_path", "/engines", "model is '/engines': there are no engine files here: set model_dir"),
        ("executor_worker_path", "/mine", "model is '/mine': the engine is a Python process of this package"),
        ("gpt_model_type", "V1", "inflight_fused_batching or inflight_batching; static batching"),
        ("max_num_seq", "4", "which has no effect; did you mean max_num_seqs"),
        ("my_own", "4", "which has no effect; docs/knobs.md has all"),
        ("batching_strategy", "inflight_batching", "which has no effect there: build.py --set batching_stra"),
        ("max_prompt_bytes", "4", "which has no effect there: build.py --set max_prompt_bytes=4 writes it"),
    ],
)
def test_wrong_parameters_are_refused_before_an_engine_is_started(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace())
    monkeypatch.setattr(llm, "KeeperHandle", lambda *_, **__: pytest.fail("an engine is started"))
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(expected)):
        TritonPythonModel().initialize(arguments({"model_dir": "bundled", name: value}))


def test_what_tensorrt_llms_template_writes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names left empty or unfilled, those with one value in every file, and values that ask for what happens
    anyway."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace())
    started = RuntimeError("all parameters were taken")
    monkeypatch.setattr(llm, "KeeperHandle", Mock(side_effect=started))
    monkeypatch.setattr(llm, "Responder", Mock())
    unset = {name: "${" + name + "}" for name in (*FOREIGN, "gpt_model_type", "max_num_seqs")}
    fixed = {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_beam_width": "1",
        "decoding_mode": "top_k_top_p",
        "enable_trt_overlap": "True",
        "lora_prefetch_dir": "",
        "normalize_log_probs": "true",
    }
    with pytest.raises(RuntimeError) as caught:
        TritonPythonModel().initialize(arguments({**unset, **fixed, "model_dir": "bundled"}))
    assert caught.value is started


def arguments(parameters: dict[str, str]) -> dict[str, str]:
    """Of initialize."""
    texts = {key: {"string_value": text} for key, text in parameters.items()}
    return {"model_name": "llm", "model_config": json.dumps({"parameters": texts})}
