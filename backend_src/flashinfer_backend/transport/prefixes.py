# SPDX-License-Identifier: Apache-2.0
"""Which prompts each engine of a model has had, in memory shared by all processes that send it some.

`<run dir>/prefixes`: int64 [engines, 2, ENTRIES]. A block of a prompt has a key, a hash of all tokens up to
its end. Its entry is that of `_entries`; there the two rows hold the key, xor the engine's pid, and how
many tokens the engine had written by then. There is no lock: an entry that two write at once is wrong, and
then a request goes to another engine than the best.
"""

from hashlib import blake2b
from pathlib import Path

import numpy as np

from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.protocol import Status

# Of an engine: 2 MiB. A cache of more blocks is known by the newest of them. 131 072 blocks of 16 tokens are
# two million tokens; an H200 holds some 50 000 blocks of an 8B model in bfloat16.
ENTRIES = 1 << 17
_SEED = 20261122  # of the keys, the same in every process


class PromptHasher:
    """Keys of prompts, for this table alone. The engine's own (KVCacheManager) are digests, one after the
    other, which cost a process that only passes requests on too much."""

    def __init__(self, longest: int, block_size: int) -> None:
        """longest: tokens of a prompt that count."""
        self.block_size = block_size
        generator = np.random.Generator(np.random.PCG64(_SEED))
        self._weights = generator.integers(0, 2**64, longest, dtype=np.uint64) | np.uint64(1)

    def keys(self, prompt: np.ndarray, adapter: str = "") -> np.ndarray:
        """uint64 [full blocks] of a prompt, int32 [n]: of each block one for all tokens up to its end. Other
        ones for each adapter, which is a folder, or "": none."""
        tokens = prompt[: len(self._weights)].astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(tokens * self._weights[: len(tokens)], dtype=np.uint64)
        if adapter:
            sums += np.uint64(int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "big"))
        return sums[self.block_size - 1 :: self.block_size]


def written_tokens(status: Status) -> int:
    """Tokens whose keys and values an engine has computed since its start."""
    return status.prompt_tokens - status.prompt_tokens_reused + status.generated_tokens


class PrefixTable:
    def __init__(self, run_dir: Path, engines: int) -> None:
        """run_dir: the model's; it has to exist. Raises OSError where there is no room."""
        self._table = rundir.shared_array(run_dir / "prefixes", np.uint64, (engines, 2, ENTRIES))

    def cached_blocks(self, engine: int, keys: np.ndarray, status: Status) -> int:
        """How many of a prompt's first blocks the engine probably has cached.

        The last block that it had decides: who had that one had those before it. One counts as evicted when
        the engine has since written as many tokens as its cache holds. status: the engine's latest report.
        """
        entries = _entries(keys)
        held, written = self._table[engine]
        age = written_tokens(status) - written[entries].astype(np.int64)
        known = (held[entries] == _salted(keys, status)) & (age < status.blocks_total * status.block_size)
        places = known.nonzero()[0]
        return int(places[-1]) + 1 if len(places) else 0

    def add(self, engine: int, keys: np.ndarray, status: Status) -> None:
        """A prompt with these keys has been sent to the engine."""
        entries = _entries(keys)
        held, written = self._table[engine]
        written[entries] = written_tokens(status)
        held[entries] = _salted(keys, status)


def _entries(keys: np.ndarray) -> np.ndarray:
    """Places of keys in the table, by their upper half: its bits depend on all tokens' (multiply-shift)."""
    return ((keys >> np.uint64(32)) % np.uint64(ENTRIES)).astype(np.int64)


def _salted(keys: np.ndarray, status: Status) -> np.ndarray:
    """Keys as they are stored: the next engine in a dead one's place has other ones, and no old entry."""
    return keys ^ np.uint64(status.pid)
