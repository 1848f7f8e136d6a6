# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file to a checkpoint folder that the server takes: config.json, tokenizer, chat template,
and the weights in bfloat16, whatever their format in the file.

    python tools/convert_gguf.py FILE.gguf FOLDER

transformers reads the file. What it would silently leave out is refused by name here.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex
from tokenizers import pre_tokenizers as split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flashinfer_backend.models.hf import ARCHITECTURES, read_spec

# Keys behind the architecture's name that say nothing more than others, or that convert() reads.
ALSO_READ = {"attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"}
MODEL_TYPES = {"qwen3moe": "qwen3_moe"}  # as transformers names them
CONFIG_TYPES = {"gemma3": "gemma3_text"}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a byte-level tokenizer cuts text into words, by tokenizer.ggml.pre.
WORD_SPLITS = {
    "gpt-2": [], "smollm": [split.Digits(individual_digits=True)],
    "llama-bpe": [split.Split(Regex(WORDS % "{1,3}"), "isolated")],
    "qwen2": [split.Split(Regex(WORDS % ""), "isolated")],
}  # fmt: skip


class Refused(ValueError):
    """The file holds something that would be lost or is not served."""


def convert(file: Path, folder: Path) -> None:
    """Writes the checkpoint `folder`, which must not exist. Raises Refused, OSError, or gguf's ValueError for
    what is no GGUF file; then nothing is left behind."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _config(file, fields, tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    processor = TENSOR_PROCESSORS.get(fields["general.architecture"], TensorProcessor)(
        config=config.to_dict()
    )
    known = get_gguf_hf_weights_map(model, processor)
    if lost := [tensor.name for tensor in reader.tensors if tensor.name not in known]:
        raise Refused(f"{file}: no place for the tensors {', '.join(lost)}")
    tokenizer = _tokenizer(file, fields)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        dense = dequantize(tensor.data, tensor.tensor_type)
        done = processor.process(  # which itself notes experts, without a name
            weights=dense, name=tensor.name, tensor_key_mapping=known, parsed_parameters={"tensors": tensors}
        )
        if done.name in known:
            tensors[known[done.name]] = torch.from_numpy(np.array(done.weights)).to(torch.bfloat16)
    missing = set(model.load_state_dict(tensors, strict=False, assign=True).missing_keys)
    if config.tie_word_embeddings:
        missing.discard("lm_head.weight")
        model.tie_weights()
    if missing:
        raise Refused(f"{file}: lacks the tensors {', '.join(sorted(missing))}")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        read_spec(folder)  # as the server does at its start
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _config(file: Path, fields: dict[str, Any], tied: bool) -> Any:
    named = fields.get("general.architecture")
    model_type = MODEL_TYPES.get(named, named)
    mapped = GGUF_CONFIG_MAPPING.get(model_type)
    config_type = CONFIG_TYPES.get(model_type, model_type)
    if mapped is None or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config_type) not in ARCHITECTURES:
        raise Refused(
            f"{file}: the architecture {named} is not served, or transformers does not read its GGUF"
        )
    own = {
        name.removeprefix(f"{named}."): value
        for name, value in fields.items()
        if name.startswith(f"{named}.")
    }
    if own.pop("rope.scaling.type", "none") == "none":  # its factors then mean nothing
        own = {name: value for name, value in own.items() if not name.startswith("rope.scaling.")}
    else:
        raise Refused(f"{file}: {named}.rope.scaling.type: scaled rotary embeddings cannot be converted")
    if lost := [f"{named}.{name}" for name in own if name not in mapped.keys() | ALSO_READ]:
        raise Refused(f"{file}: no place for the settings {', '.join(lost)}")
    key, value = (own.get(f"attention.{kind}_length") for kind in ("key", "value"))
    if key != value:
        raise Refused(f"{file}: keys of length {key} and values of length {value}; one length is served")
    if absent := {"embedding_length", "attention.head_count", "block_count"} - own.keys():
        raise Refused(f"{file}: lacks the settings {', '.join(f'{named}.{name}' for name in absent)}")
    head = key or own["embedding_length"] // own["attention.head_count"]
    if own.get("rope.dimension_count", head) != head:
        raise Refused(f"{file}: {named}.rope.dimension_count is not the heads' size {head}")
    read = {new: own[name] for name, new in mapped.items() if new and name in own}
    read |= {
        "head_dim": head,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    defaults = GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {})
    return AutoConfig.for_model(config_type, **defaults | read)


def _tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if fields["tokenizer.ggml.model"] == "gpt2":
        named = fields.get("tokenizer.ggml.pre")
        if named not in WORD_SPLITS:
            raise Refused(f"{file}: tokenizer.ggml.pre is {named}; known are {', '.join(WORD_SPLITS)}")
        words = split.ByteLevel(add_prefix_space=False, use_regex=named in ("gpt-2", "smollm"))
        tokenizer.backend_tokenizer.pre_tokenizer = split.Sequence([*WORD_SPLITS[named], words])
    return tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} is there already; name a new folder, or remove it")
    try:
        convert(args.file, args.folder)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_gguf.py: {error}")


if __name__ == "__main__":
    main()
