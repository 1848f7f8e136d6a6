# SPDX-License-Identifier: Apache-2.0
"""perf_configs.run from its command line to what it records, and the benchmarks of the engine alone."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import small_tokenizers

from checkpoints import make_checkpoint
from client.arguments import tuples
from client.load import LoadResult
from client.metrics import RequestRecord, summarise
from client.scenarios import read_scenarios
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.engine.start import start
from perf_configs import bench_engine, plan, profile_steps, provenance, results, run
from perf_configs.servers import Running, StartError, _variables, read_servers
from ports import free_ports


@pytest.fixture
def model_dir(tmp_path):
    """What the load needs of a checkpoint folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    small_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def asked(tmp_path, model_dir):
    """Arguments of perf_configs.run for row a."""
    return f"--model-dir {model_dir} --out {tmp_path / 'out'} --commit c --rows a --workers 1".split()


def test_both_servers_are_measured_and_the_time_limit_leaves_rows_out(tmp_path, asked, server, capsys):
    arguments = [*asked, "--url", f"ours={server.url}"]
    assert run.main([*arguments, "--url", f"vllm={server.url}"]) == 0
    wanted = re.escape("(--time-limit less 40 for the end)\n")
    assert re.search(rf"1 row on 2 servers: some 50 s, of 17\d\d {wanted}", capsys.readouterr().out)
    assert run.main([*arguments, "--rows", "b", "--server", "ours", "--time-limit", "45"]) == 1
    said = capsys.readouterr()
    assert re.search(rf"1 row on 1 server: some 25 s, of [45] {wanted}", said.out)
    assert re.search(r"left out for lack of time: ours row b \(some 25 s wanted, [45] left\)", said.err)
    (path,) = (tmp_path / "out").glob("*.json")
    runs = results.load(path)["runs"]
    assert [(r["server"], r["row"], r["commit"], r["version"]) for r in runs] == [
        ("ours", "a", "c", "1.0"),
        ("vllm", "a", "c", "1.0"),
    ]
    assert runs[0]["prompts_sha256"] == runs[1]["prompts_sha256"]
    assert runs[0]["warm_up"]["requests_with_checked_length"] == 2
    assert runs[0]["requests"]["chunks"] == [256] * 12
    for measured in runs:
        assert measured["checkpoint"] == {"name": "model", "config_sha256": "44136fa355b3"}
        assert (measured["profile"], measured["knobs"], measured["environment"]) == (None, "", {})
    assert str(tmp_path) not in path.read_text()
    assert "pass" in path.with_suffix(".md").read_text() or "miss" in path.with_suffix(".md").read_text()
    assert "<svg" in path.with_suffix(".html").read_text()


def test_a_call_that_is_cut_keeps_its_results_and_the_log_of_the_server_that_starts(tmp_path, asked, server):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\n[ $1 = -c ] && exit\necho loading weights\nexec sleep 60\n")
    stand_in.chmod(0o755)
    more = f"--server ours,vllm:servers-1 --url ours={server.url} --no-warm-up --port {free_ports(1)[0]}"
    command = [sys.executable, "-m", "perf_configs.run", *asked, *more.split()]
    environment = os.environ | {"VLLM_PYTHON": str(stand_in), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=run.ROOT, env=environment, stderr=subprocess.PIPE, text=True) as call:

        def started():
            return [p for p in tmp_path.glob("perf-vllm-*/vllm.log") if p.read_text() == "loading weights\n"]

        deadline = time.monotonic() + 120
        while not started():
            assert call.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        call.terminate()
        error = call.communicate(timeout=120)[1]
    assert call.returncode == 143
    (path,) = (tmp_path / "out").glob("*.json")
    assert [(r["server"], r["row"]) for r in results.load(path)["runs"]] == [("ours", "a")]
    kept = path.with_name(f"{path.stem}-vllm-servers-1.log")
    assert kept.read_text() == "loading weights\n" and f"the end of its log is in {kept}" in error
    assert not started(), "the server's folder is left"


def noted_loads(monkeypatch):
    """The loads that would have been run; each is answered by one request."""
    loads = []

    def fake_load(load, prompts):
        loads.append(load)
        records = [RequestRecord(0, 1, 2)]
        return LoadResult(records, summarise(records) | {"client_workers": 1, "busiest_worker_cpu": 0.0})

    monkeypatch.setattr(run, "run_load", fake_load)
    return loads


