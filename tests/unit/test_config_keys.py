# SPDX-License-Identifier: Apache-2.0
"""Every key of every family's config.json, changed: the same logits as transformers', or a refusal that names
it.

Some of each family's keys by default; all with ALL_CASES=1 in the environment, which takes minutes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_models import Paged, load, prompt
from torch import Tensor

from checkpoints import KINDS, make_checkpoint
from flashinfer_backend.models.weights import WeightsError
from thinned import ALL_CASES

# One key in so many, others for the next family.
THINNED = 1 if ALL_CASES else 8
# What says which family it is, how weights are stored, or that nothing was changed.
NOT_CHANGED = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
FAMILIES = {architecture: kind for kind, (architecture, *_) in reversed(KINDS.items())}
IDS = prompt(90)


def changes(value: Any) -> Iterator[Any]:
    """Other values of the same type, and what may stand for none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value)
    elif isinstance(value, float):
        yield 2 * value
    elif isinstance(value, str):
        yield "gelu"
    elif isinstance(value, list):
        yield value[::-1]
    elif isinstance(value, dict):
        for key, inner in value.items():
            for other in changes(inner):
                yield value | {key: other}
    else:
        yield from (True, 3)
    if value is not None:
        yield None


def inner_keys(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from inner_keys(inner)


def theirs(folder: Path) -> Tensor | None:
    """Logits, or None where transformers does not take it, or makes up weights."""
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if told["missing_keys"] or told["mismatched_keys"]:
            return None
        with torch.inference_mode():
            return model.eval()(torch.tensor([IDS])).logits[0]
    except Exception:
        return None


def judge(folder: Path, key: str) -> str:
    """What is wrong with what is computed, or nothing."""
    try:
        (ours,) = Paged(load(folder)).step([(2, IDS)])
    except WeightsError:
        return ""
    except (ValueError, OSError) as error:
        told = str(error).replace("rope type", "rope_type")
        names = {key, *inner_keys(json.loads((folder / "config.json").read_text()).get(key))}
        return "" if any(name in told for name in names) else f"is refused without its name: {error}"
    expected = theirs(folder)
    if expected is None:
        return ""
    if expected.shape != ours.shape or not torch.allclose(ours, expected, atol=1e-3, rtol=0):
        return "is not honoured, nor refused"
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_changed_keys_are_honoured_or_refused(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(FAMILIES[family], tmp_path)
    config = folder / "config.json"
    written = json.loads(config.read_text())
    start = list(FAMILIES).index(family)
    found = []
    for key in sorted(written.keys() - NOT_CHANGED)[start % THINNED :: THINNED]:
        for value in changes(written[key]):
            config.write_text(json.dumps(written | {key: value}))
            if wrong := judge(folder, key):
                found.append(f"{key} = {json.dumps(value)} {wrong}")
    assert not found, "\n".join(found)
