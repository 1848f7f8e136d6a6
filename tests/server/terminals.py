# SPDX-License-Identifier: Apache-2.0
"""A program in a terminal of 80 columns, typed into and read by a test."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from running import ROOT, TIMEOUT_S

END_OF_FILE, INTERRUPT = "\x04", "\x03"


class Terminal:
    """`shown` is all that was shown so far."""

    def __init__(self, *arguments: str) -> None:
        self.main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

        def take_terminal() -> None:  # Ctrl-C goes to the group in front of it
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        env = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "client", *arguments]
        files = {"stdin": side, "stdout": side, "stderr": side}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=take_terminal, **files)
        os.close(side)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def until(self, seen: str | Callable[[str], bool], after: int = 0) -> str:
        """Reads on until what came after that position holds a text, or a condition is true of it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (seen in self.shown[after:] if isinstance(seen, str) else seen(self.shown[after:])):
            assert time.monotonic() < deadline, f"timed out; shown:\n{self.shown}"
            if select.select([self.main], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.main, 65536).decode(errors="replace")
                except OSError:  # its program has ended
                    break
        return self.shown[after:]

    def rest(self) -> int:
        """Reads to the end; the exit status."""
        self.until(lambda _: self.process.poll() is not None)
        while select.select([self.main], [], [], 0)[0]:
            try:
                self.shown += os.read(self.main, 65536).decode(errors="replace")
            except OSError:
                break
        return self.process.wait(TIMEOUT_S)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """`python -m client` with these arguments."""
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
            opened.process.wait(TIMEOUT_S)
        os.close(opened.main)
