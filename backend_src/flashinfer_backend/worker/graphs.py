# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs.

Steps of decode rows alone are whole graphs (DecodeGraphs), one per number of rows: a graph holds everything
from the last tokens to the next ones, so that a step costs the host one upload and one launch. Steps in which
rows share enough of their caches for one common read to pay have graphs of their own, of fewer sizes.

Mixed steps have graphs by number of tokens (MixedGraphs), up to some 1000, or 2000 with experts on one GPU. A
step with prompts has attention of a new shape each time, but its other operations depend only on the number
of tokens. Launched one by one they cost the host 10 ms and more, more than the device needs for a short
prompt. Steps are padded to a captured number of tokens. Where attention can be captured too (StepGraphState:
FA3 and the Triton kernel read what changes from the device), the step is one full graph, another one where
decode rows share prefixes. Else, and in models with delta nets, what lies between the attention of two layers
is a graph: from the embedding to the first query, from one attention to the next one's query. After the last
mixer only the tokens go on whose logits are wanted, outside any graph. Delta nets are in the graphs: they run
over as many rows as a graph has room for, and those that the step does not have are rows without tokens.

More padding can be faster: a matrix product of 448 tokens may take longer than one of 512. So each number of
tokens is timed once it is captured, and a step takes the fastest that holds it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Prepared, StepShape
from flashinfer_backend.attention.prefixes import Prefixes
from flashinfer_backend.core.draft_counts import SIZES, draft_counts, drafted_shapes
from flashinfer_backend.core.step import NONE, Feeds, StepPlan, Wants, greedy_plan
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import AttentionLayer, Recurrent, Stream, Taps
from flashinfer_backend.ops.weight import Chosen
from flashinfer_backend.worker.device_state import DeviceState, Inputs, row_words
from flashinfer_backend.worker.drafting import Drafting, Fed

T = TypeVar("T")

COLUMNS = 5  # int32 words per row of a graph's input, besides attention's and a block of each cache group
# Numbers of tokens of mixed steps. Beyond the last one the device takes longer than the host, so nothing is
# gained. Padding costs about 3 % of a step for 16 tokens of 256, so they are dense.
MIXED_SIZES = [8, 16, 24, 32, 48, *range(64, 512, 16), *range(512, 1025, 32)]
# Of models with experts, which have some 20 kernels a layer, each a short one: on an H100 a step of
# Qwen3.5-35B-A3B of 1033 tokens took 54 ms or more, and one of 1024, which was captured, 29.
FURTHER_SIZES = [*range(1152, 2049, 128)]
# In models with delta nets a captured step has room for one prompt per 8 of its tokens, at most for 128.
TOKENS_A_PROMPT, MOST_PROMPTS = 8, 128
LARGEST_SHARING = 512  # tokens of a mixed step whose decode rows read shared prefixes once
TIMED_REPLAYS = 10
TIMED_CONTEXT = 512  # tokens in front of timed steps: attention of several tokens a row grows faster with it


