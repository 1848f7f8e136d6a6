# SPDX-License-Identifier: Apache-2.0
"""build.py on a folder that it has built before: the checkpoint stays, and what changes is said."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import json
import sys
from pathlib import Path

from build_support import build, checkpoint, snapshot, write_checkpoint


def values(tmp_path):
    return json.loads((tmp_path / "repo/build.json").read_text())["values"]


def test_the_checkpoint_is_kept_without_model(build, checkpoint, tmp_path):
    other = write_checkpoint(tmp_path / "tokenizer")
    assert build("--set", f"tokenizer_dir={other}", "load_format=dummy", "max_num_seqs=8")[0] == 0
    status, _, err = build("--set", "max_queue_size=64", model=None)
    assert status == 0
    now = values(tmp_path)
    assert (now["model_dir"], now["tokenizer_dir"]) == (str(checkpoint), str(other))
    assert (now["load_format"], now["max_queue_size"]) == ("dummy", "64")
    assert f"keeps model_dir={checkpoint} load_format=dummy tokenizer_dir={other}" in err
    assert "changes to the default: max_num_seqs (" in err and "was 8)" in err
    assert err.count("\n") == 1


def test_what_is_given_wins_and_nothing_is_said_where_nothing_is_kept(
    build, checkpoint, tmp_path, monkeypatch
):
    assert build(model=None)[2] == ""
    monkeypatch.setattr(sys, "executable", f"{Path.cwd()}/some/python")  # typed without the folder
    serve = f"some/python -m flashinfer_backend.serve --model-repository {tmp_path / 'repo'}"
    assert build() == (0, f"{tmp_path / 'repo'}: written; to serve it: {serve}\n", "")
    assert values(tmp_path)["model_dir"] == str(checkpoint)
    status, _, err = build("--model", "bundled", model=None)
    assert (status, err) == (0, "")
    assert values(tmp_path)["model_dir"] == values(tmp_path)["tokenizer_dir"] == "bundled"


def test_the_name_of_the_llm_model_is_kept(build, tmp_path):
    assert build("--llm-name", "tensorrt_llm")[0] == 0
    assert "keeps --llm-name tensorrt_llm" in build()[2]
    assert build("--llm-name", "llm")[2] == ""
    assert (tmp_path / "repo/llm").is_dir() and not (tmp_path / "repo/tensorrt_llm").exists()


def test_the_kept_build_equals_the_whole_command(build, tmp_path):
    assert build("--set", "load_format=dummy")[0] == 0
    assert build("--diff", model=None)[1] == ""
    assert build(model=None)[0] == 0
    once = snapshot(tmp_path / "repo")
    assert build(model=None)[0] == 0
    assert snapshot(tmp_path / "repo") == once


def test_every_value_that_is_not_given_again_is_named(build, checkpoint, tmp_path):
    given = ["max_queue_size=64", "preferred_batch_size=4", "ensemble_report_outputs=false", "max_num_seqs=8"]
    assert build("--set", *given, "streamed_log_probs=all")[0] == 0
    status, _, err = build("--set", "max_num_seqs=2048")
    assert status == 0
    assert err.startswith(f"build.py: {tmp_path / 'repo'} changes to the default: ")
    changes = err.strip().partition("default: ")[2].split("), ")
    assert sorted(change.rstrip(")") for change in changes) == [
        "ensemble_report_outputs (true, was false",
        "max_queue_size (8192, was 64",
        "preferred_batch_size (256, was 4",
        "streamed_log_probs (chunk, was all",
    ]


def test_a_changed_file_is_refused_whatever_it_holds(build, tmp_path):
    assert build("--set", "max_queue_size=64")[0] == 0
    file = tmp_path / "repo/llm/config.pbtxt"
    file.write_text(file.read_text().replace('"256"', '"many"'))
    status, _, err = build()
    assert status == 2 and "holds files changed or added since it was built: llm/config.pbtxt" in err


def test_a_folder_of_an_older_build_is_not_given_another_checkpoint(build, checkpoint, tmp_path):
    assert build("--llm-name", "tensorrt_llm")[0] == 0
    file = tmp_path / "repo/build.json"
    record = json.loads(file.read_text())
    del record["values"]
    file.write_text(json.dumps(record))
    before = snapshot(tmp_path / "repo")
    status, _, err = build(model=None)
    assert status == 2 and snapshot(tmp_path / "repo") == before
    assert "by an older build.py, which did not record its knobs: name the checkpoint again, --model" in err
    status, _, err = build("--set", "max_num_seqs=8")
    assert status == 0 and "keeps --llm-name tensorrt_llm" in err
    assert (values(tmp_path)["model_dir"], values(tmp_path)["max_num_seqs"]) == (str(checkpoint), "8")


def test_a_changed_record_is_no_reason_to_fail(build, tmp_path):
    assert build()[0] == 0
    file = tmp_path / "repo/build.json"
    record = json.loads(file.read_text())
    record["values"] |= {"max_num_seqs": "many", "max_queue_size": "77"}
    file.write_text(json.dumps(record))
    status, _, err = build()
    assert status == 0 and "max_num_seqs (256, was many), max_queue_size (" in err


def test_what_follows_from_others_changes_with_them_without_a_word(build, tmp_path):
    given = ["max_num_seqs=2048", "triton_max_batch_size=8"]
    assert build("--set", *given, "--llm-name", "tensorrt_llm")[0] == 0
    err = build("--set", "triton_max_batch_size=16", "--llm-name", "llm")[2]
    assert "changes to the default: max_num_seqs (256, was 2048)\n" in err
