# SPDX-License-Identifier: Apache-2.0
"""Runs planned steps on the device."""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.draft_counts import drafted_shapes
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.step import StepOutput, StepPlan
from flashinfer_backend.models.adapters import Adapter
from flashinfer_backend.ops.staging import Download, ReadbackRing
from flashinfer_backend.ops.weight import Chosen
from flashinfer_backend.sampling.logprobs import context_logits, prompt_log_probs
from flashinfer_backend.sampling.sampler import Sampled, Sampler
from flashinfer_backend.speculate.proposer import Proposer
from flashinfer_backend.worker.adapters import AdapterLoader
from flashinfer_backend.worker.device_state import DeviceState
from flashinfer_backend.worker.drafting import Drafting, Fed
from flashinfer_backend.worker.gpu_turns import GpuTurn
from flashinfer_backend.worker.graphs import DecodeGraphs, GraphCapture, MixedGraphs, Replayed, mixed_sizes
from flashinfer_backend.worker.ranks import ADAPTER, TRACE, OtherRanks, loaded_message
from flashinfer_backend.worker.trace import StepTrace

log = logging.getLogger(__name__)

Callback = Callable[[], object]


def _nothing() -> None:
    pass


@dataclass
class RowResults:
    """What a step tells of rows besides their next tokens: (row, logits float32 [length, V]) of the plan's
    logits_rows, (row, int32 [tokens, 1 + most, 2]) of those in its `told`, and (row, why) of those that
    failed, here or when they were sampled."""

    logits: list[tuple[int, np.ndarray]] = field(default_factory=list)
    log_probs: list[tuple[int, np.ndarray]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Launched:
    """A step on its way; Runner.read gives its output when `download` has arrived."""

    plan: StepPlan
    download: Download
    sampled: Sampled
    results: RowResults


class _Computed(NamedTuple):
    """logits [n or more, V] (rank 0's, of a graph as Replayed has them), tokens int32 [n], what was fed or
    replayed, and Launched's results."""

    logits: torch.Tensor
    tokens: torch.Tensor
    fed: Fed | Replayed
    results: RowResults


class Runner:
    """Owns what one rank has on its device: what its steps share, the sampler, graphs.

    Rank 0 launches steps, others follow it with the same plans. It alone samples, and the others get its
    tokens, so that nothing which a rank computes otherwise than another can part them.
    """

    def __init__(
        self,
        config: EngineConfig,
        state: DeviceState,
        proposer: Proposer | None,
        adapters: AdapterLoader | None,
    ) -> None:
        """proposer: the state's proposer of drafts. adapters: None where the model has no room for any."""
        drafts = proposer.count if proposer is not None else 0
        self.state, self.device, self.adapters = state, state.device, adapters
        self.drafting = Drafting(proposer, state) if proposer is not None else None
        # Tokens and log probabilities of each; with drafts, how many tokens a row comes to, and new drafts.
        self._readback = ReadbackRing((3 + 3 * drafts) * config.max_num_seqs, self.device)
        own = state.staging, state.last_token, state.lengths, state.drafts
        self.sampler = Sampler(state.ops, state.model.spec.vocab_size, config, self.device, *own)
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        # The same of steps in which a row has an adapter.
        self.adapted_graphs: tuple[DecodeGraphs | None, MixedGraphs | None] = None, None
        self.draft_costs: dict[tuple[int, int], float] = {}  # DecodeGraphs.step_seconds, once captured
        self.others: OtherRanks | None = None  # of rank 0, once they wait for plans
        self.turn: GpuTurn | None = None  # of rank 0: this engine's place on its GPUs, as long as it lives
        self._trace: StepTrace | None = None
        self._rest: Callback = _nothing  # of the last step

    def capture_graphs(self, sizes: list[int]) -> None:
        """Capture decode-only steps for the given numbers of rows, and small mixed steps."""
        began = time.monotonic()
        gc.collect()
        gc.disable()  # destroying an old graph while a new one is captured would spoil the capture
        capture, state = GraphCapture(), self.state
        drafts = self.drafting.proposer.count if self.drafting is not None else 0
        mixed = mixed_sizes(state.model.spec, state.max_num_tokens)
        total = len(set(sizes)) + len(drafted_shapes(sizes, drafts)) + len(mixed)
        total *= 1 if self.adapters is None else 2
        try:
            with telling(lambda: f"captured the graphs of {capture.sizes} of {total} sizes of steps"):
                self.graphs = DecodeGraphs(state, sizes, capture, self.drafting)
                self.mixed_graphs = MixedGraphs(state, capture)
                if self.adapters is not None:
                    self.adapted_graphs = (
                        DecodeGraphs(state, sizes, capture, self.drafting, adapted=True),
                        MixedGraphs(state, capture, adapted=True),
                    )
        finally:
            gc.enable()
        if drafts:
            self.draft_costs = self.graphs.step_seconds()
            log.info("decode steps in ms, by rows and drafts of each: %s", _shown(self.draft_costs))
        log.info("captured the graphs in %.1f s", time.monotonic() - began)

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        started: Callback = _nothing,
        between_layers: Callback = _nothing,
        tokens_wanted: Callback = _nothing,
    ) -> Launched:
        """Enqueue a step; `settle` enqueues its rest. Steps run in the order of their launches; the device is
        not waited for.

        started is called once, when the device has the step's first work; between_layers after each layer of
        a step that is launched layer by layer; tokens_wanted where rows cannot be sampled without the tokens
        of earlier steps: it has to read all of them.

        An exception means that the step as a whole was not launched. What concerns single rows is in
        Launched.results instead.
        """
        self.settle()
        if self.others is not None:
            self.others.send(plan)
        self.sampler.update(plan)
        if self.drafting is not None:
            self.drafting.recall(plan)
        computed = self._compute(plan, started, between_layers)
        fed, tokens = computed.fed, computed.tokens
        sampled = Sampled(tokens)
        if len(plan.stateful):
            if self.sampler.guided(plan):
                tokens_wanted()
            logits = computed.logits
            if isinstance(fed, Replayed) and fed.places is not None:
                logits = logits[fed.places]
            sampled = self.sampler.sample_stateful(logits, tokens, plan)
            rows = plan.sampling_rows
            computed.results.failed += [(int(rows[row]), why) for row, why in sampled.failed]
            self.state.model.collectives.broadcast(tokens)
        readback, counts = sampled.readback, None
        if isinstance(fed, Replayed) and fed.step.defers and not sampled.guided:
            self._rest = functools.partial(self._finish, plan, computed)
        else:
            counts = self._finish(plan, computed)
        if counts is not None:
            readback = torch.cat([counts, readback])
        if self.drafting is not None and sampled.guided:  # their grammars are on the host
            # Where a grammar lets a text go on in one way alone, its tokens are the best drafts. Ranks that
            # follow have no grammars, and must have the same drafts.
            most = 2 * plan.drafts + 1 if self.others is None else 0
            if most > 1 and (forced := self.sampler.forced(sampled, most)):
                self.drafting.replace(forced, plan.drafts)
            slots = np.array([row.slot for row in sampled.guided], np.int32)
            drafts = self.state.drafts[self.state.staging.upload([slots])]
            readback = torch.cat([drafts.view(-1), readback])
        return Launched(plan, self._readback.download(readback), sampled, computed.results)

    @torch.inference_mode()
    def settle(self) -> None:
        """Enqueue what the last step left for when its tokens are on their way: what a proposer takes in of
        steps without drafts, and its next drafts. It takes the host a millisecond or two, in which it should
        rather read the step before. The next launch does it in any case."""
        rest, self._rest = self._rest, _nothing
        rest()

    def start_trace(self, stem: str) -> list[str]:
        """Trace this rank's steps, and let the others do so, until write_trace. Returns the files that each
        will write; stem: what their paths begin with. Raises RuntimeError where this rank cannot."""
        shard = self.state.model.collectives.shard
        files = [f"{stem}-rank-{rank}.json" for rank in range(shard.size)]
        self._trace = StepTrace(self.device, Path(files[shard.rank]))
        if self.others is not None:
            self.others.trace(stem)
        return files

    def write_trace(self) -> None:
        """Raises OSError or ValueError where this rank's cannot be written."""
        if self.others is not None:
            self.others.trace("")
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.write()

    def load_adapter(self, place: int, folder: str) -> Future[Adapter]:
        """As AdapterLoader.load, on every rank."""
        assert self.adapters is not None
        others = [] if self.others is None else self.others.load_adapter(place, folder)
        return self.adapters.load(place, folder, others)

    def obey(self, message: bytes, answer: Callable[[bytes], None]) -> None:
        """What rank 0 sent to this one: a plan, an adapter to load, or a trace to start or to write. answer:
        sends rank 0 what came of an adapter, from a thread."""
        kind, data = message[:1], message[1:]
        if kind == ADAPTER:
            assert self.adapters is not None
            loading = self.adapters.load(*msgspec.msgpack.decode(data))
            loading.add_done_callback(lambda future: answer(loaded_message(future)))
        elif kind == TRACE:
            try:
                self.start_trace(data.decode()) if data else self.write_trace()
            except (OSError, ValueError, RuntimeError) as error:  # its steps go on
                log.error("the trace could not be written: %s", error)
        else:
            self.follow(StepPlan.from_bytes(data))

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """The part in a step of a rank other than 0."""
        if self.drafting is not None:
            self.drafting.recall(plan)
        computed = self._compute(plan)
        if len(plan.stateful):
            self.state.model.collectives.broadcast(computed.tokens)
            self._record(computed.tokens, plan)
        self._finish(plan, computed)

    def _compute(
        self, plan: StepPlan, started: Callback = _nothing, between_layers: Callback = _nothing
    ) -> _Computed:
        """All but what rows sample that ask for more than a temperature."""
        self.state.prefixes.note(plan)
        self.state.update_adapters(plan)
        self.state.restore_states(plan)
        results = RowResults()
        fed: Fed | Replayed
        graphs = self._graphs_of(plan)[0]
        replays = graphs is not None and graphs.takes(plan)
        if self.drafting is not None and (not replays or len(plan.drafted_rows)):
            self.drafting.catch_up()
        if graphs is not None and replays:
            fed = graphs.replay(plan)
            tokens, logits = fed.tokens, fed.logits  # rows of padding behind the logits
            started()  # the device begins when all of the graph is there
        else:
            hidden, sampling, fed, chosen = self._forward(plan, started, between_layers)
            rows = sampling if plan.reports_prompts else None
            if rows is not None:
                self._report_prompts(plan, hidden, chosen, results)
            own = None if chosen is None else chosen.of(sampling)
            logits = self.state.model.logits(hidden if rows is None else hidden[rows], chosen=own)
            tokens = self._sample(logits, fed.positions[sampling] + 1, plan)
        self.state.save_states(plan)
        return _Computed(logits, tokens, fed, results)

    def _graphs_of(self, plan: StepPlan) -> tuple[DecodeGraphs | None, MixedGraphs | None]:
        return self.adapted_graphs if plan.adapted else (self.graphs, self.mixed_graphs)

    def _finish(self, plan: StepPlan, computed: _Computed) -> torch.Tensor | None:
        """What is left once all rows are sampled: int32 [s], how many tokens each of them comes to; None
        where there were no drafts."""
        if self.drafting is None:
            return None
        self.drafting.exact = not len(plan.drafted_rows)
        if isinstance(computed.fed, Replayed):
            graphs = self._graphs_of(plan)[0]
            assert graphs is not None
            return graphs.finish(plan, computed.fed)
        return self.drafting.finish(plan, computed.fed, computed.tokens)

    def _sample(self, logits: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Tokens int32 [n], on every rank, for rows that ask for nothing but a temperature."""
        collectives = self.state.model.collectives
        if collectives.shard.rank == 0:
            return collectives.broadcast(self.sampler.sample(logits, positions, plan))
        tokens = torch.empty(len(plan.sampled_tokens), dtype=torch.int32, device=self.device)
        collectives.broadcast(tokens)
        self._record(tokens, plan)
        return tokens

    def _record(self, tokens: torch.Tensor, plan: StepPlan) -> None:
        """Note rank 0's tokens as those that their slots sampled last; of rows with drafts, any of them."""
        if len(plan.sample_slots):
            slots = np.repeat(plan.sample_slots, plan.samples)
            self.state.last_token[self.state.staging.upload([slots])] = tokens

    def run(self, plan: StepPlan) -> StepOutput:
        """Launch a step and wait for what it comes to. For steps by themselves, all earlier ones read."""
        launched = self.launch(plan)
        self.settle()
        return self.read(launched)

    def rehearse(self, plan: StepPlan) -> None:
        """Run a step of start-up, which every rank plans separately, as if its sequences had come to its
        starts."""
        state = self.state
        slots, starts = state.staging.upload([plan.slots, plan.starts]).view(2, -1)
        with torch.inference_mode():
            state.lengths[slots] = starts
        if self.state.model.collectives.shard.rank:
            self.follow(plan)
        else:
            self.run(plan)

    def read(self, launched: Launched) -> StepOutput:
        """Wait for a step's output. Steps are read in the order of their launches, each once."""
        values = launched.download.wait()
        if self.others is not None:
            self.others.step_read()
        plan, guided = launched.plan, launched.sampled.guided
        counts = drafts = None
        if self.drafting is not None and guided:
            drafts, values = np.split(values, [len(guided) * self.state.drafts.shape[1]])
            drafts = drafts.reshape(len(guided), -1)[:, : plan.drafts]
        if len(plan.drafted_rows):
            counts, values = np.split(values, [len(plan.samples)])
        return self.sampler.read(launched.sampled, plan, values, counts, drafts)

    def _forward(
        self, plan: StepPlan, started: Callback, between_layers: Callback
    ) -> tuple[torch.Tensor, torch.Tensor, Fed, Chosen | None]:
        """The residual stream behind the last layer, of the tokens behind which one is sampled, or of all
        where something is told of prompts; which tokens those are, int32 [n]; and what was fed."""
        state, graphs = self.state, self._graphs_of(plan)[1]
        if graphs is not None and not graphs.takes(plan):
            graphs = None
        size = plan.num_tokens if graphs is None else graphs.padded(plan)
        state.update_block_table(plan)
        inputs, slots, sampling = state.feed(plan, size)
        chosen = state.chosen(slots) if plan.adapted else None
        batch = AttentionBatch(
            q_lens=plan.lengths,
            kv_lens=plan.starts + plan.lengths,
            slots=plan.slots,
            block_table=state.block_table,
            lengths=state.attended_lengths,
            drafted=int(plan.lengths.max()) if len(plan.drafted_rows) else 1,
            prefixes=state.prefixes.of(plan) if graphs is not None and graphs.reads_prefixes_once else None,
        )
        rows = None if plan.reports_prompts else sampling  # of which the last layer's output is wanted
        full = graphs.plan_full(size, batch) if graphs is not None and batch.drafted == 1 else None
        taps = state.taps(size) if graphs is None else graphs.taps(size)
        attention: Prepared
        if graphs is not None and full is not None:
            hidden, attention = graphs.run_full(plan, inputs, full, rows, chosen), full.attention
            started()  # the device begins when all of the graph is there
        else:
            attention = state.attention.step(batch)
            started()
            if graphs is not None:
                hidden = graphs.run(plan, inputs, attention, rows, between_layers, chosen)
            else:
                ids, where, locations = inputs
                layered = ids, where, state.by_layer(locations), state.kv_layers, attention, rows
                own = between_layers, taps, chosen, state.recurrent(plan, where)
                hidden = state.model(*layered, *own)
        ids, where, locations = inputs
        fed = Fed(ids, slots, where, locations, attention, None if taps is None else taps.out)
        if state.model.lm_head.adapters is None:
            chosen = None
        return hidden, sampling, fed if full is not None else fed.cut(plan.num_tokens), chosen

    def _report_prompts(
        self, plan: StepPlan, hidden: torch.Tensor, chosen: Chosen | None, results: RowResults
    ) -> None:
        ends = np.cumsum(plan.lengths)

        def attempt(rows: list[int], report: Callable[..., None], *given: object) -> None:
            try:
                report(*given)
            except Exception as error:
                if self.state.model.collectives.shard.size > 1:
                    raise  # the other ranks may wait for the rest of it
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # raises where the device, not a row, is what failed
                results.failed += [(row, f"{type(error).__name__}: {error}") for row in rows]

        def logits_of(row: int) -> None:
            own = slice(ends[row] - plan.lengths[row], ends[row])
            adapters = None if chosen is None else chosen.of(own)
            results.logits.append((row, context_logits(self.state.model, hidden[own], adapters)))

        def log_probs_of(rows: list[int], most: list[int], tokens: list[np.ndarray]) -> None:
            begins = (ends - plan.lengths)[rows].tolist()
            own = [at + np.arange(len(ids), dtype=np.int32) for at, ids in zip(begins, tokens, strict=True)]
            places, following = self.state.staging.upload([*own, *tokens]).view(2, -1)
            adapters = None if chosen is None else chosen.of(places)
            found = prompt_log_probs(following, max(most), self.state.model, hidden[places], adapters)
            if found is not None:
                parts = np.split(found, np.cumsum(list(map(len, tokens)))[:-1])
                told = zip(rows, most, parts, strict=True)
                results.log_probs += [(row, part[:, : 1 + count]) for row, count, part in told]

        for row in plan.logits_rows.tolist():
            attempt([row], logits_of, row)
        if plan.told:  # all at once: each product with the head reads all of its weights
            rows, most, tokens = map(list, zip(*plan.told, strict=True))
            attempt(rows, log_probs_of, rows, most, [np.frombuffer(own, "<i4") for own in tokens])


def _shown(costs: dict[tuple[int, int], float]) -> str:
    by_rows: dict[int, list[str]] = {}
    for (rows, count), seconds in sorted(costs.items()):
        by_rows.setdefault(rows, []).append(f"{count}: {seconds * 1e3:.2f}")
    return "; ".join(f"{rows} ({', '.join(each)})" for rows, each in by_rows.items())
