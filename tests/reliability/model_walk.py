# SPDX-License-Identifier: Apache-2.0
"""The random walks of scheduler_walk.py over a real engine on the CPU, in float32:

    python tests/reliability/model_walk.py --steps 20000 --kinds qwen3.5 gemma3

Each answer has to be the one that the same request gets alone, in an engine without drafts, prefix reuse or
other requests, with the same log probabilities and logits. Tiny checkpoints of tests/checkpoints.py. Drafts
are guesses from the answers, of which some are wrong. With a `speculative_method` (ngram, eagle3, and mtp
where a checkpoint has a head) the wrong ones are its own.
"""

import functools
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

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
from eagle3_heads import make_head  # noqa: E402
from engine.graphed import replayed  # noqa: E402
from engine.harness import start_core  # noqa: E402
from engine.test_adapters import make_adapter  # noqa: E402
from engine.test_drafts import Replay  # noqa: E402
from engine.test_mtp import PREFIX  # noqa: E402
from flashinfer_backend.attention import prefixes as prefix_sets  # noqa: E402
from flashinfer_backend.core.config import EngineConfig, resolve_limits  # noqa: E402
from flashinfer_backend.core.sampling_params import SamplingParams  # noqa: E402
from flashinfer_backend.core.step import TOP_LOGPROBS  # noqa: E402
from flashinfer_backend.engine.loop import EngineLoop  # noqa: E402
from flashinfer_backend.engine.preparations import Preparations  # noqa: E402
from flashinfer_backend.engine.start import Core  # noqa: E402
from flashinfer_backend.models.adapters import WEIGHTS, Adapter, State, adapter_state  # noqa: E402
from flashinfer_backend.scheduler import scheduler  # noqa: E402
from flashinfer_backend.scheduler.budget import StepBudget  # noqa: E402
from flashinfer_backend.speculate import methods  # noqa: E402
from flashinfer_backend.speculate.mtp import NORMS  # noqa: E402
from flashinfer_backend.speculate.proposer import DraftStep, Proposer, Slots  # noqa: E402
from flashinfer_backend.transport import protocol  # noqa: E402
from flashinfer_backend.worker import start  # noqa: E402
from perf_configs.bench_engine import STUB, LocalSocket  # noqa: E402

KINDS = ("qwen3.5", "qwen3-next", "gemma3", "gpt-oss", "qwen2-windows", "mistral-window")
LONGEST = 90  # of Settings
OTHER = "other.safetensors"  # weights that an adapter is replaced by
GUIDES = ("[A-Z]{2,9}(ab|cd){1,4}x?", "(once-upon-a-time|once|twice)(-again){0,3}", "[0-9]+(,[0-9]{1,3})*")


@dataclass
class Answer:
    """reports: of each token, as far as the request asked for some. context: logits of the prompt; prompt:
    log probabilities of its tokens."""

    tokens: list[int] = field(default_factory=list)
    reports: list[protocol.RowReport] = field(default_factory=list)
    context: np.ndarray | None = None
    prompt: np.ndarray | None = None

    def hear(self, reports: list[protocol.RowReport]) -> None:
        for report in reports:
            if report.context_logits is not None:
                self.context = np.frombuffer(report.context_logits, "<f4")
            if report.prompt_log_probs is not None:
                self.prompt = np.frombuffer(report.prompt_log_probs, "<f4")[1::2]
            if report.log_prob is not None or report.generation_logits is not None:
                self.reports.append(report)

    def numbers(self, count: int) -> np.ndarray:
        """Those that came with the first `count` tokens. Of the likeliest tokens only how likely they are:
        some are as likely as others."""
        told: list[Any] = [[] if own is None else own for own in (self.context, self.prompt)]
        for report in self.reports[:count]:
            told.append([0.0 if report.log_prob is None else report.log_prob])
            told.append(np.frombuffer(report.top_logprobs or b"", TOP_LOGPROBS)["log_prob"])
            told.append(np.frombuffer(report.generation_logits or b"", "<f4"))
        return np.concatenate(told)


