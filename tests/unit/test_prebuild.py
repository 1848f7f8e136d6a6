# SPDX-License-Identifier: Apache-2.0
"""Which kernel modules are compiled ahead, and how: with a real ninja, and FlashInfer where it is there."""

import contextlib
import logging
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from checkpoints import make_checkpoint
from flashinfer_backend.core import progress, tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.tuned import RowTile
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.ops import device
from flashinfer_backend.prebuild import main
from flashinfer_backend.worker import prebuild
from specs import EXPERTS, bundled
from tables import entries

MODEL = bundled()
SHAPES = Path(__file__).parents[2] / "perf_configs" / "shapes"
NINJA = shutil.which("ninja") or ""
needs_ninja = pytest.mark.skipif(not NINJA, reason="needs ninja")


def kinds(capability=(9, 0), dtype=torch.bfloat16, model=MODEL, **knobs):
    return prebuild.needed(model, EngineConfig(model_dir="", **knobs), dtype, capability)


def test_modules_follow_from_checkpoint_knobs_and_gpu():
    common = {"sampling", "norm", "silu", "fa2"}
    assert kinds() == common | {"fa3", "gated_linear"}
    assert kinds((10, 0)) == kinds((12, 0)) == common
    assert kinds(kv_cache_dtype="fp8_e4m3") == kinds()  # FA3 over copies
    assert kinds(tensor_parallel_size=2) == kinds() | {"all_reduce"}
    assert kinds(attention_backend="torch") == kinds(dtype=torch.float32) == {"sampling"}
    odd = bundled(intermediate_size=96)  # which gated_linear does not take
    assert kinds(model=odd) == common | {"fa3"}
    assert kinds(model=MODEL.quantised_on_load()) == common | {"fa3", "gated_linear_fp8"}
    int4 = MODEL.with_format("int4_awq_128")
    assert kinds(model=int4) == common | {"fa3", "int4_linear"} and kinds((10, 0), model=int4) == common
    experts = bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2)
    assert kinds(model=experts) == kinds(model=experts.quantised_on_load()) == {*common, "fa3"} - {"silu"}
    odd = bundled(hidden_size=MODEL.hidden_size + 64)
    assert kinds(model=odd.quantised_on_load()) == common | {"fa3"}


def test_a_head_may_need_what_its_target_does_not():
    experts = bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2)
    found = prebuild.needed_by([experts, MODEL], EngineConfig(model_dir=""), torch.bfloat16, (9, 0))
    assert set(found) == kinds(model=experts) | {"silu", "gated_linear"}
    assert found["silu"] is MODEL and found["fa3"] is experts
    assert list(found) == ["fa3", "sampling", "gated_linear", "norm", "fa2", "silu"], "long ones begin first"


def test_windows_and_soft_caps_have_modules_of_their_own():
    def changed(activation="silu", **options):
        layers = [
            replace(layer, mixer=replace(layer.mixer, **(options if index % 2 else {})))
            for index, layer in enumerate(MODEL.layers)
        ]
        layers = [replace(layer, mlp=replace(layer.mlp, activation=activation)) for layer in layers]
        return replace(MODEL, layers=tuple(layers))

    found = kinds(model=changed(window=100), max_seq_len=1000)
    assert found == kinds() | {"fa2_window", "fa3_window"}
    assert kinds(model=changed(window=100), max_seq_len=100) == kinds()
    capped = kinds((10, 0), model=changed("gelu_tanh", window=100, soft_cap=2.0), max_seq_len=1000)
    assert {kind for kind in capped if kind.startswith("fa")} == {"fa2", "fa2_window_cap"}
    assert "gelu_tanh" in capped and "silu" not in capped
    varied = kinds(model=changed(variant="alibi"))  # the other layers share its plans
    assert {kind for kind in varied if kind.startswith("fa")} == {"fa2", "fa2_alibi"}


