# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel modules that a checkpoint and the knobs need, together and before they are used.

FlashInfer compiles a module when it is first called, one after another, and lets ninja look at it again in
every process. Here one run of ninja compiles all that are missing, in FlashInfer's own build folder, and the
libraries are copied to a folder next to it, which becomes FlashInfer's ahead-of-time folder in this process:
what lies there is only loaded. The folder's path has FlashInfer's version, the GPU architectures and all else
that the libraries depend on; the name of a module of ours changes with its source.

An image can bring the libraries in a folder that is only read: $FLASHINFER_BACKEND_KERNELS, written by
`python -m flashinfer_backend.prebuild --output`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.tuned import Tuned
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.ops import blocks_linear, delta_rows, device, gated_linear, int4_linear, mxfp4_experts
from flashinfer_backend.ops.weight import FORMATS, Int4

log = logging.getLogger(__name__)

READ_ONLY = "FLASHINFER_BACKEND_KERNELS"
Kind = str  # fa2 and fa3 are followed by options: fa2_window_cap, fa2_alibi
# By how long a file of a module takes (290 to 3 s): what takes longest begins first.
LONGEST_FIRST = (
    "all_reduce", "fa3", "sampling", "gated_linear", "int4_linear", "norm", "gated_linear_fp8", "fa2",
    "mxfp4_experts", "blocks_linear", "delta_rows", "silu", "gelu_tanh",
)  # fmt: skip
ACTIVATIONS: tuple[Kind, ...] = ("silu", "gelu_tanh")  # with modules of their own
ONE_VARIANT = {"blocks_linear": blocks_linear, "mxfp4_experts": mxfp4_experts, "delta_rows": delta_rows}
FILE_MEMORY = 2 << 30  # bytes that compiling one file may take
# In FlashInfer's build folder. Its own common builds also take the lock: they write the same log of ninja's,
# which gets a line for each finished step.
LOCK, NINJA_LOG = "tmp/flashinfer_jit.lock", ".ninja_log"
ERROR_LINES = 15
# What the compiler says (a regular expression) -> what is missing.
HINTS = {
    "curand": "cuRAND's headers (Debian package libcurand-dev-13-0, or pip install nvidia-curand)",
    "cublas": "cuBLAS's headers (Debian package libcublas-dev-13-0, or pip install nvidia-cublas)",
    "cuda_runtime": "CUDA's runtime headers (Debian package cuda-cudart-dev-13-0)",
    r"-lcudart\b": "CUDA's runtime (Debian package cuda-cudart-dev-13-0), or CUDA_HOME, the folder of CUDA",
    r"-lcuda\b": "the CUDA driver's library to link with (Debian package cuda-driver-dev-13-0)",
    r"Python\.h": "Python's headers (Debian package python3-dev)",
    "Killed": "MAX_JOBS, the number of files compiled at a time, as memory ran out",
    "No space left": "FLASHINFER_WORKSPACE_BASE, a folder with more space",
}
STEP = "@step "  # begins the lines of ninja's that tell of a finished step


class KernelBuildError(OSError):
    """The kernels could not be compiled; the text says what the compiler said and what to install."""


