# SPDX-License-Identifier: Apache-2.0
"""build.py on real files: what it writes, and that table, defaults, documents and engine agree."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from build_support import CONFIG, MODEL_REPO, ROOT, build, checkpoint, snapshot
from google.protobuf import text_format
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from flashinfer_backend.config_tools import checks, cli, patch
from flashinfer_backend.config_tools.knobs import (
    BLS,
    BY_NAME,
    ENGINE_IN_TRT,
    ENGINE_PLACES,
    KNOBS,
    REPORT_OUTPUTS,
    SECOND_ENSEMBLE,
    Knob,
)
from flashinfer_backend.config_tools.settings import complete
from flashinfer_backend.config_tools.trt_names import FOREIGN
from flashinfer_backend.core.config import EngineConfig, Setting, auto_queue_size, fields, resolve_limits
from thinned import examples


def read(repo: Path, model: str) -> Any:
    return text_format.Parse((repo / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def get_field(config: Any, field: str) -> str:
    """What a knob's place holds, read independently of patch.set_field."""
    if field == REPORT_OUTPUTS:
        return "true" if "cum_log_probs" in {output.name for output in config.output} else "false"
    group, _, name = field.partition(".")
    if group == "parameters":
        assert name in config.parameters
        return config.parameters[name].string_value
    if group == "instance_group":
        assert len(config.instance_group) == 1
        value = config.instance_group[0].count
    else:
        value = config
        for part in field.split("."):
            value = getattr(value, part)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else ",".join(map(str, value))


# ---- the table, the defaults and the documentation agree


def test_table_and_model_repo_have_the_same_defaults():
    templates, patched = patch.load_templates(MODEL_REPO), patch.load_templates(MODEL_REPO)
    patch.apply(patched, complete({}), "llm")
    assert patched == templates


def test_every_parameter_in_model_repo_is_a_knob():
    placed = {place for knob in KNOBS for place in knob.places} | {
        ("postprocessing", "parameters.llm_model_name")  # follows --llm-name
    }
    for model, config in patch.load_templates(MODEL_REPO).items():
        assert {(model, f"parameters.{name}") for name in config.parameters} <= placed


def test_engine_has_the_same_defaults():
    values = complete({})
    parameters = {knob.name: values[knob.name] for knob in KNOBS}
    default = EngineConfig(model_dir="bundled", tokenizer_dir="bundled", max_queue_size=auto_queue_size(256))
    assert EngineConfig.from_parameters(parameters) == default


@pytest.mark.parametrize(
    ("knobs", "size"),
    [
        ([], 4096),
        (["max_num_seqs=1"], 4096),
        (["max_num_seqs=2000"], 8000),
        (["max_num_seqs=2000", "max_queue_size=0"], 0),
        (["max_num_seqs=8", "max_queue_size=3"], 3),
    ],
)
def test_bound_of_the_queues(build, tmp_path, knobs, size):
    """Triton's queues and the engine's have the same, which follows from the slots unless it is said."""
    status, _, err = build("--set", "max_num_seqs=7")  # what an earlier build had is not kept
    assert status == 0, err
    status, _, err = build(*(["--set", *knobs] if knobs else []))
    assert status == 0, err
    llm = read(tmp_path / "repo", "llm")
    for config in (llm, read(tmp_path / "repo", "preprocessing")):
        assert config.dynamic_batching.default_queue_policy.max_queue_size == size
    texts = {name: parameter.string_value for name, parameter in llm.parameters.items()}
    assert resolve_limits(EngineConfig.from_parameters(texts), 4096).max_queue_size == size
    texts["max_queue_size"] = "auto"  # written by hand
    slots = int(texts["max_num_seqs"])
    assert resolve_limits(EngineConfig.from_parameters(texts), 4096).max_queue_size == auto_queue_size(slots)


def test_generated_files_are_current():
    for path, text in cli.generated(MODEL_REPO).items():
        assert path.read_text(encoding="utf-8") == text, f"run build.py --regenerate: {path} is old"


# By the kind of a knob, values that EngineConfig has in another form.
TEXTS = {
    "bool": ["true", "false"],
    "sizes": ["1", "1,2,16"],
    "groups": ["0", "0,1;2,3"],
    "folders": ["a=/x,b=/y"],
}


