"""The folded solution below each exercise of a notebook, made from the record of the exercise."""

from __future__ import annotations

import re

import nbformat
from nbformat import NotebookNode

TAG = "solution"
CHECK = re.compile(r"^\w+ = check\(\"([\d.]+)\"", re.MULTILINE)
SOLUTION = """<details><summary>Solution (try first)</summary>

```python
{code}
```

{why}

</details>"""


def solution_cell(key: str) -> NotebookNode:
    """The cell that stands directly after the check of an exercise."""
    from minigrpo.exercises.reader import find, solution_source  # loads torch, which is slow

    # A < begins HTML in Markdown, unless it is code.
    why = re.sub(r"(`[^`]*`)|<", lambda match: match[1] or r"\<", " ".join(find(key).why.split()))
    text = SOLUTION.format(code=solution_source(key).strip(), why=why)
    name = f"solution-{key.replace('.', '-')}"
    return nbformat.v4.new_markdown_cell(text, id=name, metadata={"tags": [TAG]})


def with_solutions(cells: list[NotebookNode]) -> list[NotebookNode]:
    """The cells of a notebook with the solution of each exercise after its check."""
    new_cells = []
    for cell in cells:
        if TAG not in cell.metadata.get("tags", []):
            keys = CHECK.findall(cell.source) if cell.cell_type == "code" else []
            new_cells += [cell, *map(solution_cell, keys)]
    return new_cells
