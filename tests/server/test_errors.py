# SPDX-License-Identifier: Apache-2.0
"""Every mistake gets an error that names it, and nobody else's request suffers."""

from __future__ import annotations

import threading
from typing import Any

from asking import PROMPT, int32, stream, strings
from running import Server

LONG = "word " * 3000

# Of the parameters; values of tensors are in tests/unit/test_requests.py.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens) is 0; it should be at least 1"),
    ({"timeout": -1}, "timeout is -1; it should be the microseconds"),
    ({"timeout": "soon"}, 'timeout is "soon"'),
    ({"timeout": 1.5}, "timeout is 1.5"),
    ({"timeout": True}, "timeout is true"),
    ({"priority": 10}, "priority is 10; it should be an integer in 1..9"),
    ({"queue_priority": "high"}, 'queue_priority is "high"'),
    ({"speculative_decoding": "off"}, 'speculative_decoding is "off"; it should be true or false'),
    ({"priority": 1, "queue_priority": 2}, "two names of one value"),
    ({"text_input": LONG}, "exceeds maximum input length (2047)"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_weights"),
]  # fmt: skip


def test_mistakes_are_named_while_others_go_on(server: Server) -> None:
    expected = server.text(PROMPT, 64)
    wrong: list[str] = []
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            events = server.post({"text_input": PROMPT, "max_tokens": 64, "stream": True}, stream=True)
            text = "".join(event.get("text_output", str(event)) for event in events)
            if text != expected:
                wrong.append(text)

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for changes, message in MISTAKES:
            status, answer = server.post({"text_input": PROMPT, "max_tokens": 4, **changes})
            assert status == 400, (changes, answer)  # whatever the model's own status is
            assert message in answer["error"], changes
            # Streaming, the status may have been sent by then.
            body = {"text_input": PROMPT, "max_tokens": 4, "stream": True, **changes}
            assert message in str(server.post(body, stream=True)), changes
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_error_leaves_the_grpc_stream_usable(server: Server) -> None:
    good = {"text_input": strings(PROMPT), "max_tokens": int32(4)}
    bad = {"text_input": strings(PROMPT), "max_tokens": int32(0)}
    answers = stream(server, "ensemble", [("1", good), ("2", bad), ("3", good)])
    assert sum(error is not None for _, error in answers) == 1
    texts = [r.as_numpy("text_output") for r, error in answers if error is None]
    assert sum(text is not None for text in texts) == 2