def test_every_field_of_the_engine_is_a_knob():
    knobs = {knob.name: knob for knob in KNOBS}
    for field in fields(EngineConfig):
        knob = knobs[field.name]
        assert ("llm", f"parameters.{field.name}") in knob.places
        assert (knob.values, knob.meaning) == (field.values, field.meaning)
        assert field.text(field.read(knob.default)) == knob.default
        for text in TEXTS.get(field.values.kind, []):
            assert field.text(field.read(text)) == text
    assert ENGINE_PLACES.keys() | ENGINE_IN_TRT <= set(EngineConfig.__struct_fields__)


def test_every_field_of_the_engine_is_read():
    """A knob that nobody reads would be accepted and ignored."""
    package = ROOT / "backend_src/flashinfer_backend"
    files = [path for path in package.rglob("*.py") if path.parent.name != "config_tools"]
    texts = [text for path in files if "config." in (text := path.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    owners = [(node.attr, getattr(node.value, "attr", getattr(node.value, "id", ""))) for node in attributes]
    read = {name for name, owner in owners if owner in ("config", "_config")}
    assert set(EngineConfig.__struct_fields__) - read == set()


def test_every_other_parameter_of_llm_is_read_by_its_stub():
    stub = (ROOT / "backend_src/flashinfer_backend/triton_server/llm.py").read_text(encoding="utf-8")
    known = {*EngineConfig.__struct_fields__, "gpt_model_type"}  # whose words say what happens anyway
    for knob in KNOBS:
        for model, field in knob.places:
            name = field.removeprefix("parameters.")
            if model == "llm" and name != field and name not in known:
                assert f'knob("{name}")' in stub or f'self._parameters.get("{name}"' in stub


class Unsaid(EngineConfig, kw_only=True, frozen=True):
    spare_blocks: int = 2


def test_a_field_that_says_nothing_of_its_values_is_refused():
    with pytest.raises(TypeError, match=r"Unsaid\.spare_blocks should be Annotated with one Setting"):
        fields(Unsaid)


def test_names_are_unique_and_defaults_are_valid():
    assert not BY_NAME.keys() & FOREIGN.keys()
    assert len(BY_NAME) == sum(1 + len(knob.aliases) for knob in KNOBS)
    for knob in KNOBS:
        assert knob.parse(knob.default) == knob.default


def test_ensemble_maps_only_declared_tensors():
    configs = patch.load_templates(MODEL_REPO)
    ensemble = configs["ensemble"]
    produced = {tensor.name for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        inputs = {tensor.name: tensor for tensor in configs[step.model_name].input}
        outputs = {tensor.name for tensor in configs[step.model_name].output}
        assert step.input_map.keys() <= inputs.keys() and step.output_map.keys() <= outputs
        assert {name for name, tensor in inputs.items() if not tensor.optional} <= step.input_map.keys()
        assert set(step.input_map.values()) <= produced
        produced |= set(step.output_map.values())
    assert {tensor.name for tensor in ensemble.output} <= produced
    fed = {name for step in ensemble.ensemble_scheduling.step for name in step.input_map.values()}
    assert {tensor.name for tensor in ensemble.input} <= fed


# ---- what is written


def test_ensemble_without_report_outputs(build, tmp_path):
    assert build("--set", "ensemble_report_outputs=false")[0] == 0
    kept = [
        "text_output", "finish_reason", "batch_index", "sequence_index", "num_input_tokens",
        "num_output_tokens",
    ]  # fmt: skip
    ensemble = read(tmp_path / "repo", "ensemble")
    assert [output.name for output in ensemble.output] == kept
    pre, llm, post = ensemble.ensemble_scheduling.step
    assert sorted(llm.output_map.values()) == sorted({*kept, "_CHUNK"} - {"text_output"})
    assert dict(post.output_map) == {"OUTPUT": "text_output"}
    template = read(MODEL_REPO, "ensemble")
    assert ensemble.input == template.input
    assert pre == template.ensemble_scheduling.step[0]
    assert llm.input_map == template.ensemble_scheduling.step[1].input_map


def test_the_ensemble_under_a_second_name(build, tmp_path):
    assert build("--set", "tensorrt_llm_bls=true", "ensemble_report_outputs=false")[0] == 0
    ensemble, second = read(tmp_path / "repo", "ensemble"), read(tmp_path / "repo", BLS)
    assert (tmp_path / "repo" / BLS / "1").is_dir()
    assert (ensemble.name, second.name) == ("ensemble", BLS)
    second.name = "ensemble"
    assert second == ensemble
    assert build()[0] == 0 and not (tmp_path / "repo" / BLS).exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "chunk"),
        (["--llm-name", "tensorrt_llm"], "all"),
        (["--llm-name", "tensorrt_llm", "--set", "streamed_log_probs=chunk"], "chunk"),
        (["--set", "streamed_log_probs=all"], "all"),
    ],
)
def test_log_probs_of_streams_follow_the_name_of_the_llm_model(build, tmp_path, arguments, expected):
    assert build(*arguments)[0] == 0
    name = "tensorrt_llm" if "tensorrt_llm" in arguments else "llm"
    assert get_field(read(tmp_path / "repo", name), "parameters.streamed_log_probs") == expected


