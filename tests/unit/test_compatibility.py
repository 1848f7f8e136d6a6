# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md names every tensor of the ensemble and of llm, and tests show each of its rows."""

import re
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
TITLES = {"ensemble": "Ensemble", "llm": "The model llm"}


def rows(title: str) -> list[list[str]]:
    """Cells of the table's rows below a heading."""
    section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def declared(model: str, kind: str) -> set[str]:
    config = (ROOT / "model_repo" / model / "config.pbtxt").read_text(encoding="utf-8")
    block = re.search(rf"^{kind} \[\n(.*?)^\]", config, re.MULTILINE | re.DOTALL)
    assert block
    return set(re.findall(r'^ *\{ name: "(\w+)"', block[1], re.MULTILINE))


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("model", TITLES)
def test_every_tensor_has_its_row(model: str, kind: str) -> None:
    named = [name for cells in rows(f"{TITLES[model]}: {kind}s") for name in code(cells[0])]
    assert len(named) == len(set(named)) and set(named) == declared(model, kind)


def test_every_tensor_of_preprocessing_and_postprocessing_is_named() -> None:
    table = rows("The models preprocessing and postprocessing")
    named = {name for cells in table for cell in cells[:2] for name in code(cell)}
    models = [(model, kind) for model in ("preprocessing", "postprocessing") for kind in ("input", "output")]
    assert named == set().union(*(declared(*each) for each in models))


def test_every_row_has_tests_that_exist() -> None:
    """compatibility.toml has the page's tables and rows, and tests for each."""
    shown = msgspec.toml.decode(Path(__file__).with_name("compatibility.toml").read_bytes())
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    tables = {title: [cells[0] for cells in rows(title)] for title in titles if rows(title)}
    del tables["Names of settings"]  # those are knobs
    assert {title: list(table) for title, table in shown.items()} == tables
    files = [
        path
        for folder in ("server", "engine", "unit")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    ]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    existing = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    for table in shown.values():
        for row, tests in table.items():
            assert tests and set(tests) <= existing, row
