# SPDX-License-Identifier: Apache-2.0
"""Times of what the host does for every step and every chunk, without a GPU: `make bench`.

A decode step of 256 sequences takes an H200 about 10 ms; scheduling, reading results and packing frames
must stay well under that. Text and streams are timed per chunk of one token.
"""

import itertools
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from client.wire import EventSplitter, read_stream
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.kv_events import KVEvents
from flashinfer_backend.engine.outputs import accept
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.serving.router import Router
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.text.chunk import pack_chunk, unpack_chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.delivery_marks import DeliveryMarks
from flashinfer_backend.triton_server.client_watch import ClientWatch
from ports import free_ports
from tests.unit import small_tokenizers
from waiting import wait_for

ROWS = 256
PROMPT = 128
ROUNDS = 400


def decoding_scheduler():
    """A scheduler whose ROWS sequences have all had their prompts computed."""
    max_new = 2 * ROUNDS
    config = EngineConfig(
        model_dir="", max_num_seqs=ROWS, max_seq_len=4096, max_input_len=4095, max_num_tokens=ROWS * PROMPT,
        enable_kv_cache_reuse=False,
    )  # fmt: skip
    scheduler = Scheduler(config, KVCacheManager([BlockPool(ROWS * 256)], 16, reuse=False))
    rng = np.random.default_rng(0)
    for local_id in range(ROWS):
        prompt = rng.integers(0, 32000, PROMPT, dtype=np.int32)
        params = SamplingParams(max_tokens=max_new, temperature=0.0)
        scheduler.submit(Request(protocol.make_handle(1, local_id), prompt, params, max_new))
    while scheduler.queue or scheduler.prefilling:
        plan = scheduler.schedule(False)
        assert plan is not None and len(plan.sampling_rows) == plan.num_rows
        accept(scheduler.table, plan, np.zeros(len(plan.sample_slots), np.int32))
    return scheduler


def test_schedule_a_decode_step(benchmark):
    scheduler = decoding_scheduler()
    plan = benchmark.pedantic(scheduler.schedule, args=(False,), rounds=ROUNDS)
    assert plan.num_rows == plan.num_decodes == ROWS


def test_schedule_and_take_in_a_decode_step(benchmark):
    scheduler = decoding_scheduler()
    tokens = np.arange(ROWS, dtype=np.int32)

    def step():
        plan = scheduler.schedule(False)
        return accept(scheduler.table, plan, tokens)

    outcome = benchmark.pedantic(step, rounds=ROUNDS)
    assert len(outcome.rows) == ROWS


