# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the engine without Triton share: its settings, checked as build.py checks them, and
its start on a GPU."""

import argparse
import gc
import logging
from collections.abc import Sequence

import torch

from flashinfer_backend.config_tools import settings
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.engine.start import Core, start
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.speculate.proposer import MakeProposer

MAX_SEQ_LEN = 8192  # or what the checkpoint allows
DEFAULTS = {"enable_kv_cache_reuse": "false", "max_num_tokens_while_decoding": "8192"}
OWN_OPTIONS = {"model_dir": "--model", "load_format": "--load-format"}


def engine_parameters(
    model: str, load_format: str, defaults: dict[str, str], assignments: Sequence[str] = ()
) -> dict[str, str]:
    """Parameters of the engine, of which KNOB=VALUE texts win. Raises OSError or ValueError for a folder that
    is no checkpoint, for what build.py refuses, and for knobs that would be without effect."""
    longest = read_spec(resolve_model_dir(model)).longest_seq_len
    chosen = settings.engine_parameters(assignments, OWN_OPTIONS)
    own = {"model_dir": model, "load_format": load_format}
    return {"max_seq_len": str(min(MAX_SEQ_LEN, longest))} | defaults | chosen | own


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Which engine: --model, --load-format and --set."""
    parser.add_argument("--model", metavar="DIR", required=True, help="checkpoint folder")
    parser.add_argument(
        "--load-format", default="dummy", choices=["auto", "dummy"],
        help="weights: random (dummy), or the checkpoint's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE",
        help="a knob of the engine; may be repeated",
    )  # fmt: skip


def parameters_from(
    parser: argparse.ArgumentParser, options: argparse.Namespace, **defaults: str
) -> dict[str, str]:
    """engine_parameters of these options, over knobs of the benchmark's own. Ends the program with a message
    and status 2 for what is refused."""
    try:
        return engine_parameters(options.model, options.load_format, DEFAULTS | defaults, options.set)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def start_frozen(parameters: dict[str, str], make_proposer: MakeProposer | None = None) -> Core:
    """An engine that no full garbage collection holds up, as the server's: it would show as a slow step."""
    core = start(EngineConfig.from_parameters(parameters), make_proposer=make_proposer)
    gc.collect()
    gc.freeze()
    return core


def start_again(parameters: dict[str, str], make_proposer: MakeProposer | None) -> Core:
    """An engine after another that was closed."""
    gc.unfreeze()
    gc.collect()  # an engine's parts know each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return start_frozen(parameters, make_proposer)


def start_on_gpu(parser: argparse.ArgumentParser, parameters: dict[str, str]) -> Core:
    """The engine; stderr has its start, such as how fast weights were read. Ends the program with a message
    where there is no GPU (status 1), or where the engine refuses its parameters (2)."""
    require_cuda(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return start_frozen(parameters)
    except (OSError, ValueError) as error:
        parser.error(str(error))
