# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of how its weights are quantised, in config.json or ModelOpt's hf_quant_config.json.

Read without torch, for build.py. The formats themselves are in ops/weight.py, by the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

from flashinfer_backend.core.values import shown, some
from flashinfer_backend.models.errors import UnsupportedModelError

WeightFormat: TypeAlias = str  # one of ops.weight.FORMATS
BLOCK = 128
GROUP_MXFP4 = 32
GROUPS = (32, 64, 128)  # columns that share a scale of 4-bit weights; -1 or null: all of a row
SERVED = (
    "served are FP8 (e4m3) checkpoints of compressed-tensors, ModelOpt (quant_algo FP8) and quant_method "
    "fp8, 4-bit weights of AWQ (gemm), GPTQ and compressed-tensors (pack-quantized) in groups of 32, 64, "
    "128 or whole rows, and GPT-OSS's experts in mxfp4; or take the 16-bit checkpoint, with the knob "
    "quantization=fp8 if it should be FP8"
)


@dataclass(frozen=True)
class Quantization:
    """format: the format of the layers' products. Modules that stay dense: those whose names have one of
    `ignored` as a part, "lm_head" or "layers.0.mlp" say, and those whose whole names match one of `patterns`.
    aliases: beginnings of names in the checkpoint, for which patterns are written, and what they are here."""

    format: WeightFormat
    ignored: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def renamed(self, aliases: tuple[tuple[str, str], ...]) -> Quantization:
        """The same for modules whose names begin otherwise in the checkpoint: beginnings there, and here."""
        ignored = {name: name for name in self.ignored}
        for there, here in aliases:
            ignored |= {name: here + name.removeprefix(there) for name in ignored if name.startswith(there)}
        return replace(self, ignored=frozenset(ignored.values()), aliases=aliases)

    def format_of(self, modules: Iterable[str]) -> WeightFormat:
        """The format of one product that computes these modules together, or of all experts'.

        Raises UnsupportedModelError if some of them are quantised and others are not.
        """
        by_module = {name: "dense" if self._ignores(name) else self.format for name in modules}
        if len(set(by_module.values())) > 1:
            dense = [name for name, format in by_module.items() if format == "dense"]
            raise UnsupportedModelError(
                f"quantization_config leaves out {some(dense)}, but quantises the other parts of the same "
                f"product; supported: all of {some(list(by_module))}, or none"
            )
        return next(iter(by_module.values()))

    def _ignores(self, module: str) -> bool:
        # Parts of the name are looked up in the set: with experts there are hundreds of names to ignore, and
        # ten thousands of modules.
        words = module.split(".") if self.ignored else []
        ends = range(1, len(words) + 1)
        parts = (".".join(words[begin:end]) for end in ends for begin in range(end))
        if any(part in self.ignored for part in parts):
            return True
        names = [there + module.removeprefix(here) for there, here in self.aliases if module.startswith(here)]
        return any(pattern.fullmatch(name) for pattern in self.patterns for name in (module, *names))


DENSE = Quantization("dense")


