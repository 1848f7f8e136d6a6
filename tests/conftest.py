# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares."""

from __future__ import annotations  # pytest 8 has no TerminalReporter by that name

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For the processes that tests start, too: threads that wait for each other by turning take whole cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start some two hundred processes, each of which would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.path.insert(0, str(Path(__file__).parent))  # helpers: checkpoints.py, engine/harness.py
sys.path.insert(0, str(Path(__file__).parent.parent))  # build.py, client/


# Seconds for a test on a GPU: the first one of a kind compiles kernels.
GPU_LIMIT_S = 600

# Session fixtures of tests/server, by the group of tests for which they run. A test takes those of one group.
SHARED_SERVERS = {
    "contract": "contract",
    "unary": "contract",  # some tests compare the two
    "server": "server",
    "api": "api",
    "scripted": "scripted",
    "metered": "metered",
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collection would go through all that torch and transformers make as they are imported, again
    and again; later ones leave it out."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    """The workers begin each folder at different files. In a fresh clone each compiles a part of them, and
    finds those of the others compiled."""
    report = yield
    if isinstance(collector, pytest.Dir) and "PYTEST_XDIST_WORKER" in os.environ:
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(report.result) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


class WithoutDevice(pytest.Module):
    """A file of tests/gpu on a machine without a GPU: it is not read, and skipped as a whole."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    import torch

    if module_path.parent.name == "gpu" and not torch.cuda.is_available():
        return WithoutDevice.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (turn(item), item.path))  # the same in each worker
    for item in items:
        if group := worker_group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        if "gpu" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(GPU_LIMIT_S))


def turn(item: pytest.Item) -> int:
    """Kernels are compiled before any test of the same process has Triton's interpreter, which changes tl.
    Those in the interpreter, the longest without a server, come early: else one worker ends with them alone.
    """
    if item.path.name == "test_prebuild_triton.py":
        return 0
    if item.path.parent.name in ("server", "reliability"):
        return 1
    return 2 if "interpreter" in item.name else 3


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


def worker_group(item: pytest.Item) -> str | None:
    """With several workers: the tests that one of them runs, so that no server and no model is made twice.
    None for tests that each start their own."""
    folder, file = item.path.parent.name, item.path.stem
    if folder == "gpu" or "gpu" in item.keywords:
        return "gpu"
    if folder == "server":
        taken = {SHARED_SERVERS[name] for name in getattr(item, "fixturenames", ()) if name in SHARED_SERVERS}
        assert len(taken) < 2, f"{item.nodeid} takes servers of several groups, which have ended: {taken}"
        if taken:
            return taken.pop()
        if file == "test_recovery" and "harmed" not in getattr(item, "fixturenames", ()):
            return None
    return f"{folder}/{file}"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with more threads, and results do not depend on the machine's cores."""
    import torch

    torch.set_num_threads(1)
