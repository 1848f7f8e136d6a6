# SPDX-License-Identifier: Apache-2.0
"""What the Markdown files, drawings and deployment files say exists and is so."""

import json
import re
import shlex
import subprocess
import xml.etree.ElementTree
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashinfer_backend.config_tools import checks, cli, settings
from flashinfer_backend.config_tools.knobs import BY_NAME, KNOBS
from flashinfer_backend.config_tools.trt_names import FOREIGN
from perf_configs.servers import read_servers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "backend_src/flashinfer_backend"
FOLDERS = ("backend_src", "client", "docker", "docs", "model_repo", "perf_configs", "tests", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Placeholders for a checkpoint; the bundled model stands in for them.
CHECKPOINTS = re.compile(r"CHECKPOINT|/models?(/[\w.-]+)?$")
ALIASES = {alias for knob in KNOBS for alias in knob.aliases}

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """Words of every command in fenced blocks and inline code, without prompts and comments."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced += re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    found = []
    for line in lines:
        line = line.strip().removeprefix("$ ")
        program = line.partition(" ")[0].rpartition("/")[2]
        if program in ("make", "python", "python3", "build.py"):
            found.append(shlex.split(line, comments=True))
    return found


@each_page
def test_links_resolve(page):
    targets = re.findall(r"\]\(([^)\n]+)\)", text_of(page))  # also those with a space, which is wrong
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    missing = [target for target in local if target and not (page.parent / target).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Names that links may use for the page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


@each_page
def test_numbers_in_tables_do_not_break_over_two_lines(page):
    """A space between thousands may: U+00A0 may not."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    rows = [re.sub(r"`[^`]*`", "``", line) for line in text.splitlines() if line.startswith("|")]
    assert not [found for row in rows for found in re.findall(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)", row)]


@each_page
def test_headings_that_links_name_exist(page):
    targets = re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", text_of(page))
    pages = [(page.parent / file if file else page, name) for file, name in targets]
    assert not [name for file, name in pages if file.suffix == ".md" and name not in anchors(file)]


@each_page
def test_files_named_in_code_exist(page):
    names = re.findall(r"`([\w.-]+/[\w./-]*(?:/|\.py|\.toml|\.json|\.yaml|\.md))`", text_of(page))
    names = [name for name in names if not name.startswith(("results/", "served/"))]  # made by commands
    missing = [n for n in names if not any((base / n).exists() for base in (ROOT, PACKAGE, page.parent))]
    assert not missing


@each_page
def test_no_path_of_some_machine(page):
    assert not re.findall(r"(?<![\w.])/(?:work|root|home)/\S*", text_of(page))
    assert str(ROOT) not in text_of(page) or Path("/") == ROOT


@each_page
def test_make_targets_and_variables_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(text_of(page)):
        if words[0] != "make":
            continue
        for word in words[1:]:
            name, assigned, _ = word.partition("=")
            pattern = rf"^{name} \?=" if assigned else rf"^{name}:"
            assert re.search(pattern, makefile, re.MULTILINE), f"{name} in {shlex.join(words)}"


def source_of(words: list[str]) -> tuple[Path, list[str]] | None:
    """Source, a file or a package, of the program of this project that a command runs, and its arguments."""
    if words[0].endswith("build.py"):
        return PACKAGE / "config_tools/cli.py", words[1:]
    if words[1:2] == ["build.py"]:
        return PACKAGE / "config_tools/cli.py", words[2:]
    if words[1:2] == ["-m"] and words[2] != "pytest":
        name = words[2].replace(".", "/").replace("backend/serve", "backend/launch")  # serve.py runs that
        if words[2] == "client.perf_analyzer":
            return None  # it hands its arguments on
        place = (ROOT / "backend_src" if name.startswith("flashinfer_backend") else ROOT) / name
        return place if place.is_dir() else place.with_suffix(".py"), words[3:]
    if words[1:2] and words[1].startswith("tensorrtllm_backend/"):
        return None  # TensorRT-LLM's
    if words[0].rpartition("/")[2].startswith("python") and words[1:2] and words[1].endswith(".py"):
        places = (ROOT, ROOT / "tools/bundled_model")
        return next(place / words[1] for place in places if (place / words[1]).exists()), words[2:]
    return None


@each_page
def test_options_of_commands_exist(page):
    for words in commands(text_of(page)):
        program = source_of(words)
        if program is None:
            continue
        source, arguments = program
        files = source.glob("*.py") if source.is_dir() else [source]
        known = "\n".join(file.read_text(encoding="utf-8") for file in files)
        if "add_engine_options(" in known:
            known += (ROOT / "perf_configs/engine_start.py").read_text(encoding="utf-8")
        if "from scheduler_walk import" in known:
            known += (ROOT / "tests/reliability/scheduler_walk.py").read_text(encoding="utf-8")
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            names = (option, option.replace("--no-", "--", 1))  # of a switch, both ways
            assert any(f'"{name}"' in known for name in names), f"{option} in {shlex.join(words)}"


def build_arguments() -> list[list[str]]:
    """Arguments of every build.py command in the pages, and what `make serve` makes of KNOBS."""
    found = []
    for words in (words for page in PAGES for words in commands(text_of(page))):
        program = source_of(words)
        if words[0] == "make":
            knobs = [word.removeprefix("KNOBS=") for word in words if word.startswith("KNOBS=")]
            chosen = [text.split() for text in knobs if "name=value" not in text]
            found += [["--output", "served", "--set", *pairs] for pairs in chosen]
        elif program and program[0].name == "cli.py" and "--output" in program[1]:
            found.append([CHECKPOINTS.sub("bundled", word) for word in program[1]])
    return found


@pytest.mark.parametrize("arguments", build_arguments(), ids=shlex.join)
def test_build_commands_are_accepted(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # profiles are named from there
    arguments[arguments.index("--output") + 1] = str(tmp_path / "repository")
    assert cli.main(ROOT / "model_repo", arguments) == 0, capsys.readouterr().err


def test_knobs_of_the_migration_table_exist():
    page = text_of(ROOT / "docs/compatibility.md")
    rows = re.search(r"^\| TensorRT-LLM \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert rows
    seen = 0
    for line in rows[1].splitlines():
        _, theirs, ours, _ = line.split("|")
        for name in re.findall(r"`([a-z][a-z_]+)`", theirs):
            known = name in FOREIGN or name in ALIASES or (name in BY_NAME and BY_NAME[name].in_trt)
            assert known or name == "tensorrt_llm_bls", f"TensorRT-LLM has no {name}"
            seen += 1
        if "the same" in ours:
            assert all(name in BY_NAME for name in re.findall(r"`([a-z][a-z_]+)`", theirs)), line
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", ours):
            assert name in BY_NAME or name == BY_NAME["batch_scheduler_policy"].default, name
    assert seen > 15


def test_example_answer_is_the_bundled_models():
    command = re.search(r"generate -d '(\{.*\})'\n(\{.*\})\n", README)
    printed = re.search(r'--max-tokens (\d+) "(.*)"\n(.*)\n```', README)
    assert command and printed
    asked, answer = json.loads(command[1]), json.loads(command[2])
    folder = PACKAGE / "bundled_model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.stop_strings = None  # of chats
    ids = tokenizer(asked["text_input"], return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**ids, max_new_tokens=asked["max_tokens"], do_sample=False)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert answer["text_output"] == text
    assert (int(printed[1]), printed[2]) == (asked["max_tokens"], asked["text_input"])
    assert printed[3] == text.removeprefix(asked["text_input"])


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_xml_with_a_title(drawing):
    svg = xml.etree.ElementTree.parse(drawing).getroot()
    assert svg.findtext("{http://www.w3.org/2000/svg}title")


