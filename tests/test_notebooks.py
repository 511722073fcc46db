"""The notebooks of examples/; make docs runs them, and shows what they print."""

import ast
import json
from pathlib import Path
from typing import Any

import public_api
import pytest
from test_public_api import imports_of

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@each
def test_a_notebook_is_stored_without_outputs_and_installs_in_one_cell(path: Path) -> None:
    first, *others = cells_of(path, "code")
    assert first["metadata"] == {"tags": ["install"]}
    assert "".join(first["source"]).replace("'", "").startswith("%pip install --quiet gym-trace")
    assert not any("%pip" in "".join(cell["source"]) for cell in others)
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in (first, *others))


@each
def test_a_notebook_imports_public_names_and_says_what_needs_pytorch(path: Path) -> None:
    uses_torch = False
    for cell in cells_of(path, "code")[1:]:
        source = "".join(cell["source"])
        ast.parse(source)
        assert [name for name in imports_of(source) if not public_api.is_public(name)] == []
        uses_torch = uses_torch or "import torch" in source
        assert ("torch" in cell["metadata"].get("tags", ())) is uses_torch  # later cells use torch, too


def test_every_notebook_has_a_page_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert f": notebooks/{path.stem}.md\n" in site
        assert cells_of(path, "markdown")[0]["source"][0].startswith("# ")
