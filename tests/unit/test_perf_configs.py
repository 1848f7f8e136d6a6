# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows, the runner with real servers, merging of results, and the verdicts in the report."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import small_tokenizers

from checkpoints import make_checkpoint
from client.configurations import base_label
from client.scenarios import Requirement, read_scenarios
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.transport.rundir import process_alive
from perf_configs import provenance, published, results, run, servers
from perf_configs.servers import ServerSpec, StartError, choose_servers, read_servers, serve
from ports import free_ports
from waiting import wait_for


def measured(server, row, started="2026-01-01T00:00:00", machine="m", rate=None, **summary):
    """A run as the runner writes it, reduced to what reports read."""
    values = dict.fromkeys(
        [f"{w}_{n}_ms" for w in ("median", "p90", "p99") for n in ("ttft", "tpot", "itl")], 100.0
    )
    values |= {"completed": 5, "failed": 0, "errors": {}, "output_tokens_per_s": 1000.0}
    values |= {"p99_send_delay_ms": 0.1, "busiest_worker_cpu": 0.2} | summary
    return {
        "server": server, "row": row, "request_rate": rate, "machine": machine, "started": started,
        "version": "1", "commit": "c", "command": "serve", "knobs": "", "start_seconds": 1.0,
        "prompts_sha256": "p", "warm_up": {}, "summary": values,
    }  # fmt: skip


def verdict(required, ours, peer):
    """results.verdict of single runs, or of several."""
    taken = [results.Repeats((run,)) if isinstance(run, dict) else run for run in (ours, peer)]
    return results.verdict(required, *taken)


def document(*runs):
    facts = {"gpu": "G", "driver": "d", "gpu_memory": "1", "cores": 2, "kernel": "6"}
    facts |= {"python": "3", "packages": {}}
    return {"machines": {"m": facts, "n": facts}, "runs": list(runs)}


@pytest.mark.parametrize(
    "requirement, ours, peer, met",
    [
        (Requirement("x", ratio_at_most=0.9), 90, 100, True),
        (Requirement("x", ratio_at_most=0.9), 90.1, 100, False),
        (Requirement("x", ratio_at_least=1.1), 110.1, 100, True),
        (Requirement("x", ratio_at_least=1.1), 109, 100, False),
        (Requirement("x", ratio_at_most=0.62, at_most=200), 200, 400, True),
        (Requirement("x", ratio_at_most=0.62, at_most=200), 201, 400, False),
        (Requirement("x", ratio_at_most=0.62, at_most=200), 150, 200, False),
        (Requirement("x", at_most=200), 150, 100, True),
        (Requirement("x", at_most=200), 201, 400, False),
    ],
)
def test_requirements(requirement, ours, peer, met):
    assert requirement.met(ours, ours / peer) is met


def test_the_table_says_pass_miss_and_why_not():
    merged = document(
        measured("ours", "a", median_tpot_ms=4.0),
        measured("vllm", "a", median_tpot_ms=5.0),
        measured("ours", "b", output_tokens_per_s=1099.0),
        measured("vllm", "b"),
        measured("ours", "d", output_tokens_per_s=9000.0, failed=2, errors={"HTTP 503": 2}),
        measured("vllm", "d"),
        measured("vllm", "e", rate=8.0),
        measured("ours", "f", output_tokens_per_s=1200.0, machine="n"),
        measured("vllm", "f", requests_with_other_prompt_length=3),
    )
    lines = results.markdown(merged, read_scenarios()).splitlines()
    table = {
        tuple(c.strip() for c in line.split("|")[1:9:2]): line.split("|")
        for line in lines
        if "ratio " in line
    }
    assert "## Against vllm" in lines
    verdicts = {(c[1].strip(), c[3].strip()): (c[6].strip(), c[8].strip()) for c in table.values()}
    assert verdicts["a", "median_tpot_ms"] == ("0.80", "pass")
    assert verdicts["b", "output_tokens_per_s"] == ("1.099", "**miss**")  # "1.10" would look like a pass
    assert verdicts["e", "median_ttft_ms"] == ("-", "not run")
    assert "c" not in {row for row, _ in verdicts}, "a row that nobody ran"
    assert verdicts["d", "output_tokens_per_s"] == ("-", "invalid: 2 of ours failed")
    assert verdicts["f", "output_tokens_per_s"] == ("1.20", "pass (other machine)")
    assert "* ours, row d, all at once: 2 x HTTP 503" in lines
    assert sum(line.startswith("* 3 prompts had another number of tokens") for line in lines) == 1
    broken = measured("ours", "f") | {"warm_up": {"failed": 1}}
    required = Requirement("output_tokens_per_s", ratio_at_most=2)
    assert verdict(required, broken, measured("vllm", "f"))[1].startswith("invalid: 1 of ours failed in")
    required = Requirement("median_tpot_ms", ratio_at_most=1)
    for changed, why in (
        ({"prompts_sha256": "q"}, "different prompts"),
        ({"tensor_parallel_size": 2}, "different numbers of GPUs"),
        ({"load_format": "auto"}, "different weights"),
    ):
        ours = measured("ours", "a") | {"tensor_parallel_size": 1, "load_format": "dummy"}
        assert verdict(required, ours, measured("vllm", "a") | changed)[1] == f"invalid: {why}"