def test_profile_and_set(build, tmp_path):
    profile = tmp_path / "fast.toml"
    profile.write_text(
        "[knobs]\nmax_num_seqs = 64\nmax_seq_len = 1024\ncuda_graph_batch_sizes = [8, 1, 4]\n"
        "kv_cache_free_gpu_mem_fraction = 0.8\nenable_kv_cache_reuse = false\nattention_backend = 'fa2'\n"
    )
    assert build("--profile", profile, "--set", "max_seq_len=2048")[0] == 0
    parameters = read(tmp_path / "repo", "llm").parameters
    assert {name: parameters[name].string_value for name in (
        "max_num_seqs", "max_seq_len", "cuda_graph_batch_sizes", "kv_cache_free_gpu_mem_fraction",
        "enable_kv_cache_reuse", "attention_backend",
    )} == {
        "max_num_seqs": "64", "max_seq_len": "2048", "cuda_graph_batch_sizes": "1,4,8",
        "kv_cache_free_gpu_mem_fraction": "0.8", "enable_kv_cache_reuse": "false", "attention_backend": "fa2",
    }  # fmt: skip
    config = EngineConfig.from_parameters({name: found.string_value for name, found in parameters.items()})
    assert config.cuda_graph_batch_sizes == [1, 4, 8] and config.enable_kv_cache_reuse is False


def test_header_names_the_command_and_python_files_are_copied(build, tmp_path, checkpoint):
    build("--set", "max_num_seqs=8")
    for model in ("ensemble", "preprocessing", "llm", "postprocessing"):
        head = (tmp_path / "repo" / model / "config.pbtxt").read_text().splitlines()[:2]
        assert head[0].startswith("# Generated")
        assert head[1] == f"#   .venv/bin/python build.py --model {checkpoint} --set max_num_seqs=8"
        assert (tmp_path / "repo" / model / "1").is_dir()


def test_rebuild_replaces_its_own_output_as_a_whole(build, tmp_path):
    build("--llm-name", "tensorrt_llm")
    cache = tmp_path / "repo" / "preprocessing" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_bytes(b"")
    assert build("--llm-name", "llm", "--set", "max_num_seqs=9")[0] == 0
    build("--set", "max_num_seqs=9", output=tmp_path / "fresh")
    assert snapshot(tmp_path / "repo") == snapshot(tmp_path / "fresh")


def test_command_line_runs_without_torch(tmp_path, checkpoint):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['build.py', '--model', {str(checkpoint)!r}, '--output', {str(tmp_path / 'out')!r}]\n"
        "try:\n    runpy.run_path('build.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "out", "llm").parameters["model_dir"].string_value == str(checkpoint)


# ---- --diff and --list-knobs


