# SPDX-License-Identifier: Apache-2.0
"""Arguments of the OpenAI API's process that are refused before anything is started."""

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_backend import prebuild
from flashinfer_backend.config_tools.settings import engine_parameters
from flashinfer_backend.core import processes
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.launch import launcher, probe
from flashinfer_backend.openai import model
from flashinfer_backend.openai.__main__ import main
from flashinfer_backend.openai.options import built_name, worker_count
from perf_configs import bench_engine, profile_steps
from ports import free_ports

ROOT = Path(__file__).parents[2]


@pytest.fixture
def free_port():
    return str(free_ports(1)[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is no file; it should name one with a key a line"), ("# none yet\n\n", "holds no key")],
)
def test_a_file_without_keys_does_not_open_the_api(tmp_path, capsys, free_port, content, message):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    arguments = ["--model", "bundled", "--set", "device=cpu", "--api-key-file", str(path)]
    assert main([*arguments, "--port", free_port]) == 1
    assert f"--api-key-file {path} {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ensembles", "expected"),
    [
        ({"ensemble": ["llm"]}, ""),
        ({"qwen": ["pre_qwen", "llm"], "llama": ["llm_llama"]}, "qwen"),
        ({"llama": ["llm_llama"]}, ""),  # the llm model is of no ensemble
        ({"ensemble": ["pre", "llm"], "old": ["pre", "llm"]}, ""),
    ],
)
def test_a_model_has_the_name_of_its_ensemble(tmp_path, ensembles, expected):
    for name, models in ensembles.items():
        (tmp_path / name).mkdir()
        steps = ", ".join(f'{{ model_name: "{model}" model_version: -1 }}' for model in models)
        text = f'name: "{name}"\nplatform: "ensemble"\nensemble_scheduling {{ step [ {steps} ] }}\n'
        (tmp_path / name / "config.pbtxt").write_text(text)
    assert built_name(tmp_path / "llm" / "config.pbtxt", "llm") == expected


@pytest.mark.parametrize("api", ["alone", "with tritonserver"])
def test_a_package_that_is_missing_is_named_before_the_start(api, capsys, monkeypatch):
    monkeypatch.setattr(model, "PACKAGES", ("starlette", "a_package_that_is_not_here"))
    if api == "alone":
        assert main(["--model", "bundled"]) == 1
    else:
        arguments = ["--check", "--model-repository", "served", "--openai-port", "9000"]
        assert launcher.main(arguments) == 1
    assert "needs the package a_package_that_is_not_here; install it with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "quota", "engines", "given", "count"),
    [
        (32, None, 2, {}, 8),  # two engines of an 8B model: 50 000 chunks/s
        (32, "max 100000", 1, {}, 4),
        (16, None, 2, {}, 4),
        (32, "800000 100000", 2, {}, 2),  # a container with eight
        (2, None, 1, {}, 1),
        (32, None, 2, {"store_mib": 1}, 1),
        (32, None, 2, {"device": "cpu"}, 1),
        (2, None, 1, {"workers": 5}, 5),
    ],
)
def test_the_number_of_processes_follows_engines_and_cores(
    tmp_path, monkeypatch, cores, quota, engines, given, count
):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(processes, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    config = EngineConfig(model_dir="bundled", replicas=engines, device=given.pop("device", "cuda"))
    options = argparse.Namespace(**({"workers": None, "store_mib": 0} | given))
    assert worker_count(options, [config]) == count


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (main, "--store-mib 1 --workers 2", "--store-mib 1 with 2 processes"),
        (main, "--tool-format hermes --reasoning-format harmony",
         "openai: --tool-format hermes and --reasoning-format harmony: Harmony writes both"),
        (main, "--tool-format harmony --reasoning-format think",
         "openai: --tool-format harmony and --reasoning-format think: Harmony writes both"),
        (prebuild.main, "", "prebuild: device=cpu: an engine on a CPU has no kernels to compile"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(capsys, free_port, command, arguments, message):
    port = ["--port", free_port] if command is main else []
    assert command(["--model", "bundled", "--set", "device=cpu", *arguments.split(), *port]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["max_num_seqs=4", "max_num_seqs=5"], "max_num_seqs=5: already set to 4; set it once"),
        (["dtype=float16", "dtype ="], "dtype=: already set to float16; set it once"),
        (["max_num_seqs"], "max_num_seqs: should be knob=value"),
        (["model_dir=/m"], "model_dir: should be given as --model"),
        (["max_num_seq=4"], "unknown knob 'max_num_seq'; did you mean max_num_seqs"),
        (["zzzz=4"], "unknown knob 'zzzz'; docs/knobs.md has all"),
        (["llm_instance_count=4"], "llm_instance_count: is no knob of the engine, which runs without"),
        (["engine_dir=/e"], "engine_dir=/e: there are no engine files here: set model_dir to"),
        (["max_num_seqs=x", "dtype=int8"],
         "max_num_seqs=x: should be an integer 1..4096; --set: dtype=int8: should"),
    ],
)  # fmt: skip
def test_settings_are_read_as_build_reads_them(settings, message):
    with pytest.raises(ValueError, match=f"^--set:? {re.escape(message)}"):
        engine_parameters(settings, {"model_dir": "--model"})


