# SPDX-License-Identifier: Apache-2.0
"""Models, loader and paged attention against Hugging Face transformers, float32 on the CPU."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import KINDS, make_checkpoint, make_model, make_multimodal
from editing import edit_tensors
from flashinfer_backend.attention import torch_paged
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Scores
from flashinfer_backend.attention.grouped import GroupAttention, GroupedAttention
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.attention.variants.alibi import ALIBI
from flashinfer_backend.attention.variants.chunked import CHUNKED
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models import upload, weights
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.safetensors_file import Header
from flashinfer_backend.models.transformer import Recurrent, Stream, Transformer
from flashinfer_backend.models.upload import FileRange, Uploader
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.torch_delta import DeltaRows
from flashinfer_backend.worker.device_state import scores_of
from flashinfer_backend.worker.memory import state_format
from thinned import some

BLOCK_SIZE, WHOLE = 16, Shard()


def load(model_dir: Path, dtype: str = "float32", shard: Shard = WHOLE) -> Transformer:
    model = Transformer(read_spec(model_dir).share(shard), torch_ops, dtype, "cpu")
    load_weights(model, model_dir)
    return model


def attention_batch(q_lens, kv_lens, slots, table) -> AttentionBatch:
    host = [np.array(values, dtype=np.int32) for values in (q_lens, kv_lens, slots)]
    return AttentionBatch(*host, table)


@pytest.fixture
def uploads(monkeypatch):
    """Weights reach the CPU as they would a GPU, in chunks of 1000 bytes; gives the Uploaders."""
    found = []

    def uploader(device, tensors):
        found.append(Uploader(device, [tensor.source for tensor in tensors if tensor.source]))
        return closing(found[-1])

    monkeypatch.setattr(weights, "_uploader", uploader)
    monkeypatch.setattr(weights, "SMALL", 100)
    monkeypatch.setattr(upload, "CHUNK", 1000)
    return found


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["all", "of-two-ranks"])
def test_weights_that_are_uploaded_are_the_files(shard, uploads, tmp_path, monkeypatch):
    """Rows are read from the file; columns, as ranks have of some, are copied from its mapping."""
    path, calls = make_checkpoint("llama", tmp_path), {"next": 0, "copy": 0}
    for name in calls:
        monkeypatch.setattr(Uploader, name, counting(getattr(Uploader, name), calls, name))
    uploaded = load(path, shard=shard).state_dict()
    monkeypatch.undo()
    for name, expected in load(path, shard=shard).state_dict().items():
        assert torch.equal(uploaded[name], expected), name
    assert len(uploads) == 1 and calls["next"] > 5 and (calls["copy"] > 3) == (shard.size == 2)


def counting(call: Callable[..., Any], calls: dict[str, int], name: str) -> Callable[..., Any]:
    def counted(*arguments):
        calls[name] += 1
        return call(*arguments)

    return counted


def places(path: Path, tensors: dict[str, Tensor]) -> list[FileRange]:
    """Of tensors that are written to this file."""
    save_file(tensors, path)
    header = Header(path)
    cuts = {name: (slice(None),) * tensor.dim() for name, tensor in tensors.items()}
    return [FileRange(path, *header.find(name, cuts[name]), tensor.dtype) for name, tensor in tensors.items()]


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_tensors_arrive_as_they_are(chunk, monkeypatch, tmp_path):
    """In their order, of files and of memory by turns; the buffers take turns, too."""
    monkeypatch.setattr(upload, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(70, 129, generator=generator),
        "fp8": torch.randn(300, 64, generator=generator).to(torch.float8_e4m3fn),
        "vector": torch.randint(0, 1 << 30, (5000,), generator=generator),
        "last": torch.randn(3, 5, 7, generator=generator),
    }
    found = [place for i in "ab" for place in places(tmp_path / i, tensors)]
    with closing(Uploader(torch.device("cpu"), found)) as uploader:
        for tensor in [*tensors.values()] * 2:
            arrived = uploader.next()
            assert arrived.dtype == tensor.dtype and arrived.shape == tensor.shape
            assert torch.equal(arrived.float(), tensor.float())
            assert torch.equal(uploader.copy(tensors["matrix"][3:50, 16:48]), tensors["matrix"][3:50, 16:48])
        files = [*uploader._files.values()]
    assert len(files) == 2
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_threads_read_on_while_a_tensor_is_used(monkeypatch, tmp_path):
    """But no farther than there are buffers for."""
    monkeypatch.setattr(upload, "CHUNK", 1000)
    monkeypatch.setattr(upload, "AHEAD", 5)
    monkeypatch.setattr(upload, "BUFFERS", 6)
    began, enough, read = [], threading.Event(), upload._read

    def noting(file, into, start):
        began.append(start)
        if len(began) == 5:
            enough.set()
        read(file, into, start)

    monkeypatch.setattr(upload, "_read", noting)
    found = places(tmp_path / "some", {f"t{i:02d}": torch.full((250,), float(i)) for i in range(40)})
    with closing(Uploader(torch.device("cpu"), found)) as uploader:
        assert uploader.next()[0] == 0
        assert enough.wait(120) and len(began) == 5
        for i in range(1, 40):
            assert uploader.next()[0] == i
            assert len(began) <= i + 5
    assert len(began) == 40


def test_a_file_that_ends_early_is_named_as_such(tmp_path):
    (place,) = places(tmp_path / "some", {"some": torch.ones(1000)})
    os.truncate(place.path, place.start + 3996)
    with (
        closing(Uploader(torch.device("cpu"), [place])) as uploader,
        pytest.raises(ValueError, match=rf"ends in the file after {place.start + 3996} bytes: is its"),
    ):
        uploader.next()


def test_no_thread_reads_on_when_it_is_closed(monkeypatch, tmp_path):
    """The numbers of its files may be another's then."""
    monkeypatch.setattr(upload, "CHUNK", 1000)
    began, ended = [], []

    def read(file, into, start):
        if start == found[0].start:
            raise ValueError("is too short")
        began.append(start)
        time.sleep(0.2)
        ended.append(start)

    monkeypatch.setattr(upload, "_read", read)
    found = places(tmp_path / "some", {"some": torch.ones(10_000)})
    with closing(Uploader(torch.device("cpu"), found)) as uploader:
        with pytest.raises(ValueError, match="is too short"):
            uploader.next()
        assert began
    assert sorted(began) == sorted(ended)
    assert len(began) < upload.AHEAD - 1  # which is all but the first