class Alone:
    """What a model answers to one request at a time."""

    def __init__(self, folder: Path) -> None:
        alone = {
            "max_num_seqs": 1,
            "enable_kv_cache_reuse": False,
            "max_loras": 1,
            "tokenizer_dir": "bundled",
        }
        core = start_core(folder, max_seq_len=2 * LONGEST, max_num_tokens=256, **alone)
        self.socket = _Tokens()
        self._loop = EngineLoop(core, self.socket)
        self._loop.pacer.deadline = lambda *_: 0.0  # type: ignore[method-assign]
        self._last = 0  # id
        self._known: dict[tuple[Any, ...], Answer] = {}

    def answer(self, prompt: list[int], params: SamplingParams, count: int) -> Answer:
        """The first tokens, at least `count`, of which the id that ends it is the last where that comes. Its
        stop sequences do not count."""
        end = params.end_id
        if shortened := not params.min_tokens and not params.grammar_type:
            params = msgspec.structs.replace(params, end_id=-1)  # its tokens do not depend on the end
        own = msgspec.structs.replace(params, max_tokens=count, stop_sequences=[], perf_metrics=False)
        files = adapter_state(Path(params.adapter)) if params.adapter else None
        key = *prompt, files, msgspec.json.encode(msgspec.structs.replace(own, max_tokens=0))
        known = self._known.get(key, Answer())
        if len(known.tokens) < count and known.tokens[-1:] != [params.end_id]:
            data = np.array(prompt, "<i4").tobytes()
            self._last += 1
            handle = protocol.make_handle(STUB, self._last)
            known = self.socket.answer = Answer()
            self.socket.ended = False
            self.socket.inbox.append(protocol.Submit(handle, data, own, 0, 0, 0))
            while not self.socket.ended:
                assert self._loop.step()
            self.socket.inbox.append(protocol.Freed(handle))
            known.tokens += [params.end_id] * (len(known.tokens) < count)
            self._known[key] = known
        if shortened and end in known.tokens:
            return replace(known, tokens=known.tokens[: known.tokens.index(end) + 1])
        return known


class _Tokens(LocalSocket):
    def __init__(self) -> None:
        super().__init__()
        self.answer = Answer()
        self.ended = False

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        found = protocol.unpack_tokens(frame)
        self.answer.tokens += [token for token in found[:, 1].tolist() if token != protocol.NO_TOKEN]
        self.answer.hear(reports or [])
        self.ended = bool(found[-1, 2])


class Taught(Replay):
    """A proposer, with known tokens in place of some of its drafts: random heads are hardly ever right."""

    def __init__(self, proposer: Proposer, spoilt: float) -> None:
        super().__init__(proposer.count, spoilt)
        self.proposer = proposer
        own = {name: getattr(proposer, name) for name in ("layers", "cache_layers", "history", "defers")}
        vars(self).update(own)

    def propose(self, step: DraftStep, state: Slots, count: int) -> torch.Tensor:
        drafts = self.proposer.propose(step, state, count)
        spoilt, self.spoilt = self.spoilt, 0.0
        known = super().propose(step, state, count)
        self.spoilt = spoilt
        own = torch.rand(drafts.shape, generator=self._random) < spoilt
        return torch.where(own, drafts, known)


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


class _AtOnce:
    """A pool of threads that has done what it is given."""

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given))
        except Exception as error:
            future.set_exception(error)
        return future


