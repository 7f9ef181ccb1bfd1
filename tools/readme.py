"""Bring the figures of README.md up to date: each is the output of a cell of a notebook.

    python tools/readme.py

An image `figures/01_char_gpt.loss-figure.png` is what cell `loss-figure` of notebook 01_char_gpt
has drawn.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
IMAGE = re.compile(r"!\[[^\]]*\]\((figures/([\w-]+)\.([\w-]+)\.png)\)")


def figures(root: Path = ROOT) -> dict[Path, bytes]:
    """Each image of the README with the PNG that its notebook holds.

    Raises:
        ValueError: the README names a cell that has no figure.
    """
    found = {}
    for path, notebook, cell_id in IMAGE.findall((root / "README.md").read_text("utf-8")):
        nb = nbformat.read(root / "notebooks" / f"{notebook}.ipynb", as_version=4)
        pngs = [
            output["data"]["image/png"]
            for cell in nb.cells
            if cell.get("id") == cell_id
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        if len(pngs) != 1:
            raise ValueError(f"{path}: cell {cell_id!r} of {notebook} has {len(pngs)} figures")
        found[root / path] = base64.b64decode(pngs[0])
    return found


def main() -> None:
    """Write every figure whose content has changed."""
    for path, png in figures().items():
        if not path.is_file() or path.read_bytes() != png:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