def test_several_runs_count_as_their_median():
    def runs(server, *values):
        return [
            measured(server, "a", median_tpot_ms=value) | {"repeat": i, "prompts_sha256": str(i)}
            for i, value in enumerate(values)
        ]

    lines = results.markdown(
        document(*runs("ours", 4.4, 4.0, 9.0), *runs("vllm", 5.0, 5.5, 20.0)), read_scenarios()
    )
    (line,) = [line for line in lines.splitlines() if line.startswith("| a |") and "ratio" in line]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4:7] == ["4.4 (4 to 9)", "5.5 (5 to 20)", "0.80"]
    assert cells[8] == "pass (within the spread)"
    assert "| ours | row a, all at once | 3 | 1,000 (1,000 to 1,000) |" in lines
    assert "| vllm | row a, all at once | 3 |" in lines
    required = Requirement("median_tpot_ms", ratio_at_most=1)
    apart = verdict(
        required, results.Repeats(tuple(runs("ours", 4, 4.1))), results.Repeats(tuple(runs("vllm", 5, 6)))
    )
    assert apart == (4.05 / 5.5, "pass")
    one, three = (results.Repeats(tuple(runs(*of))) for of in (("vllm", 5), ("ours", 4, 4.1, 4.2)))
    # As after a call that was cut: not all of its runs are there.
    assert verdict(required, three, one) == (None, "invalid: runs 1, 2, 3 of ours, run 1 of the peer's")


def test_of_a_peers_variants_the_best_counts():
    def variant(name, **values):
        return measured("vllm", "a", **values) | {"variant": name}

    runs = [variant("slow", median_tpot_ms=6.0), variant("fast", median_tpot_ms=5.0)]
    broken = variant("broken", median_tpot_ms=1.0, failed=1)
    merged = results.merge([document(measured("ours", "a", median_tpot_ms=4.0), *runs, broken)])
    assert [base_label(run) for run in merged["runs"]] == ["ours", "vllm:broken", "vllm:fast", "vllm:slow"]
    (line,) = [
        x
        for x in results.markdown(merged, read_scenarios()).splitlines()
        if x.startswith("| a |") and "≤" in x
    ]
    assert [cell.strip() for cell in line.split("|")][4:9] == ["4", "5 fast", "0.80", "ratio ≤ 0.90", "pass"]
    one, two = (results.Repeats((run,)) for run in runs)
    assert results.best(Requirement("median_tpot_ms", ratio_at_most=1), [one, two]) is two
    assert results.best(Requirement("median_tpot_ms", ratio_at_least=1), [one, two]) is one
    assert results.best(Requirement("median_tpot_ms", ratio_at_most=1), []) is None


SPLIT = {"knobs": "--set max_seq_len=8192 --set tensor_parallel_size=2 --set replicas=2"}