def test_diff_shows_changed_values_and_writes_nothing(build, tmp_path, checkpoint):
    status, out, _ = build("--diff", "--set", "max_num_seqs=9", "--llm-name", "tensorrt_llm")
    assert status == 0 and not (tmp_path / "repo").exists()
    changed = [line for line in out.splitlines() if line[0] in "+-"]
    assert "+++ b/tensorrt_llm/config.pbtxt" in changed and "--- a/llm/config.pbtxt" in changed
    assert '-parameters { key: "max_num_seqs" value { string_value: "256" } }' in changed
    assert '+parameters { key: "max_num_seqs" value { string_value: "9" } }' in changed
    assert f'+parameters {{ key: "model_dir" value {{ string_value: "{checkpoint}" }} }}' in changed
    assert len(changed) < 30  # a renamed model is not a removed and an added one


def test_diff_against_an_earlier_output(build, tmp_path):
    build("--set", "max_num_seqs=9")
    before = snapshot(tmp_path / "repo")
    assert build("--diff", "--set", "max_num_seqs=9")[1:] == ("", "build.py: nothing would change\n")
    out = build("--diff", "--set", "max_num_seqs=10")[1]
    assert [line for line in out.splitlines() if line[0] in "+-"] == [
        "--- a/llm/config.pbtxt",
        "+++ b/llm/config.pbtxt",
        '-parameters { key: "max_num_seqs" value { string_value: "9" } }',
        '+parameters { key: "max_num_seqs" value { string_value: "10" } }',
    ]
    assert snapshot(tmp_path / "repo") == before


def test_list_knobs(capsys):
    assert cli.main(MODEL_REPO, ["--list-knobs"]) == 0
    out = capsys.readouterr().out
    for knob in KNOBS:
        assert f"{knob.name} = {knob.default}\n" in out


@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("--list-knobs", ["--output", "there"]),
        ("--list-knobs", ["--set", "max_num_seqs=9"]),
        ("--list-knobs", ["--diff"]),
        ("--list-knobs", ["--regenerate"]),
        ("--regenerate", ["--model", "there"]),
        ("--regenerate", ["--force"]),
    ],
)
def test_what_has_no_effect_beside_an_option_is_refused(capsys, monkeypatch, option, other):
    monkeypatch.setattr(cli, "generated", lambda _: pytest.fail("files are written"))
    with pytest.raises(SystemExit) as caught:
        cli.main(MODEL_REPO, [option, *other])
    assert caught.value.code == 2
    assert f"{other[0]} has no effect with {option}" in capsys.readouterr().err


# ---- properties


def values_of(knob: Knob) -> st.SearchStrategy[str]:
    words = st.sampled_from(knob.values.words) if knob.values.words else st.nothing()
    numbers = st.integers(int(knob.values.low), int(min(knob.values.high, 50_000)))
    match knob.values.kind:
        case "int":
            return words | numbers.map(str)
        case "float":
            return st.floats(knob.values.low, knob.values.high).map(repr)
        case "bool":
            return st.sampled_from(["True", "true", "TRUE", "1", "False", "false", "FALSE", "0"])
        case "sizes":
            lists = st.lists(numbers, min_size=1, max_size=4)
            return words | lists.map(lambda sizes: ", ".join(map(str, sizes)))
        case "path":
            return words | st.sampled_from(["/a b", "/x/../y", "rel/ative", "/quo\"te'", "/ünï"])
        case _:
            return words


