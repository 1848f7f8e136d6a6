# SPDX-License-Identifier: Apache-2.0
"""The command that prints where tensors of a checkpoint go: they are there once it is loaded."""

import re

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import make_checkpoint, make_multimodal
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models import where
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import Weight

NAME = re.compile(r"(\S+) (\[.*?\])(?: -> (.*))?")
OF_RANK = re.compile(r"  rank (\d): (?:all|(rows|columns) (\d+):(\d+)) -> (.*)")


def read(model: Transformer, name: str, fills: str) -> torch.Tensor:
    """What lies at a place that the command names."""
    path, _, rows = fills.removeprefix("model.").partition(", rows ")
    found = model
    for step in path.split("."):
        found = found[int(step)] if step.isdigit() else getattr(found, step)
    if isinstance(found, Weight):
        found = found.bias if name.endswith(".bias") else found.data
    return found[slice(*map(int, rows.split(":")))] if rows else found


FOLDED = {"shared_expert_intermediate_size": 48}  # as one of the experts


@pytest.mark.parametrize(
    ("kind", "sizes"), [("qwen2", {}), ("qwen3-moe", {}), ("mixtral", {}), ("qwen2-moe", FOLDED)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_are_where_it_says(kind, sizes, ranks, tmp_path, capsys):
    folder = make_checkpoint(kind, tmp_path, **sizes)
    stored = load_file(folder / "model.safetensors")
    models = [
        Transformer(read_spec(folder).share(Shard(rank, ranks)), torch_ops, "float32", "cpu")
        for rank in range(ranks)
    ]
    for model in models:
        load_weights(model, folder)
    assert where.main([str(folder), "--tensor-parallel-size", str(ranks)]) == 0
    seen, name = set(), ""
    for line in capsys.readouterr().out.splitlines():
        if named := NAME.fullmatch(line):
            name, shape, fills = named.groups()
            assert str([*stored[name].shape]) == shape
            seen.add(name)
            expected, rank = stored[name], 0
        else:
            rank, what, first, last, fills = OF_RANK.fullmatch(line).groups()
            part = slice(int(first), int(last)) if what else slice(None)
            expected = stored[name][:, part] if what == "columns" else stored[name][part]
        if fills:
            assert torch.equal(read(models[int(rank)], name, fills)[: len(expected)], expected), line
    assert seen == set(stored)


def test_a_name_is_looked_for(capsys):
    assert where.main(["bundled", "layers.1.self_attn.k"]) == 0
    assert capsys.readouterr().out == (
        "model.layers.1.self_attn.k_proj.weight [128, 128] -> model.layers.1.qkv, rows 256:384\n"
    )
    for arguments, message in (
        (["bundled", "nowhere"], "no tensor that config.json asks for has 'nowhere' in its name"),
        (["bundled", "--tensor-parallel-size", "3"], "tensor_parallel_size=3 should divide"),
    ):
        with pytest.raises(SystemExit) as end:
            where.main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_name_can_be_the_checkpoints_own(tmp_path, capsys):
    """The text model of a multimodal one has another beginning there."""
    folder = make_multimodal("qwen3", tmp_path)
    names = [name for name in load_file(folder / "model.safetensors") if ".layers.1.self_attn.k_proj" in name]
    assert names == ["model.language_model.layers.1.self_attn.k_proj.weight"]
    assert where.main([str(folder), *names]) == 0
    assert capsys.readouterr().out.startswith("model.layers.1.self_attn.k_proj.weight [")
