# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint of Hugging Face's format to a ModelSpec: one file a family."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashinfer_backend.core.checkpoint_json import check_kinds, read_object, read_object_if_there
from flashinfer_backend.models.checkpoint_kind import check_config, check_folder, lacking
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.apertus import apertus
from flashinfer_backend.models.hf.arcee import arcee
from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.hf.eagle3 import Eagle3Spec, eagle3
from flashinfer_backend.models.hf.end_ids import tokenizer_end_ids
from flashinfer_backend.models.hf.ernie4_5 import ernie4_5
from flashinfer_backend.models.hf.exaone4 import exaone4
from flashinfer_backend.models.hf.gemma2 import gemma2
from flashinfer_backend.models.hf.gemma3 import gemma3_text
from flashinfer_backend.models.hf.glm4 import glm4
from flashinfer_backend.models.hf.gpt_oss import gpt_oss
from flashinfer_backend.models.hf.granite import granite
from flashinfer_backend.models.hf.helium import helium
from flashinfer_backend.models.hf.hunyuan_v1_dense import hunyuan_v1_dense
from flashinfer_backend.models.hf.internlm3 import internlm3
from flashinfer_backend.models.hf.iquestcoder import iquestcoder
from flashinfer_backend.models.hf.llama import llama
from flashinfer_backend.models.hf.llama4 import llama4_text
from flashinfer_backend.models.hf.ministral import ministral
from flashinfer_backend.models.hf.ministral3 import ministral3
from flashinfer_backend.models.hf.mistral import mistral
from flashinfer_backend.models.hf.mixtral import mixtral
from flashinfer_backend.models.hf.mpt import mpt
from flashinfer_backend.models.hf.multimodal import MULTIMODAL
from flashinfer_backend.models.hf.olmo2 import olmo2
from flashinfer_backend.models.hf.olmo3 import olmo3
from flashinfer_backend.models.hf.phi3 import phi3
from flashinfer_backend.models.hf.qwen2 import qwen2
from flashinfer_backend.models.hf.qwen2_moe import qwen2_moe
from flashinfer_backend.models.hf.qwen3 import qwen3
from flashinfer_backend.models.hf.qwen3_5 import qwen3_5_moe_text, qwen3_5_text
from flashinfer_backend.models.hf.qwen3_moe import qwen3_moe
from flashinfer_backend.models.hf.qwen3_next import qwen3_next
from flashinfer_backend.models.hf.seed_oss import seed_oss
from flashinfer_backend.models.hf.smollm3 import smollm3
from flashinfer_backend.models.pooling import Task, causal_name, read_pooling
from flashinfer_backend.models.spec import ModelSpec

# Each function has the name of its family's model_type.
ARCHITECTURES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "Llama4ForCausalLM": llama4_text,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3_5ForCausalLM": qwen3_5_text,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_text,
    "Qwen3NextForCausalLM": qwen3_next,
    "SeedOssForCausalLM": seed_oss,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "InternLM3ForCausalLM": internlm3,
    "IQuestCoderForCausalLM": iquestcoder,
    "ApertusForCausalLM": apertus,
    "ArceeForCausalLM": arcee,
    "Phi3ForCausalLM": phi3,
    "GraniteForCausalLM": granite,
    "HeliumForCausalLM": helium,
    "Ernie4_5ForCausalLM": ernie4_5,
    "SmolLM3ForCausalLM": smollm3,
    "HunYuanDenseV1ForCausalLM": hunyuan_v1_dense,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Exaone4ForCausalLM": exaone4,
    "Glm4ForCausalLM": glm4,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3_text,
    "GptOssForCausalLM": gpt_oss,
    "MptForCausalLM": mpt,
    "MPTForCausalLM": mpt,
}


def read_spec(
    model_dir: str | Path,
    tokenizer_dir: str | Path | None = None,
    changes: dict[str, Any] | None = None,
    task: Task = "auto",
) -> ModelSpec:
    """Read config.json, of which `changes` win, and, where present, generation_config.json of a checkpoint
    folder, and which token ends a text by the tokenizer in tokenizer_dir (default: in the same folder).
    task: of EngineConfig.

    Raises FileNotFoundError without a config.json, UnsupportedModelError for a kind, architecture, rotary
    embedding, layer variant or quantisation that is not implemented, and ValueError for a key that is missing
    or has a wrong value.
    """
    model_dir = Path(model_dir)
    check_folder(model_dir)
    path = model_dir / "config.json"
    raw = read_object(path) | (changes or {})
    pooling = read_pooling(model_dir, Path(tokenizer_dir or model_dir), task)
    generation_path = model_dir / "generation_config.json"
    generation = read_object_if_there(generation_path)
    check_kinds(generation, {"eos_token_id": "ids"}, f"{generation_path}: ")
    hf_quant = read_object_if_there(model_dir / "hf_quant_config.json")
    end_ids = tokenizer_end_ids(Path(tokenizer_dir or model_dir))
    with _explained(path):
        config = Config(raw, generation, hf_quant, end_ids)
        if pooling is not None:
            names = map(causal_name, config.raw.get("architectures") or [])
            if served := [name for name in names if name in ARCHITECTURES]:
                config = config.changed(architectures=served)
        check_config(config.raw, model_dir)
        return _family(config.raw)(config).pooled(pooling).checked()


def read_drafter(folder: str | Path, fp8: bool = False) -> Eagle3Spec:
    """Read config.json of a drafter's folder. fp8: its layers are quantised as they are read, unless they are
    already. Raises as read_spec does."""
    folder = Path(folder)
    check_folder(folder)
    path = folder / "config.json"
    raw, hf_quant = read_object(path), read_object_if_there(folder / "hf_quant_config.json")
    with _explained(path):
        spec = eagle3(raw, hf_quant)
    return spec.quantised_on_load() if fp8 and spec.format == "dense" else spec


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]!r}") from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} has a value of a wrong type: {error}") from None
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _family(raw: dict[str, Any]) -> Callable[[Config], ModelSpec]:
    architectures, model_type = raw.get("architectures") or [], raw.get("model_type")
    for name in architectures:
        if name in ARCHITECTURES:
            family = ARCHITECTURES[name]
            if model_type not in (None, family.__name__):  # by which transformers chooses
                raise UnsupportedModelError(
                    f"model_type {model_type!r} contradicts architecture {name}, whose model_type is"
                    f" {family.__name__!r}; set the one that the model was trained as"
                )
            return family
    by_type = {family.__name__: family for family in ARCHITECTURES.values()}
    if not architectures and model_type in by_type:
        return by_type[model_type]
    named = ", ".join(architectures) or model_type or "none named"
    if what := lacking(raw):
        raise UnsupportedModelError(
            f"architecture {named} is not supported, as such models have {what}: serve it with vLLM or"
            f" SGLang, or take a model of another architecture: {', '.join([*ARCHITECTURES, *MULTIMODAL])}"
        )
    raise UnsupportedModelError(
        f"architecture {named} is not supported; supported: {', '.join([*ARCHITECTURES, *MULTIMODAL])}"
    )
