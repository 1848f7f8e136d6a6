# SPDX-License-Identifier: Apache-2.0
"""Cancellation, refusals, limits, and what is left behind: nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import protocol
from waiting import wait_for

LONG = SamplingParams(max_tokens=200, temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_cancel_while_running_waiting_and_unknown(checkpoint, tmp_path):
    with serve(start_core(checkpoint, max_num_seqs=2), tmp_path) as client:
        ids = [client.submit([5, 6, 7], LONG) for _ in range(4)]
        while len(client.tokens[ids[0]]) < 3:
            client.receive()
        client.cancel(ids[0])  # running
        client.cancel(ids[3])  # waiting
        client.cancel(12345)  # never existed
        client.wait(ids)
        assert [client.code[i] for i in ids] == [
            protocol.FINISHED_CANCELLED,
            protocol.FINISHED_LENGTH,
            protocol.FINISHED_LENGTH,
            protocol.FINISHED_CANCELLED,
        ]
        assert client.tokens[ids[1]] == client.tokens[ids[2]]
        assert client.loop.cancellations == 2
        assert all(len(times) == 1 and times[0] >= 0 for times in client.queue_times(ids))
        (ran,), (waited,) = client.queue_times([ids[0], ids[3]])
        assert waited > ran  # it had waited since the first one began


def test_cancel_storm_leaves_nothing_and_harms_nobody(checkpoint, tmp_path):
    core = start_core(checkpoint, max_num_seqs=8, max_tokens_in_paged_kv_cache=512)
    prompts = [[3 + i] * (10 + 3 * i) for i in range(24)]
    with serve(core, tmp_path) as client:
        calm = client.generate(prompts[:1], SamplingParams(max_tokens=40, temperature=0.0))[0]
        kept = client.submit(prompts[0], SamplingParams(max_tokens=40, temperature=0.0))
        ids = [client.submit(prompt, LONG) for prompt in prompts]
        for i, victim in enumerate(ids):
            client.cancel(victim)
            if i % 3 == 0:
                client.receive(5)
        client.wait([kept, *ids])
        assert client.tokens[kept] == calm
        assert all(len(times) == 1 for times in client.queue_times([kept, *ids]))


def test_goodbye_drops_the_stubs_requests(checkpoint, tmp_path):
    with serve(start_core(checkpoint), tmp_path) as client:
        client.submit([5, 6, 7], LONG)
        client.receive()
        client.goodbye()
        client.wait_idle()


@pytest.mark.parametrize(
    ("limits", "prompt", "message"),
    [
        ({}, [], "no tokens"),
        ({}, [5, 100000], "0..255"),
        ({}, [-1], "0..255"),
        ({"max_input_len": 50}, [5] * 60,
         "Prompt length (60) exceeds maximum input length (50). Shorten the prompt, or raise max_input_len"),
        ({"max_seq_len": 51}, [5] * 51, ". Shorten the prompt, or raise max_seq_len (51) when"),
        ({"max_seq_len": 0}, [5] * 512,
         ". Shorten the prompt; max_seq_len (512) is the most that the checkpoint allows"),
        ({"max_tokens_in_paged_kv_cache": 32}, [5] * 40,
         "(31). Shorten the prompt, or raise max_seq_len (32) when"),
    ],
)  # fmt: skip
def test_refused_prompts_say_why_and_what_could_be_raised(checkpoint, tmp_path, limits, prompt, message):
    with serve(start_core(checkpoint, **limits), tmp_path) as client:
        good = client.submit([5, 6, 7], SamplingParams(max_tokens=5, temperature=0.0))
        bad = client.submit(prompt, LONG)
        client.wait([good, bad])
        assert message in client.failure[bad].message
        assert len(client.tokens[good]) == 5


def test_a_burst_that_finds_slots_is_not_refused(checkpoint, tmp_path):
    with serve(start_core(checkpoint, max_num_seqs=8, max_queue_size=2), tmp_path) as client:
        ids = [client.submit([5, 6, 7], LONG) for _ in range(12)]
        client.wait(ids[10:])  # eight run, two wait
        assert sorted(client.failure) == ids[10:]
        for i in ids[:10]:
            client.cancel(i)
        client.wait(ids)


def test_status_counts_blocks_and_requests(checkpoint, tmp_path):
    with serve(start_core(checkpoint, enable_kv_cache_reuse=False), tmp_path) as client:
        one = client.submit([5] * 33, LONG)
        client.wait([one])
        busy = [s for s in client.statuses if s.requests_running]
        assert busy and all(s.blocks_used >= 3 for s in busy)
        wait_for(lambda: client.receive() or not client.statuses[-1].requests_active)
        last = client.statuses[-1]
        assert last.longest_seq_len == 512
        assert (last.blocks_used, last.requests_active, last.generated_tokens) == (0, 0, 200)


@pytest.mark.parametrize(("tokens", "blocks"), [(320, 20), (321, 21), (335, 21)])
def test_the_bound_of_the_cache_is_rounded_up_to_whole_blocks(checkpoint, tokens, blocks):
    core = start_core(checkpoint, tokens_per_block=16, max_tokens_in_paged_kv_cache=tokens)
    assert core.scheduler.kv_manager.pools[0].num_blocks == blocks
    core.close()


def test_parameters_without_a_checkpoint_are_refused():
    with pytest.raises(ValueError, match="parameter model_dir of the llm model is not set"):
        EngineConfig.from_parameters({"max_num_seqs": "4"})


def test_engine_process_ends_with_its_parent(checkpoint, tmp_path):
    """The real process: it serves while the parent lives and leaves no socket behind."""
    (tmp_path / "engine.json").write_text(
        f'{{"model_dir": "{checkpoint}", "device": "cpu", "max_seq_len": 128}}'
    )
    parent = subprocess.Popen(["sleep", "60"])
    arguments = ["--run-dir", tmp_path, "--parent-pid", parent.pid, "--config", tmp_path / "engine.json"]
    engine = subprocess.Popen([sys.executable, "-m", "flashinfer_backend.engine", *map(str, arguments)])
    try:
        wait_for(lambda: (tmp_path / "engine.sock").exists() or engine.poll() is not None)
        assert engine.poll() is None
        parent.kill()
        parent.wait()
        assert engine.wait(120) == 0
        assert not (tmp_path / "engine.sock").exists()
    finally:
        for process in (parent, engine):
            process.kill()
            process.wait()


def test_engine_ends_with_its_parent_while_it_still_loads(checkpoint, tmp_path):
    (tmp_path / "engine.json").write_text(f'{{"model_dir": "{checkpoint}", "device": "cpu"}}')
    parent = subprocess.Popen(["sleep", "60"])
    # Stands for a load of minutes: the process is stopped before its loop.
    code = "import sys, time; from flashinfer_backend.engine import __main__ as engine\n"
    code += "engine.start = lambda *a, **b: print('loads', flush=True) or time.sleep(60)\n"
    code += "engine.GRACE_S = 0.1; sys.exit(engine.main())"
    arguments = ["--run-dir", tmp_path, "--parent-pid", str(parent.pid), "--config", tmp_path / "engine.json"]
    engine = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE)
    try:
        assert engine.stdout is not None and engine.stdout.readline() == b"loads\n"
        assert engine.poll() is None
        parent.kill()
        parent.wait()
        assert engine.wait(15) == 1
    finally:
        for process in (parent, engine):
            process.kill()
            process.wait()