@pytest.mark.parametrize("events", [False, True])
def test_a_prompt_from_start_to_end(benchmark, events):
    """Of 8192 tokens, one step, whose 512 blocks are cached when it ends, in the place of an older prompt's;
    with and without the events for a router that subscribes."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = EngineConfig(
        model_dir="bundled", max_num_seqs=1, max_seq_len=8208, max_input_len=8200, max_num_tokens=8200,
        kv_events_endpoint=endpoint if events else "none",
    )  # fmt: skip
    manager = KVCacheManager([BlockPool(1024)], 16, reuse=True)
    scheduler = Scheduler(config, manager)
    published = KVEvents(config, manager, scheduler.table, 0) if events else None
    rng, sampled = np.random.default_rng(0), np.zeros(1, np.int32)

    def prepared():
        request = Request(1, rng.integers(0, 32000, 8192, np.int32), SamplingParams(max_tokens=1), 1)
        request.block_keys = manager.prefix_keys(request.prompt)
        return (request,), {}

    def one(request):
        scheduler.submit(request)
        plan = scheduler.schedule(False)
        accept(scheduler.table, plan, sampled)
        scheduler.release(request)
        if published is not None:
            published.publish()

    with zmq.Context.instance().socket(zmq.SUB) as router:
        router.subscribe(b"")
        router.connect(endpoint)
        benchmark.pedantic(one, setup=prepared, rounds=100, warmup_rounds=5)
        if published is not None:
            # Published again, since what comes before the subscription has arrived is lost.
            wait_for(lambda: one(*prepared()[0]) or router.poll(100), "a message")
            published.close()
    assert manager.pools[0].available == 1023


def test_pack_and_unpack_a_frame(benchmark):
    columns = [np.arange(ROWS, dtype=np.int32)] * 3
    rows = benchmark(lambda: protocol.unpack_tokens(protocol.pack_tokens(*columns)))
    assert rows.shape == (ROWS, 3)


def test_pack_and_unpack_chunk(benchmark):
    context = list(range(8))
    read = benchmark(lambda: unpack_chunk(pack_chunk(5 << 32, 7, 0, -1, context, [9])[0]))
    assert read.context_ids == context and read.ids == [9]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_text_of_a_chunk(benchmark, kind):
    """One chunk: one new id with 8 ids of context; 256 chunks a round, as for one step."""
    tokenizer = getattr(small_tokenizers, kind)()
    decoder = DeltaDecoder(tokenizer)
    ids = tokenizer.encode(" ".join(small_tokenizers.TEXT), add_special_tokens=False).ids
    starts = [random.Random(0).randrange(8, len(ids)) for _ in range(ROWS)]
    chunks = [(ids[s - 8 : s], ids[s : s + 1]) for s in starts]
    texts = benchmark(lambda: [decoder.delta(context, new, False) for context, new in chunks])
    assert any(texts)


@pytest.mark.parametrize("limit", [30, 300])
def test_compile_a_schema_with_a_length(benchmark, limit):
    """With the bundled model's 2048 tokens: before the first token of a request whose guide is new."""
    pytest.importorskip("llguidance")
    compiler = GrammarCompiler("bundled", vocab_size=2048)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLength": limit}}})
    compiler.load()
    grammar = benchmark(lambda: compiler.compile("json_schema", schema, 1))
    assert grammar.masks.any()


def stream(chunks):
    fields = {"model_name": "ensemble", "model_version": "1", "sequence_end": False, "sequence_id": 0}
    event = json.dumps(fields | {"sequence_start": False, "text_output": " word"}).encode()
    return [b"data: " + event + b"\n\n"] * chunks


def test_split_events(benchmark):
    reads = stream(256)
    splitter = EventSplitter()
    events = benchmark(lambda: [event for data in reads for event in splitter.feed(data)])
    assert len(events) == 256


def test_read_a_recorded_stream(benchmark):
    reads = [(float(i), data) for i, data in enumerate(stream(256))]
    summary = benchmark(read_stream, "triton", reads, 256, True)
    assert summary.error is None and len(summary.chunk_times) == 256


@pytest.mark.parametrize("open_requests", [256, 17_000])
def test_look_for_departed_clients(benchmark, tmp_path, open_requests):
    """One check of an llm instance: no response is sent while it computes."""
    table = DeliveryMarks(tmp_path, 1)
    sequences = [
        SimpleNamespace(handle=protocol.make_handle(1, n), ended=False, sent_at=0)
        for n in range(open_requests)
    ]
    requests = [SimpleNamespace(in_ensemble=True, sequences=[sequence]) for sequence in sequences]
    watch = ClientWatch(lambda: list(requests), lambda _: None, table, lambda: True, 0)
    benchmark.pedantic(watch.check, rounds=200)


@pytest.mark.parametrize("engines", [2, 8])
@pytest.mark.parametrize("tokens", [128, 1024, 8192, 30_000])
def test_choose_an_engine(benchmark, tmp_path, engines, tokens):
    """Of several engines, for one request; prompts that all engines have had and that none has."""
    status = protocol.Status(1, "cpu", 32000, 32768, 32767, 256, 16, 50_000)
    endpoint = {
        "up": True,
        "open_sequences": 0,
        "tokens_to_compute": 0,
        "reported_at": time.monotonic() + 3600,
    }
    links = [SimpleNamespace(status=status, **endpoint) for _ in range(engines)]
    router = Router(links, tmp_path, reuse=True, period_s=0.1)
    rng = np.random.default_rng(0)
    prompts = itertools.cycle([rng.integers(0, 32000, tokens, dtype=np.int32) for _ in range(20)])

    def route():
        order, keys, _ = router.choose(next(prompts))
        router.sent(order[0], keys)
        return order

    assert len(benchmark(route)) == engines