def test_another_configuration_replaces_nothing_and_has_a_name_and_a_table_of_its_own(tmp_path):
    def one(**values):
        return measured("ours", "a", **values) | {"knobs": "--set max_seq_len=8192"}

    peer = measured("vllm", "a", median_tpot_ms=8.0) | {"variant": "servers-4"}
    split = measured("ours", "a", "2026-01-02", median_tpot_ms=6.0) | SPLIT
    merged = results.merge([document(one(median_tpot_ms=4.0), peer), document(split)])
    assert len(merged["runs"]) == 3
    again = one(median_tpot_ms=5.0) | {"started": "2026-01-03", "commit": "d"}
    assert len(results.merge([merged, document(again)])["runs"]) == 3, "a later run of the same replaces"
    results.save(merged, tmp_path / "day.json")
    assert run.main(["--merge", str(tmp_path / "day.json"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/day.md").read_text()
    assert "Medians of several runs" not in text
    tables = dict(zip(*[iter(re.split("^## (.*)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    name = "ours (replicas=2, tensor_parallel_size=2)"
    for title, ratio in (("Against vllm", "0.50"), (f"{name} against vllm", "0.75")):
        (line,) = [x for x in tables[title].splitlines() if x.startswith("| a |")]
        assert [cell.strip() for cell in line.split("|")][5:7] == ["8 servers-4", ratio]
    for label in ("ours", name, "vllm:servers-4"):
        assert tables["All runs"].count(f"| {label} | row a, all at once |") == 2  # counts, and times
        assert tables["Measured with"].count(f"* **{label}**: ") == 1
    # A row that this configuration did not run, but another one did, is not missing from its table.
    both = [measured(server, "b") | more for server, more in (("ours", SPLIT), ("vllm", {}))]
    text = results.markdown(results.merge([merged, document(*both)]), read_scenarios())
    assert text.count("| b | 128 in") == 1 and "not run" not in text


def test_servers_are_chosen_with_their_variants():
    known = read_servers()
    assert list(known) == ["ours", "ours-openai", "vllm", "sglang", "trtllm"]
    assert {"servers-1", "servers-4"} <= set(known["vllm"].variants)
    for name, count in (("servers-1", 1), ("servers-4", 4)):
        (chosen,) = choose_servers(f"vllm:{name}", known)
        assert f"--api-server-count {count} " in chosen.settings.flags
        assert chosen.settings.environment == {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert known["ours-openai"].prepare == known["ours"].prepare
    first, *others = known["vllm"].variants
    assert [s.label for s in choose_servers("ours, vllm,vllm", known)] == ["ours", f"vllm:{first}"]
    assert [s.variant for s in choose_servers("vllm:all", known)] == [first, *others]
    (chosen,) = choose_servers("sglang:flashinfer", known)
    assert "--attention-backend flashinfer " in chosen.settings.flags
    assert "--attention-backend fa3 " in known["sglang"].settings.flags
    for wrong, message in (
        ("zz", "unknown server zz; servers are ours, ours-openai, vllm"),
        ("vllm:zz", f"unknown variant zz of server vllm; variants are {first}"),
        ("ours:all", "unknown variant all of server ours; it has none"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_servers(wrong, known)


def test_runs_of_different_checkpoints_are_not_compared(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    one, two = (provenance.checkpoint_identity(tmp_path / name) for name in ("one", "two"))
    assert one["name"] == "one" and one["config_sha256"] != two["config_sha256"]
    required = Requirement("median_tpot_ms", ratio_at_most=1)
    ours, peer = measured("ours", "a") | {"checkpoint": one}, measured("vllm", "a")
    assert verdict(required, ours, peer | {"checkpoint": two}) == (None, "invalid: different checkpoints")
    renamed = one | {"name": "elsewhere"}
    assert verdict(required, ours, peer | {"checkpoint": renamed}) == (1.0, "pass")
    assert verdict(required, ours, peer) == (1.0, "pass")  # of before checkpoints were recorded


def test_the_report_says_what_was_measured():
    known = {
        "checkpoint": {"name": "model-8b", "config_sha256": "c0"},
        "profile": {"name": "small.toml", "sha256": "f0"},
        "environment": {"VLLM_FLAGS": "--max-num-seqs 512"},
    }
    text = results.markdown(document(measured("ours", "a") | known, measured("vllm", "a")), read_scenarios())
    what = "checkpoint model-8b (config.json c0), profile small.toml (f0)"
    assert f"* **ours**: ours 1, commit c, up in 1 s, {what}. " in text
    assert "`2026-01-01: serve VLLM_FLAGS=--max-num-seqs 512`\n" in text
    assert "* **vllm**: vllm 1, commit c, up in 1 s. " in text


def test_committed_results_stay_readable():
    paths = [p for p in (run.ROOT / "perf_configs/results").rglob("*.json") if "engine" not in p.name]
    assert paths
    for path in paths:
        merged = results.merge([results.load(path), document(measured("ours", "z"))])
        assert "| ours | row z, all at once |" in results.markdown(merged, read_scenarios())


def test_merging_keeps_the_latest_of_each(tmp_path):
    first = document(
        measured("ours", "a", "2026-01-01", median_tpot_ms=1.0), measured("vllm", "a", "2026-01-01")
    )
    second = document(
        measured("ours", "a", "2026-01-02", median_tpot_ms=2.0, machine="n"),
        measured("ours", "s", rate=10.0),
        measured("ours", "s", rate=20.0),
    )
    for order in ([first, second], [second, first]):
        merged = results.merge(order)
        assert [(r["server"], r["row"], r["request_rate"]) for r in merged["runs"]] == [
            ("ours", "a", None),
            ("vllm", "a", None),
            ("ours", "s", 10.0),
            ("ours", "s", 20.0),
        ]
        assert merged["runs"][0]["summary"]["median_tpot_ms"] == 2.0
        assert set(merged["machines"]) == {"m", "n"}
    results.save(first, tmp_path / "one.json")
    results.save(second, tmp_path / "two.json")
    files = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    assert run.main(["--merge", *files, "--out", str(tmp_path / "out")]) == 0
    assert results.load(tmp_path / "out/two.json") == results.merge([first, second])
    assert "| a |" in (tmp_path / "out/two.md").read_text()
    assert "Latency" in (tmp_path / "out/two.html").read_text()
    for text in ("[]", "no JSON", '{"machines": {}, "runs": 1}', '{"machines": {}, "runs": [{}]}'):
        (tmp_path / "three.json").write_text(text)
        with pytest.raises(ValueError, match="no result document"):
            results.load(tmp_path / "three.json")


def test_several_runs_of_a_point_are_of_one_version_and_machine(capsys):
    """Of three runs and a later single one by another commit, the median must not be of both."""
    tpot = {"median_tpot_ms": 9.0}
    for other in ({"commit": "d"}, {"version": "2"}, {"machine": "n"}):
        three = [measured("ours", "a", "2026-01-01", **tpot) | {"repeat": n, "seed": n} for n in range(3)]
        later = measured("ours", "a", "2026-01-02") | other
        for order in ([document(*three), document(later)], [document(later), document(*three)]):
            assert results.merge(order)["runs"] == [later]
    same = measured("ours", "a", "2026-01-02") | {"repeat": 0}
    assert results.merge([document(*three), document(same)])["runs"] == [same, *three[1:]]
    failed = measured("ours", "a", "2026-01-02", failed=1) | {"commit": "d"}
    assert results.merge([document(*three), document(failed)])["runs"] == three
    assert (
        "1 requests of the run of 2026-01-02 failed; the one of 2026-01-01 is kept" in capsys.readouterr().err
    )


def test_a_run_with_failures_does_not_replace_one_without(capsys):
    good = measured("ours", "a", "2026-01-01")
    failed = measured("ours", "a", "2026-01-02", machine="n", failed=5)
    cold = measured("ours", "a", "2026-01-03") | {"warm_up": {"failed": 1}}
    last = measured("ours", "a", "2026-01-04")
    for order in itertools.permutations([good, failed, cold]):
        assert results.merge(map(document, order))["runs"] == [good]
    assert results.merge([document(good), document(failed)])["machines"].keys() == {"m"}
    message = "row a of ours: 5 requests of the run of 2026-01-02 failed; the one of 2026-01-01 is kept"
    assert message in capsys.readouterr().err
    assert results.merge(map(document, [failed, cold]))["runs"] == [cold]
    assert results.merge(map(document, [good, last]))["runs"] == [last]
    assert capsys.readouterr().err == ""


def spec(command, prepare="", start_seconds=20.0):
    return ServerSpec("ours", "triton", "/", "/", command, start_seconds, prepare)


def test_a_server_is_started_and_ended_with_its_children(tmp_path):
    command = 'sleep 300 & echo $! >"$WORK/child"; exec "$PYTHON" -m http.server $PORT --bind 127.0.0.1'
    prepare, kept = 'echo "$EXTRA" >"$WORK/prepared"', tmp_path / "kept"
    with serve(spec(command, prepare), {"EXTRA": "x"}, tmp_path, 8377, 20.0, kept) as running:
        assert running.url == "http://127.0.0.1:8377" and running.start_seconds < 20
        with (
            pytest.raises(StartError, match="answers already"),
            serve(spec(command), {}, tmp_path / "again", 8377, 20.0, kept),
        ):
            pass
    assert (tmp_path / "prepared").read_text() == "x\n" and not kept.exists()
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not process_alive(child))


def test_a_killed_benchmark_leaves_no_server(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from perf_configs.servers import *\n"
        "start = 'echo $$ >$WORK/pid; exec python3 -m http.server $PORT'\n"
        "spec = ServerSpec('ours', 'triton', '/', '/', start, 20)\n"
        "work = Path(sys.argv[1])\n"
        "with serve(spec, {}, work, 8378, 20, work / 'kept'): print('up', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=run.ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not process_alive(pid))


@pytest.mark.parametrize(
    "bad, message",
    [
        (spec("echo no such model >&2; exit 3"), "ended with status 3\nno such model"),
        (spec("exec sleep 60", start_seconds=0.3), "not healthy after"),
        (spec("exec sleep 60", prepare="echo bad knob; exit 2"),
         "preparing ours ended with status 2\nbad knob"),
        (spec("exec sleep 60", prepare="sleep 60", start_seconds=0.3), "preparing ours took more than 0 s\n"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_start_says_why(tmp_path, capsys, bad, message):
    kept = tmp_path / "results/ours.log"
    with pytest.raises(StartError) as caught, serve(bad, {}, tmp_path, free_ports(1)[0], 20.0, kept):
        pass
    assert message in str(caught.value)
    assert kept.read_text() == (tmp_path / "ours.log").read_text()
    assert f"ours: the end of its log is in {kept}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_peer_that_is_not_there_is_looked_for_where_variables_say(tmp_path, monkeypatch, name):
    """Found out without loading it."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    bare.chmod(0o755)
    package = tmp_path / "there" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('loaded')")
    peer = read_servers()[name]
    where = (
        f" cannot be started ({name.upper()}_PYTHON should name the interpreter that has {name}, or"
        f" {name.upper()}_SITE the folder where it is installed): "
    )
    for python, site, said in (
        (bare, "", f"No module named {name}"),
        (tmp_path / "nowhere", "", "No such file or directory"),
        (bare, package.parent, None),
    ):
        monkeypatch.setenv(f"{name.upper()}_PYTHON", str(python))
        monkeypatch.setenv(f"{name.upper()}_SITE", str(site))
        if said is None:
            servers.check(peer, 8300)
            continue
        with pytest.raises(StartError) as caught:
            servers.check(peer, 8300)
        assert str(caught.value).startswith(peer.label + where) and str(caught.value).endswith(said)


def test_packages_of_this_server_s_openai_api_are_found():
    servers.check(read_servers()["ours-openai"], 8300)


def test_server_commands_are_valid_shell():
    for server in read_servers().values():
        for script in (server.check, server.prepare, server.command):
            subprocess.run(["bash", "-n", "-c", script], check=True, timeout=120)


def test_the_profile_and_the_prepare_script_build_a_repository(tmp_path):
    make_checkpoint("llama", tmp_path)
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    profile = run.ROOT / "perf_configs/profiles/h200-8b.toml"
    environment = {"PYTHON": sys.executable, "WORK": str(tmp_path), "MODEL_DIR": str(tmp_path)}
    environment |= {"KNOBS": "--set max_num_seqs=64", "PROFILE": str(profile)}
    environment |= {"LOAD_FORMAT": "dummy", "TENSOR_PARALLEL_SIZE": "1"}
    script = ["bash", "-ec", read_servers()["ours"].prepare]
    subprocess.run(script, check=True, timeout=120, cwd=run.ROOT, env=os.environ | environment)
    text = (tmp_path / "model_repo/llm/config.pbtxt").read_text()
    assert "dummy" in text and '"64"' in text


@pytest.mark.parametrize("shape", published.NAMES)
def test_shapes_have_their_published_form_in_fp8(shape, tmp_path):
    """Which products are in FP8, and that nothing else of the shape changes."""
    tokenizer = resolve_model_dir("bundled")
    published.main([shape, str(tmp_path), "--tokenizer", str(tokenizer)])
    assert (tmp_path / "tokenizer.json").is_file()
    spec, plain = read_spec(tmp_path), read_spec(published.SHAPES / shape)
    formats = {product.name: product.format for product in spec.products}
    dense = {name for name, format in formats.items() if format == "dense"}
    assert dense == {"ba", "lm_head"} | ({"router"} if "a3b" in shape else set())
    assert set(formats.values()) == {"dense", "fp8_block"}
    assert [product.shape for product in spec.products] == [product.shape for product in plain.products]
