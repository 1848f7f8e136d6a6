# SPDX-License-Identifier: Apache-2.0
"""What the workers of the API are told, and whether they can run. Imports none of the packages that they
need."""

from importlib import util as importlib_util
from pathlib import Path

import msgspec

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.transport.addresses import MOST_FILES, raise_open_files

PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
NO_MODEL = 3  # exit status: the checkpoint cannot be read, and could not the next time
# Descriptors that are not for connections: sockets of the engines' links, libraries' files.
RESERVED_FILES = 128


class Model(msgspec.Struct, frozen=True):
    names: list[str]  # under which requests may ask for it
    engine: EngineConfig
    run_dir: str = ""  # of its engines
    created: int = 0  # seconds since the epoch
    template_file: str | None = None
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    openai_defaults: bool = False  # instead of generation_config.json's
    ignore_effort: bool = False  # of reasoning, where the template has none
    lora_root: str | None = None  # below which adapters can be loaded at run time; None: none can
    max_prompt_bytes: int = 0  # of a text that is tokenized; 0: as many as come

    @property
    def folder(self) -> Path:
        return resolve_model_dir(self.engine.model_dir)

    @property
    def tokenizer_folder(self) -> Path:
        return resolve_model_dir(self.engine.tokenizer_dir or self.engine.model_dir)

    @property
    def profiles(self) -> bool:
        """Whether clients may have the engines' steps traced."""
        return self.engine.profile_dir != "none"


class WorkerOptions(msgspec.Struct, kw_only=True):
    """number: of Metrics. listener, notify: inherited file descriptors. The supervisor fills in these three.
    notify, which does not block, is told lines: + and this process's pid when each model has an engine, . and
    its pid every BEAT_S while the event loop turns. apis: of read_api_states. receive_s: of
    limited_config. max_connections: of room_for_connections."""

    models: list[Model]
    number: int = 0
    listener: int = -1
    notify: int = -1
    keys: list[str] = []
    max_body_bytes: int
    store_bytes: int = 0
    drain_s: int
    receive_s: int
    max_connections: int = 0
    metrics_dir: str
    apis: str
    allowed_origins: list[str] = []


def check_packages() -> None:
    """Raises ValueError naming a package of the extra `openai` that is not installed."""
    for name in PACKAGES:
        if importlib_util.find_spec(name) is None:
            raise ValueError(
                f"the OpenAI API needs the package {name}; install it with `pip install -e '.[openai]'` in"
                " this project's folder"
            )


def room_for_connections(asked: int) -> int:
    """How many connections a process of the API takes, once it may open as many files as the system allows:
    as many as asked for, or, asked for 0, as many as there are descriptors for. Raises ValueError where there
    are too few."""
    needed = RESERVED_FILES + max(asked, 1)
    files = raise_open_files(max(MOST_FILES, needed))
    if files >= needed:
        return asked or files - RESERVED_FILES
    if asked:
        what, instead = f"--max-connections {asked} needs", f"; or ask for at most {files - RESERVED_FILES}"
        instead = instead if files > RESERVED_FILES else ""
    else:
        what, instead = "the OpenAI API needs", ""
    raise ValueError(
        f"{what} {needed} open files or more in each process, {RESERVED_FILES} for itself and one for each"
        f" connection, but a process may open {files}. Raise that limit, for one by `ulimit -n"
        f" {max(1024, needed)}` before the start{instead}"
    )
