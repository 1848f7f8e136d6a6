# SPDX-License-Identifier: Apache-2.0
"""Knobs that contradict each other or the checkpoint."""

from pathlib import Path

from flashinfer_backend.core.config import (
    GPU_HEAD_DIMS,
    LONGEST_AUTO_SEQ_LEN,
    EngineConfig,
    contradictions,
    resolve_lengths,
)
from flashinfer_backend.core.paths import resolve_drafter_dir, resolve_model_dir
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models.adapters import AdapterError, read_adapter
from flashinfer_backend.models.checkpoint_kind import weight_files
from flashinfer_backend.models.hf import read_drafter, read_spec
from flashinfer_backend.models.spec import ModelSpec

TOKENIZER_FILE = "tokenizer.json"
ASCII_ONLY = (
    "Triton's Python backend opens only paths of ASCII characters; name it by a link (ln -s) with such"
)


def check(values: dict[str, str]) -> list[str]:
    """Problems of a complete set of values (settings.complete), each with what would be right."""
    problems: list[str] = []
    model = _check_checkpoint(values, problems)
    _check_drafter(values, model, problems)
    _check_adapters(values, model, problems)
    _check_tokenizer(values, problems)
    _check_lengths(values, model, problems)
    _check_batches(values, problems)
    _check_device(values, model, problems)
    return problems


def _check_checkpoint(values: dict[str, str], problems: list[str]) -> ModelSpec | None:
    name = values["model_dir"]
    if not name.isascii():
        problems.append(f"model_dir={name}: {ASCII_ONLY}")
    try:
        folder = resolve_model_dir(name)
    except FileNotFoundError as error:
        problems.append(f"model_dir={name}: {error}")
        return None
    try:
        model = read_spec(folder, task=values["task"])  # type: ignore[arg-type]
        if values["load_format"] != "dummy":
            try:
                weight_files(folder)
            except (OSError, ValueError) as error:
                problems.append(f"model_dir={name}: {error}; load_format=dummy runs without weights")
        if values["quantization"] == "fp8":
            model = model.quantised_on_load()
        if model.pooling is not None and values["speculative_method"] != "none":
            problems.append(f"speculative_method should be none: the checkpoint is {model.pooling.what}")
        if values["speculative_method"] == "mtp":
            model.mtp_head()
        groups = int(values["expert_parallel_size"])
        model.check_expert_groups(groups)
        model.share(Shard(0, int(values["tensor_parallel_size"]), groups))
        return model
    except (OSError, ValueError) as error:
        problems.append(f"model_dir={name}: {error}")
    return None


def _check_adapters(values: dict[str, str], model: ModelSpec | None, problems: list[str]) -> None:
    if values["lora_modules"] == "none" or model is None:
        return
    for entry in values["lora_modules"].split(","):
        try:
            read_adapter(
                Path(entry.partition("=")[2]), model, int(values["max_lora_rank"]),
                values["lora_vocabulary"] == "true",
            )  # fmt: skip
        except AdapterError as error:
            problems.append(f"lora_modules={entry}: {error}")


def _check_drafter(values: dict[str, str], model: ModelSpec | None, problems: list[str]) -> None:
    name = values["draft_model"]
    if name == "none":
        return
    try:
        folder = resolve_drafter_dir(name)
        drafter = read_drafter(folder)
        if values["load_format"] != "dummy":
            weight_files(folder)
        if model is not None:
            max_seq_len, _ = resolve_lengths(EngineConfig.from_parameters(values), model.longest_seq_len)
            drafter.check_fits(model, max_seq_len)
            drafter.share(Shard(0, int(values["tensor_parallel_size"])))
    except (OSError, ValueError) as error:
        problems.append(f"draft_model={name}: {error}")


def _check_tokenizer(values: dict[str, str], problems: list[str]) -> None:
    name = values["tokenizer_dir"]
    if not name.isascii() and name != values["model_dir"]:
        problems.append(f"tokenizer_dir={name}: {ASCII_ONLY}")
    try:
        folder = resolve_model_dir(name)
    except FileNotFoundError as error:
        if name != values["model_dir"]:
            problems.append(f"tokenizer_dir={name}: {error}")
        return
    if not (folder / TOKENIZER_FILE).is_file():
        problems.append(f"tokenizer_dir={name}: has no {TOKENIZER_FILE}; name a folder which has one")


