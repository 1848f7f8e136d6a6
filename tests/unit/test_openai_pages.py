# SPDX-License-Identifier: Apache-2.0
"""Pages of metrics: few for many who ask, and none is old."""

import asyncio
import itertools

from flashinfer_backend.openai import metrics
from flashinfer_backend.openai.metrics import Pages


def test_one_page_is_for_all_who_wait_and_made_after_they_asked() -> None:
    events = itertools.count()

    async def run() -> None:
        loop, pages = asyncio.get_running_loop(), Pages(lambda: b"%d" % next(events))
        asked: dict[int, int] = {}

        async def client(number: int) -> int:
            asked[number] = next(events)
            return int(await pages.next())

        found = await asyncio.gather(*map(client, range(20)))
        assert set(found) == {20}
        began = loop.time()
        later = await asyncio.gather(*map(client, range(20, 40)))
        assert set(later) == {41} and loop.time() - began > metrics.PAGES_S / 2
        assert all(page > asked[number] for number, page in enumerate(found + later))

    asyncio.run(run())


def test_a_page_that_fails_fails_for_those_alone_who_wait_for_it() -> None:
    results = iter([ValueError("unreadable"), b"page"])

    def make() -> bytes:
        if isinstance(result := next(results), Exception):
            raise result
        return result

    async def run() -> None:
        pages = Pages(make)
        failed = await asyncio.gather(pages.next(), pages.next(), return_exceptions=True)
        assert [str(each) for each in failed] == ["unreadable"] * 2
        assert await pages.next() == b"page"

    asyncio.run(run())
