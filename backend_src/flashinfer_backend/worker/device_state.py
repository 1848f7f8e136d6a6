# SPDX-License-Identifier: Apache-2.0
"""What the steps of one rank share on its device.

State is indexed by slot: block tables, length, last token and drafts. There is one row more than slots: the
dummy that padding uses, whose only block is block 0 and whose length is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from flashinfer_backend.attention.compared import ComparedAttention
from flashinfer_backend.attention.contract import Mixer, Scores
from flashinfer_backend.attention.grouped import GroupAttention, GroupedAttention
from flashinfer_backend.attention.variants import VARIANTS
from flashinfer_backend.core import draft_counts
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import Feeds, StepPlan
from flashinfer_backend.models.transformer import Recurrent, Taps, Transformer
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.ops.torch_delta import DeltaRows
from flashinfer_backend.ops.torch_ops import BySlot
from flashinfer_backend.ops.weight import Chosen
from flashinfer_backend.speculate.proposer import Proposer
from flashinfer_backend.worker.memory import SequenceMemory
from flashinfer_backend.worker.prefixes import SharedPrefixes

MOST_DEFERRED = 16  # tokens of a sequence that a proposer takes in at once

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # input_ids, positions and cache_locations


def row_words(rows: int) -> int:
    """Words of DeviceState.upload_rows."""
    return 4 * rows + 1


class DeviceState:
    """Model, KV caches, attention, and of each slot: block tables int32 [groups, slots + 1, blocks], length
    (tokens in the cache), last token and place of the adapter (or -1), int32 [slots + 1], guesses at what
    follows it, int32 [slots + 1, drafts], and what a proposer looks back at.

    block_table is the first group's: attention of several groups takes those of block_tables in its place.
    kv_layers: (K, V) of every layer, and behind them those of the proposer's. Steps are enqueued
    on one stream, so what one of them writes the next one reads.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Transformer,
        ops: ModuleType,
        memory: SequenceMemory,
        proposer: Proposer | None,
    ) -> None:
        """memory: of its states, where layers keep some, rows are slots, the dummy, and behind it snapshots,
        whose numbers begin with 1."""
        self.model, self.ops, self.device = model, ops, model.device
        self.states = states = memory.states
        groups, caches = memory.groups, memory.caches
        self._copied_blocks = memory.copied_blocks
        # With drafts, how many tokens of its sequence a slot's state has seen.
        self._in_state: torch.Tensor | None = None
        self.groups, self.caches = groups, caches
        self._group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        pairs = [
            pair
            for group, cache in zip(groups, caches, strict=True)
            for pair in zip(group.layers, cache.layers, strict=True)
        ]
        self.kv_layers = [kv for _, kv in sorted(pairs, key=lambda pair: pair[0])]
        format = caches[0].format  # blocks and layers have the same size in all groups
        self.block_size = format.block_size
        self.max_blocks = -(-config.max_seq_len // self.block_size)
        self.dummy_slot = config.max_num_seqs
        self.max_num_tokens = config.max_num_tokens
        rows = config.max_num_seqs + 1
        shape = (len(groups), rows, self.max_blocks)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.block_table = self.block_tables[0]
        bytes_per_token = format.bytes_per_token // format.num_layers
        once = config.read_shared_prefixes_once
        self.prefixes = SharedPrefixes(*shape[1:], self.block_size, bytes_per_token, once)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.adapters = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
        self._max_loras = config.max_loras
        drafts = proposer.count if proposer is not None else 0
        if states is not None and drafts:
            self._in_state = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.drafts = torch.zeros((rows, drafts), dtype=torch.int32, device=self.device)
        table = self.block_table, self.block_size
        self.by_slot = BySlot(self.last_token, self.lengths, self.drafts, *table)
        # Those of a step with all of its drafts, for attention of layers that run once some are rejected.
        own = proposer is not None and proposer.cache_layers
        self.fed_lengths = torch.zeros_like(self.lengths) if own else self.lengths
        # What attention reads where the host has upper bounds.
        self.attended_lengths = self.fed_lengths if proposer is not None else None
        self._tapped = proposer.layers if proposer is not None else ()
        # Tokens of every slot: all, or with a proposer that takes some in later its last ones, and of these
        # what it takes of their layers [slots + 1 times columns, layers * H].
        columns = config.max_seq_len + 1 if proposer is not None and proposer.history else 0
        if proposer is not None and proposer.defers and self._tapped:
            columns = MOST_DEFERRED
        self.tokens = torch.zeros((rows, columns), dtype=torch.int32, device=self.device)
        noted = rows * columns if self._tapped else 0
        width = len(self._tapped) * model.spec.hidden_size
        self.noted = torch.zeros((noted, width), dtype=model.dtype, device=self.device)
        self.staging = StagingRing(16 * config.max_num_tokens, self.device)
        self.attention = self._make_attention(config, proposer)

    def _make_attention(self, config: EngineConfig, proposer: Proposer | None) -> Mixer:
        plain = config.attention_backend == "torch" or self.device.type == "cpu"
        chosen = self._plain_attention() if plain else self._flashinfer_attention(config, proposer)
        if not config.compare_attention:
            return chosen
        return ComparedAttention(chosen, self._plain_attention(), len(self.model.spec.attentions))

    def _plain_attention(self) -> Mixer:
        from flashinfer_backend.attention.torch_paged import TorchPagedAttention

        heads, groups = self.model.spec.attention.heads, zip(self.groups, self.caches, strict=True)
        return self._of_groups(
            [
                TorchPagedAttention(cache, heads, group.window, scores_of(self.model, group.layers))
                for group, cache in groups
            ]
        )

    def _flashinfer_attention(self, config: EngineConfig, proposer: Proposer | None) -> Mixer:
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        most_drafts = None
        if proposer is not None:
            most_drafts = functools.partial(draft_counts.most_drafts, most=proposer.count)
        attentions: list[FlashInferAttention] = []
        for group, cache in zip(self.groups, self.caches, strict=True):
            found = FlashInferAttention(
                cache,
                self.model.spec.attention.heads,
                max_num_seqs=config.max_num_seqs,
                max_blocks_per_seq=self.max_blocks,
                decode_backend=config.attention_backend,
                dtype=self.model.dtype,
                copied_blocks=self._copied_blocks,
                most_drafts=most_drafts,
                window=group.window,
                scores=scores_of(self.model, group.layers),
                like=attentions[0] if attentions else None,
            )
            attentions.append(found)
        return self._of_groups(attentions)

    def _of_groups(self, attentions: Sequence[Mixer]) -> Mixer:
        if len(attentions) == 1:
            return attentions[0]
        parts = zip([group.layers for group in self.groups], attentions, self.block_tables, strict=True)
        return GroupedAttention([GroupAttention(*part) for part in parts])

    def kept_taps(self) -> Taps | None:
        """For the outputs that a proposer takes, as they are."""
        return Taps(self._tapped, None, []) if self._tapped else None

    def taps(self, tokens: int) -> Taps | None:
        """For the outputs that a proposer takes of a step of `tokens`; None where it takes none."""
        if not self._tapped:
            return None
        shape = (tokens, len(self._tapped) * self.model.spec.hidden_size)
        return Taps(self._tapped, torch.empty(shape, dtype=self.model.dtype, device=self.device), [])

    def update_block_table(self, plan: StepPlan) -> None:
        """Enter the step's new blocks, before anything of the step reads the table."""
        updates = plan.block_updates
        if len(updates):
            group, slot, column, block = updates.T
            row = group * (self.dummy_slot + 1) + slot
            where, blocks = self.staging.upload([row * self.max_blocks + column, block]).view(2, -1)
            self.block_tables.view(-1)[where] = blocks

    @property
    def snapshots(self) -> int:
        """How many there is room for."""
        return 0 if self.states is None else self.states.rows - self.dummy_slot - 1

    def restore_states(self, plan: StepPlan) -> None:
        """Give sequences that came to slots the states of their cached prefixes, before the step."""
        if self.states is not None and len(plan.restored):
            slots, snapshots = self._state_rows(plan.restored)
            self.states.copy(snapshots, slots)

    def save_states(self, plan: StepPlan) -> None:
        """Keep the states that the step has come to, behind it."""
        if self.states is not None and len(plan.saved):
            self.states.copy(*self._state_rows(plan.saved))

    def _state_rows(self, pairs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of slots and of snapshots."""
        slots, snapshots = self.staging.upload([pairs.T.reshape(-1)]).view(2, -1)
        return slots, snapshots + self.dummy_slot

    def recurrent(self, plan: StepPlan, positions: torch.Tensor) -> Recurrent | None:
        """What layers that keep states are told of the plan's rows; positions: of its tokens."""
        if self.states is None:
            return None
        decodes = self.state_decodes(plan)
        rows = torch.empty(row_words(plan.num_rows), dtype=torch.int32, device=self.device)
        self.upload_rows(plan, rows, decodes)
        return self._recurrent(rows, positions, decodes, padded=False)

    def recurrent_padded(self, rows: torch.Tensor, positions: torch.Tensor, decodes: int) -> Recurrent | None:
        """The same of rows that a graph reads. upload_rows(plan, rows, decodes) gives it a step's."""
        return None if self.states is None else self._recurrent(rows, positions, decodes, padded=True)

    def recurrent_decodes(self, slots: torch.Tensor, positions: torch.Tensor, feeds: int) -> Recurrent | None:
        """The same of rows of as many tokens each, of which padding is as drafts that are rejected."""
        if self.states is None:
            return None
        starts = feeds * torch.arange(len(slots) + 1, dtype=torch.int32, device=self.device)
        own = slots, starts, positions[::feeds].contiguous()
        return Recurrent(self.states.layers, DeltaRows(*own, self._held(*own, len(slots)), len(slots)))

    def state_decodes(self, plan: StepPlan) -> int:
        """How many rows in front are decode rows for layers that keep states: with drafts, rows of given
        tokens are none that a state waits for, however short they are."""
        if self._in_state is not None:
            return plan.num_decodes
        longer = (plan.lengths > 1).nonzero()[0]
        return int(longer[0]) if len(longer) else plan.num_rows

    def upload_rows(self, plan: StepPlan, rows: torch.Tensor, decodes: int) -> None:
        """Write the plan's rows to `rows`, int32 [row_words(n)], with room for `decodes` decode rows and
        n - decodes others: slots, cuts and saves [n], starts [n + 1]. What no row takes is a row without
        tokens, in the dummy slot."""
        room, own = len(rows) // 4, self.state_decodes(plan)
        host = self.staging.begin(len(rows))
        slots, cuts, saves = host[: 3 * room].reshape(3, room)
        starts = host[3 * room :]
        places = np.arange(plan.num_rows)
        places[own:] += decodes - own
        slots[:] = self.dummy_slot
        slots[places] = plan.slots
        lengths = np.zeros(room, np.int32)
        lengths[places] = plan.lengths
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        cuts[:], saves[:] = starts[:-1], slots
        if len(plan.cuts):
            cut, tokens, snapshots = plan.cuts.T
            cuts[places[cut]] += tokens
            saves[places[cut]] = snapshots + self.dummy_slot
        self.staging.send(rows)

    def _recurrent(
        self, rows: torch.Tensor, positions: torch.Tensor, decodes: int, padded: bool
    ) -> Recurrent:
        assert self.states is not None
        room = len(rows) // 4
        slots, cuts, saves, starts = rows.split([room, room, room, room + 1])
        first = positions[starts[:-1].clamp(max=len(positions) - 1)]
        own = slots, starts, first
        found = DeltaRows(*own, self._held(*own, decodes), decodes, cuts, saves, padded)
        return Recurrent(self.states.layers, found)

    def _held(
        self, slots: torch.Tensor, starts: torch.Tensor, first: torch.Tensor, decodes: int
    ) -> torch.Tensor | None:
        if self._in_state is None:
            return None
        return self.ops.count_held(self._in_state, slots, starts, first, decodes)

    def update_adapters(self, plan: StepPlan) -> None:
        """Note the adapters of sequences that came to slots, before the step reads them."""
        if len(plan.adapters):
            slots, places = self.staging.upload([plan.adapters.T.reshape(-1)]).view(2, -1)
            self.adapters[slots] = places

    def chosen(self, slots: torch.Tensor) -> Chosen:
        """The adapters of tokens of these slots."""
        return self.ops.group_adapters(self.adapters[slots], self._max_loras)

    def feed(self, plan: StepPlan, size: int) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
        """What the plan's tokens feed the model (ops.step_inputs), int32 [size], of which those behind the
        plan's tokens are padding. Their slots, and the plan's sampled_tokens. Several cache groups have a row
        of cache_locations each.

        Moves lengths on, for rows with drafts as if all were accepted.
        """
        count, given = plan.num_tokens, slice(plan.num_last, plan.num_last + len(plan.tokens))
        starts = np.where(plan.feeds == Feeds.GIVEN, plan.starts, 0) - (
            np.cumsum(plan.lengths) - plan.lengths
        )
        data = np.zeros((3, size), np.int32)
        data[0, :count], data[0, count:] = np.repeat(plan.slots, plan.lengths), self.dummy_slot
        data[1, :count] = np.arange(count) + np.repeat(starts, plan.lengths)
        data[2, given] = plan.tokens
        uploaded = self.staging.upload([data.reshape(-1), plan.sampled_tokens])
        slots, positions, tokens = uploaded[: 3 * size].view(3, size)
        if given.stop < count:  # rows with drafts, whose places count from their last token on
            own, place = slots[given.stop : count], positions[given.stop : count]
            known = torch.cat([self.last_token.unsqueeze(1), self.drafts], dim=1)
            tokens[given.stop : count] = known[own, place]
            positions[given.stop : count] = place + self.lengths[own]
        inputs = self.ops.step_inputs(slots, self.by_slot, given=(tokens, positions, plan.num_last))
        self.note_fed_lengths()
        return self._of_all_groups(inputs, slots), slots, uploaded[3 * size :]

    def note_fed_lengths(self) -> None:
        """Once a step has moved lengths on, and before its drafts are checked."""
        if self.fed_lengths is not self.lengths:
            self.fed_lengths.copy_(self.lengths)

    def decode_inputs(self, slots: torch.Tensor, new_blocks: torch.Tensor) -> Inputs:
        """The same of decode rows, each of its slot's last token. new_blocks int32 [groups, rows]: of each
        row's token, where that begins a block, else -1; they are entered into the block tables."""
        inputs = self.ops.step_inputs(slots, self.by_slot, new_blocks[0])
        return self._of_all_groups(inputs, slots, new_blocks)

    def draft_inputs(
        self, slots: torch.Tensor, fed: torch.Tensor, feeds: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decode rows with drafts feed; see ops.draft_inputs. cache_locations as those of feed."""
        inputs = self.ops.draft_inputs(slots, fed, feeds, self.by_slot)
        self.note_fed_lengths()
        ids, owners, *places = inputs
        ids, positions, locations = self._of_all_groups((ids, *places), owners)
        return ids, owners, positions, locations

    def _of_all_groups(
        self, inputs: Inputs, slots: torch.Tensor, new_blocks: torch.Tensor | None = None
    ) -> Inputs:
        """Those of the first group with the other groups' cache_locations."""
        if len(self.groups) == 1:
            return inputs
        ids, positions, first = inputs
        columns, places = positions // self.block_size, positions % self.block_size
        locations = [first]
        for group, table in enumerate(self.block_tables[1:], 1):
            blocks = table[slots, columns]
            if new_blocks is not None:
                blocks = torch.where(new_blocks[group] >= 0, new_blocks[group], blocks)
                table[slots, columns] = blocks
            locations.append(blocks * self.block_size + places)
        return ids, positions, torch.stack(locations)

    def by_layer(
        self, cache_locations: torch.Tensor | list[torch.Tensor]
    ) -> torch.Tensor | list[torch.Tensor]:
        """Those of feed, or of each group, as the model takes them: of several groups, each layer's."""
        if len(self.groups) == 1:
            return cache_locations
        return [cache_locations[self._group_of[layer]] for layer in range(len(self.kv_layers))]


def scores_of(model: Transformer, layers: Sequence[int]) -> list[Scores]:
    """How attention scores in each of these layers. A proposer's layers, numbered after the model's, have the
    usual scores."""
    found = []
    for index in layers:
        usual = model.spec.attention.head_dim**-0.5
        if index >= len(model.attention_layers):
            found.append(Scores(usual))
            continue
        layer = model.attention_layers[index]
        mixer = layer.mixer
        by_head = torch.tensor(mixer.by_head, device=model.device) if mixer.variant else None
        variant = VARIANTS[mixer.variant] if mixer.variant else None
        found.append(Scores(mixer.scale or usual, mixer.soft_cap, layer.sinks, variant, by_head))
    return found
