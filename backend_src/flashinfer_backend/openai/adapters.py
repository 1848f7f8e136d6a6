# SPDX-License-Identifier: Apache-2.0
"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from flashinfer_backend.models.adapters import AdapterError
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.served_model import Answering, ServedModel, find_able_model
from flashinfer_backend.serving.adapters import NameTakenError


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """load_inplace: whether an adapter that was loaded under the name is replaced. model: which one's adapter
    it is, where several take some."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str = ""


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


def served_by_load(models: Sequence[ServedModel], request: LoadRequest) -> ServedModel:
    """The model whose adapter is loaded. Raises ApiError."""
    served = find_able_model(models, request.model, lambda served: served.adapters is not None)
    if served.adapters is None:
        raise ApiError(
            f"the model {served.name} was built without max_loras and takes no adapters", param="model"
        )
    return served


def served_by_unload(models: Sequence[ServedModel], request: UnloadRequest) -> ServedModel:
    """The model that has the adapter, or any that takes adapters."""
    taking = [served for served in models if served.adapters is not None]
    return next((each for each in taking if each.adapter_folder(request.lora_name) is not None), taking[0])


def load_adapter(models: Sequence[ServedModel], served: ServedModel, request: LoadRequest) -> Answering:
    """Lets requests ask for an adapter. models: all that the process serves. Raises ApiError."""
    name, adapters, root = request.lora_name, served.adapters, Path(served.model.lora_root or "")
    assert adapters is not None and served.model.lora_root is not None
    try:
        folder = Path(root, request.lora_path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a character 0
        raise field_error("lora_path", f"cannot be followed: {error}") from None
    if root not in folder.parents:
        raise ApiError(f"lora_path should be a folder below {root} (--lora-root)", 403, "lora_path")
    for each in models:
        if name in each.model.names:
            raise ApiError(f"`{name}` is the model {each.name}; take another name", param="lora_name")
    others = [each.adapters for each in models if each is not served and each.adapters is not None]
    change = partial(adapters.load, name, folder, request.load_inplace, others)
    return partial(_change, change, 400, "lora_path", f"LoRA adapter '{name}' added")


def unload_adapter(served: ServedModel, request: UnloadRequest) -> Answering:
    """Takes no more requests for an adapter. Raises ApiError."""
    name, adapters = request.lora_name, served.adapters
    assert adapters is not None
    change = partial(adapters.unload, name)
    return partial(_change, change, 404, "lora_name", f"LoRA adapter '{name}' removed")


async def _change(change: Callable[[], None], status: int, param: str, done: str) -> Response:
    """status, param: of the error where the change is refused. done: what has happened then."""
    try:
        # A slow disk, or a process that holds the lock, keeps no other request.
        await run_in_threadpool(change)
    except NameTakenError as error:
        raise ApiError(str(error), status, "lora_name") from None
    except AdapterError as error:
        raise ApiError(str(error), status, param) from None
    return PlainTextResponse(f"Success: {done} successfully.")
