"""Bring the course up to date, and keep what you have written into its notebooks.

    python tools/update.py                    # make update
    python tools/update.py --answers-of OLD   # OLD: another copy of the course, with your answers

First your notebooks are copied to `answers/`, where they stay. Then the new edition is fetched
with `git pull`, and each of your answers takes the place of its stub again. An exercise that asks
for other arguments now keeps its new stub; your answer to the old one is in the copy.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECK = re.compile(r"\bcheck\(\s*\"([\d.]+)\",\s*(\w+)")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def exercises(notebook: dict[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """The key of each exercise, the name of its function, and the code cells it is written in."""
    cells: list[dict[str, Any]] = []  # since the last text
    for cell in notebook["cells"]:
        check = CHECK.search(source(cell)) if cell["cell_type"] == "code" else None
        if check:
            yield check[1], check[2], cells
        cells = [*cells, cell] if cell["cell_type"] == "code" and not check else []


def parameters(code: str, name: str) -> list[str] | None:
    """Of the function of this name; None if there is none or it is still a stub."""
    try:
        body = ast.parse(code).body
    except SyntaxError:  # unfinished: it is kept as it is
        return []
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            written = [n for n in node.body if not isinstance(getattr(n, "value", 0), ast.Constant)]
            stub = len(written) == 1 and "NotImplementedError" in ast.unparse(written[0])
            return None if stub else [argument.arg for argument in node.args.args]
    return None


def carry(old: Path, new: Path) -> tuple[list[str], list[str]]:
    """Put the answers of one notebook into another; the keys of those carried and of the others."""
    notebook, mine = read(new), read(old)
    places = {key: (name, cells) for key, name, cells in exercises(notebook)}
    printed = {source(cell) for cell in notebook["cells"]}
    carried, left = [], []
    for key, name, cells in exercises(mine):
        code = "\n\n\n".join(source(cell) for cell in cells if source(cell) not in printed)
        if (asked := parameters(code, name)) is None:
            continue
        stub = places[key][1][-1] if key in places and places[key][1] else None
        wanted = stub and re.search(rf"def {name}\((.*?)\)", source(stub), re.S)
        names = re.findall(r"(\w+)\s*(?:,|=[^,]*|$)", wanted[1]) if wanted else None
        if names is None or asked and asked != names:
            left.append(key)
            continue
        stub["source"] = code.splitlines(keepends=True)
        stub["outputs"] = []
        carried.append(key)
    if carried:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        unfinished = new.with_suffix(".part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(new)
    return carried, left


def bring_back(copies: list[Path], folder: Path) -> None:
    """Put the answers in these notebooks into those of the same name, and say what was done."""
    for copy in copies:
        if not (folder / copy.name).is_file():
            print(f"{copy.name}: is not part of the course any more. Yours: {copy}")
            continue
        carried, left = carry(copy, folder / copy.name)
        print(f"{copy.name}: answers put back: {', '.join(carried) or 'none'}")
        if left:
            print(f"  not put back, because the exercise has changed: {', '.join(left)}")
            print(f"  Yours: {copy}")


def git(*words: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def update(root: Path = ROOT) -> None:
    """Copy the notebooks, fetch the new edition, put the answers back.

    Raises:
        RuntimeError: git refuses; the notebooks are then as they were.
    """
    notebooks = root / "notebooks"
    changed = git("diff", "--name-only", "HEAD", "--", "notebooks/*.ipynb", root=root).split("\n")
    mine = [root / name for name in changed if name and (root / name).is_file()]
    backup = root / "answers" / datetime.now().strftime("%Y-%m-%d %H.%M.%S.%f")
    if mine:
        backup.mkdir(parents=True)
        copies = [Path(shutil.copy2(path, backup)) for path in mine]
        print(f"{len(mine)} notebooks that you have changed are copied to {backup}")
        git("checkout", "HEAD", "--", *changed[:-1], root=root)
    try:
        print(git("pull", "--ff-only", root=root).strip())
    except RuntimeError:
        for path in mine:
            shutil.copy2(backup / path.name, path)
        raise
    if mine:
        bring_back(copies, notebooks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--answers-of", type=Path, metavar="OLD", help="another copy of the course")
    old = parser.parse_args().answers_of
    if old is None:
        try:
            update()
        except RuntimeError as error:
            sys.exit(f"{error}\nNothing was changed.")
        return
    if not (copies := sorted((old / "notebooks").glob("*.ipynb"))):
        sys.exit(f"{old}: expected a copy of the course, with notebooks/ in it")
    bring_back(copies, ROOT / "notebooks")


if __name__ == "__main__":
    main()
