"""Bring the pages up to date: their figures are outputs of notebooks, their tables stored results.

    python tools/readme.py

An image `figures/01_char_gpt.loss-figure.png` in README.md or docs/ is what cell `loss-figure` of
notebook 01_char_gpt has drawn. A table between two comments such as `results: begin` and
`results: end` is made of what data/results/ holds. The table `results` shows the experiments that
SHOWN names.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools" / "experiments"))

import bench  # noqa: E402
import results  # noqa: E402
import thinking  # noqa: E402

SHOWN = (  # the other experiments end alike
    "the run of notebook 07",
    "no room to think",
    "reward for the form only",
    "reward for any thought",
    "supervised, the same demonstrations",
    "supervised, right demonstrations",
    "no baseline",
    "KL weight 0.1",
    "KL weight 1",
)
TABLES = {"docs/results.md": ("results", "thinking"), "docs/speed.md": tuple(bench.TABLES)}
IMAGE = re.compile(r"!\[[^\]]*\]\((?:\.\./)?(figures/([\w-]+)\.([\w-]+)\.png)\)")


def made(name: str) -> str:
    """A table, of what is stored."""
    if name == "results":
        stored = results.load()["experiments"]
        return results.table({"experiments": {key: stored[key] for key in SHOWN if key in stored}})
    if name == "thinking":
        return thinking.table()
    return bench.table(bench.load(), name)


def with_tables(text: str, page: str) -> str:
    """The text of a page with each of its tables in its place.

    Raises:
        ValueError: no place for one, or more than one.
    """
    for name in TABLES[page]:
        place = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if (count := len(place.findall(text))) != 1:
            raise ValueError(f"{page}: expected one pair of comments `{name}`, got {count}")
        text = place.sub(lambda match, name=name: f"{match[1]}{made(name)}\n{match[2]}", text)
    return text


def figures(root: Path = ROOT) -> dict[Path, bytes]:
    """Each image of README.md and docs/ that a notebook has drawn, with the PNG it holds.

    Raises:
        ValueError: a page names a cell that has no figure.
    """
    images = {}
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    named = [match for page in pages for match in IMAGE.findall(page.read_text("utf-8"))]
    for path, notebook, cell_id in named:
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
        images[root / path] = base64.b64decode(pngs[0])
    return images


def main() -> None:
    """Write the tables and every figure whose content has changed."""
    for page in TABLES:
        text = (ROOT / page).read_text("utf-8")
        if with_tables(text, page) != text:
            (ROOT / page).write_text(with_tables(text, page), "utf-8")
            print(f"written: the tables of {page}")
    for path, png in figures().items():
        if not path.is_file() or path.read_bytes() != png:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
