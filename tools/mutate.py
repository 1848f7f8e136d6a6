# SPDX-License-Identifier: Apache-2.0
"""Mutation score: the share of small changes of the package that its tests notice.

Takes a random sample of a folder's changes (operators, numbers, conditions, removed statements), runs the
folder's tests for each in a copy of the tree, and prints those that no test noticed. Texts, log lines,
assertions (zip's strict too) and annotations stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns

import psutil

from client.arguments import integer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "backend_src/flashinfer_backend"
LEAST = 0.85
MOST_PROCESSES = 200  # of the tests at a time
MARK = "FLASHINFER_BACKEND_MUTANT"  # a variable of the environment

# Tests by folder, or by module where it has separate ones. The first failure ends a run: quick files first.
WALK = "engine/test_scheduler_walk.py::"
TESTS = {
    "scheduler": (
        "unit/test_scheduler.py unit/test_request_queue.py unit/test_cache_groups.py "
        f"{WALK}test_a_broken_manager_is_found {WALK}test_thousands_of_random_steps"
    ),
    "scheduler/draft_pace": "unit/test_draft_pace.py",
    "scheduler/request_queue": (
        f"unit/test_request_queue.py {WALK}test_thousands_of_random_steps engine/test_waiting.py"
    ),
    "scheduler/invariants": (
        f"unit/test_invariants.py {WALK}test_a_broken_manager_is_found {WALK}test_thousands_of_random_steps"
    ),
    "scheduler/kv_cache_manager": (
        "unit/test_cache_groups.py unit/test_scheduler.py engine/test_kv_events.py engine/test_states.py "
        f"{WALK}test_a_broken_manager_is_found {WALK}test_thousands_of_random_steps"
    ),
    "scheduler/slot_table": (
        f"unit/test_scheduler.py engine/test_generate.py {WALK}test_thousands_of_random_steps"
    ),
    "scheduler/scheduler": (
        "unit/test_scheduler.py unit/test_request_queue.py unit/test_cache_groups.py "
        f"{WALK}test_thousands_of_random_steps engine/test_failing_steps.py engine/test_loop.py "
        "engine/test_logits_room.py engine/test_waiting.py engine/test_generate.py engine/test_ngram.py "
        "engine/test_states.py engine/test_drafts.py"
    ),
    "sampling": (
        "unit/test_sampling.py unit/test_sampling_params.py engine/test_logits_room.py "
        "engine/test_sampling_options.py engine/test_drafts.py "
        "engine/test_guided.py"
    ),
    "text": "unit/test_named_tokens.py unit/test_stop_words.py unit/test_answer_texts.py unit/test_delta.py",
    "text/tokenizer": "unit/test_named_tokens.py unit/test_preprocessing.py",
    "text/chunk": "unit/test_postprocessing.py unit/test_responder.py",
    "transport": "unit/test_keeper.py unit/test_endpoint.py engine/test_link.py",
    "transport/addresses": "unit/test_serve.py unit/test_router.py",
    "transport/delivery_marks": "unit/test_client_watch.py",
    "transport/api_states": "unit/test_watchdog.py",
    "transport/endpoint": "unit/test_endpoint.py engine/test_link.py",
    "transport/engine_socket": ("unit/test_endpoint.py engine/test_engine_socket.py engine/test_link.py"),
    "transport/gpus": "unit/test_router.py",
    "transport/loads": "unit/test_router.py",
    "transport/maintenance_server": "unit/test_probe.py unit/test_openai_supervisor.py",
    "transport/peers": "unit/test_keeper.py",
    "transport/prefixes": "unit/test_router.py",
    "transport/protocol": "unit/test_endpoint.py unit/test_responder.py engine/test_engine_socket.py",
    "transport/records": "unit/test_keeper.py unit/test_watchdog.py engine/test_link.py",
    "transport/restarts": "unit/test_keeper.py unit/test_watchdog.py unit/test_openai_supervisor.py",
    "transport/rundir": (
        "unit/test_keeper.py unit/test_stub_processes.py unit/test_other_users.py unit/test_router.py"
    ),
    "transport/stub_processes": "unit/test_stub_processes.py unit/test_other_users.py unit/test_watchdog.py",
    "structured": (
        "unit/test_json_schema.py unit/test_grammars.py unit/test_strict_calls.py "
        "engine/test_preparations.py engine/test_guided.py"
    ),
}

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CONDITIONAL = (ast.If, ast.While, ast.IfExp)
LOGGERS = ("log", "logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of the file `path` become `after`."""

    path: Path
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Changed copies of a node."""
    operator = getattr(node, "op", None)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(operator) in SWAPS:
        changed = copy.deepcopy(node)
        changed.op = SWAPS[type(operator)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(operator, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Compare):
        for index, kind in enumerate(map(type, node.ops)):
            changed = copy.deepcopy(node)
            changed.ops[index] = SWAPS[kind]()
            yield changed
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    attribute = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if (
        attribute
        or call
        or isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete)
    ):
        yield ast.Pass()


def _pairs(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each node below `node` that can change, and what it becomes."""
    if isinstance(node, ast.Assert | ast.JoinedStr) or getattr(node, "arg", None) == "strict":
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Expr) and ast.unparse(node.value).partition(".")[0] in LOGGERS:
        return
    yield from ((node, changed) for changed in _changes(node))
    conditions = node.ifs if isinstance(node, ast.comprehension) else []
    conditions += [node.test] if isinstance(node, CONDITIONAL) else []
    for test in conditions:
        if not isinstance(test, ast.Constant):
            yield from ((test, ast.Constant(value)) for value in (True, False))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _pairs(child)