ALL_KNOBS = st.fixed_dictionaries({}, optional={knob.name: values_of(knob) for knob in KNOBS})
A_FEW_KNOBS = st.lists(
    st.sampled_from([knob for knob in KNOBS if knob.values.kind != "path"]).flatmap(
        lambda knob: st.tuples(st.just(knob.name), values_of(knob))
    ),
    max_size=3,
).map(dict)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(ALL_KNOBS)
def test_values_are_read_back_and_nothing_else_changes(texts):
    values = complete({name: BY_NAME[name].parse(text) for name, text in texts.items()})
    files = patch.render(MODEL_REPO, values, "llm", "command")
    assert files == patch.render(MODEL_REPO, values, "llm", "command")
    configs = {
        model: text_format.Parse(files[f"{model}/config.pbtxt"].decode(), model_config_pb2.ModelConfig())
        for model in patch.MODELS
    }
    for knob in KNOBS:
        for model, field in knob.places:
            if field == SECOND_ENSEMBLE:
                assert (f"{BLS}/config.pbtxt" in files) == (values[knob.name] == "true")
            else:
                assert get_field(configs[model], field) == values[knob.name]
    templates = patch.load_templates(MODEL_REPO)
    if values["ensemble_report_outputs"] == "false":  # what was dropped does not come back
        patch.apply(templates, complete({"ensemble_report_outputs": "false"}), "llm")
    patch.apply(configs, complete({}), "llm")
    assert configs == templates


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.sampled_from(KNOBS), st.text(max_size=12) | st.integers().map(str) | st.floats().map(str))
def test_parse_accepts_its_own_spelling_or_says_what_is_right(knob, text):
    try:
        value = knob.parse(text)
    except ValueError as error:
        assert str(error) == f"should be {knob.values.expected()}"
    else:
        assert knob.parse(value) == value
        assert "\n" not in value


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(A_FEW_KNOBS)
def test_what_passes_the_checks_is_accepted_by_the_engine(checkpoint, texts):
    chosen = {name: BY_NAME[name].parse(text) for name, text in texts.items()}
    values = complete(chosen | {"model_dir": str(checkpoint), "tokenizer_dir": str(checkpoint)})
    assume(not checks.check(values))
    config = EngineConfig.from_parameters(values)
    resolved = resolve_limits(config, CONFIG["max_position_embeddings"])
    assert 0 < resolved.max_input_len < resolved.max_seq_len <= 4096
    for name, value in msgspec.structs.asdict(config).items():
        if values[name] != "auto" and not isinstance(value, list):
            assert str(value).lower() == values[name].lower()


def test_several_models_in_one_repository(tmp_path: Path) -> None:
    """An ensemble of each model's name over its own parts, knobs for all and for one, and what is refused."""
    out = tmp_path / "repo"
    named = ["--model", "chat=bundled", "--model", "code=bundled"]
    done = cli.main(
        MODEL_REPO,
        ["--output", str(out), *named, "--set", "device=cpu", "max_num_seqs=8", "code.max_num_seqs=4"],
    )
    assert done == 0
    parts = ("preprocessing", "llm", "postprocessing")
    for name, slots in (("chat", "8"), ("code", "4")):
        steps = [step.model_name for step in read(out, name).ensemble_scheduling.step]
        assert steps == [f"{name}_{part}" for part in parts]
        llm = read(out, f"{name}_llm").parameters
        assert llm["max_num_seqs"].string_value == slots
        assert llm["postprocessing_model_name"].string_value == f"{name}_postprocessing"
        post = read(out, f"{name}_postprocessing").parameters
        assert post["llm_model_name"].string_value == f"{name}_llm"
    assert len(list(out.glob("*/config.pbtxt"))) == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "a=bundled", "--model", "bundled"], "need a name each"),
        (["--model", "a=bundled", "--model", "a=bundled"], "given twice"),
        (["--model", "a=bundled", "--model", "a_llm=bundled"], "would be called a_llm"),
        (["--model", "a=bundled", "--llm-name", "x"], "NAME_llm"),
        (["--model", "a=bundled", "--set", "b.max_num_seqs=4"], "no model is called b"),
        (["--model", "a=bundled", "--set", "device=cpu", "a.dtype=float16"], "a: dtype=float16 needs a GPU"),
        (["--model", "a=bundled", "--set", "a.tensorrt_llm_bls=true"], "a: tensorrt_llm_bls=true needs"),
        (["--model", "a=bundled", "--model", "b=bundled"], "on GPU 0 that of a and b makes 1.8"),
        (
            ["--model=a=bundled", "--model=b=bundled", "--set", "device=cpu", "a.replicas=2"]
            + ["kv_events_endpoint=tcp://*:5557", "b.kv_events_endpoint=tcp://*:5558"],
            "engines of a and b would use the port 5558",
        ),
    ],
)
def test_several_models_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert cli.main(MODEL_REPO, ["--output", str(tmp_path / "repo"), *arguments]) == 2
    assert says in capsys.readouterr().err
