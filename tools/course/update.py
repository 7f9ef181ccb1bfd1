"""Bring the course up to date, and keep what you have written into its notebooks.

    python tools/course/update.py                    # make update
    python tools/course/update.py --answers-of OLD   # OLD: another copy of the course

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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # any Python will do
from minigrpo.files import atomic_path

ROOT = Path(__file__).resolve().parents[2]
CHECK = re.compile(r"\bcheck\(\s*\"([\d.]+)\",\s*(\w+)")
STUB = re.compile(r'"""\s+raise NotImplementedError\s*\Z')


def source(cell: dict) -> str:
    return "".join(cell["source"])


def exercises(notebook: dict) -> Iterator[tuple[str, str, list[dict]]]:
    """The key of each exercise, the name of its function, and the code cells it is written in."""
    cells: list[dict] = []  # since the last text
    for cell in notebook["cells"]:
        check = CHECK.search(source(cell)) if cell["cell_type"] == "code" else None
        if check:
            yield check[1], check[2], cells
        cells = [*cells, cell] if cell["cell_type"] == "code" and not check else []


def parameters(code: str, name: str) -> list[str] | None:
    """Of the function of this name; None if the code is unfinished or has no such function."""
    try:
        functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    asked = [[a.arg for a in node.args.args] for node in functions if node.name == name]
    return asked[-1] if asked else None


def bring_back(mine: Path, new: Path) -> None:
    """Put the answers of one notebook into its new edition, and say what was done."""
    if not new.is_file():
        print(f"{mine.name}: is not part of the course any more. Yours: {mine}")
        return
    notebook, answered = (json.loads(path.read_text(encoding="utf-8")) for path in (new, mine))
    stubs = {key: cells[-1] for key, _, cells in exercises(notebook) if cells}
    printed = {source(cell) for cell in notebook["cells"]}
    carried, left = [], []
    for key, name, cells in exercises(answered):
        code = "\n\n\n".join(source(cell) for cell in cells if source(cell) not in printed)
        if not code or STUB.search(code):
            continue
        asked = parameters(source(stubs[key]), name) if key in stubs else None
        if asked is None or parameters(code, name) not in (None, asked):
            left.append(key)
            continue
        stubs[key] |= {"source": code.splitlines(keepends=True), "outputs": []}
        carried.append(key)
    if carried:
        with atomic_path(new) as unfinished:
            text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            unfinished.write_text(text, encoding="utf-8", newline="\n")
    print(f"{mine.name}: answers put back: {', '.join(carried) or 'none'}")
    if left:
        print(f"  not put back, because the exercise has changed: {', '.join(left)}")
        print(f"  Yours: {mine}")


def git(*words: str, root: Path) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def update(root: Path = ROOT) -> None:
    """Copy the notebooks, fetch the new edition, put the answers back.

    Raises:
        RuntimeError: git refuses; the notebooks are then as they were.
    """
    changed = git("diff", "--name-only", "HEAD", "--", "notebooks/*.ipynb", root=root).splitlines()
    mine = [root / name for name in changed if (root / name).is_file()]
    backup = root / "answers" / datetime.now().strftime("%Y-%m-%d %H.%M.%S.%f")
    if mine:
        backup.mkdir(parents=True)
        print(f"{len(mine)} notebooks that you have changed are copied to {backup}")
    copies = [Path(shutil.copy2(path, backup)) for path in mine]
    if changed:
        git("checkout", "HEAD", "--", *changed, root=root)
    try:
        print(git("pull", "--ff-only", root=root).strip())
    except RuntimeError:
        for path, copy in zip(mine, copies):
            shutil.copy2(copy, path)
        raise
    for path, copy in zip(mine, copies):
        bring_back(copy, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--answers-of", type=Path, metavar="OLD", help="another copy of the course")
    if old := parser.parse_args().answers_of:
        if not (copies := sorted(old.glob("notebooks/*.ipynb"))):
            sys.exit(f"{old}: expected a copy of the course, with notebooks/ in it")
        for path in copies:
            bring_back(path, ROOT / "notebooks" / path.name)
        sys.exit()
    try:
        update()
    except RuntimeError as error:
        sys.exit(f"{error}\nNothing was changed.")
