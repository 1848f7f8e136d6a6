# SPDX-License-Identifier: Apache-2.0
"""Embedding models and rerankers: how a checkpoint says that it is one, and what is read of a prompt's last
token. Read without torch, for build.py and the OpenAI API.

sentence-transformers lists a model's modules in modules.json: https://sbert.net/docs. Qwen3-Embedding and
Qwen3-Reranker: https://arxiv.org/abs/2506.05176.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from flashinfer_backend.core.checkpoint_json import check_kinds, read_object, read_object_if_there
from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError

Task = Literal["auto", "generate", "embed", "score"]
ST_CONFIG = "config_sentence_transformers.json"
CLASSIFIER, BASE, CAUSAL = "ForSequenceClassification", "Model", "ForCausalLM"
GENERATORS = ("LMHeadModel", "ChatGLMModel")  # they end in BASE too
INSTEAD = "serve it with vLLM, text-embeddings-inference or sentence-transformers"
SERVED = "served are Qwen3-Reranker, and its form as Qwen3ForSequenceClassification with one label"
ANSWERS = ("yes", "no")  # the tokens that Qwen3-Reranker answers with


@dataclass(frozen=True)
class Pooling:
    """What a model gives in place of logits, of a prompt's last token.

    task: "embed": the final hidden state; "score": the logits of `tokens` (yes, no), or without tokens the
    one logit of the checkpoint's score.weight. size: numbers of an embedding. normalize: its length is 1.
    """

    task: Literal["embed", "score"]
    size: int = 0
    normalize: bool = True
    tokens: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """For errors: what the model is, and where its requests go."""
        if self.task == "embed":
            return "an embedding model, which writes no text; send texts to /v1/embeddings"
        return "a reranker, which writes no text; send queries and documents to /v1/rerank or /v1/score"


def read_pooling(folder: Path, tokenizer_dir: Path | None = None, task: Task = "auto") -> Pooling | None:
    """None for a model that writes text. Raises UnsupportedModelError for a kind that is not served, and
    OSError or ValueError for files that cannot be read."""
    if task == "generate":
        return None
    raw, modules = read_object_if_there(folder / "config.json"), _modules(folder)
    check_kinds(
        raw, {"architectures": "texts", "model_type": "text", "hidden_size": "integer", "id2label": "object"}
    )
    names = raw.get("architectures") or []
    classifies = any(name.endswith(CLASSIFIER) for name in names)
    if task == "auto":
        if "LogitScore" in modules or (classifies and raw.get("model_type") == "qwen3"):
            task = "score"
        elif modules or any(is_base(name) for name in names):
            task = "embed"
        else:
            return None
    if task == "embed":
        return Pooling("embed", raw.get("hidden_size") or 0, _embedding(folder, modules))
    if raw.get("model_type") != "qwen3":
        _refuse(f"{folder} is a reranker of another family: {SERVED}; {INSTEAD}")
    if classifies:
        if (labels := len(raw.get("id2label") or (0, 0))) != 1:
            _refuse(f"{folder} is a classifier with {labels} labels: {SERVED}; {INSTEAD}")
        return Pooling("score")
    if "LogitScore" in modules:
        tokens = _logit_score(folder, modules["LogitScore"])
    else:
        tokens = _ids(tokenizer_dir or folder)
    size = raw.get("vocab_size")
    if isinstance(size, int) and max(tokens) >= size:
        raise ValueError(f"{folder}: the reranker's tokens {tokens} should lie in 0..{size - 1}")
    return Pooling("score", tokens=tokens)


def is_base(architecture: str) -> bool:
    """Whether it is a decoder without its head, like Qwen3Model."""
    return architecture.endswith(BASE) and not architecture.endswith(GENERATORS)


def causal_name(architecture: str) -> str:
    """The same decoder's architecture as a model that writes text."""
    for end in (CLASSIFIER, BASE):
        if architecture.endswith(end):
            return architecture.removesuffix(end) + CAUSAL
    return architecture


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name that sentence-transformers puts before texts, and the name of the default one."""
    path = folder / ST_CONFIG
    found = read_object_if_there(path)
    check_kinds(found, {"prompts": "object", "default_prompt_name": "text"}, f"{path}: ")
    prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    check_kinds(prompts, dict.fromkeys(prompts, "text"), f"{path}: prompts.")
    if default is not None and default not in prompts:
        raise ValueError(f"{path}: default_prompt_name is {shown(default)}; it should be one of its prompts")
    return {name: text or "" for name, text in prompts.items()}, default


def _modules(folder: Path) -> dict[str, str]:
    """Kind -> folder of a checkpoint's modules; none where sentence-transformers did not write it."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(str(module["type"]), str(module.get("path") or "")) for module in listed]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} should list modules as sentence-transformers writes them") from None
    own = "sentence_transformers."  # others are code that the checkpoint brings
    return {kind.rpartition(".")[2] if kind.startswith(own) else kind: place for kind, place in kinds}


def _embedding(folder: Path, modules: dict[str, str]) -> bool:
    """Whether embeddings are normalised. Raises UnsupportedModelError for what is not computed."""
    if other := sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"}):
        _refuse(f"{folder} has a module {', '.join(other)}, which is not computed: {INSTEAD}")
    if modules:
        if "Pooling" not in modules:
            _refuse(f"{folder}/modules.json has no module Pooling, so it is no embedding model: {INSTEAD}")
        path = folder / modules["Pooling"] / "config.json"
        config = read_object(path)
        modes = {name.removeprefix("pooling_mode_") for name, on in config.items() if on is True}
        modes &= {"cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"}
        if config.get("pooling_mode_lasttoken"):
            modes.add("lasttoken")
        mode = config.get("pooling_mode")
        modes |= {mode} if isinstance(mode, str) else set(mode or ())
        if modes != {"lasttoken"}:
            _refuse(
                f"{path} pools by {', '.join(sorted(modes)) or 'nothing'}; only lasttoken, the last token's"
                f" hidden state, is computed: {INSTEAD}"
            )
    return not modules or "Normalize" in modules


def _logit_score(folder: Path, place: str) -> tuple[int, ...]:
    path = folder / place / "config.json"
    config = read_object(path)
    check_kinds(config, {"true_token_id": "integer", "false_token_id": "integer"}, f"{path}: ")
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if true is None or false is None or min(true, false) < 0:
        _refuse(f"{path} should name true_token_id and false_token_id: {SERVED}; {INSTEAD}")
    return true, false


def _ids(folder: Path) -> tuple[int, ...]:
    path = folder / "tokenizer.json"
    found = read_object(path)
    model = found.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    vocabulary = vocabulary if isinstance(vocabulary, dict) else {}
    ids = tuple(i for word in ANSWERS if isinstance(i := vocabulary.get(word), int))
    if len(ids) != len(ANSWERS):
        raise ValueError(f"{path} has no tokens yes and no, whose logits Qwen3-Reranker compares")
    return ids


def _refuse(message: str) -> NoReturn:
    raise UnsupportedModelError(message)
