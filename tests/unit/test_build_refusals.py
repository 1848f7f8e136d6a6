# SPDX-License-Identifier: Apache-2.0
"""What build.py refuses, with words that say what would be right, and nothing written."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_support import MODEL_REPO, ROOT, build, checkpoint, refused, snapshot, write_checkpoint

from eagle3_heads import make_head
from flashinfer_backend.config_tools.trt_names import FOREIGN, refusal

REFUSALS = [
    (["max_num_seq=3"], "unknown knob 'max_num_seq'; did you mean max_num_seqs"),
    (["frobnicate=3"], "unknown knob 'frobnicate'; --list-knobs shows all"),
    (["max_num_seqs"], "--set max_num_seqs: should be knob=value"),
    (["max_num_seqs=0"], "max_num_seqs=0: should be an integer 1..4096"),
    (["max_num_seqs=4", "max_num_seqs=5"], "max_num_seqs=5: already set to 4; set it once"),
    (["batching_strategy=inflight_batching", "gpt_model_type=inflight_fused_batching"], "already set to"),
    (["gpt_model_type=V1"], "static batching is not supported"),
    (["enable_kv_cache_reuse=yes"], "enable_kv_cache_reuse=yes: should be true or false"),
    (["kv_cache_free_gpu_mem_fraction=1.5"], "should be a number 0.001..1"),
    (["kv_cache_free_gpu_mem_fraction=nan"], "should be a number 0.001..1"),
    (["cuda_graph_batch_sizes=1,x"], "should be auto, none, or integers 1..4096 separated by commas"),
    (["cuda_graph_batch_sizes=1,512"], "cuda_graph_batch_sizes=512 should be at most max_num_seqs=256"),
    (["preferred_batch_size=512"], "should be at most triton_max_batch_size=256"),
    (["llm_preferred_batch_size=1,512"], "llm_preferred_batch_size=512 should be at most"),
    (["max_seq_len=8192"], "max_seq_len 8192 is above the checkpoint's max_position_embeddings 4096"),
    (["max_seq_len=1024", "max_input_len=1024"], "max_input_len=1024 should be at most 1023"),
    (["max_num_tokens_while_decoding=100"], "should be at least max_num_seqs=256"),
    (["max_num_tokens=1024"], "max_num_tokens_while_decoding=2048 should be at most max_num_tokens=1024"),
    (["enable_chunked_context=false", "max_num_tokens=2048"],
     "needs max_num_tokens=2048 to be at least 4095, since a prompt of max_input_len (auto: 4095)"),
    (["max_tokens_in_paged_kv_cache=1024"], "should be at least 4096, or max_seq_len at most 1024"),
    (["device=cpu", "attention_backend=fa2"], "with device=cpu it should be torch or auto"),
    (["device=cpu", "dtype=float16"], "dtype=float16 needs a GPU: with device=cpu it should be float32"),
    (["device=cpu", "cuda_graph_batch_sizes=1,2"], "with device=cpu it should be none or auto"),
    (["attention_backend=fa2", "dtype=float32"], "dtype=float32 needs attention_backend=torch"),
    (["attention_backend=torch", "cuda_graph_batch_sizes=1"], "needs FlashInfer's attention"),
    (["attention_backend=xqa"], "attention_backend=xqa: should be auto, fa2, triton or torch"),
    (["device=cuda", "quantization=fp8", "dtype=float16"], "weights in FP8 need dtype=bfloat16 or auto"),
    (["quantization=int4"], "quantization=int4: should be auto or fp8"),
    (["model_dir=/elsewhere"], "already set to"),
    (["tokenizer_dir=/no/such/folder"], "tokenizer_dir=/no/such/folder: no folder /no/such/folder"),
    (["engine_dir=/engines"], "set model_dir to a Hugging Face checkpoint folder"),
    (["triton_backend=tensorrtllm"], "always runs on Triton's python backend; accepted: python"),
    (["gpu_device_ids=0;1"], "has the GPUs of 2 engines, and replicas=1: set replicas=2, or name 1 groups"),
    (["gpu_device_ids=0", "replicas=3"], "has the GPUs of 1 engine, and replicas=3: set replicas=1"),
    (["gpu_device_ids=0;0", "replicas=2"], "names GPU 0 twice: each should belong to one engine"),
    (["gpu_device_ids=0,1;2,3", "replicas=2"], "tensor_parallel_size=1 each group should have 1"),
    (["gpu_device_ids=0;1", "replicas=2", "tensor_parallel_size=2"], "each group should have 2"),
    (["gpu_device_ids=0;1", "replicas=2", "device=cpu"], "needs a GPU: with device=cpu it should be auto"),
    (["gpu_device_ids=0;x"], "should be auto, or integers >= 0 separated by commas, and by semicolons"),
    (["expert_parallel_size=2"], "expert_parallel_size=2 should divide tensor_parallel_size=1"),
    (["expert_parallel_size=2", "tensor_parallel_size=2"], "expert_parallel_size=2 is for models with exp"),
    (["tensor_parallel_size=8", "device=cpu"], "tensor_parallel_size=8 should divide num_attention_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("assignments", "text"), REFUSALS, ids=lambda value: str(value)[:50])
def test_refused_knobs(refused, assignments, text):
    assert text in refused("--set", *assignments)


def test_all_problems_are_listed_at_once(refused):
    wrong = ["max_num_seq=3", "engine_dir=/x", "tokens_per_block=24", "max_seq_len=9999", "oops"]
    err = refused("--set", *wrong)
    assert "5 to correct" in err
    assert [line[:4] for line in err.splitlines()[1:]] == ["  - "] * 5


def test_refused_checkpoints(refused, tmp_path):
    """With what the reader of config.json says of it."""
    message = refused(model=write_checkpoint(tmp_path / "bad", num_attention_heads=None))
    assert "num_attention_heads is null; it should be an integer of at least 1" in message


def test_a_quantised_checkpoint_is_not_quantised_again(refused, build, tmp_path):
    scheme = {"quant_method": "fp8", "activation_scheme": "static"}
    folder = write_checkpoint(tmp_path / "fp8", quantization_config=scheme)
    assert "is quantised already (fp8_static)" in refused("--set", "quantization=fp8", model=folder)
    assert build(model=folder)[0] == 0


@pytest.mark.parametrize("setting", ["attention_backend=fa2", "device=cuda"])
def test_head_dim_without_flashinfer_attention(refused, build, tmp_path, setting):
    folder = write_checkpoint(tmp_path / "narrow", head_dim=32)
    err = refused("--set", setting, model=folder)
    assert "has head_dim 64, 128, 256, and the checkpoint's is 32: set attention_backend=torch" in err
    assert build("--set", "attention_backend=torch", model=folder)[0] == 0


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json; name a folder which has one"),
        ("model.safetensors", "has no weights: expected model.safetensors or model.safetensors.index.json"),
    ],
)
def test_incomplete_checkpoint(refused, tmp_path, missing, text):
    folder = write_checkpoint(tmp_path / "bad")
    (folder / missing).unlink()
    assert text in refused(model=folder)


def test_paths_that_the_server_could_not_open(refused, build, tmp_path):
    folder = write_checkpoint(tmp_path / "mo del é")
    err = refused(model=folder)
    assert err.count("Triton's Python backend opens only paths of ASCII characters") == 1
    (tmp_path / "link").symlink_to(folder)
    assert build(model=tmp_path / "link")[0] == 0
    assert build(model=write_checkpoint(tmp_path / "a space"))[0] == 0
    assert "-m flashinfer_backend.serve" in build(output=tmp_path / "repo~^{1}]")[1]
    for name in ("sp ace", "accé", "dollar$", "{a,b}"):
        status, out, err = build(output=tmp_path / name)
        assert (status, out) == (0, "") and f"starts no models from {tmp_path / name}: " in err


def test_dummy_weights_need_no_weight_file(build, tmp_path):
    folder = write_checkpoint(tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    assert build("--set", "load_format=dummy", model=folder)[0] == 0


def test_no_checkpoint_folder(refused, tmp_path):
    message = refused(model=tmp_path / "nowhere")
    assert "name a local checkpoint folder, or 'bundled'" in message and "hf download" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[knobs\n", "profile.toml: is not valid TOML: "),
        ("[knobs]\na =\n", "(at line 2, column 4)"),
        ("max_num_seqs = 3\n", "should hold one table, [knobs]; found also max_num_seqs"),
        ("[knobs]\nmax_num_seqs = {a = 1}\n", "max_num_seqs should be a string, number, boolean or list"),
        ("[knobs]\nmax_num_sqs = 1\n", "profile.toml: unknown knob 'max_num_sqs'; did you mean max_num_seqs"),
        (None, "cannot be read: No such file"),
    ],
)
def test_refused_profiles(refused, tmp_path, text, message):
    if text is not None:
        (tmp_path / "profile.toml").write_text(text)
    assert message in refused("--profile", tmp_path / "profile.toml")


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "a/b", "", ".hidden", "build.json"])
def test_refused_llm_names(refused, name):
    assert "should be of letters, digits" in refused("--llm-name", name)


def test_other_peoples_folders_are_left_alone(build, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    for force in ((), ("--force",)):
        status, _, err = build(*force, output=folder)
        assert status == 2 and "was not made by build.py" in err
    assert snapshot(folder) == {"notes.txt": b"keep"}
    status, _, err = build(output=folder / "notes.txt")
    assert status == 2 and "is not a folder" in err


VALUES = '{"files": {}, "llm_name": "llm", "values": ["max_num_seqs"]}'


@pytest.mark.parametrize("record", ["[]", '{"files": []}', '{"files": {}}', "no JSON", VALUES])
def test_folders_with_a_record_that_is_none_of_ours(build, tmp_path, record):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "build.json").write_text(record)
    for more in ((), ("--diff",)):
        status, _, err = build(*more, output=tmp_path / "mine")
        assert status == 2 and "(it has no valid build.json)" in err


def test_the_root_is_no_output_and_is_not_walked(build):
    status, _, err = build(output=Path("/"))
    assert status == 2 and "/ was not made by build.py" in err


def test_what_may_not_be_read_is_named(tmp_path):
    """In a process of its own, which root starts without the capabilities that open every file."""
    closed, open_to_all = tmp_path / "closed", tmp_path / "open"
    write_checkpoint(closed / "model")
    write_checkpoint(open_to_all / "model")
    capabilities = "-dac_override,-dac_read_search"
    as_anyone = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    command = [*(as_anyone if os.geteuid() == 0 else []), sys.executable, str(ROOT / "build.py")]
    closed.chmod(0)
    try:
        for output, model in ((closed, open_to_all), (open_to_all, closed)):
            run = subprocess.run(
                [*command, "--output", str(output / "repo"), "--model", str(model / "model")],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert run.returncode == 2 and "Permission denied" in run.stderr, run.stderr
            assert str(closed) in run.stderr and "Traceback" not in run.stderr
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("name", ["llm/config.pbtxt", "llm/1/model.py", "llm/1/extra.py"])
def test_edited_output_is_left_alone(build, tmp_path, name):
    build()
    path = tmp_path / "repo" / name
    path.write_text((path.read_text() if path.exists() else "") + "# edited\n")
    before = snapshot(tmp_path / "repo")
    status, _, err = build("--set", "max_num_seqs=8")
    assert status == 2 and f"changed or added since it was built: {name};" in err
    assert "with --force" in err and snapshot(tmp_path / "repo") == before
    assert build("--set", "max_num_seqs=8", "--force")[0] == 0
    assert (path.read_text() if path.exists() else "").count("# edited") == 0


def test_model_repo_itself_is_no_output(build):
    before = snapshot(MODEL_REPO)
    for output in (MODEL_REPO, MODEL_REPO / "llm" / "new"):
        status, _, err = build(output=output)
        assert status == 2 and "lies in the defaults' own folder" in err
    assert snapshot(MODEL_REPO) == before


@pytest.mark.parametrize("name", FOREIGN)
def test_every_foreign_name_is_refused_or_accepted_by_value(name):
    assert refusal(name, "something else")
    assert refusal(name, "") is None  # as scripts pass for TensorRT-LLM's default
    for value in FOREIGN[name][1]:
        assert refusal(name, value) is None


def test_a_python_without_the_dependencies_is_told_what_to_do():
    isolated = subprocess.run(
        [sys.executable, "-I", "-S", "build.py", "--list-knobs"], cwd=ROOT, capture_output=True, text=True
    )
    assert isolated.returncode == 1
    assert "is missing in" in isolated.stderr and ".venv/bin/python build.py" in isolated.stderr
    assert "Traceback" not in isolated.stderr


def test_drafters_that_do_not_fit_are_named_with_the_reason(refused, tmp_path):
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "known": 32}
    head, other = make_head("speculators", tmp_path / "head", **sizes, vocab=32), tmp_path / "other"
    assert "mtp needs a checkpoint of a family that" in refused("--set", "speculative_method=mtp")
    eagle = "--set", "speculative_method=eagle3"
    message = refused(*eagle, "--set", f"draft_model={head}")
    assert f"draft_model={head}: the drafter has vocab_size 32, and the target 64" in message
    message = refused(*eagle, "--set", f"draft_model={other}")
    assert f"draft_model={other}: no folder {other}" in message
    assert "draft_model=bundled: the drafter has" in refused(*eagle, "--set", "draft_model=bundled")
