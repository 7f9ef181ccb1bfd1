"""Bring the course up to date, and keep what you have written into its notebooks.

    python tools/course/update.py    # make update

First your notebooks are copied to `answers/`, where they stay. Then the new edition is fetched
with `git pull`, and each of your answers takes the place of its stub again. An exercise that asks
for other arguments now keeps its new stub; your answer to the old one is in the copy.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = re.compile(r"\bcheck\(\s*\"([\dA.]+)\",\s*(\w+)")
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
        asked = re.search(rf"def {name}\(.*?\)", source(stubs.get(key, {"source": ""})), re.DOTALL)
        if asked and asked[0] in code:
            stubs[key] |= {"source": code.splitlines(keepends=True), "outputs": []}
            carried.append(key)
        else:
            left.append(key)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    new.write_text(text, encoding="utf-8", newline="\n")
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
    """All three steps; on a RuntimeError git refuses, and the notebooks are as they were."""
    changed = git("diff", "--name-only", "HEAD", "--", "notebooks/*.ipynb", root=root).splitlines()
    backup = root / "answers" / datetime.now().strftime("%Y-%m-%d %H.%M.%S.%f")
    backup.mkdir(parents=True)
    mine = [root / name for name in changed if (root / name).is_file()]
    copies = {path: Path(shutil.copy2(path, backup)) for path in mine}
    print(f"{len(mine)} notebooks that you have changed are copied to {backup}")
    try:
        if changed:
            git("checkout", "HEAD", "--", *changed, root=root)
        print(git("pull", "--ff-only", root=root).strip())
    except RuntimeError:
        for path, copy in copies.items():
            shutil.copy2(copy, path)
        raise
    for path, copy in copies.items():
        bring_back(copy, path)


if __name__ == "__main__":
    try:
        update()
    except RuntimeError as error:
        sys.exit(f"{error}\nNothing was changed.")
