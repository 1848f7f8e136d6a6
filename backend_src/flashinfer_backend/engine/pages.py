# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache: who holds them, which hold a reusable prefix, which go next.

A page is in exactly one place: held (reference count > 0), in `_free` (nothing of use in it),
or in `_lru` (no holder, but registered content). Content is named by a digest over the whole
prefix up to and including the page, so a key never depends on another page's fate.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np


class PageAllocator:
    """Allocates pages 1..num_pages-1; page 0 is the dummy that padded rows write to."""

    def __init__(self, num_pages: int, page_size: int, reuse: bool) -> None:
        if num_pages < 2:
            raise ValueError(f"a KV cache needs at least 2 pages, got {num_pages}")
        self.page_size = page_size
        self.num_pages = num_pages - 1
        self.reuse = reuse
        self._references = np.zeros(num_pages, dtype=np.int32)
        self._free = list(range(num_pages - 1, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that an allocation can have, cached ones included."""
        return len(self._free) + len(self._lru)

    @property
    def cached(self) -> int:
        """Pages without a holder whose content can be reused."""
        return len(self._lru)

    def prefix_keys(self, tokens: np.ndarray, start: int = 0, parent: bytes = b"") -> list[bytes]:
        """Keys of the full pages of `tokens` (int32 [n]) from page `start` on; `parent` is the
        key of page start - 1."""
        size, keys = self.page_size, []
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        for page in range(start, len(tokens) // size):
            parent = blake2b(parent + data[page * size * 4 : (page + 1) * size * 4], digest_size=16).digest()
            keys.append(parent)
        return keys

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages that hold the longest known prefix of `keys`. The caller now holds each."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._references[page] == 0:
                del self._lru[page]
            self._references[page] += 1
            pages.append(page)
        return pages

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with undefined content, or None (and no change) if there are too few."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._lru.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Name a held page's content. A key that another page already has is left with it."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: list[int]) -> None:
        """Give pages of one sequence back, in sequence order. The last page becomes the oldest,
        so that the end of a prefix is evicted before its beginning."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            assert self._references[page] == 0, f"page {page} was released more often than it was held"
            if page in self._key_of:
                self._lru[page] = None
            else:
                self._free.append(page)