class GraphCapture:
    """Each stream that graphs are captured on brings workspaces of cuBLAS, so there is one. Graphs share a
    pool of memory: they replay one after another, and what one computes is used up before the next."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self.sizes = 0  # of steps by now, each of one or more graphs; for those who wait

    def __call__(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `work` launches, and what it returns. `warm_up` (or `work`) is run before, outside
        the capture, for what is initialised at first use."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            (warm_up or work)()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result


def default_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: dense where steps are short, so that little is padded. Not 40: on an H200
    such a step takes longer than one of 48."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 1024)]


def mixed_sizes(model: ModelSpec, most: int) -> list[int]:
    """Numbers of tokens of mixed steps to capture, where no step has more than `most`."""
    # On one GPU: FlashInfer's all-reduce has room for no more.
    further = model.experts is not None and model.shard.size == 1
    sizes = MIXED_SIZES + (FURTHER_SIZES if further else [])
    return sizes[: bisect_left(sizes, most) + 1]


def sharing_sizes(sizes: list[int]) -> list[int]:
    """Those of `sizes` that have a graph for rows that share prefixes: such steps are long, and what padding
    costs is little compared to what they save. Few rows save little."""
    return [
        size
        for size in sizes
        if size >= 16 and (size == sizes[-1] or not size % (16 if size <= 128 else 32 if size <= 256 else 64))
    ]


class Replayed(NamedTuple):
    """A step that was replayed: the graph's tokens int32 [rows and padding, feeds] (flat) and rank 0's logits
    [as many, V], valid until the next replay; and which of these are the plan's sampled tokens, int32 [n],
    where they are not the first ones."""

    step: DecodeStep
    tokens: torch.Tensor
    logits: torch.Tensor
    places: torch.Tensor | None


class DecodeStep(NamedTuple):
    """A graph, what it reads (int32: attention's words, then those of `_upload`) and what it writes. feeds:
    tokens of a row; first: int32 [rows], where each row's begin. `tails` are the graphs that follow it, by
    the number of drafts proposed, and give how many tokens each row comes to. defers: what the proposer would
    take in of it without drafts waits for a later step; notes: what that needs is noted."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    attention: Captured
    feeds: int
    tokens: torch.Tensor
    logits: torch.Tensor
    first: torch.Tensor
    tails: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]]
    defers: bool
    notes: bool


