# SPDX-License-Identifier: Apache-2.0
"""Client for Triton's ensemble and for OpenAI servers: `python -m client COMMAND`.

  generate       print a completion as it arrives
  chat           talk to a model in the terminal
  bench          put a load on a server and measure its times
  report         write a Markdown and an HTML page of bench's results
  perf-analyzer  run Triton's perf_analyzer with the libraries that it expects

`python -m client COMMAND --help` lists a command's options.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = ("generate", "chat", "bench", "report", "perf-analyzer")
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Where the reader of its output has gone (`| head`) it ends as by SIGPIPE, quietly."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail once more, aloud, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    """Hands the arguments after the command's name on."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print((__doc__ or "").strip())
        return 0
    if not argv or argv[0] not in COMMANDS:
        what = f"unknown command {argv[0]!r}" if argv else "a command is missing"
        print(f"python -m client: {what}; it is one of {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        module = importlib.import_module(f"client.{argv[0].replace('-', '_')}")
        return int(module.main(list(argv[1:])))  # gRPC's packages are imported by what needs them
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("client"):
            raise
        print(
            f"client {argv[0]} needs {error.name}: `pip install -e '.[client]'` in this project's folder",
            file=sys.stderr,
        )
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
