# SPDX-License-Identifier: Apache-2.0
"""The Triton decode kernel in Triton's interpreter, without a GPU: over a cache of e4m3, what the tiles that
the search of core.tuned tries compute, and over one of 16 bits, windows, sinks, soft caps, shared prefixes.
tests/gpu/test_fp8_cache.py and tests/gpu/test_windows.py run the real one.
"""

import numpy as np
import torch
from interpreted import interpreted
from msgspec.structs import replace

from flashinfer_backend.attention import split
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Scores
from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles, find_prefixes
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import DecodeAttention, Entry, Tuned
from flashinfer_backend.ops import device, fp8
from flashinfer_backend.ops.fp8 import E4M3

BLOCK_SIZE = 16
SCALES = (0.5, 0.25)
TILES = [(16, 4, 16), (32, 4, 4), (64, 8, 2), (128, 8, 2)]  # block, merge, programs of an SM
SHAPES = [(1, 1, 64), (4, 1, 128), (8, 1, 256), (14, 2, 64)]  # heads, key/value heads, dim
LENGTHS = [1, 64, 129, 500]
CPU = torch.device("cpu")


def numbers(block: int, merge: int, programs: int) -> Tuned:
    """Without prefetching, which is a GPU's alone."""
    form = (Entry(None, ((None, DecodeAttention(block, 3, 1, 0, merge, programs)),)),)
    return replace(tuned.fallback(), decode_attention={"16 bits": form, "e4m3": form})


