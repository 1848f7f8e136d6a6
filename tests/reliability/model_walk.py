# SPDX-License-Identifier: Apache-2.0
"""The random walks of scheduler_walk.py over a real engine on the CPU, in float32:

    python tests/reliability/model_walk.py --steps 20000 --kinds qwen3.5 gemma3

Each answer has to be the one that the same request gets alone, in an engine without drafts, prefix reuse or
other requests. Tiny checkpoints of tests/checkpoints.py; drafts are guesses from the answers, of which some
are wrong, or those of the knob `speculative_method`: ngram, and mtp where a checkpoint has a head.
"""

import functools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)]

from scheduler_walk import (  # noqa: E402
    ADAPTERS,
    SNAPSHOT_TOKENS,
    AdapterState,
    Asked,
    Settings,
    World,
    expected,
    run,
    walk,
)

from checkpoints import make_checkpoint  # noqa: E402
from engine.harness import start_core  # noqa: E402
from engine.test_adapters import make_adapter  # noqa: E402
from engine.test_drafts import Replay  # noqa: E402
from engine.test_graph_steps import replayed  # noqa: E402
from engine.test_mtp import Reference  # noqa: E402
from flashinfer_backend.attention import prefixes as prefix_sets  # noqa: E402
from flashinfer_backend.core.config import EngineConfig, resolve_limits  # noqa: E402
from flashinfer_backend.core.sampling_params import SamplingParams  # noqa: E402
from flashinfer_backend.engine.loop import EngineLoop  # noqa: E402
from flashinfer_backend.engine.start import Core  # noqa: E402
from flashinfer_backend.models.adapters import Adapter, State, adapter_state  # noqa: E402
from flashinfer_backend.scheduler import scheduler  # noqa: E402
from flashinfer_backend.scheduler.budget import StepBudget  # noqa: E402
from flashinfer_backend.transport import protocol  # noqa: E402
from flashinfer_backend.worker import start  # noqa: E402
from perf_configs.bench_engine import STUB, LocalSocket  # noqa: E402

KINDS = ("qwen3.5", "qwen3-next", "gemma3", "gpt-oss", "qwen2-windows")
LONGEST = 90  # of Settings