def needed(
    model: ModelSpec, config: EngineConfig, dtype: torch.dtype, capability: tuple[int, int]
) -> set[Kind]:
    """The modules that an engine with these settings calls on a GPU of this compute capability."""
    if config.attention_backend == "torch" or dtype == torch.float32:
        return {"sampling"}  # top-k and top-p; all else is plain torch
    kinds: set[Kind] = {"sampling", "norm"}
    kinds |= _attention_kinds(model, config, capability)
    # Experts' products are Triton's, with the activation.
    activations = {mlp.activation for mlp in model.mlps}
    kinds.update(name for name in ACTIVATIONS if name in activations)
    formats = {product.format for product in model.products if product.gated and not product.experts}
    if capability == (9, 0) and any(mlp.size % 64 == 0 for mlp in model.mlps):
        if model.hidden_size % 64 == 0 and "dense" in formats:
            kinds.add("gated_linear")
        if model.hidden_size % 128 == 0 and formats & {"fp8_token", "fp8_on_load", "fp8_static"}:
            kinds.add("gated_linear_fp8")
    if capability == (9, 0) and _int4_format(model):
        kinds.add("int4_linear")
    blocks = {p.shape for p in model.products if p.format.startswith("fp8_block") and not p.experts}
    if capability == (9, 0) and _names_row_tiles(blocks):
        kinds.add("blocks_linear")
    mixture = {product.format for product in model.products if product.experts}
    if capability == (9, 0) and "mxfp4" in mixture and _names_teams():
        kinds.add("mxfp4_experts")
    nets = {(net.key_dim, net.value_dim, net.kernel) for net in model.delta_nets}
    if capability == (9, 0) and delta_rows.SIZES in nets and 1 + config.drafts <= delta_rows.MOST:
        kinds.add("delta_rows")
    if config.tensor_parallel_size > 1:
        kinds.add("all_reduce")
    return kinds


def _numbers() -> Tuned | None:
    """The device's numbers, or without a GPU those that a Hopper GPU would have."""
    return device.active() if torch.cuda.is_available() else tuned.load(device.LIKE)


def _names_teams() -> bool:
    """Whether the numbers name a tile of ops.mxfp4_experts."""
    numbers = _numbers()
    entries = numbers.experts["mxfp4"] if numbers else ()
    return any(tile is not None and tile.teams for entry in entries for _, tile in entry.steps)


def _names_row_tiles(shapes: set[tuple[int, int]]) -> bool:
    """Whether the numbers name a tile of ops.blocks_linear for a weight of one of these shapes."""
    numbers = _numbers()
    entries = chain.from_iterable(numbers.blocks_linear.values() if numbers else ())
    named = [entry for entry in entries if any(tile for _, tile in entry.steps)]
    return any(entry.shape in shapes or (entry.shape is None and shapes) for entry in named)


def needed_by(
    models: Sequence[ModelSpec], config: EngineConfig, dtype: torch.dtype, capability: tuple[int, int]
) -> dict[Kind, ModelSpec]:
    """The modules that several models need, in the order of LONGEST_FIRST, each with the first of these."""

    def place(kind: Kind) -> int:
        return LONGEST_FIRST.index(kind if kind in LONGEST_FIRST else kind.split("_")[0])

    first = {kind: model for model in reversed(models) for kind in needed(model, config, dtype, capability)}
    return {kind: first[kind] for kind in sorted(first, key=place)}


def _attention_kinds(model: ModelSpec, config: EngineConfig, capability: tuple[int, int]) -> set[Kind]:
    """Modules of prompts' attention: with and without windows and soft caps, as layers want them. A variant
    is FA2's, and so are layers without one in its cache group."""
    windows = model.windows(config.max_seq_len or model.longest_seq_len)
    mixers = model.attentions
    varied = any(mixer.variant for mixer in mixers)
    kinds: set[Kind] = set()
    for window, mixer in zip(windows, mixers, strict=True):
        options = "_window" * bool(window) + "_cap" * bool(mixer.soft_cap)
        kinds.add("_".join(filter(None, ["fa2" + options, mixer.variant])))
        if capability[0] == 9 and not (varied and window is None):
            kinds.add("fa3" + options)
    return kinds


def _int4_format(model: ModelSpec) -> str | None:
    """That of a checkpoint's weights of 4 bits, or None without. There is one: what else it has is dense."""
    formats = (product.format for product in model.products)
    return next((format for format in formats if format.startswith("int4")), None)


