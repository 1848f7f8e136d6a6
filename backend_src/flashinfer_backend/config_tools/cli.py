# SPDX-License-Identifier: Apache-2.0
"""Command line of build.py."""

import argparse
import re
import shlex
import sys
import textwrap
from pathlib import Path

from flashinfer_backend.config_tools import checks, output, patch, settings
from flashinfer_backend.config_tools.knobs import BLS, BY_NAME, KNOBS, LLM, MODELS, Knob, engine_knobs
from flashinfer_backend.core.paths import unservable

EXIT_REFUSED = 2


def main(model_repo: Path, argv: list[str] | None = None) -> int:
    """Run build.py on the defaults in `model_repo`. Returns the exit status; 2 = refused, nothing written."""
    parser = _parser()
    args = parser.parse_args(argv)
    _refuse_beside(parser, args, "list_knobs")
    _refuse_beside(parser, args, "regenerate")
    if args.list_knobs:
        print(text_table(), end="")
        return 0
    if args.regenerate:
        for path, text in generated(model_repo).items():
            path.write_text(text, encoding="utf-8")
            print(path)
        return 0
    if args.output is None:
        parser.error("--output DIR is needed")
    problems: list[str] = []
    notes: list[str] = []
    try:
        named = _named_models(args, problems)
        if named and not problems:
            several = _several(args, named, problems)
        elif not problems:
            several = {"": _values(args, problems, notes)}
        args.llm_name = LLM if args.llm_name is None else args.llm_name
        _check_places(args.llm_name, args.output, model_repo, args.force, problems)
    except OSError as error:
        problems.append(f"cannot read {error.filename}: {error.strerror}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        print(f"build.py: nothing was written, {len(problems)} to correct:\n{listed}", file=sys.stderr)
        return EXIT_REFUSED
    if notes:
        print(f"build.py: {args.output} {'; '.join(notes)}", file=sys.stderr)
    command = _command(args)
    files: dict[str, bytes] = {}
    for name, values in several.items():
        files |= patch.render(model_repo, values, args.llm_name, command, name)
    if args.diff:
        defaults = patch.render(model_repo, settings.complete({}), LLM, patch.COMMAND)
        try:
            changes = output.diff(args.output, defaults, files, args.llm_name)
        except OSError as error:
            print(f"build.py: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
            return EXIT_REFUSED
        print(changes, end="")
        if not changes:
            print("build.py: nothing would change", file=sys.stderr)
    else:
        try:
            output.replace_folder(args.output, output.with_record(files, command, args.llm_name, several))
        except OSError as error:
            print(f"build.py: cannot write {args.output}: {error.strerror or error}", file=sys.stderr)
            return EXIT_REFUSED
        if reason := unservable(args.output):
            print(f"build.py: {reason}", file=sys.stderr)
        else:
            serve = shlex.join(
                [_interpreter(), "-m", "flashinfer_backend.serve", "--model-repository", str(args.output)]
            )
            print(f"{args.output}: written; to serve it: {serve}")
    return 0


def _interpreter() -> str:
    """What to type for the Python that runs this: `python` on PATH may be another, or missing."""
    here, path = f"{Path.cwd()}/", sys.executable or "python"
    return path[len(here) :] if path.startswith(here) else path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="build.py",
        usage="build.py --output DIR [--model DIR] [--set KNOB=VALUE ...] [options]\n"
        "       build.py --list-knobs",
        description="Writes a model repository for tritonserver: model_repo with knobs (settings) set.",
    )
    parser.add_argument(
        "--model", metavar="[NAME=]DIR", action="append",
        help="checkpoint folder, the same as --set model_dir=DIR (default: that of the last build of"
        " --output, else bundled, the small model in the package). NAME=DIR, repeated, serves several models,"
        " each by its name; --set NAME.KNOB=VALUE then sets a knob of one",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="folder to write: a new one, or one that build.py wrote earlier",
    )
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="TOML file with knobs in a table [knobs]"
    )
    parser.add_argument(
        "--set", metavar="KNOB=VALUE", nargs="+", action="extend", default=[],
        help="set knobs, overriding the profile; --list-knobs shows all",
    )  # fmt: skip
    parser.add_argument(
        "--llm-name", metavar="NAME",
        help="name of the llm model (default: that of the last build of --output, else llm); clients of"
        " TensorRT-LLM's own model use tensorrt_llm",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="overwrite files of --output that were changed since its build"
    )
    parser.add_argument(
        "--diff", action="store_true", help="show what would change in --output, write nothing"
    )
    parser.add_argument(
        "--list-knobs", action="store_true", help="show all knobs with their meanings, values and defaults"
    )
    parser.add_argument(
        "--regenerate", action="store_true",
        help="for developers, after a change of EngineConfig or of the knobs: rewrite docs/knobs.md and the "
        "engine's parameters in model_repo",
    )  # fmt: skip
    return parser