def _check_lengths(values: dict[str, str], model: ModelSpec | None, problems: list[str]) -> None:
    config = EngineConfig.from_parameters(values)
    longest = model.longest_seq_len if model else LONGEST_AUTO_SEQ_LEN
    if model:
        try:
            model.check_max_seq_len(config.max_seq_len)
        except ValueError as error:
            problems.append(f"max_seq_len={values['max_seq_len']}: {error}")
    problems += contradictions(config, longest)
    max_seq_len, _ = resolve_lengths(config, longest)
    if values["max_tokens_in_paged_kv_cache"] != "auto":
        cache = config.max_tokens_in_paged_kv_cache
        shown = f"max_seq_len={max_seq_len}" if config.max_seq_len else f"max_seq_len (auto: {max_seq_len})"
        if cache < max_seq_len:
            problems.append(
                f"max_tokens_in_paged_kv_cache={cache} should be at least {max_seq_len}, or max_seq_len at "
                f"most {cache}: a sequence of {shown} tokens could never finish"
            )


def _check_batches(values: dict[str, str], problems: list[str]) -> None:
    _check_sizes("preferred_batch_size", "triton_max_batch_size", values, problems)
    if values["llm_preferred_batch_size"] != values["preferred_batch_size"]:  # else it is reported already
        _check_sizes("llm_preferred_batch_size", "triton_max_batch_size", values, problems)
    if values["cuda_graph_batch_sizes"] not in ("auto", "none"):
        reason = ": larger batches do not occur"
        _check_sizes("cuda_graph_batch_sizes", "max_num_seqs", values, problems, reason)


def _check_sizes(
    name: str, limit: str, values: dict[str, str], problems: list[str], reason: str = ""
) -> None:
    largest = int(values[limit])
    too_large = [size for size in values[name].split(",") if int(size) > largest]
    if too_large:
        problems.append(f"{name}={','.join(too_large)} should be at most {limit}={largest}{reason}")


def _check_device(values: dict[str, str], model: ModelSpec | None, problems: list[str]) -> None:
    backend, dtype = values["attention_backend"], values["dtype"]
    graphs = values["cuda_graph_batch_sizes"]
    if values["device"] == "cpu":
        if backend in ("fa2", "triton"):
            problems.append(
                f"attention_backend={backend} needs a GPU: with device=cpu it should be torch or auto"
            )
        if dtype in ("bfloat16", "float16"):
            problems.append(f"dtype={dtype} needs a GPU: with device=cpu it should be float32 or auto")
        if graphs not in ("auto", "none"):
            problems.append(
                f"cuda_graph_batch_sizes={graphs} needs a GPU: with device=cpu it should be none or auto"
            )
        return
    in_fp8 = model is not None and model.format.startswith("fp8")
    if values["device"] == "cuda" and backend != "torch" and in_fp8 and dtype in ("float16", "float32"):
        problems.append(f"dtype={dtype}: weights in FP8 need dtype=bfloat16 or auto on a GPU")
    kernels = backend in ("fa2", "triton")
    if kernels and dtype == "float32":
        problems.append(
            f"attention_backend={backend} computes in bfloat16 or float16: dtype=float32 needs "
            "attention_backend=torch"
        )
    on_gpu = values["device"] == "cuda" or kernels
    if on_gpu and backend != "torch" and model and model.attention.head_dim not in GPU_HEAD_DIMS:
        problems.append(
            f"attention_backend={backend} has head_dim {', '.join(map(str, GPU_HEAD_DIMS))}, and "
            f"the checkpoint's is {model.attention.head_dim}: set attention_backend=torch"
        )
    if backend == "torch" and graphs not in ("auto", "none"):
        problems.append(
            f"cuda_graph_batch_sizes={graphs} needs FlashInfer's attention: with attention_backend=torch it "
            "should be none or auto"
        )