def prepare(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, drafter: ModelSpec | None = None
) -> int:
    """Compile what is missing and let FlashInfer load all from one folder; returns how many were compiled.

    For GPUs of the architectures that FlashInfer sees, or FLASHINFER_CUDA_ARCH_LIST names.
    Raises KernelBuildError.
    """
    try:
        from flashinfer.jit import env
    except OSError as error:
        raise KernelBuildError(
            f"FlashInfer cannot write to its cache folder: {error}; set FLASHINFER_WORKSPACE_BASE (or"
            " HOME) to a folder that can be written"
        ) from error
    models = [model] if drafter is None else [model, drafter]
    kinds = needed_by(models, config, dtype, _lowest_capability())
    specs = {kind: _spec(kind, each, config, dtype) for kind, each in kinds.items()}
    if all(spec.is_aot for spec in specs.values()):
        return 0
    folder = libraries_folder(env.FLASHINFER_WORKSPACE_DIR)
    compiled = 0
    if not _link_existing(specs, folder):
        with _locked(env.FLASHINFER_JIT_DIR):
            if not _link_existing(specs, folder):  # what another process compiled meanwhile is there
                missing = {kind: s for kind, s in specs.items() if not library(folder, s.name).exists()}
                compiled = _compile(missing, folder)
    env.FLASHINFER_AOT_DIR = folder
    return compiled


def libraries_folder(workspace: Path) -> Path:
    """Where the libraries lie for what they depend on besides FlashInfer's version and the architectures,
    which FlashInfer's `workspace` folder is named after."""
    import tvm_ffi

    parts = [f"cuda{torch.version.cuda or ''}", f"ffi{tvm_ffi.__version__}"]
    if flags := "\n".join(compiler_flags(os.environ)):
        parts.append(hashlib.sha256(flags.encode()).hexdigest()[:8])
    return workspace / "-".join(["libraries", *parts])


def compiler_flags(environment: Mapping[str, str]) -> list[str]:
    """What the environment adds to FlashInfer's compiler flags; not where to search for files, which may
    differ between the machine that compiles and the one that runs."""
    names = ("FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS")
    words = shlex.split(" ".join(environment.get(name, "") for name in names))
    kept, previous = [], ""
    for word in words:
        if not word.startswith(("-I", "-L", "-isystem")) and previous not in ("-I", "-L", "-isystem"):
            kept.append(word)
        previous = word
    switches = ("FLASHINFER_JIT_DEBUG", "FLASHINFER_JIT_VERBOSE", "FLASHINFER_JIT_LINEINFO")
    return kept + [f"{name}=1" for name in switches if environment.get(name, "0") == "1"]


def library(folder: Path, name: str) -> Path:
    """Where FlashInfer looks for the module `name` in an ahead-of-time folder."""
    return folder / name / f"{name}.so"


def export(output: Path) -> Path:
    """Copy the libraries that `prepare` found or made to `output`, for $FLASHINFER_BACKEND_KERNELS; returns
    their folder there."""
    from flashinfer.jit import env

    source = env.FLASHINFER_AOT_DIR
    target = output / libraries_folder(env.FLASHINFER_WORKSPACE_DIR).relative_to(env.FLASHINFER_CACHE_DIR)
    for path in source.glob("*/*.so"):
        _place(path, library(target, path.stem))
    return target


def _lowest_capability() -> tuple[int, int]:
    """The lowest architecture to compile for: with several kinds of GPUs, only what all of them have is
    used."""
    from flashinfer.compilation_context import CompilationContext

    found = [(major, int(minor.rstrip("af"))) for major, minor in CompilationContext().TARGET_CUDA_ARCHS]
    if not found:
        raise KernelBuildError("there is no GPU to compile for; name an architecture, such as --arch sm_90")
    return min(found)


