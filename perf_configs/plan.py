# SPDX-License-Identifier: Apache-2.0
"""What the arguments of perf_configs.run ask for, and whether all that they name is there: a server takes
minutes to start."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from client.datasets import load_sharegpt
from client.scenarios import Scenario, read_scenarios
from client.wire import OPENAI, TRITON
from flashinfer_backend.config_tools.settings import parse_pairs, read_profile, split_assignments
from flashinfer_backend.core.values import TRUE_WORDS
from perf_configs.results import OWN
from perf_configs.servers import ROOT, ServerSpec, choose_servers, read_servers

PROFILE = ROOT / "perf_configs/profiles/h200-8b.toml"
OWN_OPTIONS = {"model_dir": "--model-dir", "load_format": "--load-format"}
LONGEST_FIRST = PROFILE.with_name("h200-8b-longest-first.toml")


@dataclass(frozen=True)
class Plan:
    """What a call measures. urls holds the servers that run already; profile and knobs are for ours."""

    scenarios: dict[str, Scenario]
    servers: list[ServerSpec]
    urls: dict[str, str]
    profile: Path
    knobs: str


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError for arguments that contradict each other or name what is not there."""
    scenarios, known = read_scenarios(args.rows), read_servers()
    chosen = choose_servers(args.server, known)
    given = [_split_url(item) for item in args.url]
    urls = dict(given)
    if twice := [name for name in urls if [name for name, _ in given].count(name) > 1]:
        raise ValueError(f"--url {twice[0]}=URL is given twice: a server is measured at one address")
    if unknown := [name for name in urls if name not in known]:
        raise ValueError(f"unknown server {', '.join(unknown)}; servers are {', '.join(known)}")
    if unused := [name for name in urls if name not in {spec.name for spec in chosen}]:
        raise ValueError(f"--url {unused[0]}=URL: --server {args.server} does not name {unused[0]}")
    if (args.knob or args.profile) and not any(spec.name in OWN for spec in chosen):
        raise ValueError(
            f"--knob and --profile are for ours: --server {args.server} names none of {', '.join(OWN)}"
        )
    for spec in chosen:
        if not spec.command and spec.name not in urls:
            raise ValueError(f"{spec.name} is not started here: give its address, --url {spec.name}=URL")
        if spec.variant and spec.name in urls and f"{spec.name}:" in args.server:
            raise ValueError(
                f"--server {spec.label}: the server at --url {spec.name}=URL runs as it was started"
            )
    sizes = {scenario.tensor_parallel_size for scenario in scenarios.values()}
    if len(sizes) > 1 and any(spec.name in urls for spec in chosen):
        raise ValueError(
            "--url names one server, but the rows want tensor_parallel_size "
            f"{' and '.join(map(str, sorted(sizes)))}: choose rows of one size"
        )
    if args.model_dir is None:
        raise ValueError("--model-dir is required: it names the checkpoint folder to serve")
    for name in ("config.json", "tokenizer.json"):
        if not (args.model_dir / name).is_file():
            raise ValueError(
                f"--model-dir {args.model_dir} has no {name}; it should name a checkpoint folder"
            )
    if (args.knob or args.profile) and (running := [name for name in OWN if name in urls]):
        raise ValueError(
            f"--knob and --profile are for a server started here: use them without --url {running[0]}=URL"
        )
    profile = args.profile or PROFILE
    if any(spec.name in OWN and spec.name not in urls for spec in chosen):
        _check_file("--profile", profile)
    if rows := [row for row, scenario in scenarios.items() if scenario.from_file]:
        if args.sharegpt is None:
            raise ValueError(f"--sharegpt is required by rows {', '.join(rows)}")
        _check_file("--sharegpt", args.sharegpt)
    elif args.sharegpt is not None:
        raise ValueError(
            f"--sharegpt {args.sharegpt} is for rows of conversations, and none of {', '.join(scenarios)} has"
            " them: leave it out"
        )
    if args.check_tokens and not any(spec.backend in TRITON for spec in chosen):
        raise ValueError(
            f"--check-tokens is for Triton's ensemble: of --server {args.server} all are OpenAI servers, "
            "which always count"
        )
    started = [spec for spec in chosen if spec.name not in urls]
    peers = [spec.label for spec in started if spec.name not in OWN]
    if peers and len(peers) < len(started):
        for row, scenario in scenarios.items():
            gpus = gpus_of_ours(scenario, profile, args.knob)
            if gpus != scenario.tensor_parallel_size:
                raise ValueError(
                    f"ours would run on {gpus} GPUs in row {row} and {peers[0]} on "
                    f"{scenario.tensor_parallel_size}: tensor_parallel_size times replicas must be that"
                )
    if peers and len(peers) < len(started):
        _check_prefix_caching(started, known, args.knob)
    if known_lengths := [row for row, s in scenarios.items() if s.priority_per_output_token]:
        _check_order(", ".join(known_lengths), started, known, profile, args.knob)
    # What runs already has no variant that is known here.
    servers = [replace(spec, variant="") if spec.name in urls else spec for spec in chosen]
    return Plan(scenarios, servers, urls, profile, knob_options(args.knob))