def test_the_kernels_of_delta_nets_are_for_hopper():
    nets = bundled(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text")
    drafting = {"speculative_method": "ngram", "max_draft_len": 3}
    assert "delta_rows" in kinds(model=nets) & kinds(model=nets, **drafting)
    assert "delta_rows" not in kinds(model=nets, **drafting | {"max_draft_len": 8})  # they take 7
    assert "delta_rows" not in kinds() | kinds((10, 0), model=nets)


def test_the_kernel_of_mxfp4_is_compiled_where_numbers_name_its_teams(monkeypatch):
    model = read_spec(SHAPES / "gpt-oss-20b")
    assert "mxfp4_experts" in kinds(model=model)  # by the H200's file
    assert "mxfp4_experts" not in kinds() | kinds((10, 0), model=model)
    monkeypatch.setattr(tuned, "load", {device.LIKE: tuned.fallback()}.get)
    assert "mxfp4_experts" not in kinds(model=model)


def test_the_kernel_of_blocks_is_compiled_where_numbers_name_its_tiles(monkeypatch):
    """Without a GPU, those of the device whose numbers others with its processor take."""
    blocks, named = (
        MODEL.with_format("fp8_block"),
        msgspec.structs.replace(tuned.fallback(), blocks_linear={"o": entries((8, RowTile()))}),
    )
    assert "blocks_linear" not in kinds(model=blocks)  # the H200's file has none for its shapes
    (shape,) = {product.shape for product in blocks.products if product.role == "o"}
    for tiles, needed in (
        (entries((8, RowTile())), True),
        (entries((8, RowTile()), shape=shape), True),
        (entries((8, RowTile()), shape=(shape[0] + 128, shape[1])), False),
        (entries((8, None)), False),
    ):
        numbers = msgspec.structs.replace(named, blocks_linear={"o": tiles})
        monkeypatch.setattr(tuned, "load", {device.LIKE: numbers}.get)
        assert ("blocks_linear" in kinds(model=blocks)) == needed
    monkeypatch.setattr(tuned, "load", {device.LIKE: named}.get)
    assert "blocks_linear" not in kinds() | kinds((10, 0), model=blocks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with device.use(tuned.fallback()):
        assert "blocks_linear" not in kinds(model=blocks)


def test_the_libraries_depend_on_flags_but_not_on_where_files_are_found():
    def flags(**environment):
        return prebuild.compiler_flags({f"FLASHINFER_{name}": text for name, text in environment.items()})

    assert flags(EXTRA_CUDAFLAGS="-isystem /a/include -I/b -I /c", EXTRA_LDFLAGS="-L/d -L /e") == []
    assert flags(EXTRA_CUDAFLAGS="-I /c -lineinfo", EXTRA_CFLAGS="-g") == ["-g", "-lineinfo"]
    assert flags(JIT_DEBUG="1") != flags(JIT_DEBUG="0") == []


@pytest.mark.parametrize(
    ("format", "named"),
    [
        ("int4_awq_128", "_1_zeros_"),
        ("int4_packed_row", "_1_middle_"),
        ("int4_gptq_64", "_2_zeros_"),
        ("int4_packed_32", "_4_middle_"),
    ],
)
def test_the_kernel_of_4_bits_is_compiled_for_the_checkpoints_groups(format, named, monkeypatch):
    core = pytest.importorskip("flashinfer.jit.core")
    hopper = {(9, "0a")}  # also where there is no GPU
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", hopper)
    model = MODEL.with_format(format)
    found = prebuild._spec("int4_linear", model, EngineConfig(model_dir=""), torch.float16)
    assert named in found.name and "nv_half" in found.name


@pytest.fixture
def small_build(tmp_path):
    """A ninja file of a "module" of two files whose compiler is a shell script, and the command that runs
    it."""
    (tmp_path / "one.cu").write_text("good")
    (tmp_path / "two.cu").write_text("good")
    (tmp_path / "compile").write_text(
        'grep -q bad $2 && { echo "two.cu(7): error: expected a semicolon"; exit 1; }; sleep 0.1; cp $2 $4\n'
    )
    rules = [
        "rule cc",
        "  command = sh compile -c $in -o $out",
        "build one/a.o: cc one.cu",
        "build two/b.o: cc two.cu",
        "rule ld",
        "  command = cat $in > $out",
        "build module.so: ld one/a.o two/b.o",
    ]
    (tmp_path / "build.ninja").write_text("\n".join(rules) + "\n")
    return tmp_path, [NINJA, "-C", str(tmp_path), "-j", "1"]


@needs_ninja
def test_progress_counts_steps_and_only_modules_that_are_stale(small_build, caplog, monkeypatch):
    _, command = small_build
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "PROGRESS_S", 0.01)
    assert prebuild.run_ninja(command) == 1
    assert any(record.message.startswith("compiled 1 of 3 files in ") for record in caplog.records)
    assert prebuild.run_ninja(command) == 0


@needs_ninja
def test_a_failure_ends_with_what_the_compiler_said(small_build):
    folder, command = small_build
    (folder / "two.cu").write_text("bad")
    with pytest.raises(
        prebuild.KernelBuildError, match=r"two.cu\(7\): error: expected a semicolon"
    ) as caught:
        prebuild.run_ninja(command)
    assert "sh compile" not in str(caught.value)  # nobody wants to read nvcc's flags
    (folder / "build.ninja").write_text("build a: none b\n")
    with pytest.raises(prebuild.KernelBuildError, match="unknown build rule"):
        prebuild.run_ninja(command)


def test_failures_name_what_to_install():
    said = ["FAILED: x.o", "nvcc -fPIC x.cu", "in x.cu:1:", "x.cu:1:10: fatal error: curand.h: No such file"]
    text = prebuild.describe_failure(said, 1)
    assert "libcurand-dev" in text and "curand.h: No such file" in text and "nvcc -fPIC" not in text
    assert "cuda-driver-dev" in prebuild.describe_failure(["ld: cannot find -lcuda: No such file"], 1)
    assert "cuda-driver-dev" not in prebuild.describe_failure(["ld: cannot find -lcudart"], 1)


HOLD = """if True:
    import sys
    from pathlib import Path
    from flashinfer_backend.worker import prebuild
    with prebuild._locked(Path(sys.argv[1])):
        print("locked", flush=True)
        for command in sys.stdin:
            prebuild.run_ninja(command.split())
            print("compiled", flush=True)
"""


@contextlib.contextmanager
def holding(folder):
    """A process that has the lock, and runs a command of ninja's for each line that it gets."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        try:
            yield other
        finally:
            other.kill()


@needs_ninja
def test_with_a_process_that_is_killed_its_compilers_end_and_its_lock(tmp_path):
    pytest.importorskip("filelock")
    (tmp_path / "build.ninja").write_text(
        "rule cc\n  command = echo $$$$ >started && mv started pid && exec sleep 300\nbuild a: cc\n"
    )
    with holding(tmp_path) as other:
        other.stdin.write(shlex.join([NINJA, "-C", str(tmp_path)]) + "\n")
        other.stdin.flush()
        while not (tmp_path / "pid").exists():
            assert other.poll() is None
            time.sleep(0.05)
        compiler = os.pidfd_open(int((tmp_path / "pid").read_text()))
        other.kill()
        other.wait()
        assert select.select([compiler], [], [], 20)[0], "the compiler goes on"
        os.close(compiler)
        with prebuild._locked(tmp_path):
            pass


@needs_ninja
def test_one_process_at_a_time_compiles_and_that_is_progress_of_one_that_waits(
    small_build, monkeypatch, tmp_path
):
    """And its waiting alone is none."""
    pytest.importorskip("filelock")
    folder, command = small_build
    monkeypatch.setattr(progress, "PROGRESS_S", 0.01)
    monkeypatch.setattr(progress, "_file", None)
    run = tmp_path / "run"
    run.mkdir()
    progress.note_in(run)
    looks, texts = threading.Semaphore(0), set()

    def log(_: str, text: str) -> None:
        texts.add(text)
        looks.release()

    monkeypatch.setattr(progress.log, "info", log)

    def after_looks() -> float:
        for _ in range(4):
            assert looks.acquire(timeout=120)
        return progress.last_progress(run)

    def wait() -> None:
        with prebuild._locked(folder):
            pass

    with holding(folder) as other:
        waiting = threading.Thread(target=wait)
        waiting.start()
        began = after_looks()
        while len(texts) < 3:  # which tell the seconds
            assert after_looks() == began, "time passes, and that is all"
        other.stdin.write(shlex.join(command) + "\n")
        other.stdin.flush()
        assert other.stdout.readline() == "compiled\n"
        while looks.acquire(blocking=False):
            pass
        later = after_looks()
        assert began < later == after_looks()
        assert waiting.is_alive() and all("another process" in text for text in texts)
        other.stdin.close()  # it ends
        waiting.join(120)
    assert not waiting.is_alive()


@pytest.mark.parametrize("wrong", [["--arch", "sm_80"], ["--arch", "hopper"]])
def test_wrong_architectures_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert "sm_90" in capsys.readouterr().err


def test_it_says_what_to_install_where_flashinfer_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", None)
    assert main(["--arch", "sm_90"]) == 1
    assert (
        "flashinfer" in (said := capsys.readouterr().err) and "'.[cuda]'" in said and "Traceback" not in said
    )


def test_wrong_knobs_and_models_are_refused(capsys):
    assert main(["--arch", "sm_90", "--set", "head_size=3", "--set", "dtype=float16"]) == 1
    assert "head_size" in capsys.readouterr().err
    assert main(["--arch", "sm_90", "--model", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


def test_the_image_has_the_modules_of_one_gpu_and_of_several(monkeypatch):
    """The line of the Dockerfile that compiles them, as its shell would run it."""
    text = (Path(__file__).parents[2] / "docker/Dockerfile").read_text()
    (line,) = re.findall(r"^RUN .*flashinfer_backend\.prebuild (.*?) \\$", text, re.MULTILINE)
    found = []
    monkeypatch.setattr(prebuild, "prepare", lambda *settings: found.append(settings))
    monkeypatch.setattr(prebuild, "export", lambda output: output)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")  # which main sets
    assert main(shlex.split(line.replace("${ARCH}", "sm_90"))) == 0
    ((config, model, dtype, _),) = found
    compiled = prebuild.needed(model, config, dtype, (9, 0))
    for ranks in (1, 2, 4, 8):
        assert compiled >= kinds(model=model, dtype=dtype, tensor_parallel_size=ranks)


def test_knobs_need_not_fit_the_model_whose_config_is_at_hand(monkeypatch):
    """Without --model that is the bundled one's."""
    found = []
    monkeypatch.setattr(prebuild, "prepare", lambda *settings: found.append(settings))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")  # which main sets
    assert main(["--arch", "sm_90", "--set", "max_seq_len=131072"]) == 0
    ((config, model, *_),) = found
    assert config.max_seq_len == model.longest_seq_len == 131072


def test_groups_of_ranks_need_what_their_shared_experts_do(monkeypatch, tmp_path):
    """Which are not folded there."""
    folder, found = make_checkpoint("qwen3.5-moe", tmp_path), []
    monkeypatch.setattr(prebuild, "prepare", lambda *settings: found.append(settings))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")  # which main sets
    for groups in ("1", "2"):
        knobs = ["tensor_parallel_size=2", f"expert_parallel_size={groups}"]
        assert main(["--arch", "sm_90", "--model", str(folder), "--set", *knobs]) == 0
    needed = [prebuild.needed(model, config, dtype, (9, 0)) for config, model, dtype, _ in found]
    assert ["silu" in kinds for kinds in needed] == [False, True]


BUILD = """
import sys
from flashinfer_backend.worker import prebuild
prebuild.needed = lambda *_: {"silu"}  # one small file
from flashinfer_backend import prebuild as command
status = command.main(sys.argv[1:])
from flashinfer.jit import gen_act_and_mul_module
spec = gen_act_and_mul_module("silu")
assert status or spec.is_aot, "FlashInfer would compile it again"
sys.exit(status)
"""


def build(workspace: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = os.environ | {"FLASHINFER_WORKSPACE_BASE": str(workspace)} | environment
    command = [sys.executable, "-c", BUILD, "--arch", "sm_90", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(600)
def test_a_second_run_compiles_nothing(tmp_path):
    """A module of FlashInfer's, really compiled, without a GPU."""
    pytest.importorskip("flashinfer")
    if not NINJA or not shutil.which("nvcc"):
        pytest.skip("needs ninja and nvcc")
    first = build(tmp_path / "workspace", "--output", str(tmp_path / "image"))
    assert first.returncode == 0, first.stderr
    assert "compiled 1 kernel modules" in first.stdout and "files at a time: silu" in first.stderr
    no_compiler = {"FLASHINFER_NVCC": "/nowhere/nvcc"}
    assert "nothing to compile" in build(tmp_path / "workspace", **no_compiler).stdout
    # Another machine's first start, with the libraries that an image brings, in a folder it cannot write to.
    missing = build(tmp_path / "other", **no_compiler)
    assert missing.returncode == 1 and "nvcc" in missing.stderr and "cuda-nvcc" in missing.stderr
    brought = build(tmp_path / "other", **no_compiler, FLASHINFER_BACKEND_KERNELS=str(tmp_path / "image"))
    assert "nothing to compile" in brought.stdout, brought.stderr
    # What FlashInfer compiled itself is taken over; other flags are other libraries.
    shutil.rmtree(next((tmp_path / "workspace").rglob("libraries-*/")))
    assert "nothing to compile" in build(tmp_path / "workspace").stdout
    assert "compiled 1" in build(tmp_path / "workspace", FLASHINFER_EXTRA_CUDAFLAGS="-DUNUSED").stdout