class Alone:
    """What a model answers to one request at a time."""

    def __init__(self, folder: Path) -> None:
        alone = {"max_num_seqs": 1, "enable_kv_cache_reuse": False, "max_loras": 1}
        core = start_core(folder, max_seq_len=2 * LONGEST, max_num_tokens=256, **alone)
        self.socket = _Tokens()
        self._loop = EngineLoop(core, self.socket)
        self._last = 0  # id
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def answer(self, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
        """The first tokens, at least `count`, of which the id that ends it is the last where that comes. Its
        stop sequences do not count."""
        key = *prompt, params.frequency_penalty, params.adapter, params.end_id, params.min_tokens
        known = self._known.get(key, [])
        if len(known) < count and known[-1:] != [params.end_id]:
            nothing = {"stop_sequences": [], "context_logits": False, "generation_logits": False}
            own = msgspec.structs.replace(params, max_tokens=count, temperature=0.0, **nothing)
            data = np.array(prompt, "<i4").tobytes()
            self._last += 1
            handle = protocol.make_handle(STUB, self._last)
            self.socket.tokens, self.socket.ended = [], False
            self.socket.inbox.append(protocol.Submit(handle, data, own, 0, 0, 0))
            while not self.socket.ended:
                assert self._loop.step()
            ends = [params.end_id] * (len(self.socket.tokens) < count)
            self._known[key] = self.socket.tokens + ends
        return self._known[key]


class _Tokens(LocalSocket):
    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.ended = False

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        found = protocol.unpack_tokens(frame)
        self.tokens += [token for token in found[:, 1].tolist() if token != protocol.NO_TOKEN]
        self.ended = bool(found[-1, 2])


def _resolve_limits(config: EngineConfig, longest: int) -> EngineConfig:
    """Smaller blocks than there are make more of what may go wrong."""
    small = {"tokens_per_block": config.tokens_per_block}
    small["max_tokens_in_paged_kv_cache"] = config.max_tokens_in_paged_kv_cache
    plain = msgspec.structs.replace(config, **dict.fromkeys(small, 16))
    return msgspec.structs.replace(resolve_limits(plain, longest), **small)


def _loaded(load: Callable[[int, str], Future[Adapter]], place: int, folder: str) -> Future[Adapter]:
    """An adapter is there with the step that wants it."""
    future = load(place, folder)
    future.result()
    return future


class ModelWorld(World):
    """A real runner in place of the model of a device."""

    patience_s = 0.0  # a walk does not depend on how long its steps take

    def __init__(
        self,
        folder: Path,
        alone: Alone,
        has_head: bool,
        adapters: dict[str, Path],
        settings: Settings,
        seed: int,
    ) -> None:
        """has_head: the checkpoint brings a head that drafts. adapters: folders by the names of ADAPTERS."""
        self.folder, self.alone, self.has_head, self.folders = folder, alone, has_head, adapters
        self.proposer: Replay | None = None
        self.ends = random.Random(seed)  # of which answers end, and not before when
        super().__init__(replace(settings, full=True), seed)
        self.counts["walks with drafts"] += self.scheduler.drafts > 0

    def _start(self) -> Core:
        settings, choose = self.settings, self.load_rng.choice
        config = settings.config()
        own = {name: getattr(config, name) for name in config.__struct_fields__}
        own |= {"device": "cpu", "kv_cache_free_gpu_mem_fraction": 0.02}
        own["max_tokens_in_paged_kv_cache"] = settings.blocks * settings.block
        del own["model_dir"]
        make: Any = None
        methods = ["", "", "ngram", *["mtp"] * self.has_head]
        if settings.drafts and (method := choose(methods)):
            own |= {"speculative_method": method, "max_draft_len": settings.drafts}
            self.counts[f"walks with {method}"] += 1
        elif settings.drafts:
            make = self.proposer = Replay(settings.drafts, 1 - settings.right_drafts)
        resolve = mock.patch.object(start, "resolve_limits", _resolve_limits)
        with resolve, mock.patch.object(scheduler, "SNAPSHOT_TOKENS", SNAPSHOT_TOKENS):
            core = start_core(self.folder, proposer=make, **own)
        settings.longest = core.config.max_seq_len
        core.scheduler._budget = StepBudget(core.config, settings.numbers())
        if (pace := core.scheduler._pace) is not None and choose([True, True, False]):
            counts = [0, *pace._counts.tolist()]  # whether they pay or not
            pace.offers = lambda *_: self.load_rng.choice(counts)  # type: ignore[method-assign]
        mixers = core.spec.attentions  # those of replayed graphs have none of these
        ordinary = not any(m.scale or m.sinks or m.soft_cap or m.variant for m in mixers)
        if choose([True, False]) and ordinary:
            replayed(core.runner, [1, 2, 4, 8])
            self.counts["walks with graphs"] += 1
        runner = core.runner
        runner.load_adapter = functools.partial(_loaded, runner.load_adapter)  # type: ignore[method-assign]
        self._launch, core.runner.launch = core.runner.launch, self.launch  # type: ignore[method-assign]
        return core

    def launch(self, plan: Any, started: Callable[[], object], *more: Any) -> Any:
        failing, self.failing = self.failing, ""
        if failing:
            self.counts["failed steps"] += 1

        def fail() -> None:
            raise RuntimeError("the step fails as it was told to")

        if failing == "before":
            fail()
        self.counts["restored states"] += len(plan.restored)
        self.counts["states kept within a row"] += len(plan.cuts)
        self.counts["steps with adapters"] += plan.adapted
        launched = self._launch(plan, fail if failing else started, *more)
        self._check_prefixes(plan)
        return launched

    def _check_prefixes(self, plan: Any) -> None:
        """What rows are said to begin with is in the blocks that attention reads."""
        state = self.loop.runner.state
        prefixes = state.prefixes
        prefixes.enabled, prefixes._least_tokens = True, 0
        with mock.patch.object(prefix_sets, "_LEAST_GAIN", 0):
            found = prefixes.of(plan)
        prefixes.enabled = False
        if found is None:
            return
        sets = np.split(found.rows, np.cumsum(found.counts)[:-1])
        for rows, tokens in zip(sets, found.tokens.tolist(), strict=True):
            table = state.block_table[plan.slots[rows].tolist(), : tokens // state.block_size]
            assert tokens and (table == table[:1]).all() and (plan.starts[rows] >= tokens).all()
            self.counts["rows that share a prefix"] += len(rows)

    def _expected(self, prompt: list[int], params: SamplingParams, adapter: AdapterState | None) -> Asked:
        params.temperature = 0.0
        params.adapter = str(self.folders[params.adapter]) if params.adapter else ""
        room = min(params.max_tokens, self.settings.longest - len(prompt))
        own_end, params.end_id = params.end_id, -1
        following = self.alone.answer(prompt, params, room)
        if self.ends.random() < 0.4:  # an end that comes, or would if it were not held back
            params.end_id = self.ends.choice(following[:room])
            params.min_tokens = self.ends.choice([0, 1, 3, room // 2, room])
            following = self.alone.answer(prompt, params, room)
            self.counts["ends held back"] += params.min_tokens > 0
        else:
            params.end_id = own_end
        if self.proposer is not None:
            self.proposer.sequences.append(prompt + following)
        ends = self.loop.scheduler.table.end_ids.tolist()
        return expected(prompt, params, self.settings.longest, ends, adapter, following)

    def _files(self, folder: Path) -> State:
        return adapter_state(folder)

    def replace_adapter(self, folder: str) -> None:
        """They stay as they are."""

    def _check_cache(self) -> None:
        """The tokens show what was read."""

    def drain(self) -> None:
        super().drain()
        self.counts["drafts"] += self.scheduler.drafted_tokens
        self.counts["accepted drafts"] += self.scheduler.accepted_tokens


def walk_model(
    kind: str, steps: int, seed: int, length: int = 120, episodes: int | None = None
) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
        if kind in ("qwen3.5", "qwen3-next"):
            sizes |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        checkpoint = make_checkpoint(kind, Path(folder) / "model", **sizes)
        if has_head := kind == "qwen3.5":
            Reference(checkpoint)  # writes the head
        form = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "o_proj"]}
        made = [make_adapter(checkpoint, Path(folder) / name, form, n) for n, name in enumerate(ADAPTERS)]
        adapters = dict(zip(ADAPTERS, made, strict=True))
        make = functools.partial(ModelWorld, checkpoint, Alone(checkpoint), has_head, adapters)
        return walk(steps, seed, episodes, length, make)


if __name__ == "__main__":
    run(
        lambda kind, own: walk_model(kind, own.steps, own.seed, own.length, own.episodes),
        steps=20_000,
        length=120,
        kinds=KINDS,
    )
