"""Bring README.md up to date: its figures are outputs of notebooks, its tables stored results.

    python tools/readme.py

An image `figures/01_char_gpt.loss-figure.png` is what cell `loss-figure` of notebook 01_char_gpt
has drawn. The table between the two comments `results` shows those of the experiments in
data/results/results.json that SHOWN names, the ones between the comments `thinking` and `bench` are
made of thinking.json and bench.json beside it.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import bench
import nbformat
import results
import thinking

ROOT = Path(__file__).resolve().parent.parent
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
IMAGE = re.compile(r"!\[[^\]]*\]\((figures/([\w-]+)\.([\w-]+)\.png)\)")


def with_table(text: str) -> str:
    """The text with each table of stored results in its place.

    Raises:
        ValueError: no place for one, or more than one.
    """
    stored = results.load()["experiments"]
    shown = {name: stored[name] for name in SHOWN if name in stored}
    tables = {
        "results": results.table({"experiments": shown}),
        "thinking": thinking.table(),
        "bench": bench.table(bench.load()),
    }
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if (found := len(place.findall(text))) != 1:
            raise ValueError(f"README.md: expected one pair of comments `{name}`, got {found}")
        text = place.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    return text


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
    """Write the tables and every figure whose content has changed."""
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    if with_table(text) != text:
        readme.write_text(with_table(text), "utf-8")
        print("written: the tables of README.md")
    for path, png in figures().items():
        if not path.is_file() or path.read_bytes() != png:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