def read_quantization(raw: dict[str, Any], hf_quant: dict[str, Any]) -> Quantization:
    """Read config.json and hf_quant_config.json ({} without that file).

    Raises UnsupportedModelError, naming what was found, for what is not served.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        config = {"quant_method": "modelopt", **hf_quant.get("quantization", {})} if hf_quant else None
    if config is None:
        return DENSE
    method = config.get("quant_method") or config.get("quant_library")
    readers: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": lambda config: "mxfp4",
    }
    if method is None:
        raise UnsupportedModelError(f"quantization_config: quant_method is missing; {SERVED}")
    if method not in readers:
        _refuse(_value(method))
    _check_kv_cache(method, config)
    lists = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
    ignored = [name for key in lists for name in config.get(key) or ()]
    if method == "gptq":
        ignored += _gptq_ignored(config)
    patterns = [name for name in ignored if name.startswith("re:") or "*" in name]
    names = frozenset(name.strip(".") for name in ignored) - set(patterns)  # some say model.layers.0.
    return Quantization(readers[method](config), names, tuple(map(_pattern, patterns)))


def _pattern(name: str) -> re.Pattern[str]:
    """A module or all within it, by its name or the end of it, with `*` for anything; or a regular expression
    behind "re:", for the beginning of the name."""
    if name.startswith("re:"):
        text = rf"(?:{name[3:]}).*"
    else:
        text = r"(?:.*\.)?" + re.escape(name).replace(r"\*", ".*") + r"(?:\..*)?"
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"quantization_config ignores {name!r}, which is no regular expression: {error}"
        ) from None


def _compressed_tensors(config: dict[str, Any]) -> WeightFormat:
    """https://github.com/vllm-project/compressed-tensors: quantization/quant_config.py, quant_args.py."""
    method = "'compressed-tensors'"
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        return "dense"  # only the KV cache is quantised
    group = groups[0]
    if len(groups) > 1 or not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        _refuse(f"{method} with other config_groups than one for all of Linear")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        _refuse(f"{method} with sparsity")
    if config.get("transform_config") or group.get("output_activations"):
        _refuse(f"{method} with transform_config or output_activations")
    format = group.get("format") or config.get("format")
    if format == "pack-quantized":
        return _packed(weights, inputs)
    if format not in ("float-quantized", "naive-quantized"):
        _refuse(f"{method} in format {_value(format)}")
    _expect(f"{method}: weights", weights, num_bits=8, type="float", symmetric=True, dynamic=False)
    if inputs is None:
        _refuse(f"{method} with activations of 16 bits (weights alone in FP8)")
    _expect(f"{method}: input_activations", inputs, num_bits=8, type="float", symmetric=True)
    kinds = weights.get("strategy"), inputs.get("strategy"), inputs.get("dynamic")
    match kinds:
        case "channel" | "tensor", "token", True:
            return "fp8_token"
        case "channel" | "tensor", "tensor", False:
            return "fp8_static"
        case "block", "group", True:
            sizes = tuple(weights.get("block_structure") or ()), inputs.get("group_size")
            if sizes == ((BLOCK, BLOCK), BLOCK):
                return "fp8_block_scale"
            _refuse(f"{method} with blocks of {shown(sizes[0])} and groups of {shown(sizes[1])}, not {BLOCK}")
    weights_by, inputs_by, dynamic = (shown(kind).strip('"') for kind in kinds)
    _refuse(f"{method} with weights by {weights_by}, activations by {inputs_by}, dynamic {dynamic}")


def _packed(weights: dict[str, Any], inputs: object) -> WeightFormat:
    """compressed-tensors' compressors/pack_quantized. An actorder says how weights were found; "group" stores
    each column's group."""
    what = "'compressed-tensors' in format 'pack-quantized'"
    if inputs is not None:
        _refuse(f"{what} with quantised activations")
    _expect(f"{what}: weights", weights, num_bits=4, type="int", dynamic=False)
    if weights.get("actorder") not in (None, "weight", "static", "group", "dynamic"):
        _refuse(f"{what}: weights with actorder {_value(weights['actorder'])}")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "channel") or type(weights.get("symmetric")) is not bool:
        _refuse(f"{what}: weights by {strategy or 'none'}, symmetric {shown(weights.get('symmetric'))}")
    layout = "packed" if weights["symmetric"] else "packed_zeros"
    return _int4(what, layout, size if strategy == "group" else -1)


def _awq(config: dict[str, Any]) -> WeightFormat:
    """https://github.com/casper-hansen/AutoAWQ: awq/models/_config.py, awq/modules/linear/gemm.py."""
    _expect("'awq'", {"version": "gemm", **config}, bits=4, zero_point=True)
    if str(config.get("version", "gemm")).lower() != "gemm":
        _refuse(f"'awq' with version {_value(config['version'])}")
    return _int4("'awq'", "awq", config.get("group_size"))