def benchmark(model_dir, out, *more):
    arguments = ["--model-dir", str(model_dir), "--out", str(out), "--commit", "c", "--rows", "a", *more]
    args = run.argument_parser().parse_args(arguments)
    return run.Benchmark(args, plan.make_plan(args))


def test_a_started_server_is_recorded_with_its_settings(tmp_path, model_dir, monkeypatch):
    for name in provenance.LEFT_OUT:
        monkeypatch.setenv(f"VLLM_{name}", "private")
    flags = "--max-num-seqs 512 --chat-template=/home/me/chat.jinja --a file:///home/me/b [/home/me/c]"
    monkeypatch.setenv("VLLM_FLAGS", flags)
    monkeypatch.setenv("VLLM_HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/home/me/cache")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    profile = tmp_path / "small.toml"
    profile.write_text("[knobs]\nmax_num_seqs = 8\n")
    found = benchmark(model_dir, tmp_path, "--profile", str(profile), "--knob", "dtype=float16")
    started = Running("http://127.0.0.1:1", 3.0, "1")
    servers, row = read_servers(), found.plan.scenarios["a"]
    ours, peer, other = (found.settings(row, servers[name], started) for name in ("ours", "vllm", "sglang"))
    assert ours["knobs"] == "--set dtype=float16" and ours["environment"] == {}
    assert ours["profile"] == {"name": "small.toml", "sha256": provenance.file_identity(profile)["sha256"]}
    assert peer["knobs"] == "" and peer["profile"] is None
    assert ours["checkpoint"] == peer["checkpoint"] == provenance.checkpoint_identity(model_dir)
    assert peer["environment"]["VLLM_FLAGS"] == "--max-num-seqs 512 --chat-template=chat.jinja --a file:b [c]"
    assert peer["environment"]["VLLM_USE_V1"] == "1"
    assert "VLLM_CACHE_ROOT" not in peer["environment"]
    assert not any(word in str(peer) for word in ("private", "secret", "/home/me"))
    assert "--api-server-count" in peer["flags"] and peer["environment"]["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    api = found.settings(row, servers["ours-openai"], started)
    assert (api["knobs"], api["profile"]) == (ours["knobs"], ours["profile"])
    assert api["flags"] == "--workers 4" and api["environment"] == {}
    assert ours["flags"] == "" and "--attention-backend fa3 " in other["flags"] and other["environment"] == {}
    assert {each["load_format"] for each in (ours, peer, other)} == {"dummy"}
    running = found.settings(row, servers["ours"], Running("http://127.0.0.1:1", None, "1"))
    assert running["knobs"] == "" and running["profile"] is running["tensor_parallel_size"] is None


def test_a_row_whose_whole_warm_up_fails_does_not_run(tmp_path, model_dir, monkeypatch):
    loads = []

    def fake_load(load, prompts):
        loads.append(len(prompts))
        error = "HTTP 404" if len(loads) == 1 else None  # the next row's warm-up is answered
        records = [RequestRecord(0, 1, 2, error=error), RequestRecord(1, 1, 2, error="HTTP 404")]
        return LoadResult(records, summarise(records) | {"client_workers": 1, "busiest_worker_cpu": 0.0})

    monkeypatch.setattr(run, "run_load", fake_load)
    spec, running = read_servers()["ours"], Running("http://127.0.0.1:1", None, "1")
    found = benchmark(model_dir, tmp_path, "--rows", "a,b")
    for scenario in found.plan.scenarios.values():
        found.run_row(scenario, spec, running)
    assert found.problems == ["ours row a: its whole warm-up failed: HTTP 404"]
    assert [each["row"] for each in found.document["runs"]] == ["b"] and len(loads) == 3


def test_every_run_of_a_row_has_prompts_of_its_own(tmp_path, model_dir, monkeypatch):
    """A server that caches prefixes would know those of the run before. All servers get the same ones."""
    loads = noted_loads(monkeypatch)
    arguments = ["--no-warm-up", "--repeats", "2"]
    found = benchmark(model_dir, tmp_path, *arguments, "--rows", "small,a")
    shutil.copy(run.ROOT / "perf_configs/shapes/llama-3.1-8b/config.json", tmp_path / "model")
    found.floor = {"copy_bytes_per_s": 4.29e12, "flops_per_s": 8e14, "device": "G", "product": "x"}
    for name in ("ours", "vllm"):
        spec, running = read_servers()[name], Running("http://127.0.0.1:1", None, "1")
        for scenario in found.plan.scenarios.values():
            found.run_row(scenario, spec, running)
    runs = [r for r in found.document["runs"] if r["row"] == "small"]
    assert [(r["request_rate"], r["server"], r["repeat"], r["seed"]) for r in runs] == [
        *((10.0, "ours", 0, 0), (10.0, "ours", 1, 2), (10.0, "vllm", 0, 0), (10.0, "vllm", 1, 2)),
        *((20.0, "ours", 0, 1), (20.0, "ours", 1, 3), (20.0, "vllm", 0, 1), (20.0, "vllm", 1, 3)),
    ]
    assert len({r["prompts_sha256"] for r in runs}) == 4
    assert runs[0]["prompts_sha256"] == runs[2]["prompts_sha256"]
    assert [load.seed for load in loads[:4]] == [0, 1, 2, 3]
    assert all("tpot_ms" not in r["floor"] for r in runs)  # how many rows a step has is not given
    # One row of 128 + 256 / 2 tokens: 15.04 GB.
    (floor_ms,) = {r["floor"]["tpot_ms"] for r in found.document["runs"] if r["row"] == "a"}
    assert floor_ms == pytest.approx(15.042871296e9 / 4.29e12 * 1e3, abs=1e-4)
    assert all(r["devices"].keys() & {"none", "gpus"} for r in runs)
    text = results.markdown(found.document, read_scenarios("a"))
    assert "its own floor: copy 4.29 TB/s (read and written), product x 800 TFLOP/s on G" in text


def test_rows_for_different_numbers_of_gpus_start_a_server_each(tmp_path, model_dir, monkeypatch):
    seen = []

    @contextmanager
    def fake_serve(spec, variables, *_):
        seen.append((variables["TENSOR_PARALLEL_SIZE"], variables["LOAD_FORMAT"], variables["KNOBS"].strip()))
        if variables["TENSOR_PARALLEL_SIZE"] == "4":
            raise StartError("no such knob")
        yield Running("http://127.0.0.1:1", 1.0, "1")

    monkeypatch.setattr(run, "serve", fake_serve)
    monkeypatch.setattr(run.Benchmark, "run_row", lambda _, scenario, *__: seen.append(scenario.row))
    rows = "flashinfer-70b-random,a,flashinfer-8b-random"
    found = benchmark(model_dir, tmp_path, "--rows", rows, "--load-format", "auto")
    found.run_server(read_servers()["ours"])
    of = "--set tensor_parallel_size="
    off = "--set enable_kv_cache_reuse=false"
    assert seen == [("4", "auto", f"{of}4 {off}"), ("1", "auto", f"{of}1 {off}"), "a", "flashinfer-8b-random"]
    assert found.problems == ["ours: no such knob"]
    # The same GPUs cut up otherwise.
    two = ["--knob", "tensor_parallel_size=2", "--knob", "replicas=2"]
    seen.clear()
    benchmark(model_dir, tmp_path, "--rows", "flashinfer-70b-random", *two).run_server(read_servers()["ours"])
    assert seen == [("4", "dummy", f"{off} {of}2 --set replicas=2")]


def test_peers_cache_prefixes_where_ours_does(tmp_path):
    """By the real commands, with a program that writes down its arguments in place of Python."""
    noted = tmp_path / "python"
    noted.write_text('#!/bin/sh\necho "$@" >"$WORK/arguments"\n')
    noted.chmod(0o755)
    spec_of = read_servers()
    for name, off in (("vllm", "--no-enable-prefix-caching"), ("sglang", "--disable-radix-cache")):
        for variant, settings in spec_of[name].variants.items():
            spec = replace(spec_of[name], variant=variant)
            environment = (
                os.environ | _variables(spec, 8300, tmp_path) | {f"{name.upper()}_PYTHON": str(noted)}
            )
            environment |= {"MODEL_DIR": "m", "LOAD_FORMAT": "dummy", "TENSOR_PARALLEL_SIZE": "1"}
            subprocess.run(["bash", "-ec", spec.command], check=True, timeout=120, env=environment)
            arguments = (tmp_path / "arguments").read_text().split()
            assert (off not in arguments) is settings.prefix_caching and "--port" in arguments, spec.label
        assert any(settings.prefix_caching for settings in spec_of[name].variants.values())


def test_the_gpus_of_a_run_are_those_it_ran_on(tmp_path, model_dir):
    """Knobs of ours alone must not make a comparison of two GPUs with one."""
    started, known = Running("http://127.0.0.1:1", 3.0, "1"), read_servers()
    for knobs, gpus in (
        ([], 1),
        (["tensor_parallel_size=2"], 2),
        (["tensor_parallel_size=2", "replicas=4"], 8),
    ):
        options = ["--server", "ours", *(word for knob in knobs for word in ("--knob", knob))]
        found = benchmark(model_dir, tmp_path, *options)
        row = found.plan.scenarios["a"]
        assert found.settings(row, known["ours"], started)["tensor_parallel_size"] == gpus
        assert found.settings(row, known["vllm"], started)["tensor_parallel_size"] == 1
    profile = tmp_path / "two.toml"
    profile.write_text("[knobs]\nreplicas = 2\n")
    found = benchmark(model_dir, tmp_path, "--server", "ours", "--profile", str(profile))
    assert found.settings(row, known["ours-openai"], started)["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rows", "a,flashinfer-70b-random", "--url", "ours=http://x"],
         "want tensor_parallel_size 1 and 4"),
        (["--server", "trtllm"], "trtllm is not started here: give its address, --url trtllm=URL"),
        (["--server", "vllm:defaults", "--url", "vllm=http://x"], "runs as it was started"),
        (["--rows", "known-lengths-random", "--server", "vllm"],
         "vllm:servers-4 does not order by it: take vllm:priority-256 or vllm:priority"),
        (["--rows", "shared-prefix", "--knob", "enable_kv_cache_reuse=true"],
         "ours cache prefixes, and vllm:servers-4 does not: take vllm:prefix-caching"),
        (["--rows", "shared-prefix", "--server", "ours-openai,sglang:fa3-radix"],
         "sglang:fa3-radix caches prefixes, and ours does so with --knob enable_kv_cache_reuse=true alone"),
        (["--rows", "known-lengths-random", "--server", "sglang"], "sglang:fa3 does not order by it: leave"),
        (["--rows", "known-lengths-random", "--server", "ours"],
         "give --profile perf_configs/profiles/h200-8b-l"),
        (
            ["--rows", "known-lengths-random", "--profile", str(plan.LONGEST_FIRST), "--server", "ours"]
            + ["--knob", "schedule_policy=fcfs"],
            "or --knob schedule_policy=lof",
        ),
        (["--repeats", "0"], "--repeats: '0' must be a whole number of at least 1"),
        (["--port", "65534"], "--port: '65534' must be a whole number from 1 to 65533"),
        (["--time-limit", "nan"], "--time-limit: 'nan' must be a number of seconds over 0"),
        (["--time-limit", "40"],
         "--time-limit 40 leaves no time to measure: 40 s of it are kept for stopping"),
        (["--rows", "zz"], "no scenario for row zz; rows are a,"),
        (["--server", "zz"], "unknown server zz; servers are ours, ours-openai, vllm"),
        (["--url", "ours=127.0.0.1:8000"], "--url ours=127.0.0.1:8000 should be SERVER=URL"),
        (["--url", "sglang=http://x"], "--url sglang=URL: --server ours,vllm does not name sglang"),
        (["--server", "vllm", "--knob", "a=1"], "--knob and --profile are for ours: --server vllm names"),
        (["--server", "vllm", "--profile", "{tmp}/few.json"], "--server vllm names none of ours, ours-o"),
        (["--knob", "a=$x"], "knob 'a=$x' must have the form name=value"),
        (["--knob", "load_format=auto"], "knob load_format=auto: should be given as --load-format"),
        (["--knob", "max_num_seq=4"], "--knob: unknown knob 'max_num_seq'; did you mean max_num_seqs or"),
        (["--knob", "max_num_seqs=0"], "--knob: max_num_seqs=0: should be an integer 1..4096"),
        (["--knob", "replicas=x"], "knob replicas=x: should be a whole number"),
        (["--knob", "replicas=4"], "ours would run on 4 GPUs in row a and vllm:servers-4 on 1"),
        (["--server", "vllm,ours-openai", "--check-tokens"], "--check-tokens is for Triton's ensemble"),
        (["--url", "ours=http://x", "--url", "ours=http://y"], "--url ours=URL is given twice"),
        (["--knob", "a=1", "--url", "ours=http://x"], "without --url ours=URL"),
        (["--profile", "{tmp}/p.toml", "--url", "ours=http://x"], "without --url ours=URL"),
        (["--profile", "{tmp}/p.toml"], "p.toml: there is no such file"),
        (["--profile", "{tmp}/broken.toml"], "broken.toml: is not valid TOML: "),
        (["--model-dir", "/nonexist"], "--model-dir /nonexist has no config.json"),
        (["--rows", "c"], "--sharegpt is required by rows c"),
        (["--rows", "a,b", "--sharegpt", "{tmp}/few.json"], "and none of a, b has them: leave it out"),
        (["--rows", "c", "--sharegpt", "{tmp}/s.json"], "s.json: there is no such file"),
        (["--rows", "c", "--sharegpt", "{tmp}/few.json"], "has 3 usable conversations, 1000 were asked for"),
        (["--merge", "/nonexist.json"], "/nonexist.json cannot be read: No such file"),
        (["--merge", "{tmp}/few.json"], "is no result document"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_a_server_is_used(
    tmp_path, asked, monkeypatch, capsys, arguments, message
):
    turns = [{"value": "one two three four five"}, {"value": "six seven eight nine"}]
    (tmp_path / "few.json").write_text(json.dumps([{"conversations": turns}] * 3))
    (tmp_path / "broken.toml").write_text("[knobs\n")
    monkeypatch.setattr(run.Benchmark, "run_server", lambda *_: pytest.fail("a server was used"))
    with pytest.raises(SystemExit) as caught:
        run.main([*asked, *(a.format(tmp=tmp_path) for a in arguments)])
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("listed, taken", [(["bundled", "other"], "bundled"), (["x", "model"], "model")])
def test_a_running_openai_server_is_asked_for_a_model_that_it_has(asked, server, capsys, listed, taken):
    server.models = listed
    assert run.main([*asked, "--no-warm-up", "--server", "vllm", "--url", f"vllm={server.url}"]) == 0
    assert {body["model"] for body in server.bodies} == {taken}
    assert f"vllm 1.0 at {server.url}, running already\n" in capsys.readouterr().out


def test_a_running_server_that_is_not_healthy_is_not_measured(tmp_path, asked, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert run.main([*asked, "--server", "ours", "--url", f"ours={url}"]) == 1
    error = capsys.readouterr().err
    assert f"ours: {url}/v2/health/ready does not answer with status 200; is ours running there?" in error
    (path,) = (tmp_path / "out").glob("*.json")
    assert results.load(path)["runs"] == []


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path, asked, monkeypatch, capsys):
    for name in ("serve", "run_load", "running_at"):
        monkeypatch.setattr(run, name, None)
    monkeypatch.setattr(run.floor, "measure_apart", None)
    monkeypatch.setattr(run, "check", lambda spec, port: None)
    how = "--dry-run --rows small,e,tp2-70b-one --knob max_num_seqs=8 --repeats 2"
    how = [*asked, *how.split()]
    assert run.main([*how, "--server", "ours,vllm:servers-1"]) == 0
    said = capsys.readouterr().out
    first, *lines = said.splitlines()
    assert first.startswith("3 rows on 2 servers: some 380 s beside the servers' starts, of 17")
    ours, knobs = "ours: started, h200-8b.toml", "--set enable_kv_cache_reuse=false --set max_num_seqs=8"
    peer = "vllm:servers-1: started, VLLM_USE_FLASHINFER_SAMPLER=1 tensor parallel over"
    for line, words in zip(lines[1:5], (ours, ours, f"{peer} 1 GPU ", f"{peer} 2 GPUs "), strict=True):
        assert line.strip().startswith(words)
    assert [f"--set tensor_parallel_size={n} {knobs}" in lines[n] for n in (1, 2)] == [True, True]
    assert any("20 prompts at 10 requests/s; 20 prompts at 20 requests/s, 2 times" in line for line in lines)
    assert "    1 prompt to warm up; 6 prompts 1 at a time, 2 times" in lines
    assert "    required: p99_ttft_ms ratio ≤ 0.85" in lines
    assert lines[-1].startswith(f"results: {tmp_path / 'out'}") and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):  # what it finds out it refuses
        run.main([*how, "--server", "ours", "--rows", "d", "--sharegpt", str(tmp_path / "none.json")])
    assert "none.json: there is no such file" in capsys.readouterr().err