def test_dockerfile_copies_what_exists():
    text = (ROOT / "docker/Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text()
    assert all(f"!{source.partition('/')[0]}\n" in ignored for source in sources)


def deployed(name: str) -> list[dict]:
    """The documents of a file in docker/."""
    return list(yaml.safe_load_all((ROOT / "docker" / name).read_text()))


def defaults_of_variables(text: str) -> str:
    """Compose's ${NAME:-default}, where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_manifests_name_each_other():
    deployment, service = deployed("kubernetes.yaml")
    (scaled,) = deployed("kubernetes-autoscaling.yaml")
    runtime, served = deployed("kserve.yaml")
    name = deployment["metadata"]["name"]
    assert scaled["spec"]["scaleTargetRef"] == {"name": name} and service["metadata"]["name"] == name
    assert served["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert served["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    for each in (container, runtime["spec"]["containers"][0]):
        assert each["readinessProbe"]["httpGet"]["path"] == "/v2/models/ensemble/ready"
        assert each["startupProbe"]["httpGet"] == each["readinessProbe"]["httpGet"]
        volumes = runtime["spec"]["volumes"] if each is not container else None
        volumes = volumes or deployment["spec"]["template"]["spec"]["volumes"]
        assert {m["name"] for m in each["volumeMounts"]} == {volume["name"] for volume in volumes}


def test_probes_ask_the_port_of_tritonserver():
    (served,) = [each for each in deployed("inference-gateway.yaml") if each["kind"] == "LLMInferenceService"]
    (container,) = served["spec"]["template"]["containers"]
    (port,) = re.findall(r"--http-port (\d+)", " ".join(container["args"]))
    assert f"http://127.0.0.1:{port}" in container["livenessProbe"]["exec"]["command"]
    assert container["startupProbe"]["httpGet"] == container["readinessProbe"]["httpGet"]


def test_composed_images_share_no_cache():
    """One that runs as root would own what another, which does not, has to write to."""
    (compose,) = deployed("compose.yaml")
    mounted = [
        volume.rsplit("}", 1)[-1].split(":") for s in compose["services"].values() for volume in s["volumes"]
    ]
    caches = [source for source, target, *_ in mounted if target == "/cache"]
    assert len(set(caches)) == len(caches) == len(compose["services"])
    assert set(caches) == compose["volumes"].keys()


def test_the_composed_vllm_is_the_first_variant_of_perf_configs():
    (compose,) = deployed("compose.yaml")
    vllm = compose["services"]["vllm"]
    settings_there = read_servers()["vllm"].settings
    assert shlex.split(" ".join(vllm["command"][-3:]).replace("=", " ")) == shlex.split(settings_there.flags)
    assert settings_there.environment.items() <= vllm["environment"].items()


def test_the_composed_profile_is_the_h200s():
    (compose,) = deployed("compose.yaml")
    problems: list[str] = []
    words = defaults_of_variables(compose["services"]["ours"]["environment"]["KNOBS"]).split()
    chosen = settings.parse_pairs(settings.split_assignments(words, problems), "KNOBS", problems)
    profile = msgspec.toml.decode((ROOT / "perf_configs/profiles/h200-8b.toml").read_bytes())["knobs"]
    complete = settings.complete(chosen)
    different = {name for name, value in profile.items() if complete[name].lower() != str(value).lower()}
    assert not different


def test_shell_scripts_are_valid():
    for script in (ROOT / "docker").glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=120)


def test_knobs_of_deployments_are_accepted():
    deployment, service = deployed("kubernetes.yaml")
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    runtime, _ = deployed("kserve.yaml")
    containers = [deployment["spec"]["template"]["spec"]["containers"][0], runtime["spec"]["containers"][0]]
    written = [{e["name"]: e["value"] for e in container["env"]}["KNOBS"] for container in containers]
    (compose,) = deployed("compose.yaml")
    written.append(defaults_of_variables(compose["services"]["ours"]["environment"]["KNOBS"]))
    for knobs in written:
        problems: list[str] = []
        chosen = settings.parse_pairs(settings.split_assignments(knobs.split(), problems), "KNOBS", problems)
        assert not problems + checks.check(settings.complete(chosen))
