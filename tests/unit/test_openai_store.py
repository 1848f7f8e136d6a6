# SPDX-License-Identifier: Apache-2.0
"""What a process keeps of responses, and what gives way."""

from __future__ import annotations

import json

import pytest

from flashinfer_backend.openai import store as store_module
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.store import Store


def kept(store: Store, *names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            found.append(json.loads(store.response(name))["id"] == name)
        except ApiError as error:
            assert error.status == 404
            found.append(False)
    return found


def put(store: Store, name: str, size: int = 0) -> None:
    store.put(name, [{"text": "x" * size}], {"id": name})


def test_bytes_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(400)
    put(store, "a", 150)
    put(store, "b", 150)
    assert kept(store, "b", "a") == [True, True]
    put(store, "c", 150)  # b has not been used for the longest time
    assert kept(store, "a", "b", "c") == [True, False, True]
    put(store, "large", 400)
    assert kept(store, "a", "large", "c") == [True, False, True]
    assert store.items("a", "p") == [{"text": "x" * 150}]
    store.delete("a")
    put(store, "d", 150)
    put(store, "e", 20)
    assert kept(store, "a", "c", "d", "e") == [False, True, True, True]
    monkeypatch.setattr(store_module, "MOST_STORED", 3)
    put(store, "f")
    assert kept(store, "c", "d", "e", "f") == [False, True, True, True]
