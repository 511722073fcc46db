"""Pages of the site from the notebooks in examples/, which run when it is built. An error in a cell fails the build.

Cells with the tag `install` do not run; those with the tag `torch` only run where PyTorch is installed.
"""

from __future__ import annotations

import html
import importlib.util
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).parent.parent / "examples"
_SECONDS = 120  # timeout of a cell
_QUIET = "--IPKernelApp.log_level=40"
_KINDS = ("text/html", "image/svg+xml", "image/png", "text/plain")  # an output is shown as the first that it has
_LINK = re.compile(r"\((\w+)\.ipynb\)")
_log = logging.getLogger("mkdocs.hooks.notebooks")
_outputs: dict[str, str] = {}  # HTML by its marker in a page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_page(path, config.repo_url)))
    return files


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Put the outputs in, which Markdown would change."""
    return re.sub(r"<p>(notebook-output-\w+)</p>", lambda marker: _outputs[marker[1]], content)


def _page(path: Path, repository: str | None) -> str:
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    skipped = {"install"} if importlib.util.find_spec("torch") else {"install", "torch"}
    cells = notebook.cells
    notebook.cells = [cell for cell in cells if not skipped & {*cell.metadata.get("tags", ())}]
    with tempfile.TemporaryDirectory() as directory:
        resources = {"metadata": {"path": directory}}
        try:
            NotebookClient(notebook, timeout=_SECONDS, resources=resources, extra_arguments=[_QUIET]).execute()
        except CellExecutionError as error:
            raise PluginError(f"{path.name}: {error}") from error
        return "\n\n".join(_parts(path.stem, cells, repository, directory))


def _parts(name: str, cells: list[Any], repository: str | None, directory: str) -> Iterator[str]:
    """Yield the Markdown of the cells. directory: where they ran, which is not shown."""
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            yield _LINK.sub(r"(\1.md)", cell.source)
        else:
            yield f"```python\n{cell.source}\n```"
            if "install" in cell.metadata.get("tags", ()):
                yield _about(name, repository)
            elif cell.execution_count is None:
                yield "*Needs PyTorch, which the build of this site has not: run the notebook to see what it prints.*"
        shown = "".join(_output(name, output) for output in cell.get("outputs", ())).replace(directory, ".")
        if shown:
            marker = f"notebook-output-{name}{number}"
            _outputs[marker] = f'<div class="notebook-output">{shown}</div>'
            yield marker


def _about(name: str, repository: str | None) -> str:
    text = f"This page is `examples/{name}.ipynb`, and ran when the site was built"
    if repository is None:
        return f"{text}. In Colab: *File*, *Upload notebook*."
    place = repository.removeprefix("https://github.com/").strip("/")
    return (
        f"{text}. [Open it in Colab](https://colab.research.google.com/github/{place}/blob/main/examples/{name}.ipynb)."
    )


def _output(name: str, output: Any) -> str:
    """Return the HTML of an output of a cell."""
    if output.output_type == "stream":
        if output.name == "stderr":  # libraries warn there, and may name paths
            _log.info("%s: %s", name, output.text.strip())
            return ""
        return f"<pre>{html.escape(output.text)}</pre>"
    kind = next(kind for kind in _KINDS if kind in output.data)
    data = output.data[kind]
    if kind == "image/png":
        return f'<img src="data:image/png;base64,{data.strip()}" alt="output of the cell above">'
    return f"<pre>{html.escape(data)}</pre>" if kind == "text/plain" else str(data)