def _refuse_beside(parser: argparse.ArgumentParser, args: argparse.Namespace, alone: str) -> None:
    """Ends the program if an option that writes no repository comes with one for writing."""
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    others = [name for name in given if name != alone]
    if alone in given and others:
        option, other = (f"--{name.replace('_', '-')}" for name in (alone, others[0]))
        parser.error(f"{other} has no effect with {option}; give one of them")


def generated(model_repo: Path) -> dict[Path, str]:
    """Path and text of the repository's files that follow from EngineConfig and the knobs."""
    config = model_repo / LLM / "config.pbtxt"
    values = settings.complete({})
    engine = {knob.name: values[knob.name] for knob in engine_knobs()}
    return {
        config: patch.with_engine_knobs(config.read_text(encoding="utf-8"), engine),
        model_repo.parent / "docs" / "knobs.md": markdown_table(),
    }


def _values(args: argparse.Namespace, problems: list[str], notes: list[str]) -> dict[str, str]:
    """A value for every knob; meaningful only while there are no problems. The checkpoint of an earlier build
    in the same folder stays, with a line in `notes`."""
    pairs = settings.split_assignments(args.set, problems)
    if args.model is not None:
        pairs.insert(0, ("model_dir", args.model[0]))
    chosen = {}
    if args.profile is not None:
        from_file = settings.read_profile(args.profile, problems)
        chosen = settings.parse_pairs(from_file, f"profile {args.profile}", problems)
    chosen |= settings.parse_pairs(pairs, "--set", problems)
    name, before = output.built_llm_name(args.output), output.built_values(args.output)
    if name and not before and "model_dir" not in chosen:
        problems.append(
            f"--output {args.output} was built by an older build.py, which did not record its knobs: name"
            " the checkpoint again, --model DIR"
        )
    kept = {} if "model_dir" in chosen else _checkpoint(before)
    kept = {knob: value for knob, value in kept.items() if knob not in chosen}
    args.set += [f"{knob}={value}" for knob, value in kept.items()]
    shown = [f"{knob}={value}" for knob, value in kept.items()]
    if args.llm_name is None:
        args.llm_name = name or LLM
        shown += [f"--llm-name {name}"] if args.llm_name != LLM else []
    if shown:
        notes.append(f"keeps {' '.join(shown)}, as it was built")
    chosen |= kept
    values = settings.complete(chosen, args.llm_name)
    reset = [
        f"{knob} ({value}, was {before[knob]})"
        for knob, value in values.items()
        if knob not in chosen and before.get(knob, value) != value
        if not _followed(knob, before, name or LLM)
    ]
    if reset:
        notes.append(f"changes to the default: {', '.join(reset)}")
    problems += checks.check(values)
    return values