def table_of(slots: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """A block table: for each slot its number of blocks, in random order, and a row of zeros."""
    order, table = iter(torch.randperm(int(columns.sum())).tolist()), torch.zeros(len(slots) + 1, 48)
    for slot, count in zip(slots.tolist(), columns.tolist(), strict=True):
        table[slot, :count] = torch.tensor([next(order) for _ in range(count)])
    return table.int()


def error_of(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    batch: AttentionBatch,
    window: int | None = None,
    how: Scores | None = None,
    scales: tuple[float, ...] = (1.0, 1.0),
) -> torch.Tensor:
    """Of each query, relative to what plain torch computes in float64."""
    wide = tuple(elements.double() * scale for elements, scale in zip(cache, scales, strict=True))
    reference = TorchPagedAttention(KVCache.over([wide]), q.shape[1], window, how and [how])
    expected = torch.empty_like(q).double()
    reference.step(batch).run(0, q.double(), expected)
    return (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


def check(
    block: int,
    merge: int,
    programs: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    lengths: list[int] = LENGTHS,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    in_fp8: bool = True,
    block_size: int = BLOCK_SIZE,
) -> None:
    """Against float64."""
    from flashinfer_backend.attention import triton_decode

    torch.manual_seed(0)
    rows, lens = len(lengths), np.array(lengths, np.int32)
    slots, columns = np.arange(rows, dtype=np.int32)[::-1].copy(), -(-lens // block_size)
    table = table_of(slots, columns)
    shape = (int(columns.sum()), block_size, kv_heads, dim)
    scales = SCALES if in_fp8 else (1.0, 1.0)
    values = [torch.randn(shape) for _ in scales]
    cache = tuple(
        fp8.to_e4m3(x, scale) if in_fp8 else x.half() for x, scale in zip(values, scales, strict=True)
    )
    how = Scores(dim**-0.5, soft_cap, torch.linspace(-3, 4, heads) if sinks else None)
    q = torch.randn(rows, heads, dim).half()  # the interpreter multiplies no bfloat16
    with device.use(numbers(block, merge, programs)):
        count = split.max_items(rows, kv_heads, fp8=in_fp8)
        items = np.zeros((count, split.ITEM_WORDS), np.int32)
        split.split_rows(lens, slots, count, items, window)
        assert (items[:, 4] > 1).any()
        space = triton_decode.DecodeWorkspace(rows, count, heads, kv_heads, dim, CPU)
        out = torch.empty_like(q)
        words = torch.from_numpy(items)
        more = {"soft_cap": how.soft_cap, "sinks": how.sinks}
        triton_decode.decode(q, cache, out, words, table, space, how.scale, scales, native=False, **more)
    batch = AttentionBatch(np.ones(rows, np.int32), lens, slots, table)
    error = error_of(out, q, cache, batch, window, how, scales)
    assert (error < 2e-3).all(), f"block {block}, {heads} heads of {dim}: {error.tolist()}"
    assert not space.counters.any()


def check_drafts(
    heads: int,
    kv_heads: int,
    queries: int,
    ragged: bool,
    in_e4m3: bool,
    ahead: int = 0,
    window: int | None = None,
    count_of_rows: int = 6,
) -> None:
    """Rows of several query tokens, of which the host planned more keys than there are: up to two steps'
    drafts more, and so parts of rows that hold none of their keys. Blocks behind a window are NaN."""
    from flashinfer_backend.attention import triton_decode

    torch.manual_seed(1)
    dim = 32
    # Parts begin at multiples of 64: two of these end before the last part that is planned.
    lens = np.array([queries, 62, 260, 190, 133, 64 + queries], np.int32)[:count_of_rows]
    fed = np.array([1 + i % queries for i in range(len(lens))], np.int32)
    planned = lens + np.array([2 * queries - 2, queries + 2, 0, 5, 1, 3], np.int32)[:count_of_rows]
    rows, slots = len(lens), np.arange(len(lens), dtype=np.int32)[::-1].copy()
    blocks = -(-planned // BLOCK_SIZE)
    table, on_device = table_of(slots, blocks), torch.zeros(rows + 1, dtype=torch.int32)
    on_device[slots] = torch.from_numpy(lens) - ahead
    shape = (int(blocks.sum()) + 1, BLOCK_SIZE, kv_heads, dim)
    scales = SCALES if in_e4m3 else (1.0, 1.0)
    cache = tuple(torch.randn(shape).half() for _ in scales)
    for row in range(rows if window else 0):
        for part in cache:
            part[-1] = torch.nan
        table[slots[row], : max(0, int(lens[row] - fed[row]) - window + 1) // BLOCK_SIZE] = shape[0] - 1
    if in_e4m3:
        cache = tuple(fp8.to_e4m3(part.float(), scale) for part, scale in zip(cache, scales, strict=True))
    # Of rows with padding, what is behind their own tokens is computed and means nothing.
    places = np.cumsum(fed) - fed if ragged else np.arange(rows) * queries
    q = torch.randn(int(fed.sum()) if ragged else rows * queries, heads, dim).half()
    both = numbers(32, 4, 16)
    with device.use(both):
        count = split.max_items(rows, kv_heads, in_e4m3)
        items = np.zeros((count, split.ITEM_WORDS), np.int32)
        most = split.planned_window(window, max(2, queries - 1))
        split.split_rows(planned, slots, count, items, most, fed)
        behind = items[:, 1] >= lens[items[:, 0]]
        assert window or ((items[:, 4] > 1).any() and (behind & (items[:, 0] >= 0)).any())
        space = triton_decode.DecodeWorkspace(rows, count * queries, heads, kv_heads, dim, CPU)
        space.out.fill_(float("nan"))
        out = torch.full_like(q, 7.0)
        triton_decode.decode(
            q,
            cache,
            out,
            torch.from_numpy(items),
            table,
            space,
            dim**-0.5,
            scales,
            native=False,
            rows=rows,
            lengths=split.Lengths(on_device, queries, ahead, ragged),
            window=window,
        )
    assert out.isfinite().all()
    for row, (place, count) in enumerate(zip(places.tolist(), fed.tolist(), strict=True)):
        one, own = slice(row, row + 1), slice(place, place + count)
        batch = AttentionBatch(fed[one], lens[one], slots[one], table)
        error = error_of(out[own], q[own], cache, batch, window, scales=scales)
        assert (error < 2e-3).all(), f"{heads} heads, {queries} queries, ragged {ragged}, row {row}: {error}"
    assert not space.counters.any()


def check_prefixes(heads: int, kv_heads: int, dim: int = 32) -> None:
    """Rows that share prefixes, of which one is longer than a part and one has more rows than a tile, and
    rows that share none; against float64."""
    from flashinfer_backend.attention import triton_decode, triton_prefix

    torch.manual_seed(2)
    alike, tokens = [10, 2, 3], [336, 576, 144]  # rows of each set, and what they share
    own = [1, 300, *(1 + 37 * i % 70 for i in range(sum(alike)))]
    sets = np.repeat([-1, 0, 1, 2], [2, *alike])
    lens = np.array([length + (tokens[s] if s >= 0 else 0) for s, length in zip(sets, own, strict=True)])
    mixed = np.random.default_rng(0).permutation(len(lens))
    lens, sets, rows = lens[mixed].astype(np.int32), sets[mixed], len(lens)
    slots = np.arange(rows, dtype=np.int32)[::-1].copy()
    order = iter(torch.randperm(600).tolist())
    heads_of = [[next(order) for _ in range(count // BLOCK_SIZE)] for count in tokens]
    table = torch.zeros(rows, 48, dtype=torch.int32)
    for slot, length, of_set in zip(slots.tolist(), lens.tolist(), sets.tolist(), strict=True):
        blocks = list(heads_of[of_set]) if of_set >= 0 else []
        blocks += [next(order) for _ in range(-(-length // BLOCK_SIZE) - len(blocks))]
        table[slot, : len(blocks)] = torch.tensor(blocks)
    cache = tuple(torch.randn(600, BLOCK_SIZE, kv_heads, dim).half() for _ in "kv")
    prefixes = find_prefixes(table.numpy(), slots, (lens - 1) // BLOCK_SIZE, BLOCK_SIZE)
    assert prefixes is not None and sorted(prefixes.tokens.tolist()) == sorted(tokens)
    q = torch.randn(rows, heads, dim).half()
    with device.use(numbers(32, 4, 2)):
        count, tiles = split.max_items(rows, kv_heads, False), PrefixTiles(rows, heads, kv_heads)
        items, words = np.zeros((count, split.ITEM_WORDS), np.int32), np.full(tiles.words, 99, np.int32)
        split.split_rows(lens, slots, count, items, shared=tiles.split(prefixes, slots, count, words))
        used = words[: tiles.sizes[0]].reshape(-1, PREFIX_WORDS)
        assert (used[:, 5] > 1).any() and (items[:, 4] > 1).any()
        assert ((items[:, 4] == 1) & (items[:, 6] > 0)).any()
        space = triton_decode.DecodeWorkspace(rows, count + tiles.cells, heads, kv_heads, dim, CPU)
        space.out.fill_(float("nan"))
        out = torch.empty_like(q)
        work = triton_prefix.SharedWork(*map(torch.from_numpy, (used, words[tiles.sizes[0] :])))
        triton_prefix.prefix_parts(q, cache, work, table, space, dim**-0.5)
        triton_decode.decode(
            q, cache, out, torch.from_numpy(items), table, space, dim**-0.5, native=False, shared=True
        )
    error = error_of(out, q, cache, AttentionBatch(np.ones(rows, np.int32), lens, slots, table))
    assert (error < 2e-3).all(), f"{heads} heads of {dim}: {error.tolist()}"
    assert not space.counters.any()


def check_elements() -> None:
    """Every number of e4m3: over one token, the result is the token's value."""
    from flashinfer_backend.attention import triton_decode

    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = torch.where(every.isnan(), 0.0, every).to(E4M3).view(2, 1, 1, 128)
    cache = torch.zeros(2, BLOCK_SIZE, 1, 128).to(E4M3), torch.zeros(2, BLOCK_SIZE, 1, 128).to(E4M3)
    cache[1].view(torch.uint8)[:, :1] = values.view(torch.uint8)
    items, table = np.zeros((3, split.ITEM_WORDS), np.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    split.split_rows(np.ones(2, np.int32), np.arange(2, dtype=np.int32), 3, items)
    space = triton_decode.DecodeWorkspace(2, 3, 4, 1, 128, CPU)
    q, words = torch.ones(2, 4, 128).half(), torch.from_numpy(items)
    out = torch.empty_like(q)
    with device.use(numbers(*TILES[0])):
        triton_decode.decode(q, cache, out, words, table, space, 1.0, SCALES, native=False)
    expected = (values.float() * SCALES[1]).half().view(2, 1, 128).expand(2, 4, 128)
    assert torch.equal(out, expected)


def check_sinks() -> None:
    """Of prompts, behind a kernel that gives the logarithm of its sums: rows of others are left alone."""
    from flashinfer_backend.attention.triton_sinks import apply_sinks

    torch.manual_seed(0)
    out, sinks = torch.randn(7, 6, 32), torch.linspace(-3, 3, 6)
    scores = torch.randn(7, 6, 20)
    lse, before = scores.exp().sum(-1).log2(), out.clone()
    apply_sinks(out, lse, sinks, torch.tensor([2, 4, 6], dtype=torch.int32))
    weights = torch.cat([scores, sinks.view(1, 6, 1).expand(7, 6, 1)], -1).softmax(-1)
    share = weights[..., :-1].sum(-1, keepdim=True)
    torch.testing.assert_close(out[2:6], before[2:6] * share[2:6])
    assert torch.equal(out[:2], before[:2]) and torch.equal(out[6:], before[6:])


def check_gather() -> None:
    """The blocks of rows of which some lie behind a window."""
    from flashinfer_backend.attention.metadata import _gather_blocks

    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    out = torch.full((8,), -1, dtype=torch.int32)
    arguments = table, words(3, 1), words(33, 16), words(0, 3, 4), words(2, 0), out, 10
    _gather_blocks[(2, 1)](*arguments, BLOCK_SIZE=16, COLUMNS=4)
    assert out.tolist() == [32, 33, 34, 10, -1, -1, -1, -1]


def test_tiles_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.attention import triton_decode as kernels
    from flashinfer_backend.attention import triton_prefix as prefix_kernels

    device.sms = lambda: 16  # of a GPU's 132 programs or more most would find no work
    # Waiting for the kernel before is a GPU's alone.
    kernels.gdc_wait = kernels.gdc_launch_dependents = lambda: None
    prefix_kernels.gdc_wait = prefix_kernels.gdc_launch_dependents = lambda: None
    for shape in [(14, 2), (2, 2)]:
        check_prefixes(*shape)
    for tile in TILES:
        check(*tile)
    for tile, block_size in [((16, 4, 16), 64), ((64, 8, 2), 64), ((64, 8, 2), 32)]:
        check(*tile, window=70, block_size=block_size)
    check_elements()
    check_sinks()
    check_gather()
    check(64, 8, 2, window=70, soft_cap=2.0, sinks=True)
    for options in ({"window": 70}, {"soft_cap": 2.0}, {"sinks": True}, {"window": 130, "sinks": True}):
        check(64, 8, 2, heads=6, in_fp8=False, **options)
    for group, queries, ragged, in_e4m3 in [
        (1, 4, False, False),
        (4, 4, True, False),
        (8, 5, False, True),
        (4, 2, True, True),
        (64, 3, True, False),  # a program has one of the tokens
        (8, 3, False, False),  # two
    ]:
        check_drafts(2 * group, 2, queries, ragged, in_e4m3)
    check_drafts(8, 2, 1, False, False, ahead=3)
    check_drafts(128, 1, 2, True, False, window=130)
    check_drafts(8, 2, 3, True, False, count_of_rows=4)  # a program has one
    for queries, ragged, window in [(1, False, 100), (4, True, 3), (4, False, 130), (3, True, 130)]:
        check_drafts(8, 2, queries, ragged, window == 3, window=window)
    for shape in SHAPES:
        check(64, 8, 2, *shape, [1, 200])