def test_kinds_of_steps_are_read(capsys):
    assert tuples("n/n")("1024/0,0/64,8/1") == [[1024, 0], [0, 64], [8, 1]]
    for text in ("", "8", "8/", "1/2,", "0/0", "8/1,0/0", "-1/3", "8/1@300"):
        with pytest.raises(SystemExit):
            profile_steps.main(["--model", "bundled", f"--steps={text}"])
        said = capsys.readouterr().err
        assert re.search("--steps.* (must have the form n/n|should have decode rows)", said)


def ends_later(offline, begun, *values):
    begun.append(1 / (1 - len(begun)))
    return offline(*values)


def test_bench_engine_runs_loads_of_one_shape(tmp_path, monkeypatch, capsys):
    """On the CPU's engine, whose 26 blocks hold 13 sequences of 20 tokens."""
    folder = str(make_checkpoint("llama", tmp_path))
    small = ["device=cpu", "tokens_per_block=16", "max_tokens_in_paged_kv_cache=416"]
    monkeypatch.setattr(
        bench_engine, "start_on_gpu", lambda _, values: start(EngineConfig.from_parameters(values))
    )
    command = ["--model", folder, "--batches", "", "--out", str(tmp_path / "out.json")]
    command += [word for item in small for word in ("--set", item)]
    bench_engine.main([*command, "--lengths", "5/3x7,12/8"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["decode"] == []
    rows = [{**row, "timeline": None} for row in found["lengths"]]
    assert [(row["prompt"], row["output"], row["requests"]) for row in rows] == [(5, 3, 7), (12, 8, 13)]
    assert [row["prompt_tokens"] for row in rows] == [5 * 7, 12 * 13]
    for row in rows:
        assert row["output_tokens_per_s"] == row["output"] * row["requests"] / row["seconds"]
    assert max(decoding for _, decoding, _, _ in found["lengths"][1]["timeline"]) == 13
    assert re.search(r"^12/8: 13 requests in .* s, [0-9]+ output tokens/s$", capsys.readouterr().out, re.M)
    with pytest.raises(ZeroDivisionError):  # ended in the second load
        monkeypatch.setattr(bench_engine, "offline", partial(ends_later, bench_engine.offline, []))
        bench_engine.main([*command, "--lengths", "5/3x4,12/8"])
    assert [r["requests"] for r in json.loads((tmp_path / "out.json").read_text())["lengths"]] == [4]
    for lengths, status, message in (
        ("128/", 2, "argument --lengths: '128/' must have the form N/N[xN], with commas between"),
        ("128/8x", 2, "argument --lengths: '128/8x' must have the form N/N[xN]"),
        ("400/20", 1, "needs sequences of 420 tokens, and max_seq_len is 416"),
    ):
        with pytest.raises(SystemExit) as caught:
            bench_engine.main([*command, "--lengths", lengths])
        assert caught.value.code == status and message in capsys.readouterr().err
    # A block table of 26 holds one sequence of 412 tokens; a second one would wait for it.
    for batches, status, message in (
        ("1,2", 1, "--batches 2: 1 run at once with these settings"),
        ("1,x", 2, "argument --batches: 'x' must be a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as caught:
            bench_engine.main([*command, "--batches", batches])
        assert caught.value.code == status and message in capsys.readouterr().err
    for shared, status, message in (
        ("2x1x100", 1, "needs the decode graphs that these settings switch off"),
        ("64x16", 2, "argument --shared: '64x16' must have the form NxnxN, with commas between"),
    ):
        with pytest.raises(SystemExit) as caught:
            bench_engine.main([*command, "--shared", shared])
        assert caught.value.code == status and message in capsys.readouterr().err


def test_bench_engine_answers_conversations_with_the_bundled_model(tmp_path, monkeypatch):
    path, out = tmp_path / "s.json", tmp_path / "out.json"
    path.write_text(json.dumps([{"conversations": [{"value": "Once"}, {"value": "upon a time"}]}]))
    monkeypatch.setattr(
        bench_engine, "start_on_gpu", lambda _, values: start(EngineConfig.from_parameters(values))
    )
    small = ["--set", "device=cpu", "--set", "max_tokens_in_paged_kv_cache=416", "--out", str(out)]
    bench_engine.main(["--model", "bundled", "--batches", "", "--sharegpt", str(path), *small])
    assert json.loads(out.read_text())["offline"]["requests"] == 1