class ModelWorld(World):
    """A real runner in place of the model of a device."""

    tells_prompts = False
    patience_s = 0.0  # a walk does not depend on how long its steps take

    def __init__(
        self,
        folder: Path,
        alone: Alone,
        methods: list[str],
        head: Path,
        adapters: dict[str, Path],
        settings: Settings,
        seed: int,
    ) -> None:
        """methods: of drafts, which the model can have. head: for eagle3. adapters: folders by the names of
        ADAPTERS."""
        self.folder, self.alone, self.folders = folder, alone, adapters
        self.methods, self.head = methods, head
        self.proposer: Replay | None = None
        self.ends = random.Random(seed)  # of which answers end, and not before when
        self.options = random.Random(seed)  # of what else is asked for
        self.heard: dict[int, Answer] = {}  # by handle
        self.sent = 0  # tokens
        super().__init__(replace(settings, full=True), seed)
        grammars = self.loop._grammars
        grammars._threads = _AtOnce()  # type: ignore[assignment]
        line = [grammars, self.loop.adapters, self.loop.logits]
        self.loop.preparations = Preparations(line, self.scheduler, self.loop._refuse)
        self.counts["walks with drafts"] += self.scheduler.drafts > 0

    def _start(self) -> Core:
        settings, choose = self.settings, self.load_rng.choice
        config = settings.config()
        own = {name: getattr(config, name) for name in config.__struct_fields__}
        own |= {"device": "cpu", "kv_cache_free_gpu_mem_fraction": 0.02, "tokenizer_dir": "bundled"}
        own["max_tokens_in_paged_kv_cache"] = settings.blocks * settings.block
        own["read_shared_prefixes_once"] = choose([True, False])
        del own["model_dir"]
        make: Any = None
        spoilt = 1 - settings.right_drafts
        if settings.drafts and (method := choose(["", *self.methods])):
            own |= {"speculative_method": method, "max_draft_len": settings.drafts}
            own |= {"draft_model": str(self.head)} if method == "eagle3" else {}
            self.counts[f"walks with {method}"] += 1

            def make(config: EngineConfig, model: Any) -> Taught:
                make_method = methods.chosen(config)
                assert make_method is not None
                self.proposer = Taught(make_method(config, model), spoilt)
                return self.proposer

        elif settings.drafts:
            self.proposer = Replay(settings.drafts, spoilt)
            make = lambda *_: self.proposer  # noqa: E731
        resolve = mock.patch.object(start, "resolve_limits", _resolve_limits)
        with resolve, mock.patch.object(scheduler, "SNAPSHOT_TOKENS", SNAPSHOT_TOKENS):
            core = start_core(self.folder, make_proposer=make, **own)
        settings.longest = core.config.max_seq_len
        core.runner.state.prefixes._least_tokens = 0
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
            with mock.patch.object(self.loop.runner, "_compute", lambda *_: fail()):
                return self._launch(plan, started, *more)
        self.counts["restored states"] += len(plan.restored)
        self.counts["states kept within a row"] += len(plan.cuts)
        self.counts["steps with adapters"] += plan.adapted
        with mock.patch.object(prefix_sets, "_LEAST_GAIN", 0):
            launched = self._launch(plan, fail if failing else started, *more)
            self._check_prefixes(plan)
        return launched

    def _check_prefixes(self, plan: Any) -> None:
        """What rows are said to begin with is in the blocks that attention reads."""
        state = self.loop.runner.state
        prefixes = state.prefixes
        once, prefixes.enabled = prefixes.enabled, True
        found = prefixes.of(plan)
        prefixes.enabled = once
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
        self._ask_more(params)
        found = self.alone.answer(prompt, params, room)
        if (
            self.ends.random() < 0.4 and not params.grammar_type
        ):  # an end that comes, or would if it were not held back
            params.end_id = self.ends.choice(found.tokens[:room])
            params.min_tokens = self.ends.choice([0, 1, 3, room // 2, room])
            self.counts["ends held back"] += params.min_tokens > 0
        else:
            params.end_id = own_end
        if self.options.random() < 0.15:
            params.bad_words = [self._part(found.tokens, 3), [self.options.randrange(250)]]
        found = self.alone.answer(prompt, params, room)
        following = found.tokens
        if self.options.random() < 0.3:
            params.stop_sequences = [self._part(following, 4), *params.stop_sequences]
        if self.proposer is not None:
            self.proposer.sequences.append([token for token in prompt + following if token >= 0])
        ends = self.loop.scheduler.table.end_ids.tolist()
        asked = expected(prompt, params, self.settings.longest, ends, adapter, following)
        asked.alone = found
        return asked

    def _part(self, tokens: list[int], most: int) -> list[int]:
        """A random run of at most `most` of an answer's tokens."""
        at = self.options.randrange(len(tokens))
        return [max(token, 0) for token in tokens[at : at + self.options.randint(1, most)]]

    def _ask_more(self, params: SamplingParams) -> None:
        """Options that steps with drafts have to respect, each of some requests."""
        draw = self.options

        def chance(share: float) -> bool:
            return draw.random() < share

        params.speculative_decoding = chance(0.85)
        params.perf_metrics = chance(0.3)
        if chance(0.2):
            params.temperature, params.seed = 0.8, draw.getrandbits(60)
            params.top_k, params.top_p, params.min_p = draw.choice(
                [(0, 1.0, 0.0), (9, 1.0, 0.0), (0, 0.8, 0.02), (100, 0.9, 0.0)]
            )
        if chance(0.15):
            params.repetition_penalty, params.presence_penalty = draw.choice([(1.3, 0.0), (1.1, 0.7)])
        if chance(0.15):
            params.log_probs, params.top_logprobs = True, draw.choice([0, 1, 3])
        if chance(0.1):
            params.bias_ids, params.bias_values = [5, 50], [2.0, -9.0]
        if chance(0.15):
            params.grammar_type, params.grammar = "regex", draw.choice(GUIDES)
        elif chance(0.1):
            params.allowed_ids = [*range(3, 200, 3)]

    def _files(self, folder: Path) -> State:
        return adapter_state(folder)

    def replace_adapter(self, folder: str) -> None:
        path = self.folders[folder]
        before = self.versions[str(path)]
        super().replace_adapter(str(path))
        if self.versions[str(path)] > before:
            weights, other, new = (path / name for name in (WEIGHTS, OTHER, "new"))
            os.replace(weights, new)
            os.replace(other, weights)
            os.replace(new, other)

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        open_ = dict(self.asked)
        self.sent += int(np.count_nonzero(protocol.unpack_tokens(frame)[:, 1] != protocol.NO_TOKEN))
        for report in reports or []:
            handle = protocol.make_handle(pid, report.local_id)
            if handle in open_:
                self.heard.setdefault(handle, Answer()).hear([report])
                if (perf := report.perf) is not None:
                    on = open_[handle].params.speculative_decoding
                    assert 0 <= perf.accepted_tokens <= perf.drafted_tokens * on, (handle, perf)
        super().send_tokens(pid, frame, reports)
        for handle in [h for h in self.heard if h not in self.asked]:
            heard, asked = self.heard.pop(handle), open_.get(handle)
            if asked is None:
                continue
            got, params = len(asked.got), asked.params
            assert len(heard.reports) == got * params.reports_logits, (handle, asked, heard)
            numbers, right = heard.numbers(got), asked.alone.numbers(got)
            close = numbers.shape == right.shape and np.allclose(numbers, right, atol=1e-3)
            assert close or not asked.got, (handle, asked, numbers, right)
            self.counts["answers with numbers"] += len(numbers) > 0

    def _check_cache(self) -> None:
        """The tokens show what was read."""

    def drain(self) -> None:
        super().drain()
        assert self.loop.generated_tokens == self.sent
        states, freed = self.loop.runner.sampler._states, self.scheduler._news.freed
        left = states._by_handle.keys() - {*freed}, self.loop.runner.sampler.grammars._made
        left += self.loop._grammars._in_room, self.loop._grammars._room.held
        assert not any(left), left
        sharing = getattr(self.loop.runner.state.attention, "sharing", [])
        self.counts["prompt tokens read once"] += sum(own.saved for own in sharing)
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
        methods = ["ngram", "eagle3"]
        if kind in ("qwen3.5", "qwen3-next"):
            add_mtp_head(checkpoint)
            methods.append("mtp")
        head = eagle3_head(checkpoint, Path(folder) / "head")
        form = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "o_proj"]}
        made = [make_adapter(checkpoint, Path(folder) / name, form, n) for n, name in enumerate(ADAPTERS)]
        for own in made:
            found = load_file(own / WEIGHTS)
            opposite = {name: -value if "lora_B" in name else value for name, value in found.items()}
            save_file(opposite, own / OTHER)
        adapters = dict(zip(ADAPTERS, made, strict=True))
        make = functools.partial(ModelWorld, checkpoint, Alone(checkpoint), methods, head, adapters)
        return walk(steps, seed, episodes, length, make)


def add_mtp_head(target: Path) -> None:
    """Its layer is the target's last one."""
    file = target / "model.safetensors"
    found = load_file(file)
    last = {name.partition(".layers.1.")[2]: value for name, value in found.items()}
    hidden, generator = len(found["model.norm.weight"]), torch.Generator().manual_seed(0)
    head = {f"{PREFIX}{name}": value.clone() for name, value in last.items() if name}
    head["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    head |= {f"mtp.{name}.weight": torch.rand(hidden, generator=generator) for name in NORMS}
    save_file(found | head, file, metadata={"format": "pt"})


def eagle3_head(target: Path, folder: Path) -> Path:
    config = json.loads((target / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": config["num_key_value_heads"]}
    sizes |= {"head_dim": config.get("head_dim") or hidden // heads, "vocab": config["vocab_size"]}
    return make_head("speculators", folder, **sizes, known=200, eagle_aux_hidden_state_layer_ids=[1])


if __name__ == "__main__":
    run(
        lambda kind, own: walk_model(kind, own.steps, own.seed, own.length, own.episodes),
        steps=20_000,
        length=120,
        kinds=KINDS,
    )
