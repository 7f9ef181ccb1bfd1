"""Notebook files: how they are read and written, and the form in which they are committed."""

import base64
import io
import json
import re
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode
from PIL import Image

from minigrpo.files import atomic_path

FIGURES = ("image/png", "image/svg+xml")
# Cells whose code JupyterLab and Colab fold, down to a first line. `pages.py` knows the tags too.
FOLDED = {"verdict", "plot", "setup", "drawing"}
FORM = {"jupyter": {"source_hidden": True}, "cellView": "form"}
APART = {"predict", "verdict"}  # cells whose outputs answer questions, or confirm an answer
COLORS = 128  # of a stored figure
CHECK = re.compile(r"^\w+ = check\(\"([\dA.]+)\"", re.MULTILINE)
SOLUTION = """<details><summary>Solution (try first)</summary>

```python
{code}
```

{why}

</details>"""


class CourseError(Exception):
    """What went wrong, as the reader is told it."""


def read(path: Path) -> NotebookNode:
    """Read a notebook whose cells have ids: nbformat would make up others at each reading."""
    try:
        nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    except Exception as error:  # JSON, encoding, schema: nbformat raises them all as they come
        raise CourseError(f"{path.name} cannot be read: {error}") from error
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        raise CourseError(f"{path.name} is older than notebook format 4.5, which has cell ids")
    return nb


def as_json(nb: NotebookNode) -> str:
    """The text of a notebook file: sorted keys, indent 1, one line break at the end."""
    return nbformat.writes(nb).rstrip("\n") + "\n"


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def committed_form(nb: NotebookNode) -> NotebookNode:
    """Reduce an executed notebook, in place, to what does not change from run to run."""
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    nb.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in nb.cells:
        keys = ("alt", "tags") if cell.cell_type == "code" else ("tags",)
        kept = {key: cell.metadata[key] for key in keys if key in cell.metadata}
        folded = FORM if FOLDED & {*kept.get("tags", [])} else {}
        cell.metadata = nbformat.from_dict(kept | folded)
        if cell.cell_type == "code":
            CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)  # as nbval compares them
            describe(cell)
            for output, kind in figures(cell):
                if kind == "image/png":
                    output.data[kind] = lighter(output.data[kind])
    return nb


def alts(cell: NotebookNode) -> list[str]:
    """What a code cell says about its figures, for people who cannot see them: one text each."""
    told = cell.metadata.get("alt", [])
    return [told] if isinstance(told, str) else list(told)


def figures(cell: NotebookNode) -> list[tuple[NotebookNode, str]]:
    """Each figure among the outputs of a cell, and of which kind it is; a drawing has two."""
    kinds = ((out, kinds_of(out)) for out in cell.get("outputs", []))
    return [(out, kinds[0]) for out, kinds in kinds if kinds]


def kinds_of(output: NotebookNode) -> list[str]:
    return [kind for kind in FIGURES if kind in output.get("data", {})]


def describe(cell: NotebookNode) -> None:
    """Give each figure of a cell its description, beside its width and height."""
    for (output, _), alt in zip(figures(cell), alts(cell)):
        for kind in kinds_of(output):
            output.metadata.setdefault(kind, NotebookNode())["alt"] = alt


def lighter(png: str) -> str:
    """A PNG in base64 with few colors, which takes a third of the room; once is enough."""
    image, out = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    if image.mode == "P":
        return png
    few_colors(image).save(out, "PNG", optimize=True, dpi=image.info.get("dpi"))
    return base64.b64encode(out.getvalue()).decode()


def few_colors(image: Image.Image) -> Image.Image:
    """What a drawing needs of them, on white."""
    ground = Image.new("RGBA", image.size, "white")
    flat = Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return flat.quantize(COLORS, dither=Image.Dither.NONE)


def predicted(path: Path) -> Path:
    """Where the outputs of a notebook's cells APART are: not in it, below the questions."""
    return path.parents[1] / "tests" / "predicted" / f"{path.stem}.json"


def with_predicted(nb: NotebookNode, path: Path) -> NotebookNode:
    """Put the outputs that answer a question back, in place; `path` is that of the notebook."""
    file = predicted(path)
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for cell in nb.cells:
        if cell.id in stored:
            cell.outputs = nbformat.from_dict(stored[cell.id])
    return nb


def without_predicted(nb: NotebookNode) -> dict[str, list]:
    """Take them out, in place; returns them by the ids of their cells."""
    taken = {}
    for cell in nb.cells:
        if cell.cell_type == "code" and APART & {*cell.metadata.get("tags", [])}:
            taken[cell.id], cell.outputs = cell.outputs, []
    return taken


def solution_cell(key: str) -> NotebookNode:
    """The folded cell that stands directly after the check of an exercise, made of its record."""
    from minigrpo.exercises.reader import find, solution_source  # loads torch, which is slow

    # A < begins HTML in Markdown, unless it is code.
    why = re.sub(r"(`[^`]*`)|<", lambda match: match[1] or r"\<", " ".join(find(key).why.split()))
    text = SOLUTION.format(code=solution_source(key).strip(), why=why)
    name = f"solution-{key.replace('.', '-')}"
    return nbformat.v4.new_markdown_cell(text, id=name, metadata={"tags": ["solution"]})


def with_solutions(cells: list[NotebookNode]) -> list[NotebookNode]:
    """The cells of a notebook with the solution of each exercise after its check."""
    new_cells = []
    for cell in cells:
        if "solution" not in cell.metadata.get("tags", []):
            keys = CHECK.findall(cell.source) if cell.cell_type == "code" else []
            new_cells += [cell, *map(solution_cell, keys)]
    return new_cells


def uncommittable(nb: NotebookNode) -> list[str]:
    """What forbids committing an executed notebook: one sentence per finding."""
    findings = []
    for number, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), start=1):
        where = f"code cell {number} (id {cell.id})"
        if cell.execution_count != number:
            findings.append(f"{where} was not executed (is it empty, or tagged to be skipped?)")
        for output in cell.outputs:
            if output.get("name") == "stderr":
                findings.append(f"{where} wrote to stderr: {output.text.strip()[:300]}")
            expected = "raises-exception" in cell.metadata.get("tags", [])
            if output.output_type == "error" and not expected:
                findings.append(f"{where} raised {output.ename}: {output.evalue}")
            if any("widget" in kind for kind in output.get("data", {})):
                findings.append(f"{where} shows a widget, which a stored notebook cannot")
        drawn, told = len(figures(cell)), len(alts(cell))
        if told and drawn != told:
            findings.append(f"{where} has {drawn} figures, and describes {told} in `alt`")
    return findings