class DecodeGraphs:
    """Captured decode steps; `replay` runs the smallest that fits.

    With `drafting`, the end of a step is a second graph, so that rows whose sampling has a state can be
    sampled between the two; and there are steps of rows that check drafts (core/draft_counts.py).
    """

    def __init__(
        self,
        state: DeviceState,
        sizes: list[int],
        capture: GraphCapture,
        drafting: Drafting | None,
        adapted: bool = False,
    ) -> None:
        """adapted: rows have adapters, by their slots."""
        self._state, self._drafting, self._adapted = state, drafting, adapted
        self._sizes = sorted(set(sizes))
        self._ones = np.ones(self._sizes[-1], np.int32)
        groups = len(state.groups)
        self._columns = COLUMNS + groups
        # Inert rows: dummy slot, no new blocks, temperature 0, nothing suppressed.
        self._padding = np.array([[state.dummy_slot], *[[-1]] * groups, [0], [-1]], np.int32)
        self._opened = np.full((groups, state.dummy_slot + 1), -1, np.int32)  # scratch of _upload
        count = drafting.proposer.count if drafting is not None else 0
        drafted = [(size, 1 + most) for size, most in drafted_shapes(self._sizes, count)]
        shapes = [*((size, 1) for size in self._sizes), *drafted]
        # One for all sizes: a step's logits are used up before the next step. Rank 0 alone gets any.
        model, most = state.model, max(size * feeds for size, feeds in shapes)
        shape = (0 if model.collectives.shard.rank else most, model.spec.outputs)
        self._logits = torch.empty(shape, dtype=model.dtype, device=state.device)
        # The largest first, so that the others fit its memory.
        shapes.sort(key=lambda shape: shape[0] * shape[1], reverse=True)
        self._captured = {shape: self._capture(*shape, capture) for shape in shapes}
        self._drafted = sorted(drafted)
        self.last: torch.cuda.CUDAGraph | None = None  # replayed, without tails
        # By rows. Adapters and drafts have none.
        self._sharing: dict[int, DecodeStep] = {}
        once = state.prefixes.enabled and drafting is None and not adapted
        for size in reversed(sharing_sizes(self._sizes) if once else []):
            found = self._try_capture(StepShape(size, size, 1, shared=True), capture)
            if found is None:
                break
            self._sharing[size] = found

    def takes(self, plan: StepPlan) -> bool:
        """Whether a graph runs the step: of decode rows alone, not too many of them, nor of drafts."""
        return plan.num_decodes == plan.num_rows and self._shape(plan) is not None

    def replay(self, plan: StepPlan) -> Replayed:
        """Launch the step, up to its sampled tokens."""
        shape, rows = self._shape(plan), plan.num_rows
        assert shape is not None
        captured, prefixes = self._captured[shape], None
        if self._sharing and (prefixes := self._state.prefixes.of(plan)) is not None:
            captured = self._sharing[min(size for size in self._sharing if size >= rows)]
        # Else the graph's own entry is early enough. Where drafts may have been rejected, the device does not
        # know which column the host has opened.
        exact = captured.feeds == 1 and (self._drafting is None or self._drafting.exact)
        if not exact or not captured.attention.reads_block_table:
            self._state.update_block_table(plan)
        places = None
        size = len(captured.tokens) // captured.feeds
        self._upload(plan, size, captured.feeds, captured.inputs, captured.attention, exact, prefixes)
        self.last = captured.graph
        if captured.feeds > 1 and plan.num_tokens < rows * captured.feeds:
            first = np.cumsum(plan.lengths) - plan.lengths
            each = np.arange(rows, dtype=np.int32) * captured.feeds - first
            index = np.arange(plan.num_tokens) + np.repeat(each, plan.lengths)
            places = self._state.staging.upload([index.astype(np.int32)])
        captured.graph.replay()
        if places is None:
            return Replayed(captured, captured.tokens[: plan.num_tokens], captured.logits, None)
        return Replayed(captured, captured.tokens[places], captured.logits, places)

    def finish(self, plan: StepPlan, replayed: Replayed) -> torch.Tensor | None:
        """Check drafts and have new ones proposed, once all rows are sampled: as Drafting.finish."""
        step = replayed.step
        if replayed.places is not None and len(plan.stateful):
            step.tokens[replayed.places] = replayed.tokens
        if self._drafting is None:
            return None
        if step.defers:
            self._drafting.defer(plan.slots, step.notes)
            if not plan.drafts:
                return None
            self._drafting.catch_up()
        graph, counts = step.tails[plan.drafts]
        graph.replay()
        return counts[: plan.num_rows] if len(plan.drafted_rows) else None

    def step_seconds(self) -> dict[tuple[int, int], float]:
        """What steps cost, with drafts and without: (rows, drafts of each) -> seconds of a step that has as
        many drafts proposed. Writes to what the device keeps of all slots; no sequence may have one yet."""
        timed = (
            [(size, feeds) for size, feeds in self._captured if size <= SIZES[-1]] if self._drafted else []
        )
        return {(size, feeds - 1): self._seconds(size, feeds) for size, feeds in timed}

    def _seconds(self, size: int, feeds: int) -> float:
        state, step = self._state, self._captured[size, feeds]
        # Tokens that differ, as in a step: they decide how many experts it reads.
        tokens = torch.randint(state.model.spec.vocab_size, state.last_token.shape, device=state.device)
        drafts = torch.randint(state.model.spec.vocab_size, state.drafts.shape, device=state.device)
        each = np.arange(size, dtype=np.int32)
        # In block 0 alone. States of layers have seen none.
        context = min(TIMED_CONTEXT, state.max_blocks * state.block_size // 2)
        context = context if state.states is None else 0
        plan = _decodes(each, np.full(size, feeds, np.int32), context)
        self._upload(plan, size, feeds, step.inputs, step.attention)

        def replay() -> None:
            state.lengths[:-1] = context
            state.last_token.copy_(tokens)
            state.drafts.copy_(drafts)
            step.graph.replay()
            if feeds > 1:
                step.tails[feeds - 1][0].replay()

        with torch.inference_mode():
            seconds = replay_seconds(replay)
            state.lengths.zero_()
        return seconds

    def _shape(self, plan: StepPlan) -> tuple[int, int] | None:
        """Rows and feeds of the smallest graph that has room for the plan's rows."""
        rows = plan.num_rows
        if not len(plan.drafted_rows):
            return (self._sizes[bisect_left(self._sizes, rows)], 1) if rows <= self._sizes[-1] else None
        fed = int(plan.lengths.max())
        return next((shape for shape in self._drafted if shape[0] >= rows and shape[1] >= fed), None)

    def _words(self, size: int, feeds: int) -> int:
        """Words of an upload without attention's."""
        return self._columns * size if feeds == 1 else 4 * size * feeds + 2 * size

    def _upload(
        self,
        plan: StepPlan,
        size: int,
        feeds: int,
        inputs: torch.Tensor,
        attention: Captured,
        exact: bool = False,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Give a graph its step: attention's words, seeds [2 T], then [T] each, T the tokens of all rows:
        slots, blocks, temperature, suppressed. With drafts temperature and suppressed alone, then [size]
        each: slots and how many tokens they feed. exact: new blocks are those of the tokens that are fed."""
        rows, tokens, given = plan.num_rows, size * feeds, plan.num_rows * feeds
        words = self._state.staging.begin(len(inputs))
        own = len(words) - self._words(size, feeds)
        seed = words[own : own + 2 * tokens].view(np.uint64)
        seed[:given], seed[given:] = np.repeat(plan.seed, feeds) if feeds > 1 else plan.seed, 0
        rest = words[own + 2 * tokens :]
        q_lens = self._ones[:size]
        if feeds == 1:
            columns = rest.reshape(self._columns - 2, size)
            slots, temperature, suppressed = columns[0], columns[-2], columns[-1]
            slots[:rows] = plan.slots
            if exact:
                (group, slot, _, block), opened = plan.block_updates.T, self._opened
                opened[group, slot] = block
                columns[1:-2, :rows] = opened[:, plan.slots]
                opened[group, slot] = -1
            else:
                columns[1:-2, :rows] = -1
            temperature[:rows] = plan.temperature.view(np.int32)
            suppressed[:rows] = plan.suppressed
            columns[:, rows:] = self._padding
        else:
            temperature, suppressed = rest[: 2 * tokens].reshape(2, tokens)
            slots, q_lens = rest[2 * tokens :].reshape(2, size)
            temperature[:given] = np.repeat(plan.temperature.view(np.int32), feeds)
            suppressed[:given] = np.repeat(plan.suppressed, feeds)
            temperature[given:], suppressed[given:] = 0, -1
            slots[:rows], slots[rows:] = plan.slots, self._state.dummy_slot
            q_lens[:rows], q_lens[rows:] = plan.lengths, 1
        kv_lens = q_lens.copy()
        kv_lens[:rows] += plan.starts
        if self._drafting is not None:
            kv_lens += self._drafting.ahead
        batch = AttentionBatch(
            q_lens=q_lens,
            kv_lens=kv_lens,
            slots=slots,
            block_table=self._state.block_table,
            prefixes=prefixes,
        )
        if not attention.plan(batch, words[:own]):
            raise RuntimeError(f"attention cannot run a step of {size} decode rows in its graph")
        self._state.staging.send(inputs)

    def _capture(self, size: int, feeds: int, capture: GraphCapture) -> DecodeStep:
        step = self._try_capture(StepShape(size * feeds, size, feeds), capture)
        if step is None:
            raise ValueError("this attention cannot be captured: set cuda_graph_batch_sizes to none")
        return step

    def _try_capture(self, shape: StepShape, capture: GraphCapture) -> DecodeStep | None:
        """None where attention has no graph of such steps."""
        state = self._state
        tokens, size, feeds = shape.tokens, shape.rows, shape.feeds_per_row
        assert feeds is not None
        own = state.attention.graph_words(shape)
        inputs = torch.empty(own + self._words(size, feeds), dtype=torch.int32, device=state.device)
        lengths = state.attended_lengths
        if lengths is not None and feeds == 1:
            lengths = state.lengths
        attention = state.attention.captured(shape, state.block_table, inputs[:own], lengths)
        if attention is None:
            return None
        self._upload(_decodes(NONE, NONE), size, feeds, inputs, attention)
        data = inputs[own:]
        graph, outputs = capture(lambda: self._step(data, attention, size, feeds))
        drafting, own_logits = self._drafting, self._logits[:tokens]
        defers = drafting is not None and drafting.proposer.defers and feeds == 1
        first = torch.arange(0, tokens, feeds, dtype=torch.int32, device=state.device)
        notes = size <= SIZES[-1]
        step = DecodeStep(graph, inputs, attention, feeds, outputs[0], own_logits, first, {}, defers, notes)
        if drafting is not None and (step.notes or not defers):
            # Fewer rows than there is room for may have more drafts.
            fewest = 1 + max((other for other in self._sizes if other < size), default=0)
            rows = size if feeds > 1 else fewest
            counts = draft_counts(rows, drafting.proposer.count) if step.notes else []
            for count in counts if defers else [0, *counts]:
                step.tails[count] = capture(functools.partial(self._tail, step, size, outputs, count))
        capture.sizes += not shape.shared
        return step

    def _step(
        self, data: torch.Tensor, attention: Captured, size: int, feeds: int
    ) -> tuple[torch.Tensor, ...]:
        """What is captured: tokens int32 [size * feeds], their logits in self._logits; and what a proposer of
        drafts takes (Fed, without attention). Reads only the static input and device state."""
        state, tokens = self._state, size * feeds
        seed, rest = data[: 2 * tokens].view(torch.int64), data[2 * tokens :]
        record = None
        if feeds == 1:
            columns = rest.view(-1, size)
            slots, temperature, suppressed = columns[0], columns[-2], columns[-1]
            input_ids, positions, locations = state.decode_inputs(slots, columns[1:-2])
            record, owners = (state.last_token, slots), slots
        else:
            temperature, suppressed, slots, fed = rest.split([tokens, tokens, size, size])
            input_ids, owners, positions, locations = state.draft_inputs(slots, fed, feeds)
        cache_locations, taps = state.by_layer(locations), None
        drafting, defers, places = self._drafting, False, None
        if drafting is not None and feeds == 1 and drafting.proposer.defers:
            defers = True
            if state.tokens.shape[1] and (size <= SIZES[-1] or drafting.proposer.history):
                places = state.ops.note_tokens(state.tokens, input_ids, owners, positions)
        if not defers or places is not None:
            taps = state.kept_taps()
        chosen = state.chosen(owners) if self._adapted else None
        inputs = input_ids, positions, cache_locations, state.kv_layers, attention
        recurrent = state.recurrent_decodes(slots, positions, feeds)
        hidden = state.model(*inputs, taps=taps, chosen=chosen, recurrent=recurrent)
        logits = state.model.logits(hidden, self._logits[:tokens], chosen)
        collectives = state.model.collectives
        if collectives.shard.rank:
            sampled = collectives.broadcast(torch.empty_like(owners))
            if record is not None:
                state.last_token[slots] = sampled
        else:
            sampled = state.ops.sample(
                logits, temperature.view(torch.float32), seed, positions + 1, suppressed, record
            )
            sampled = collectives.broadcast(sampled)
        outputs = sampled, input_ids, owners, positions, locations
        if taps is None:
            return outputs
        if places is not None:
            state.noted[places] = torch.cat(taps.kept, dim=1)
        return (*outputs, *taps.kept)

    def _tail(
        self, step: DecodeStep, size: int, outputs: tuple[torch.Tensor, ...], count: int
    ) -> torch.Tensor:
        """The end of a step with drafts, and of any where there can be some, which is captured by itself: how
        many tokens each row comes to, int32 [size]. outputs: of _step."""
        assert self._drafting is not None
        state = self._state
        sampled, input_ids, owners, positions, cache_locations, *tapped = outputs
        if step.feeds == 1:
            slots, counts, ends = owners, step.first, step.first  # counts is not read
        else:
            slots, fed = step.inputs[-2 * size :].split(size)
            counts, ends = state.ops.accept(sampled, step.first, fed, slots, state.by_slot)
        hidden = torch.cat(tapped, dim=1) if tapped else None
        own = Fed(input_ids, owners, positions, cache_locations, step.attention, hidden)
        ahead = functools.partial(step.attention.ahead, lengths=state.lengths)
        # Only steps with drafts note how much they have fed: of others all is kept.
        lengths = state.lengths if step.feeds == 1 else state.fed_lengths
        self._drafting.propose(own, sampled, slots, ends, lengths, ahead, count)
        return counts


class FullStep(NamedTuple):
    """A captured step, attention and all: `decode_rows` is the most decode rows of a step that it serves,
    `stream` what goes around the last attention."""

    decode_rows: int
    graph: torch.cuda.CUDAGraph
    attention: Captured
    stream: Stream


class MixedGraphs:
    """Captured steps by number of tokens, over one set of static tensors."""

    def __init__(self, state: DeviceState, capture: GraphCapture, adapted: bool = False) -> None:
        """adapted: tokens have adapters."""
        self._state, self._model = state, state.model
        model, attention, block_table = state.model, state.attention, state.block_table
        self._sizes = mixed_sizes(model.spec, state.max_num_tokens)
        self.largest = self._sizes[-1]
        heads, device = model.spec.attention, model.device
        # Ids, positions, and cache locations in each cache group.
        self._inputs = torch.zeros((2 + len(state.groups), self.largest), dtype=torch.int32, device=device)
        shape = (self.largest, heads.heads, heads.head_dim)
        self._q = torch.zeros(shape, dtype=model.dtype, device=device)
        # Rows of padding are never written: they must not hold NaN.
        self._attended = torch.zeros(shape, dtype=model.dtype, device=device)
        # Layers of each piece: it ends before attention, or behind the last delta net.
        ends = [1 + index for index, layer in enumerate(model.layers) if isinstance(layer, AttentionLayer)]
        if ends[-1:] != [len(model.layers)]:
            ends.append(len(model.layers))
            width = model.spec.delta_nets[0].o.shape[1]
            self._last_mixed = torch.zeros((self.largest, width), dtype=model.dtype, device=device)
        else:
            self._last_mixed = self._attended
        self._pieces = [range(*each) for each in itertools.pairwise([0, *ends])]
        most = sum(self._row_room(self.largest))
        self._rows = torch.zeros(row_words(most), dtype=torch.int32, device=device)
        self._recurrent: Recurrent | None = None  # of the step that is captured
        self._taps = state.taps(self.largest)
        dummies = torch.full((self.largest,), state.dummy_slot, dtype=torch.int32, device=device)
        self._chosen = state.chosen(dummies) if adapted else None
        self._no_words = torch.empty(0, dtype=torch.int32, device=device)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._streams: dict[int, Stream] = {}
        self._full: dict[int, list[FullStep]] = {}
        self._sharing: dict[int, FullStep] = {}
        self._capture_graph = capture
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first, so that the others fit its memory
                self._capture(size)
                capture.sizes += 1
                if state.states is not None:
                    continue  # pieces of several layers: launching them takes the host less than the device
                most = min(size, block_table.shape[0] - 1)
                # Few decode rows are cut up otherwise than many.
                for rows in sorted({min(64, most), most}):
                    steps = StepShape(size, rows, None)
                    own = block_table, self._no_words, state.attended_lengths
                    if (full := self._capture_full(size, attention.captured(steps, *own), rows)) is not None:
                        self._full.setdefault(size, []).append(full)
                once = state.prefixes.enabled and size <= LARGEST_SHARING and not adapted
                if once and size in self._full:
                    shared = attention.captured(steps._replace(shared=True), *own)
                    if (full := self._capture_full(size, shared, most)) is not None:
                        self._sharing[size] = full
        # All ranks must pad to the same sizes.
        times = model.collectives.agreed([self._layer_seconds(size) for size in self._sizes])
        # No step that has a full graph is padded to a size without one.
        whole = bisect_right(self._sizes, max(self._full, default=0))
        self._best = fastest_sizes(self._sizes[:whole], times[:whole])
        self._best += fastest_sizes(self._sizes[whole:], times[whole:])

    def takes(self, plan: StepPlan) -> bool:
        """Whether there are graphs for the step."""
        return self._least(plan) <= self.largest

    def padded(self, plan: StepPlan) -> int:
        """The number of tokens to run a step with that `takes` has taken."""
        return self._best[bisect_left(self._sizes, self._least(plan))]

    def _least(self, plan: StepPlan) -> int:
        """The fewest tokens of a graph that has room for the plan's tokens and rows."""
        if self._state.states is None:
            return plan.num_tokens
        prompts = plan.num_rows - self._state.state_decodes(plan)
        if prompts > MOST_PROMPTS:
            return self.largest + 1
        return max(plan.num_tokens, prompts * TOKENS_A_PROMPT)

    def _row_room(self, size: int) -> tuple[int, int]:
        """Decode rows and prompts that delta nets have room for in a graph of `size` tokens."""
        return min(size, self._state.dummy_slot), min(size // TOKENS_A_PROMPT, MOST_PROMPTS)

    def _own_rows(self, size: int) -> torch.Tensor:
        return self._rows[: row_words(sum(self._row_room(size)))]

    def plan_full(self, size: int, batch: AttentionBatch) -> FullStep | None:
        """The full graph of a step of `size` tokens (padding included), its attention planned; None where
        the step must run piecewise."""
        sharing = self._sharing.get(size) if batch.prefixes is not None else None
        for full in self._full.get(size, ()) if sharing is None else [sharing]:
            if batch.num_single <= full.decode_rows:
                return full if full.attention.plan(batch, np.empty(0, np.int32)) else None
        return None

    def run_full(
        self,
        plan: StepPlan,
        inputs: Inputs,
        full: FullStep,
        rows: torch.Tensor | None,
        chosen: Chosen | None,
    ) -> torch.Tensor:
        """As `run`, of a step that plan_full has planned."""
        size = self._copy(plan, inputs, chosen)
        full.graph.replay()
        return self._finish(size, full.stream, rows, chosen)

    def run(
        self,
        plan: StepPlan,
        inputs: Inputs,
        attention: Prepared,
        rows: torch.Tensor | None,
        between_layers: Callable[[], object],
        chosen: Chosen | None,
    ) -> torch.Tensor:
        """As Transformer.forward over inputs int32 [padded size]; padding must lie in the dummy block.
        chosen: None unless captured for adapters."""
        size = self._copy(plan, inputs, chosen)
        q, attended = self._q[: plan.num_tokens], self._attended[: plan.num_tokens]
        for place, graph in enumerate(self._graphs[size]):
            graph.replay()
            if place < len(self._model.attention_layers):
                attention.run(place, q, attended)
                between_layers()
        return self._finish(size, self._streams[size], rows, chosen)

    def _finish(
        self, size: int, stream: Stream, rows: torch.Tensor | None, chosen: Chosen | None
    ) -> torch.Tensor:
        return self._model.finish(self._last_mixed[:size], stream, rows, chosen, self.taps(size))

    def taps(self, size: int) -> Taps | None:
        """The outputs that a proposer takes of the last step, of `size` tokens; None where it takes none."""
        if self._taps is None or self._taps.out is None:
            return None
        return self._taps._replace(out=self._taps.out[:size])

    def _copy(self, plan: StepPlan, inputs: Inputs, chosen: Chosen | None) -> int:
        """Give the graphs their step; its number of tokens, padding included."""
        ids, positions, locations = inputs
        size = len(ids)
        if self._chosen is not None:
            assert chosen is not None
            for own, given in zip(self._chosen, chosen, strict=True):
                own[: len(given)].copy_(given)
        self._inputs[0, :size].copy_(ids)
        self._inputs[1, :size].copy_(positions)
        self._inputs[2:, :size].copy_(locations.view(-1, size))
        self._upload_rows(plan, size)
        return size

    def _upload_rows(self, plan: StepPlan, size: int) -> None:
        if self._state.states is not None:
            self._state.upload_rows(plan, self._own_rows(size), self._row_room(size)[0])

    def _layer_seconds(self, size: int) -> float:
        """Median time of the piece between two layers' attention."""
        *before, graph = self._graphs[size]
        self._upload_rows(_decodes(NONE, NONE), size)  # another size's rows can be there
        if self._model.spec.experts is not None:
            # Tokens that differ, as in a step: which experts they have decides how long it takes.
            with torch.inference_mode():
                self._inputs[0, :size] = torch.arange(size) % self._model.spec.vocab_size
            for each in before:
                each.replay()
        return replay_seconds(graph.replay)

    def _piece(self, size: int, layers: range, stream: Stream | None) -> Stream:
        """Runs these layers over the static tensors, from the mixer before them on; returns what goes around
        the last one's mixer."""
        model = self._model
        input_ids, positions, *locations = (row[:size] for row in self._inputs)
        cache_locations = self._state.by_layer(locations[0] if len(locations) == 1 else locations)
        inputs, mixed = (input_ids, positions, cache_locations), self._attended[:size]
        own = self._q[:size], self.taps(size), self._own_chosen(size)
        if not layers.start:
            decodes = self._row_room(size)[0]
            self._recurrent = self._state.recurrent_padded(self._own_rows(size), positions, decodes)
        for index in layers:
            q, stream = model.piece(index, inputs, self._state.kv_layers, mixed, stream, *own)
            if q is None:
                assert self._recurrent is not None
                mixed = model.mix(index, stream, self._recurrent)
        assert stream is not None
        if q is None:
            self._last_mixed[:size].copy_(mixed)
        return Stream(stream.hidden, stream.gate)

    def _own_chosen(self, size: int) -> Chosen | None:
        if self._chosen is None:
            return None
        places, distinct = self._chosen
        return Chosen(places[:size], distinct[: 1 + size])

    def _capture(self, size: int) -> None:
        stream: Stream | None = None
        self._graphs[size] = []
        self._upload_rows(_decodes(NONE, NONE), size)

        def warm_up() -> None:
            self._finish(size, self._piece(size, self._pieces[0], None), None, self._own_chosen(size))

        for layers in self._pieces:
            piece = functools.partial(self._piece, size, layers, stream)
            graph, stream = self._capture_graph(piece, (lambda: None) if layers.start else warm_up)
            self._graphs[size].append(graph)
        assert stream is not None
        self._streams[size] = stream

    @property
    def reads_prefixes_once(self) -> bool:
        """Whether there are graphs of steps whose decode rows share prefixes."""
        return bool(self._sharing)

    def _capture_full(self, size: int, attention: Captured | None, rows: int) -> FullStep | None:
        if attention is None:
            return None

        def step(pieces: list[range]) -> Stream:
            stream = None
            for layer, layers in enumerate(pieces):
                stream = self._piece(size, layers, stream)
                attention.run(layer, self._q[:size], self._attended[:size])
            assert stream is not None
            return stream

        graph, stream = self._capture_graph(lambda: step(self._pieces), lambda: step(self._pieces[:1]))
        return FullStep(rows, graph, attention, stream)


def _decodes(slots: np.ndarray, lengths: np.ndarray, context: int = 0) -> StepPlan:
    """Greedy decode rows of as many tokens, of sequences with `context` tokens in the cache."""
    feeds = np.where(lengths > 1, Feeds.LAST_AND_DRAFTS, Feeds.LAST)
    wants = np.where(lengths > 1, Wants.NEXT_OF_EACH, Wants.NEXT)
    return greedy_plan(slots, context, lengths, feeds, wants=wants)


def replay_seconds(replay: Callable[[], object]) -> float:
    """Median time on the device of what is launched, back to back."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_REPLAYS + 1)]
    replay()
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def fastest_sizes(sizes: list[int], seconds: list[float]) -> list[int]:
    """For each of the ascending `sizes`, the one of at least that size that takes least time."""
    best: list[int] = []
    fastest = float("inf")
    for size, time in zip(reversed(sizes), reversed(seconds), strict=True):
        if time < fastest:
            fastest = time
            best.append(size)
        else:
            best.append(best[-1])
    return best[::-1]
