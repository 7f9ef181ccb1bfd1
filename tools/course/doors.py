"""Write a new address of the repository into every file that names the old one.

    python tools/course/doors.py https://github.com/you/minigrpo    # make address REPOSITORY=...

`Repository` in pyproject.toml holds the address. The first cell of each notebook installs the
course from it, and the links to Colab, Kaggle and others, README.md and CITATION.cff name it too.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = r"https://github\.com/([\w.-]+/[\w.-]+)"  # Colab opens those of GitHub alone
TEXTS = {".cff", ".ipynb", ".json", ".md", ".py", ".toml", ".yml"}
LEFT_OUT = {".git", ".venv", "answers", "build", "cache", "dist", "runs"}


def repository(root: Path = ROOT) -> str:
    """Owner and name of the repository, as pyproject.toml has them."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(rf'^Repository = "{ADDRESS}"$', text, re.MULTILINE)[1]


def site(root: Path = ROOT) -> str:
    """The address of the course's pages, with a slash behind it."""
    return "https://{}.github.io/{}/".format(*repository(root).split("/"))


def forms(name: str) -> list[str]:
    """How links name a repository such as "you/minigrpo"."""
    sites = ("github.com", "colab.research.google.com/github", "codespaces.new")
    return [*(f"{site}/{name}" for site in sites), "{}.github.io/{}".format(*name.split("/"))]


def files(root: Path = ROOT) -> Iterator[Path]:
    """The text files of the repository, without what was built, installed or downloaded."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted({*folders} - LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(names) if Path(name).suffix in TEXTS)


def move(new: str, root: Path = ROOT) -> list[Path]:
    """Replace owner and name of the repository in all files; returns those that have changed."""
    links = dict(zip(forms(repository(root)), forms(new)))
    old = re.compile("|".join(rf"(?<![\w.-]){re.escape(link)}(?![\w-])" for link in links))
    changed = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        moved = old.sub(lambda link: links[link[0]], text)
        if moved != text:
            path.write_text(moved, encoding="utf-8", newline="\n")
            changed.append(path)
    return changed


if __name__ == "__main__":
    new = re.fullmatch(ADDRESS, " ".join(sys.argv[1:]).removesuffix("/").removesuffix(".git"))
    if not new:
        sys.exit("Name the address: make address REPOSITORY=https://github.com/you/minigrpo")
    for path in move(new[1]):
        print(path.relative_to(ROOT))