def mutants(root: Path, path: Path) -> list[Mutant]:
    """Every mutant of a file, whose path is relative to `root`."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made = []
    for node, changed in _pairs(ast.parse(source)):
        start, end = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        after = ast.unparse(changed)
        after = f"({after})" if isinstance(changed, ast.expr) else after
        made.append(Mutant(path, node.lineno, start, end, ast.unparse(node), after))
    return made


def run(tree: Path, tests: list[str], limit_s: float) -> bool:
    """Whether the tests pass in the tree within the limit. All processes that they started end then: broken
    code may start some without end."""
    mark = secrets.token_hex()
    environment = {**os.environ, MARK: mark, "PYTHONPATH": f"{tree / 'backend_src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    until = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as output:
        pytest = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=output)
        try:
            while pytest.poll() is None and time.monotonic() < until and len(marked(mark)) < MOST_PROCESSES:
                time.sleep(0.3)
            code = pytest.poll()
        finally:
            pytest.kill()
            pytest.wait()
            while left := marked(mark):
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left, timeout=1)
        output.seek(0)
        if code not in (None, 0, 1, 2):  # 2: a test file that cannot be imported
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{output.read().decode()[-2000:]}")
    return code == 0


def marked(mark: str) -> list[psutil.Process]:
    """Processes that were started with this MARK."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def survivors(tree: Path, sample: list[Mutant], tests: dict[Path, list[str]]) -> list[Mutant]:
    """Those of the sample that pass their file's tests. Changes files of the tree and puts them back."""
    limits: dict[tuple[str, ...], float] = {}
    alive = []
    for mutant in sample:
        chosen = tests[mutant.path]
        if tuple(chosen) not in limits:
            began = time.monotonic()
            if not run(tree, chosen, 3600):
                raise RuntimeError(f"tests fail without any change: {' '.join(chosen)}")
            limits[tuple(chosen)] = 30 + 3 * (time.monotonic() - began)
        file = tree / mutant.path
        source = file.read_bytes()
        file.write_bytes(mutant.apply(source))
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        if run(tree, chosen, limits[tuple(chosen)]):
            alive.append(mutant)
        print("SURVIVED" if mutant in alive else "killed  ", mutant, flush=True)
        file.write_bytes(source)
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    return alive


def main() -> int:
    folders = [name for name in TESTS if "/" not in name]
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=folders, help=f"of {', '.join(folders)}; default: all")
    parser.add_argument("--mutants", type=integer(1), default=12, help="for each folder (12)")
    parser.add_argument("--seed", type=integer(0), default=0, help="chooses the mutants (0)")
    arguments = parser.parse_args()
    if unknown := set(arguments.folders) - set(folders):
        parser.error(f"no tests are known for {', '.join(unknown)}: choose of {', '.join(folders)}")
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copytree(ROOT, tree, ignore=ignore_patterns(".*", "__pycache__", "served", "results"), symlinks=True)
        for name in arguments.folders:
            paths = [path.relative_to(tree) for path in sorted((tree / PACKAGE / name).glob("*.py"))]
            files = {path: TESTS.get(f"{name}/{path.stem}", TESTS[name]).split() for path in paths}
            tests = {path: [f"tests/{file}" for file in chosen] for path, chosen in files.items()}
            made = [mutant for path in paths for mutant in mutants(tree, path)]
            sample = random.Random(arguments.seed).sample(made, min(arguments.mutants, len(made)))
            alive = survivors(tree, sample, tests)
            scores[name] = 1 - len(alive) / len(sample)
            print(f"{name}: {scores[name]:.0%} of {len(sample)} noticed, of {len(made)} possible", flush=True)
    return int(min(scores.values()) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
