# SPDX-License-Identifier: Apache-2.0
"""Weights that threads bring to a GPU, against the files."""

from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import make_checkpoint
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models import upload
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.safetensors_file import Header
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.upload import FileRange, Uploader
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["all", "of-two-ranks"])
def test_weights_are_as_on_a_cpu(shard, tmp_path):
    """Rows are read, columns are copied; of both there are several chunks and parts of one."""
    sizes = {"hidden_size": 1024, "intermediate_size": 5000, "vocab_size": 20001}
    path = make_checkpoint("llama", tmp_path, **sizes)
    config = read_spec(path).share(shard)
    found = []
    for device in ("cuda", "cpu"):
        model = Transformer(config, torch_ops, "bfloat16", device)
        load_weights(model, path)
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, expected in found[1].items():
        assert torch.equal(found[0][name], expected), name


def test_no_buffer_is_filled_again_before_it_has_arrived(tmp_path, monkeypatch):
    """The device is behind: copies wait for work that takes longer than reading all of it."""
    monkeypatch.setattr(upload, "CHUNK", 1 << 20)
    tensors = {f"t{i:02d}": torch.full((3 << 18,), float(i)) for i in range(60)}  # 3 MiB each
    save_file(tensors, tmp_path / "some")
    header = Header(tmp_path / "some")
    places = [
        FileRange(tmp_path / "some", *header.find(name, [slice(None)]), torch.float32) for name in tensors
    ]
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with closing(Uploader(torch.device("cuda"), places)) as uploader:
        arrived = []
        for _ in places:
            torch.mm(matrix, matrix)
            arrived.append(uploader.next())
        for i, tensor in enumerate(arrived):
            assert bool((tensor == i).all()), i
