# SPDX-License-Identifier: Apache-2.0
"""What a server's processes are told of a model that they serve."""

from pathlib import Path

import msgspec

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir


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