def _gptq(config: dict[str, Any]) -> WeightFormat:
    """https://github.com/ModelCloud/GPTQModel: quantization/config.py, nn_modules/qlinear. desc_act needs no
    look: which column is in which group is stored."""
    _expect("'gptq'", {"pack_dtype": "int32", "lm_head": False, "is_marlin_format": False, **config},
            bits=4, pack_dtype="int32", lm_head=False, is_marlin_format=False)  # fmt: skip
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        _refuse(f"'gptq' with checkpoint_format {_value(version)}")
    return _int4("'gptq'", version, config.get("group_size"))


def _gptq_ignored(config: dict[str, Any]) -> list[str]:
    """What GPTQ's tools leave out besides ignore lists. GPTQModel's `dynamic` has regular expressions, behind
    "-:" for modules that stay as they were, and the settings of others, {} for no other ones;
    modules_in_block_to_quantize lists what is quantised."""
    dynamic = config.get("dynamic") or {}
    left_out = [name for name in dynamic if name.startswith("-:")]
    if other := [name for name, settings in dynamic.items() if settings and name not in left_out]:
        _refuse(f"'gptq' with other settings for some modules (dynamic {other[0]!r})")
    quantised = [
        re.escape(name) for names in config.get("modules_in_block_to_quantize") or () for name in names
    ]
    others = [rf"re:(?!.*\.(?:{'|'.join(quantised)})$)"] if quantised else []
    return [f"re:{name[2:]}" for name in left_out] + others


def _int4(what: str, layout: str, size: object) -> WeightFormat:
    if type(size) is not int or size not in (*GROUPS, -1):
        _refuse(f"{what} with group_size {shown(size)}")
    return f"int4_{layout}_{'row' if size == -1 else size}"


def _modelopt(config: dict[str, Any]) -> WeightFormat:
    """https://github.com/NVIDIA/Model-Optimizer: modelopt/torch/export."""
    algorithm = config.get("quant_algo")
    formats: dict[str | None, WeightFormat] = {None: "dense", "FP8": "fp8_static"}
    formats["FP8_PER_CHANNEL_PER_TOKEN"] = "fp8_token"
    if algorithm not in formats:
        _refuse(f"'modelopt' with quant_algo {_value(algorithm)}")
    return formats[algorithm]


def _fp8(config: dict[str, Any]) -> WeightFormat:
    """transformers' FineGrainedFP8Config; without blocks, AutoFP8's per-tensor scales."""
    _expect("'fp8'", {"fmt": "e4m3", "scale_fmt": "float", **config}, fmt="e4m3", scale_fmt="float")
    scheme, block = config.get("activation_scheme"), config.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        _refuse(f"'fp8' with activation_scheme {_value(scheme)}")
    if block is None:
        return "fp8_token" if scheme == "dynamic" else "fp8_static"
    if block != [BLOCK, BLOCK] or scheme != "dynamic":
        _refuse(f"'fp8' with weight_block_size {shown(block)} and activation_scheme {_value(scheme)}")
    return "fp8_block"


def _check_kv_cache(method: str, config: dict[str, Any]) -> None:
    """Scales that a checkpoint brings for its KV cache must be e4m3's."""
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        what = f"{method!r}: kv_cache_scheme"
        _expect(what, {"strategy": "tensor", "symmetric": True, **scheme},
                num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)  # fmt: skip
    elif scheme not in (None, "FP8", "static"):
        _refuse(f"{method!r} with a KV cache of {_value(scheme)}")


def _expect(what: str, found: dict[str, Any], **wanted: Any) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            _refuse(f"{what} with {key} {_value(found[key])}" if key in found else f"{what} without {key}")


def _value(value: object) -> str:
    """A text in the quotes of these messages, another value as JSON has it."""
    return repr(value) if isinstance(value, str) else shown(value)


def _refuse(found: str) -> NoReturn:
    raise UnsupportedModelError(f"quantization_config {found} is not supported; {SERVED}")
