# SPDX-License-Identifier: Apache-2.0
"""/start_profile and /stop_profile, as vLLM has them: traces of the engines' steps (engine/profiling.py)."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flashinfer_backend.core.bounds import MOST_TRACED_STEPS
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.link import unavailable
from flashinfer_backend.openai.served_model import Answering, ServedModel, find_able_model
from flashinfer_backend.transport.endpoint import EngineDown

ANSWER_S = 60.0  # for the engines to answer, and for their files to be there
LOOK_S = 0.05
STEPS = 20  # unless a request says


class StartProfile(msgspec.Struct, forbid_unknown_fields=True):
    """model: whose engines are traced, where several can be."""

    steps: int = STEPS
    model: str = ""


class StopProfile(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""


def served_by_profile(models: Sequence[ServedModel], request: StartProfile | StopProfile) -> ServedModel:
    """The model whose engines are traced. Raises ApiError."""
    served = find_able_model(models, request.model, lambda served: served.model.profiles)
    if not served.model.profiles:
        raise ApiError(f"the model {served.name} was built without profile_dir", 404, "model")
    return served


def start_profile(served: ServedModel, request: StartProfile) -> Answering:
    """Has the engines trace their next steps. Raises ApiError."""
    if not 1 <= request.steps <= MOST_TRACED_STEPS:
        raise field_error("steps", f"is {request.steps}; it should be 1 to {MOST_TRACED_STEPS}")

    async def answer() -> dict[str, Any]:
        return {"steps": request.steps, "files": await _ask(served, request.steps)}

    return answer


def stop_profile(served: ServedModel, request: StopProfile) -> Answering:
    """The files of the trace, which ends if it has not. Raises ApiError."""
    return partial(_stop, served)


async def _stop(served: ServedModel) -> dict[str, Any]:
    files = await _ask(served, 0)
    deadline = asyncio.get_running_loop().time() + ANSWER_S
    while missing := [file for file in files if not Path(file).exists()]:
        if asyncio.get_running_loop().time() > deadline:
            raise ApiError(f"{missing[0]} was not written within {ANSWER_S:.0f} s; the log may say why", 500)
        await asyncio.sleep(LOOK_S)
    return {"files": files}


async def _ask(served: ServedModel, steps: int) -> list[str]:
    """Each engine's answer. Raises ApiError where one refuses or fails; others may have done what was
    asked."""
    try:
        futures = served.link.engines.profile(steps)
        waits = [asyncio.wrap_future(future) for future in futures.values()]
        _, late = await asyncio.wait(waits, timeout=ANSWER_S)
        if late:
            raise ApiError(f"an engine has not answered within {ANSWER_S:.0f} s", 500)
        answers = [await wait for wait in waits]
    except EngineDown as error:
        raise unavailable(str(error)) from None
    for number, answer in zip(futures, answers, strict=True):
        if answer.error:
            engine = f"engine {number}: " if served.model.engine.replicas > 1 else ""
            raise ApiError(engine + answer.error, 409 if answer.refused else 500)
    return [file for answer in answers for file in answer.files]
