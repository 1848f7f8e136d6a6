# SPDX-License-Identifier: Apache-2.0
"""tools/mutate.py finds what tests do not notice."""

from pathlib import Path

import psutil

from tools.mutate import ROOT, TESTS, mutants, run, survivors

SOURCE = '''"""A docstring of 3 words."""
import logging

log = logging.getLogger(__name__)


def larger(left: int, right: int = 2) -> int:
    """é: columns count bytes."""
    assert right > 1
    log.warning("%d", 1 + 1)
    return left if left > right else right
'''


def test_what_tests_notice_and_what_they_do_not(tmp_path: Path) -> None:
    """Among equals it does not matter which is the larger."""
    path = Path("backend_src/tiny.py")
    (tmp_path / "backend_src").mkdir()
    (tmp_path / path).write_text(SOURCE)
    test = (
        "from tiny import larger\n\n\ndef test():\n    assert [larger(n) for n in (1, 2, 3)] == [2, 2, 3]\n"
    )
    (tmp_path / "test_tiny.py").write_text(test)
    made = mutants(tmp_path, path)
    assert [(mutant.line, mutant.before, mutant.after) for mutant in made] == [
        (7, "2", "(3)"),
        (11, "left > right", "(True)"),
        (11, "left > right", "(False)"),
        (11, "left > right", "(left >= right)"),
    ]
    assert survivors(tmp_path, made[-2:], {path: ["test_tiny.py"]}) == made[-1:]
    assert (tmp_path / path).read_text() == SOURCE


def test_what_tests_leave_running_is_ended(tmp_path: Path) -> None:
    """Also what has a session of its own."""
    test = """
import subprocess, sys

def test():
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("pid", "w").write(str(asleep.pid))
"""
    (tmp_path / "test_left.py").write_text(test)
    assert run(tmp_path, ["test_left.py"], 60)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_every_test_that_it_runs_is_there() -> None:
    for names in TESTS.values():
        for name in names.split():
            file, _, function = name.partition("::")
            assert function in (ROOT / "tests" / file).read_text(), name