def test_a_file_that_cannot_be_opened_fails_its_own_tensors_alone(tmp_path):
    """Reading ahead comes to it while a tensor of the file before is asked for."""
    here, gone = (places(tmp_path / i, {"some": torch.ones(1000)})[0] for i in "ab")
    gone.path.unlink()
    with closing(Uploader(torch.device("cpu"), [here, gone])) as uploader:
        assert torch.equal(uploader.next(), torch.ones(1000))
        with pytest.raises(FileNotFoundError, match=str(gone.path)):
            uploader.next()


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path, read = make_checkpoint("llama", tmp_path), weights._value

    def value(mapped, tensor, upload):
        if tensor.name == "model.norm.weight":
            raise OSError(5, "Input/output error")
        return read(mapped, tensor, upload)

    monkeypatch.setattr(weights, "_value", value)
    named = r"model\.safetensors: model\.norm\.weight cannot be read: .*Input/output error"
    with pytest.raises(WeightsError, match=named):
        load(path)


@pytest.mark.parametrize("after", ["_find", "_value"])
def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(after, tmp_path, uploads, monkeypatch):
    """Its tensors may lie elsewhere then, and what is read there would be other numbers."""
    path = make_checkpoint("llama", tmp_path) / "model.safetensors"
    call = getattr(weights, after)

    def replacing(*arguments):
        found = call(*arguments)
        save_file({"other": torch.ones(3)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
        return found

    monkeypatch.setattr(weights, after, replacing)
    with pytest.raises(WeightsError, match=r"model\.safetensors was replaced or written to while"):
        load(path.parent)


def test_a_tensor_is_gone_before_the_next_is_read(tmp_path, uploads, monkeypatch):
    """A GPU that its weights fill has no room for two."""
    path, read, last = make_checkpoint("llama", tmp_path), weights._value, []

    def value(*arguments):
        assert not last or last[-1]() is None, "the one before is still there"
        found = read(*arguments)
        last.append(weakref.ref(found))
        return found

    monkeypatch.setattr(weights, "_value", value)
    load(path)
    assert len(last) > 10


class Paged:
    """Drives a Transformer over paged caches without a scheduler.

    Blocks are given out in random order; unwritten cache is NaN, unused entries of the table are far out of
    range.
    """

    def __init__(self, model: Transformer) -> None:
        heads, num_slots, max_blocks = model.spec.attention, 4, 12
        shape = (num_slots * max_blocks, BLOCK_SIZE, heads.kv_heads, heads.head_dim)
        self.model = model
        self.caches = [
            tuple(torch.full(shape, torch.nan, dtype=model.dtype) for _ in "kv")
            for _ in model.spec.attentions
        ]
        kept = state_format(model)
        self.states = [] if kept is None else kept.allocate(num_slots, model.device).layers
        for states in self.states:
            states.recurrent.fill_(torch.nan)
            states.inputs.fill_(torch.nan)
        self.table = torch.full((num_slots, max_blocks), 2**30, dtype=torch.int32)
        self.attention = self._attention()
        self.lens = [0] * num_slots
        self.free = torch.randperm(len(self.table) * max_blocks, generator=torch.manual_seed(0)).tolist()

    def _attention(self) -> GroupedAttention:
        """All layers' blocks are the same here, whatever their windows."""
        groups = []
        mixers = self.model.spec.attentions
        for window in dict.fromkeys(mixer.window for mixer in mixers):
            layers = tuple(index for index, mixer in enumerate(mixers) if mixer.window == window)
            cache = KVCache.over([self.caches[index] for index in layers])
            scores = scores_of(self.model, layers)
            attention = TorchPagedAttention(cache, mixers[0].heads, window, scores)
            groups.append(GroupAttention(layers, attention, self.table))
        return GroupedAttention(groups)

    def step(self, work: list[tuple[int, list[int]]], last_only: bool = False) -> list[Tensor]:
        """Run rows of (slot, new tokens) -> logits[q_len, V] per row; of the
        last token of each alone with last_only."""
        positions, cache_locations = [], []
        for slot, new in work:
            for position in range(self.lens[slot], self.lens[slot] + len(new)):
                if position % BLOCK_SIZE == 0:
                    self.table[slot, position // BLOCK_SIZE] = self.free.pop()
                positions.append(position)
                block = int(self.table[slot, position // BLOCK_SIZE])
                cache_locations.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            self.lens[slot] += len(new)
        slots, q_lens = [slot for slot, _ in work], [len(new) for _, new in work]
        kv_lens = [self.lens[slot] for slot in slots]
        prepared = self.attention.step(attention_batch(q_lens, kv_lens, slots, self.table))
        int32 = {"dtype": torch.int32}
        ids = torch.tensor([token for _, new in work for token in new], **int32)
        ends, where = torch.tensor(q_lens).cumsum(0), torch.tensor(positions, **int32)
        rows, starts = ends - 1, torch.cat([torch.zeros(1, **int32), ends.int()])
        decodes = next((n for n, length in enumerate(q_lens) if length > 1), len(q_lens))
        own = DeltaRows(torch.tensor(slots, **int32), starts, where[starts[:-1]], None, decodes)
        hidden = self.model(
            ids,
            where,
            torch.tensor(cache_locations, **int32),
            self.caches,
            prepared,
            rows if last_only else None,
            recurrent=Recurrent(self.states, own),
        )
        return list(self.model.logits(hidden).split([1] * len(rows) if last_only else q_lens))


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request, tmp_path_factory):
    """The same checkpoint in transformers and here."""
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    # transformers' usual attention leaves out soft caps.
    how = {"attn_implementation": "eager"} if "capped" in request.param else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how).eval()
    return theirs, load(path)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 256, (length,), generator=torch.manual_seed(seed)).tolist()


@torch.inference_mode()
def their_logits(theirs, ids: list[int]) -> Tensor:
    return theirs(torch.tensor([ids])).logits[0]


def test_rows_are_those_of_all_tokens(pair):
    """The last layer may leave out tokens whose logits nobody wants; the cache must hold them as well."""
    _, ours = pair
    work = [(1, prompt(1)), (0, prompt(37)), (3, prompt(20, seed=1))]
    every, some = Paged(ours), Paged(ours)
    expected = [logits[-1:] for logits in every.step(work)]
    torch.testing.assert_close(some.step(work, last_only=True), expected)
    for mine, theirs in zip(some.caches, every.caches, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    none = torch.empty(0, dtype=torch.int32)
    assert ours.finish(torch.zeros(2, 4), Stream(torch.zeros(2, 8)), none).shape == (0, 8)


def test_logits_match_transformers(pair):
    """Of a sequence at once; in chunks, and then token by token next to another one that comes in chunks."""
    theirs, ours = pair
    ids, others = prompt(150), prompt(83, seed=2)
    (whole,) = Paged(ours).step([(2, ids)])
    expected = their_logits(theirs, ids)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    paged = Paged(ours)
    found = [paged.step([(1, ids[a:b])])[0] for a, b in [(0, 37), (37, 38), (38, 140)]]
    of_others = []
    chunks = [(0, 20), (20, 75), *((n, n + 1) for n in range(75, 83))]
    for token, (a, b) in zip(ids[140:], chunks, strict=True):  # both come to another block
        own, other = paged.step([(1, [token]), (3, others[a:b])])
        found.append(own)
        of_others.append(other)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(of_others), their_logits(theirs, others), atol=1e-4, rtol=0)


def test_a_prompt_can_be_cut_anywhere(tmp_path):
    """Layers that keep states go on from a chunk's end; they compute 64 tokens at once. Those of other models
    differ in what is around them."""
    path = make_checkpoint("qwen3.5", tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours, ids = load(path), prompt(70)
    expected = their_logits(theirs, ids)
    for cut in some(range(1, len(ids)), [*range(1, 6), 31, 32, 33, *range(60, 70)]):
        paged = Paged(ours)
        pieces = [paged.step([(1, part)])[0] for part in (ids[:cut], ids[cut:])]
        torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=0)


OF_IMAGES = "exaone4-windows gemma3 llama4 mistral ministral3 qwen2 qwen3 qwen3-moe-plain qwen3.5 qwen3.5-moe"


@pytest.mark.parametrize("kind", OF_IMAGES.split())
def test_the_text_part_of_a_multimodal_checkpoint(kind, tmp_path):
    """Its tensors have another prefix there, and those for images are not read."""
    path = make_multimodal(kind, tmp_path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ours, ids = load(path), prompt(90)
    assert ours.spec.tie_word_embeddings == theirs.config.tie_word_embeddings
    (logits,) = Paged(ours).step([(2, ids)])
    torch.testing.assert_close(logits, their_logits(theirs, ids), atol=1e-4, rtol=0)


def test_the_text_part_of_a_multimodal_checkpoint_without_text_config(tmp_path):
    """As Qwen2-VL and Qwen2.5-VL were published: keys and tensors of the text are those of the whole."""
    path, ids = make_multimodal("qwen2", tmp_path), prompt(90)
    expected = Paged(load(path)).step([(2, ids)])
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = text.pop("rope_parameters") | {"type": "mrope", "rope_type": "mrope"}
    older = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    (path / "config.json").write_text(json.dumps(text | config | older))
    tensors = load_file(path / "model.safetensors")
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    for name in list(tensors):
        for before, now in names.items():
            if name.startswith(before):
                tensors[now + name.removeprefix(before)] = tensors.pop(name)
    save_file(tensors, path / "model.safetensors")
    torch.testing.assert_close(Paged(load(path)).step([(2, ids)]), expected)


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["all", "of-two-ranks"])
def test_experts_can_be_in_one_tensor(shard, tmp_path):
    """As transformers has them in memory, and Qwen publishes them in 16 bits."""
    path = make_checkpoint("qwen3.5-moe", tmp_path)
    expected, tensors = load(path, shard=shard).state_dict(), load_file(path / "model.safetensors")
    written = dict(tensors)
    for layer in range(5):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([written.pop(f"{block}.{expert}.{name}_proj.weight") for expert in range(8)])
            for name in ("gate", "up", "down")
        )
        written |= {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    save_file(written, path / "model.safetensors")
    for name, tensor in load(path, shard=shard).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    save_file(written | {"model.layers.1.mlp.experts.3.up_proj.weight": up[3]}, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight twice"):
        load(path, shard=shard)
    del written["model.layers.4.mlp.experts.down_proj"]
    save_file(written, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lacks tensors .*model\.layers\.4\.mlp\.experts\.0\.down_proj"):
        load(path, shard=shard)


def test_bfloat16_stays_near_transformers(tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ids = prompt(60)
    (ours,) = Paged(load(path, "bfloat16")).step([(0, ids)])
    assert ours.dtype == torch.bfloat16
    error = (ours.float() - their_logits(theirs, ids).float()).abs()
    assert error.max() < 0.25 and error.mean() < 0.03  # the logits' standard deviation is 1.2


# Paged attention


PLAIN, SINKS = Scores(16**-0.5), torch.linspace(-3, 3, 6)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, how: Scores = PLAIN
) -> Tensor:
    """Lower-right causal softmax attention in float64: q[q, Hq, D], k and v [kv, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * how.scale
    if how.soft_cap is not None:
        scores = how.soft_cap * (scores / how.soft_cap).tanh()
    own = k.shape[0] - q.shape[0]
    if how.variant is not None:
        queries = torch.arange(q.shape[0]).unsqueeze(1) + own
        by_head = how.by_head.double().view(-1, 1, 1)
        scores = how.variant.scores(scores, torch.arange(k.shape[0]), queries, by_head)
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(own + 1)
    if window is not None:
        unseen |= torch.ones_like(unseen).tril(own - window)
    weights = scores.masked_fill(unseen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if how.sinks is not None:
        total += how.sinks.double().exp().view(-1, 1, 1)
    return torch.einsum("hqk,khd->qhd", weights / total, v).float()


@pytest.mark.parametrize(("query_rows", "group_tokens"), [(1024, 4096), (8, 20)])
@pytest.mark.parametrize(
    ("how", "window"),
    [
        (how, window)
        for how in (
            PLAIN,
            Scores(0.4, 1.5),
            Scores(0.25, None, SINKS),
            Scores(0.4, 2.0, SINKS),
            Scores(0.4, variant=ALIBI, by_head=SINKS.sigmoid()),
            Scores(0.4, variant=CHUNKED, by_head=torch.full_like(SINKS, 11)),
        )
        for window in (None, 1, 9, 30, 40, 200)
        if how.variant is not CHUNKED or window is None  # chunks are counted from the first token
    ],
)
def test_paged_attention_matches_dense(monkeypatch, query_rows, group_tokens, window, how):
    """With a window, no block behind it is in the block table."""
    monkeypatch.setattr(torch_paged, "_QUERY_ROWS", query_rows)
    monkeypatch.setattr(torch_paged, "_GROUP_TOKENS", group_tokens)
    generator = torch.manual_seed(0)
    q_lens, kv_lens, slots = [1, 1, 1, 1, 30, 30, 1], [17, 160, 1, 150, 30, 101, 12], [5, 0, 3, 6, 1, 2, 4]
    heads, kv_heads, dim, blocks = 6, 2, 16, 80
    shape = (blocks, BLOCK_SIZE, kv_heads, dim)
    caches = [tuple(torch.full(shape, torch.nan) for _ in "kv") for _ in range(2)]
    table = torch.full((7, 11), -(2**30), dtype=torch.int32)
    free = torch.randperm(blocks, generator=generator).tolist()
    dense = {}
    for slot, kv_len, q_len in zip(slots, kv_lens, q_lens, strict=True):
        first = 0 if window is None else max(0, kv_len - q_len - window + 1) // BLOCK_SIZE
        for block in range(first, -(-kv_len // BLOCK_SIZE)):
            table[slot, block] = free.pop()
        there = range(first * BLOCK_SIZE, kv_len)
        where = [int(table[slot, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in there]
        for layer, pair_of_caches in enumerate(caches):
            for name, cache in zip("kv", pair_of_caches, strict=True):
                dense[slot, layer, name] = torch.randn(kv_len, kv_heads, dim, generator=generator)
                cache.view(-1, kv_heads, dim)[where] = dense[slot, layer, name][there.start :]
    attention = TorchPagedAttention(KVCache.over(caches), heads, window, [PLAIN, how])
    with torch.inference_mode():  # run() must work outside of the mode that plan() ran in
        attention.step(attention_batch(q_lens, kv_lens, slots, table))
    for layer in range(2):
        q = torch.randn(sum(q_lens), heads, dim, generator=generator)
        out = torch.full_like(q, torch.nan)
        attention.run(layer, q, out)
        for slot, rows, got in zip(slots, q.split(q_lens), out.split(q_lens), strict=True):
            k, v = (dense[slot, layer, name] for name in "kv")
            expected = dense_attention(rows, k, v, window, [PLAIN, how][layer])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


# Loader


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return make_checkpoint("llama", tmp_path / "llama")


def test_stored_rotary_frequencies_are_not_unexpected(checkpoint):
    edit_tensors(
        checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load(checkpoint)


def test_tied_checkpoint_may_store_the_same_head_but_no_other(tmp_path):
    path = make_checkpoint("llama-tied", tmp_path)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(path)
    assert model.lm_head.data is model.embed_tokens
    edit_tensors(path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(WeightsError, match=r"lm_head.weight differs"):
        load(path)


def test_missing_files_are_named(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="has no weights: expected model"):
        load(checkpoint)
    sharded = make_checkpoint("llama-sharded", tmp_path / "sharded")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        load(sharded)
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("first", [{}, {"max_shard_size": "100KB"}])
def test_of_one_file_and_shards_those_are_read_that_transformers_reads(tmp_path, first):
    """Saving a model again leaves the index of earlier shards, or an earlier single file."""
    again: dict = {} if first else {"max_shard_size": "100KB"}
    make_model("llama", seed=1).save_pretrained(tmp_path, **first)
    make_model("llama", seed=2).save_pretrained(tmp_path, **again)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(load(tmp_path).lm_head.data, theirs.lm_head.weight.data)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    path = make_checkpoint("llama-sharded", tmp_path)
    first, *_, last = sorted(path.glob("*.safetensors"))
    save_file(load_file(last) | load_file(first), last)
    with pytest.raises(WeightsError, match="appears in more than one file"):
        load(path)


def test_weights_need_no_gradient_and_keep_their_dtype(checkpoint):
    model = load(checkpoint, "bfloat16")
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad and parameter.dtype == torch.bfloat16, name


def test_dummy_weights(checkpoint):
    config = read_spec(checkpoint)
    models = [Transformer(config, torch_ops, torch.float32, "cpu") for _ in range(3)]
    for model, seed in zip(models, [5, 5, 6], strict=True):
        load_weights(model, "/nonexistent", load_format="dummy", seed=seed)
    gate_up = [model.layers[0].gate_up.data for model in models]
    assert torch.equal(gate_up[0], gate_up[1]) and not torch.equal(gate_up[0], gate_up[2])
    assert gate_up[0].std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert bool((models[0].layers[1].post_norm == 1).all())
    with pytest.raises(ValueError, match=r"load_format 'npz' is unknown; known: auto, dummy"):
        load_weights(models[0], checkpoint, load_format="npz")


def test_a_truncated_file_is_named(tmp_path):
    folder = make_checkpoint("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    config = read_spec(folder)
    model = Transformer(config, torch_ops, torch.float32, "cpu", 64)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read .*download complete"):
        load_weights(model, folder)


def test_the_settings_of_an_adapter_that_is_not_there_are_named(tmp_path, caplog):
    """They are left behind in folders of merged checkpoints."""
    folder = make_checkpoint("llama", tmp_path / "merged")
    config = read_spec(folder)
    for written in (False, True):
        if written:
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        load_weights(Transformer(config, torch_ops, torch.float32, "cpu", 64), folder)
        assert ("merged has adapter_config.json, but no adapter's weights" in caplog.text) == written