def _spec(kind: Kind, model: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> Any:
    """FlashInfer's description of how the module is built."""
    from flashinfer.jit import gen_act_and_mul_module, norm, sampling

    if kind == "sampling":
        return sampling.gen_sampling_module()
    if kind == "norm":
        return norm.gen_norm_module()
    if kind in ACTIVATIONS:
        return gen_act_and_mul_module(kind)
    if kind == "all_reduce":
        from flashinfer.jit.comm import gen_trtllm_comm_module

        return gen_trtllm_comm_module()
    if kind in ("gated_linear", "gated_linear_fp8"):
        return gated_linear.spec(dtype if kind == "gated_linear" else torch.float8_e4m3fn)
    if kind in ONE_VARIANT:
        return ONE_VARIANT[kind].spec()
    if kind == "int4_linear":
        format = FORMATS[_int4_format(model) or ""]
        assert isinstance(format, Int4)
        return int4_linear.spec(dtype, int4_linear.parts_of(format.group), format.zeros)
    from flashinfer_backend.attention.flashinfer_calls import batch_spec
    from flashinfer_backend.attention.variants import VARIANTS

    kv_dtype = dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn
    backend, *variant = kind.split("_")
    own = next((VARIANTS[name] for name in variant if name in VARIANTS), None)
    options = {"window": "window" in variant, "soft_cap": "cap" in variant}
    return batch_spec(backend, dtype, kv_dtype, model.attention.head_dim, **options, variant=own)


def _link_existing(specs: dict[Kind, Any], folder: Path) -> bool:
    """Link the libraries that FlashInfer or an image brings into `folder`; whether all are there then."""
    from flashinfer.jit import env

    brought = []
    if read_only := os.environ.get(READ_ONLY):
        brought.append(Path(read_only) / folder.relative_to(env.FLASHINFER_CACHE_DIR))
    missing = False
    for spec in specs.values():
        target = library(folder, spec.name)
        if target.exists():
            continue
        sources = [spec.aot_path, *(library(place, spec.name) for place in brought)]
        source = next((path for path in sources if path.exists()), None)
        if source is None:
            missing = True
        else:
            _place(source, target, link=True)
    return not missing


def _place(source: Path, target: Path, link: bool = False) -> None:
    """Copy or link, so that others see all of the file or none of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    if link:
        part.symlink_to(source.resolve())
    else:
        shutil.copyfile(source, part)
    part.replace(target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time compiles in FlashInfer's build folder; the lock ends with its holder."""
    from filelock import FileLock, Timeout

    path = folder / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        began = time.monotonic()

        def how_far() -> str:
            return f"another process compiles the kernels: waiting, {time.monotonic() - began:.0f} s by now"

        log.info("%s", how_far())
        # A file that the other process compiled is also progress of this start. There is none while it hangs.
        with telling(how_far, lambda: _written(folder / NINJA_LOG)):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _written(path: Path) -> tuple[int, int]:
    """What changes when a file is written; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _compile(specs: dict[Kind, Any], folder: Path) -> int:
    """Build the modules and put their libraries into `folder`; returns how many had to be compiled."""
    from flashinfer.jit import env

    names = ", ".join(specs)
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        raise KernelBuildError(
            f"these kernels are not compiled yet: {names}; FLASHINFER_DISABLE_JIT forbids it, unset it"
        )
    ninja = _tools()
    with _headers_of_wheels():
        for spec in specs.values():
            spec.write_ninja()
    build = env.FLASHINFER_JIT_DIR / f"{folder.name}.ninja"
    lines = ["ninja_required_version = 1.3", *(f"subninja {spec.ninja_path}" for spec in specs.values())]
    build.write_text("\n".join(lines) + "\n")
    command = [ninja, "-f", str(build), "-C", str(env.FLASHINFER_JIT_DIR)]
    jobs = _jobs()
    architectures = env.FLASHINFER_WORKSPACE_DIR.name
    log.info("compiling GPU kernels for sm_%s, %d files at a time: %s", architectures, jobs, names)
    began = time.monotonic()
    linked = run_ninja([*command, "-j", str(jobs)])
    for spec in specs.values():
        _place(spec.jit_library_path, library(folder, spec.name))
    log.info("GPU kernels ready after %.0f s, kept in %s", time.monotonic() - began, folder)
    return linked


def _tools() -> str:
    """Path of ninja. Raises KernelBuildError where a tool is missing."""
    from flashinfer.jit.cpp_ext import get_cuda_path

    missing = []
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja is None:
        missing.append("ninja (pip install ninja)")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        missing.append("a C++ compiler (Debian package build-essential)")
    try:
        nvcc: str | None = os.environ.get("FLASHINFER_NVCC") or f"{get_cuda_path()}/bin/nvcc"
    except RuntimeError:
        nvcc = None
    if nvcc is None or shutil.which(nvcc) is None:
        version = torch.version.cuda or "13"
        package = f"cuda-nvcc-{torch.version.cuda.replace('.', '-') if torch.version.cuda else '13-0'}"
        missing.append(f"nvcc of CUDA {version} on PATH or in CUDA_HOME (Debian package {package})")
    if missing or ninja is None:
        raise KernelBuildError("the GPU's kernels are not compiled yet, which needs " + " and ".join(missing))
    return ninja


@contextmanager
def _headers_of_wheels() -> Iterator[None]:
    """Let FlashInfer also look for headers where torch's wheels bring cuBLAS's and cuRAND's, behind CUDA's
    own folder: an installation of nvcc alone does not have them."""
    wheels = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (wheels.submodule_search_locations if wheels else None) or ()]
    headers = [path.parent for root in roots for path in sorted(root.glob("*/include/cu*.h"))]
    name = "FLASHINFER_EXTRA_CUDAFLAGS"
    before = os.environ.get(name)
    options = [f"-isystem {shlex.quote(str(folder))}" for folder in dict.fromkeys(headers)]
    os.environ[name] = " ".join([before or "", *options])
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _jobs() -> int:
    """How many files to compile at a time: as many as there are cores and memory for."""
    if os.environ.get("MAX_JOBS", "").isdigit():
        return max(1, int(os.environ["MAX_JOBS"]))
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), pages // FILE_MEMORY))


def run_ninja(command: list[str]) -> int:
    """Run ninja and log its progress; returns how many modules it linked. FlashInfer, or a start that was
    ended, may have compiled some before. Raises KernelBuildError with the last lines of what failed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"NINJA_STATUS": STEP + "%f of %t: "},
        preexec_fn=end_with_parent,  # ninja, and with it the compilers
    )
    assert process.stdout is not None
    began = time.monotonic()
    failure: deque[str] = deque(maxlen=400)
    finished, linked = "0", 0

    def how_far() -> str:
        return f"compiled {finished} files in {time.monotonic() - began:.0f} s"

    with telling(how_far, lambda: finished):
        for data in process.stdout:
            line = data.decode(errors="replace").rstrip()
            if line.startswith(STEP):
                finished, _, step = line.removeprefix(STEP).partition(": ")
                linked += " -c " not in step
            elif failure or line.startswith(("FAILED:", "ninja: error", "ninja: fatal")):
                failure.append(line)
    if process.wait():
        raise KernelBuildError(describe_failure(list(failure), process.returncode))
    return linked


def describe_failure(lines: list[str], status: int) -> str:
    """What to tell of ninja's output from the first failed step on."""
    # Behind each FAILED line is the command, with all of nvcc's flags.
    commands = {i + 1 for i, line in enumerate(lines) if line.startswith("FAILED:")}
    said = [line[:300] for i, line in enumerate(lines) if line and i not in commands]
    said = [line for line in said if not line.startswith(("FAILED:", "ninja: build stopped"))]
    first = next((i for i, line in enumerate(said) if re.search(r"\berror\b|cannot find|Killed", line)), 0)
    told = said[max(0, first - 1) :][:ERROR_LINES]
    hints = [hint for word, hint in HINTS.items() if any(re.search(word, line) for line in told)]
    advice = f"; install or set {' and '.join(hints)}" if hints else ""
    return "\n  ".join(
        [f"the GPU's kernels could not be compiled (ninja ended with {status}){advice}:", *told]
    )