def _named_models(args: argparse.Namespace, problems: list[str]) -> dict[str, str]:
    """Checkpoint folders by name where --model has names, else none."""
    models = args.model or []
    pairs = [text.partition("=") for text in models if re.match(r"[A-Za-z0-9_][A-Za-z0-9_-]*=", text)]
    named = {name: folder for name, _, folder in pairs}
    if not named and len(models) < 2:
        if not models and len(built := output.built_models(args.output)) > 0:
            given = " ".join(f"--model {name}=DIR" for name in built)
            problems.append(f"--output {args.output} was built with several models: name them again, {given}")
        return {}
    if len(pairs) < len(models):
        problems.append("--model: several models need a name each: --model chat=DIR --model code=DIR")
    if len(named) < len(pairs):
        problems.append("--model: a name is given twice; each model needs a different one")
    parts = [name for model in named for name in patch.names_of(LLM, model).values()]
    if twice := sorted({name for name in parts if parts.count(name) > 1}):
        problems.append(
            f"--model: two models of the repository would be called {twice[0]}; choose other names"
        )
    if args.llm_name is not None:
        problems.append("--llm-name: has no effect on models with names, whose llm models are NAME_llm")
    return named


def _several(
    args: argparse.Namespace, named: dict[str, str], problems: list[str]
) -> dict[str, dict[str, str]]:
    """A value for every knob of each model, by its name."""
    from_file = settings.read_profile(args.profile, problems) if args.profile is not None else []
    shared = settings.parse_pairs(from_file, f"profile {args.profile}", problems)
    own: dict[str, list[tuple[str, str]]] = {name: [("model_dir", named[name])] for name in named}
    for_all: list[tuple[str, str]] = []
    for knob, value in settings.split_assignments(args.set, problems):
        name, dot, rest = knob.partition(".")
        if not dot:
            for_all.append((knob, value))
        elif name in named:
            own[name].append((rest, value))
        else:
            problems.append(f"--set {knob}={value}: no model is called {name}; it has {', '.join(named)}")
    shared |= settings.parse_pairs(for_all, "--set", problems)
    several = {}
    for name, pairs in own.items():
        chosen = settings.parse_pairs(pairs, f"--set, of {name}", problems)
        several[name] = settings.complete(shared | chosen, f"{name}_{LLM}")
        problems += [f"{name}: {problem}" for problem in checks.check(several[name])]
        if several[name][BLS] == "true":
            problems.append(f"{name}: {BLS}=true needs a repository with one model")
    problems += _shared_gpus(several) + _shared_ports(several)
    return several


def _shared_gpus(several: dict[str, dict[str, str]]) -> list[str]:
    """GPUs whose engines would take more than all of the memory for their caches."""
    shares: dict[str, dict[str, float]] = {}
    for name, values in several.items():
        groups = values["gpu_device_ids"]
        engines, ranks = int(values["replicas"]), int(values["tensor_parallel_size"])
        ids = map(str, range(engines * ranks)) if groups == "auto" else re.split("[,;]", groups)
        for gpu in ids if values["device"] != "cpu" else ():
            shares.setdefault(gpu, {})[name] = float(values["kv_cache_free_gpu_mem_fraction"])
    return [
        f"kv_cache_free_gpu_mem_fraction: on GPU {gpu} that of {' and '.join(held)} makes"
        f" {sum(held.values()):g}; together it should be at most 1 (--set"
        " NAME.kv_cache_free_gpu_mem_fraction=0.4), or give each model a GPU (--set NAME.gpu_device_ids=1)"
        for gpu, held in shares.items()
        if sum(held.values()) > 1 + 1e-9
    ]


def _shared_ports(several: dict[str, dict[str, str]]) -> list[str]:
    """Ports on which engines of two models would publish."""
    taken: dict[int, str] = {}
    problems = []
    for name, values in several.items():
        for knob in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            first = re.search(r":(\d+)$", values[knob])
            ports = range(int(first[1]), int(first[1]) + int(values["replicas"])) if first else ()
            if twice := [port for port in ports if taken.setdefault(port, name) != name]:
                problems.append(
                    f"{knob}: engines of {taken[twice[0]]} and {name} would use the port {twice[0]}; give"
                    f" each model ports of its own (--set NAME.{knob}=ADDRESS)"
                )
    return problems


