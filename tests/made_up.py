"""Courses that are made up, for the tests of the tools: a few notebooks of a few cells."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode

ENTRY = """
[[notebook]]
number = "{number}"
file = "{stem}.ipynb"
title = "{title}"
path = "core"
built = "what {number} builds"
inside = "what {number} is about"
card = "The card of {number} & more."
figure = "figure"
seconds = 5
"""


def notebook(*sources: str, text: str = "# A title", tags: tuple[str, ...] = ()) -> NotebookNode:
    """A notebook of a text and these code cells; `tags` are those of the last one."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources, start=1)]
    for cell in cells[-1:]:
        cell.metadata["tags"] = list(tags)
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(text, id="top"), *cells])
    nb.nbformat_minor = 5
    return nb


def course(root: Path, notebooks: dict[str, NotebookNode]) -> Path:
    """A course of notebooks such as "01_one"."""
    for folder in ("notebooks", "figures"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "figures" / "map.svg").write_text("<svg/>")
    entries = ""
    for stem, nb in notebooks.items():
        nbformat.write(nb, root / "notebooks" / f"{stem}.ipynb")
        entries += ENTRY.format(number=stem[:2], stem=stem, title=stem[3:].capitalize())
    (root / "course.toml").write_text(entries)
    (root / "pyproject.toml").write_text('Repository = "https://github.com/made/up"\n')
    return root


def files(folder: Path) -> list[str]:
    """The names in a folder, none if it isn't there."""
    return sorted(path.name for path in folder.glob("*"))
