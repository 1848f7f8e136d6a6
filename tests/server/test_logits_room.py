# SPDX-License-Identifier: Apache-2.0
"""Many requests for logits at once: there is a bound for all of them, max_logits_mib, and one for each that
the ensemble answers in JSON."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from asking import inputs, int32, stream
from contract import LLM
from running import JSON_LOGITS_MIB, LLM_LOGITS_MIB, EngineWatch, Server, wait_for

ROW = 4 * 2048  # bytes of a token's logits
ROWS = (LLM_LOGITS_MIB << 20) // ROW
JSON_ROWS = (JSON_LOGITS_MIB << 20) // ROW
YES = np.array([[True]])


def asking(number: int, tokens: int, max_tokens: int = 2, **more: np.ndarray) -> dict[str, np.ndarray]:
    ids = (5 + 7 * number + 13 * np.arange(tokens, dtype=np.int32)) % 2000
    values = {"input_ids": ids[None], "input_lengths": int32(tokens), "request_output_len": int32(max_tokens)}
    return values | more


def logits(results: list[Any], name: str) -> np.ndarray:
    parts = [result.as_numpy(name) for result, _ in results]
    return next(part for part in parts if part is not None)


def free(watch: EngineWatch) -> bool:
    status = watch.status()
    return not status.logits_bytes and not status.requests_active


def test_many_get_what_one_gets_alone_within_the_bound(contract: Server, watch_contract: EngineWatch) -> None:
    kinds = [
        {"return_context_logits": YES, "streaming": YES, "max_tokens": 50},
        {"return_context_logits": YES, "num_return_sequences": int32(2), "max_tokens": 50},
        {"return_generation_logits": YES, "max_tokens": 100},
    ]
    requests = [asking(n % 3, 340, **kinds[n % 3]) for n in range(15)]  # type: ignore[arg-type]
    alone = [stream(contract, LLM, [("", request)]) for request in requests[:3]]
    held = 0  # the most bytes that the engine tells of
    with ThreadPoolExecutor(len(requests)) as pool:
        together = [pool.submit(stream, contract, LLM, [("", request)]) for request in requests]
        while not all(each.done() for each in together):
            held = max(held, watch_contract.status().logits_bytes)
    assert ROWS * ROW // 3 < held <= ROWS * ROW
    for number, results in enumerate(each.result() for each in together):
        assert not any(error for _, error in results)
        name = "generation_logits" if number % 3 == 2 else "context_logits"
        np.testing.assert_allclose(logits(results, name), logits(alone[number % 3], name), atol=1e-3)
    wait_for(lambda: free(watch_contract), "all room to be free")


def test_a_request_whose_first_prompt_is_refused_holds_no_room_for_the_others(
    contract: Server, watch_contract: EngineWatch
) -> None:
    """The engine says so while the others are still being submitted."""
    lengths = [ROWS + 1, *[4] * 199]
    values = {
        "input_ids": np.full((len(lengths), ROWS + 1), 5, np.int32),
        "input_lengths": int32(*lengths),
        "request_output_len": int32(*[900] * len(lengths)),
        "return_context_logits": np.full((len(lengths), 1), True),
    }
    ((_, error),) = stream(contract, LLM, [("", values)])
    assert f"of {ROWS + 1} prompt tokens, could be" in str(error)
    wait_for(lambda: free(watch_contract), "all room to be free")


def test_the_ensemble_writes_few_logits_as_json(contract: Server, watch_contract: EngineWatch) -> None:
    body = {"text_input": "Once", "max_tokens": JSON_ROWS + 1, "return_generation_logits": True}
    for stream_too in (False, True):
        answer = contract.post({**body, "stream": stream_too}, stream=stream_too)
        error = answer[0]["error"] if stream_too else answer[1]["error"]
        assert f"at most {JSON_LOGITS_MIB} MiB, those of {JSON_ROWS} tokens" in error, error
        assert "could be 4.0 MiB" in error and "max_json_logits_mib" in error
    status, answer = contract.post({**body, "max_tokens": 3})
    assert status == 200 and len(answer["generation_logits"]) == 3 * 2048
    # What the engine cuts to the room that is left counts as that.
    long = "Once upon a time " * 400
    left = {"text_input": long, "max_tokens": 99999, "return_generation_logits": True, "stop_words": [" "]}
    assert contract.post(left)[0] == 200
    wait_for(lambda: free(watch_contract), "all room to be free")


def test_of_the_model_itself_there_may_be_more(contract: Server, watch_contract: EngineWatch) -> None:
    """As over gRPC, and in binary over HTTP."""
    ids = asking(1, JSON_ROWS + 1, 1, return_context_logits=YES)
    status, answer = contract.post({name: value[0].tolist() for name, value in ids.items()}, LLM)
    assert status == 200, answer
    assert len(answer["context_logits"]) == (JSON_ROWS + 1) * 2048
    wait_for(lambda: free(watch_contract), "all room to be free")


def test_clients_that_leave_give_their_room_to_those_that_wait(
    contract: Server, watch_contract: EngineWatch
) -> None:
    long = asking(1, ROWS - 2, 900, return_context_logits=YES, streaming=YES)
    with contextlib.ExitStack() as clients:
        for _ in range(2):  # one that has all room, and one that waits
            client = clients.enter_context(grpcclient.InferenceServerClient(contract.grpc))
            client.start_stream(lambda result, error: None)
            client.async_stream_infer(LLM, inputs(long))
            clients.callback(client.stop_stream, cancel_requests=True)
        wait_for(lambda: watch_contract.status().logits_waiting == 1, "one to have all room, and one to wait")
        assert watch_contract.status().logits_bytes == (ROWS - 2) * ROW
        assert contract.text("Once upon a time", 4), "others pass"
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(stream, contract, LLM, [("", asking(2, 9, return_context_logits=YES))])
            wait_for(lambda: watch_contract.status().logits_waiting == 2, "another one")
            clients.close()
            results = last.result(30)
        assert not any(error for _, error in results)
    wait_for(lambda: free(watch_contract), "all room to be free")