def _followed(knob: str, before: dict[str, str], llm_name: str) -> bool:
    """Whether a knob had the value that followed from the others, so that it changes as they do."""
    others = {name: value for name, value in before.items() if name != knob}
    try:
        return knob in settings.FOLLOWING and settings.complete(others, llm_name)[knob] == before[knob]
    except ValueError:  # no number: somebody has changed the record
        return False


def _checkpoint(before: dict[str, str]) -> dict[str, str]:
    """What has to be said to have the same checkpoint as before, none where it is the default."""
    kept: dict[str, str] = {knob: before[knob] for knob in ("model_dir", "load_format") if knob in before}
    if before.get("tokenizer_dir", "") not in ("", before.get("model_dir", "")):
        kept["tokenizer_dir"] = before["tokenizer_dir"]
    return {knob: value for knob, value in kept.items() if value != BY_NAME[knob].default}


def _check_places(llm_name: str, target: Path, model_repo: Path, force: bool, problems: list[str]) -> None:
    taken = [model for model in MODELS if model != LLM] + [BLS, output.RECORD]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", llm_name) or llm_name in taken:
        problems.append(
            f"--llm-name {llm_name}: should be of letters, digits, _ - and ., and not {' or '.join(taken)}"
        )
    if model_repo.resolve() in (target.resolve(), *target.resolve().parents):
        problems.append(f"--output {target}: lies in the defaults' own folder {model_repo}; name another")
    elif reason := output.obstacle(target, force):
        problems.append(f"--output {reason}")


def _command(args: argparse.Namespace) -> str:
    """The command in one line, without --output: what a build contains does not depend on where it is."""
    words = patch.COMMAND.split()
    for model in args.model or []:
        words += ["--model", model]
    if args.profile is not None:
        words += ["--profile", str(args.profile)]
    if args.set:
        words += ["--set", *args.set]
    if args.llm_name != LLM:
        words += ["--llm-name", args.llm_name]
    return " ".join(shlex.join(words).split("\n"))


def _models(knob: Knob) -> str:
    return ", ".join(dict.fromkeys(model for model, _ in knob.places))


def _trt_names(knob: Knob) -> list[str]:
    return [knob.name, *knob.aliases] if knob.in_trt else list(knob.aliases)


def text_table() -> str:
    blocks = []
    for knob in KNOBS:
        blocks.append(
            f"{knob.name} = {knob.default}\n"
            + textwrap.fill(knob.meaning, 100, initial_indent="    ", subsequent_indent="    ")
            + f"\n    values: {knob.values.expected()}\n    models: {_models(knob)}"
            f"   TensorRT-LLM: {', '.join(_trt_names(knob)) or '-'}\n"
        )
    return "\n".join(blocks)


def markdown_table() -> str:
    """docs/knobs.md."""
    lines = [
        f"<!-- Generated by: {patch.COMMAND} --regenerate -->",
        "# Knobs",
        "",
        f"Knobs are settings. Set them with `{patch.COMMAND} --set knob=value ...` or in the `[knobs]` table "
        "of a TOML file (`--profile FILE`); `--set` takes precedence.",
        "build.py writes each to the config.pbtxt of its models; `model_repo/` has the defaults. Values that "
        "contradict each other or the checkpoint are refused.",
        "Booleans are true, True, TRUE, 1 or false, False, FALSE, 0. A star marks names that TensorRT-LLM "
        "also has.",
        "",
        "| knob | default | values | models | meaning |",
        "|---|---|---|---|---|",
    ]
    for knob in KNOBS:
        names = ", ".join(f"{name}\\*" for name in _trt_names(knob)) or knob.name
        cells = (names, knob.default, knob.values.expected(), _models(knob), knob.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "TensorRT-LLM's other names are accepted with an empty value or one that describes what happens "
        "anyway. For other values build.py, or the start with a config.pbtxt written by hand, says what to "
        "set instead.",
    ]
    return "\n".join(lines) + "\n"