def _check_order(
    rows: str,
    started: Sequence[ServerSpec],
    known: dict[str, ServerSpec],
    profile: Path,
    knobs: Sequence[str],
) -> None:
    """Raises ValueError for a server that would make nothing of the lengths it is told, or refuse them."""
    for spec in started:
        if spec.backend in OPENAI and not spec.settings.orders_by_priority:
            those = [f"{spec.name}:{n}" for n, v in known[spec.name].variants.items() if v.orders_by_priority]
            raise ValueError(
                f"rows {rows} tell the answers' lengths by priority, and {spec.label} does not order by it: "
                + (f"take {' or '.join(those)}" if those else "leave it out")
            )
    if any(spec.name in OWN for spec in started):
        policy = knob_values(knobs).get("schedule_policy", _profile_knobs(profile).get("schedule_policy"))
        if policy != "lof":
            raise ValueError(
                f"rows {rows} are for the longest answers first: give --profile "
                f"{LONGEST_FIRST.relative_to(ROOT)} or --knob schedule_policy=lof"
            )


def _check_prefix_caching(
    started: Sequence[ServerSpec], known: dict[str, ServerSpec], knobs: Sequence[str]
) -> None:
    """Raises ValueError where ours would cache prefixes and a peer not, or the other way round."""
    ours = knob_values(knobs).get("enable_kv_cache_reuse", "false").lower() in TRUE_WORDS
    for spec in started:
        if spec.name in OWN or spec.settings.prefix_caching == ours:
            continue
        if not ours:
            raise ValueError(
                f"{spec.label} caches prefixes, and ours does so with --knob enable_kv_cache_reuse=true alone"
            )
        those = [f"{spec.name}:{n}" for n, v in known[spec.name].variants.items() if v.prefix_caching]
        raise ValueError(
            f"--knob enable_kv_cache_reuse=true has ours cache prefixes, and {spec.label} does not: "
            + (f"take {' or '.join(those)}" if those else "leave it out")
        )


def knob_values(knobs: Sequence[str]) -> dict[str, str]:
    return dict(knob.partition("=")[::2] for knob in knobs)


def _profile_knobs(profile: Path) -> dict[str, str]:
    """Raises ValueError for a file that is no profile."""
    problems: list[str] = []
    knobs = dict(read_profile(profile, problems))
    if problems:
        raise ValueError("; ".join(problems))
    return knobs


def gpus_of_ours(scenario: Scenario, profile: Path, knobs: Sequence[str]) -> int:
    """How many GPUs our server gets for a row, by knobs over the profile. Raises ValueError for numbers that
    are none."""
    wanted = {"tensor_parallel_size": str(scenario.tensor_parallel_size)}
    wanted["replicas"] = _profile_knobs(profile).get("replicas", "1")
    gpus = 1
    for name, value in (wanted | knob_values([k for k in knobs if k.partition("=")[0] in wanted])).items():
        if not value.isdecimal():
            raise ValueError(f"knob {name}={value}: should be a whole number")
        gpus *= int(value)
    return gpus


def knob_options(knobs: Sequence[str]) -> str:
    """`--set name=value ...` for build.py; each must have the form name=value without blanks. Raises
    ValueError for what build.py would refuse, before anything is measured."""
    for knob in knobs:
        if not re.fullmatch(r"\w+=[^\s'\"$`\\;&|<>()*?]*", knob):
            raise ValueError(f"knob {knob!r} must have the form name=value")
        if option := OWN_OPTIONS.get(knob.partition("=")[0]):
            raise ValueError(f"knob {knob}: should be given as {option}")
    problems: list[str] = []
    parse_pairs(split_assignments(knobs, problems), "--knob", problems, see="docs/knobs.md has all")
    if problems:
        raise ValueError("; ".join(problems))
    return " ".join(f"--set {knob}" for knob in knobs)


def check_conversations(path: Path | None, tokenizer: Tokenizer, scenarios: Iterable[Scenario]) -> None:
    """Raises ValueError if the file has too few conversations for a row. One look does for all rows: how many
    are usable depends on no seed."""
    rows = [scenario for scenario in scenarios if scenario.dataset == "sharegpt"]
    if path is None or not rows:
        return
    needed = max(n for s in rows for n in (s.warm_up_prompts, *(p.num_prompts for p in s.points)))
    load_sharegpt(path, tokenizer, needed, seed=0)


def _split_url(item: str) -> tuple[str, str]:
    name, _, url = item.partition("=")
    if not re.match("https?://.", url):
        raise ValueError(f"--url {item} should be SERVER=URL, such as ours=http://127.0.0.1:8000")
    return name, url


def _check_file(option: str, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{option} {path}: there is no such file")