@pytest.mark.parametrize("command", [main, prebuild.main, bench_engine.main, profile_steps.main])
def test_every_command_refuses_settings_that_it_has_an_option_for(capsys, free_port, command):
    name, option = (
        ("model_dir", "--model") if command in (main, prebuild.main) else ("load_format", "--load-f")
    )
    more = ["--port", free_port] if command is main else []
    try:
        status = command(["--model", "bundled", "--set", "max_num_seqs=8", "--set", f"{name}=auto", *more])
    except SystemExit as end:
        status = end.code
    assert status and f"--set {name}: should be given as {option}" in capsys.readouterr().err


def test_what_settings_may_be():
    """An empty one is the default; folders are of this one; what asks for what happens anyway is accepted."""
    texts = ["dtype=", "max_num_seqs = +08", "enable_kv_cache_reuse=TRUE", "tokenizer_dir=here"]
    texts += ["triton_backend=python", "schedule_policy=lof", "schedule_policy=lof"]
    assert engine_parameters(texts, {}) == {
        "dtype": "", "max_num_seqs": "8", "enable_kv_cache_reuse": "true", "schedule_policy": "lof",
        "tokenizer_dir": str(Path("here").absolute()),
    }  # fmt: skip


def test_parameters_that_nobody_reads_are_refused(capsys, free_port, tmp_path):
    """Of a config.pbtxt that was written by hand, as by the llm model."""
    file = tmp_path / "config.pbtxt"
    parameters = {"model_dir": "bundled", "max_beam_width": "2", "lora_prefetch_dir": "${lora_prefetch_dir}"}
    lines = [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    file.write_text("\n".join(lines))
    assert main(["--llm-config", str(file), "--port", free_port]) == 1
    message = "parameter max_beam_width of the llm model is '2': beam search is not supported"
    assert f"openai: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "arguments", "words"),
    [
        (128, [], "the OpenAI API needs 129 open files or more in each .*may open 128.*`ulimit -n 1024`"),
        (
            200,
            ["--max-connections", "2000"],
            "--max-connections 2000 needs 2128 .*may open 200.*`ulimit -n 2128`.*at most 72",
        ),
    ],
)
def test_a_limit_of_open_files_that_leaves_no_room_for_clients(files, arguments, words, free_port):
    command = [sys.executable, "-m", "flashinfer_backend.openai", "--model", "bundled", "--port", free_port]
    limit = (resource.RLIMIT_NOFILE, (files, files))
    ran = subprocess.run(
        [*command, *arguments],
        preexec_fn=lambda: resource.setrlimit(*limit),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1 and ran.stdout == ""
    assert re.fullmatch(f"openai: {words}.*\n", ran.stderr)


def test_as_many_connections_as_there_are_files_for():
    code = """if True:
        import resource
        from flashinfer_backend.openai.model import room_for_connections
        for asked, room in ((0, 172), (10, 10), (172, 172)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
            assert room_for_connections(asked) == room
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("command", "option", "value", "message"),
    [
        (main, "--drain-seconds", "-1", "-1: it should be a whole number from 0 to 86400"),
        (main, "--workers", "0", "0: it should be a whole number from 1 to 1024"),
        (main, "--port", "0", "0: it should be a whole number from 1 to 65535"),
        (main, "--max-request-bytes", "0", "0: it should be a whole number from 1 to"),
        (main, "--allowed-origins", "chat.example",
         "chat.example: an origin is a scheme, a host and perhaps a port"),
        (main, "--served-model-name", "", "a name should not be empty"),
        (main, "--allowed-origins", "https://Chat.example",  # no browser sends it so
         "https://Chat.example: an origin is a scheme, a host and perhaps a port"),
        (main, "--max-prompt-bytes", "-1", "-1: it should be a whole number from 0 to"),
        (main, "--max-prompt-bytes", "inf", "inf: it should be a whole number from 0 to"),
        (launcher.main, "--drain-seconds", "nan", "nan: it should be 0 to 86400 seconds"),
        (launcher.main, "--http-port", "65536", "65536: it should be a whole number from 1 to 65535"),
        (launcher.main, "--openai-port", "-9", "-9: it should be a whole number from 1 to 65535"),
        (launcher.main, "--openai-workers", "two", "two: it should be a whole number from 1 to 1024"),
        (launcher.main, "--openai-tool-format", "xml", "invalid choice: 'xml'"),
        (launcher.main, "--restarts", "-1", "-1: it should be a whole number from 0 to"),
        (probe.main, "--timeout", "inf", "inf: it should be 0 to 86400 seconds"),
        (probe.main, "--timeout", "0", "0: it should be more than 0 seconds"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(capsys, command, option, value, message):
    with pytest.raises(SystemExit):
        command(["--model-repository", "r"][: 2 * (command is launcher.main)] + [f"{option}={value}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_every_number_on_a_command_line_has_bounds():
    """Those of the processes that our own code starts aside."""
    internal = ("engine/__main__.py", "worker/__main__.py", "launch/keeper.py")
    files = [
        file
        for folder in ("backend_src", "client", "perf_configs", "tools", "tests/reliability")
        for file in (ROOT / folder).rglob("*.py")
        if not str(file).endswith(internal)
    ]
    assert len(files) > 100
    assert [file for file in files if re.search(r"\btype=(int|float)\b", file.read_text())] == []
