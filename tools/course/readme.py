"""Bring the pages up to date: what they list and count, their tables, their figures, the maps.

    python tools/course/readme.py

README.md, docs/notebooks.md, CITATION.cff and the maps of the notebooks follow course.toml. A
table between two comments such as `results: begin` and `results: end` is made of what data/results/
holds; the table `results` shows the experiments that SHOWN names. An image
`figures/01_char_gpt.loss-figure.png` in README.md or docs/ is what cell `loss-figure` of notebook
01_char_gpt has drawn.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import nbformat
from doors import repository
from listing import ROOT, notebooks

from minigrpo.files import atomic_path

sys.path.append(str(ROOT / "tools" / "experiments"))
import bench
import results
import store
import thinking

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
NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty""".split()
PART = re.compile(r'class="part" data-notebooks="([\w ]*)"')  # of figures/map.svg


def put(text: str, page: str, place: str, what: str, made: str) -> str:
    """The text of a page with `made` in its one place, which is a pattern.

    Raises:
        ValueError: no such place, or more than one.
    """
    if (count := len(re.findall(place, text, re.DOTALL))) != 1:
        raise ValueError(f"{page}: expected one {what}, got {count}")
    return re.sub(place, lambda _: made, text, flags=re.DOTALL)


def between(text: str, page: str, name: str, made: str) -> str:
    """The same for the place between two comments."""
    place = rf"(?<=<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)"
    return put(text, page, place, f"pair of comments `{name}`", made)


# ---------------------------------------------------------------------------------------------
# what course.toml decides


def tables() -> dict[str, str]:
    """The table of the notebooks, short and long."""
    short, long, address = "", "", repository()
    for notebook in notebooks():
        head, file, title = notebook.number, notebook.file, notebook.title
        colab = f"https://colab.research.google.com/github/{address}/blob/main/notebooks/{file}"
        read, write = (notebook.told[f"minutes of {what}"] for what in ("prose", "exercises"))
        short += f"| {head} [{title}](notebooks/{file}) ([Colab]({colab})) "
        short += f"| {notebook.built} | {read} + {write} |\n"
        long += f"| {head} | [{title}](../notebooks/{file}) | {notebook.inside} | {notebook.path} "
        long += f"| {read} | {write} | {notebook.seconds} | {notebook.exercises} |\n"
    names = "| notebook | what you'll have built | minutes, prose + exercises |\n|---|---|---|\n"
    more = "minutes of prose | minutes of exercises | seconds to run | exercises |\n"
    more = f"| | notebook | what's in it | path | {more}{8 * '|---'}|\n"
    return {"README.md": names + short, "docs/notebooks.md": more + long}


def counts() -> dict[str, list[tuple[str, str]]]:
    """For each page what stands there in words or digits: a pattern, and what it should be."""
    course = notebooks()
    many = NUMBERS[len(course)].capitalize()
    hours = [
        NUMBERS[round(sum(int(notebook.told[f"minutes of {what}"]) for notebook in course) / 60)]
        for what in ("prose", "exercises")
    ]
    exercises = str(sum(notebook.exercises for notebook in course))
    return {
        "README.md": [
            (r"(?<=\*\* )\w+(?= notebooks that run on a laptop CPU)", many),
            (r"(?<=There are )\d+(?=\. Your function)", exercises),
            (r"(?<=That's about )\w+(?= hours of prose)", hours[0]),
            (r"(?<=hours of prose and )\w+(?= of exercises)", hours[1]),
        ],
        "CITATION.cff": [(r"(?<=abstract: >-\n  )\w+(?= notebooks)", many)],
    }


def lit(source: str, number: str) -> str:
    """The map of the course, with the parts of one notebook lit; else only the title differs.

    A part names its notebooks, `class="part" data-notebooks="03 07"`, and is lit in theirs.
    """

    def light(part: re.Match[str]) -> str:
        return f'class="{"part lit" if number in part[1].split() else "part"}"'

    title = "<title>Map of the course"
    return PART.sub(light, source).replace(title, f"{title}: notebook {number}")


def lists() -> dict[Path, str]:
    """Each file that course.toml has a part in, as it should be.

    Raises:
        ValueError: a page has no place for something.
    """
    made = {}
    for page, table in tables().items():
        made[page] = between((ROOT / page).read_text("utf-8"), page, "notebooks", table)
    for page, places in counts().items():
        text = made.get(page) or (ROOT / page).read_text("utf-8")
        for place, count in places:
            text = put(text, page, place, f"place for {place!r}", count)
        made[page] = text
    source = (ROOT / "figures" / "map.svg").read_text("utf-8")
    made |= {f"figures/map_{n.number}.svg": lit(source, n.number) for n in notebooks()}
    return {ROOT / page: text for page, text in made.items()}


# ---------------------------------------------------------------------------------------------
# what is stored and drawn


def stored(name: str) -> str:
    """A table, of what is stored."""
    if name == "results":
        there = store.load("results.json")["experiments"]
        return results.table({"experiments": {key: there[key] for key in SHOWN if key in there}})
    if name == "thinking":
        return thinking.table()
    return bench.table(store.load("bench.json"), name)


def with_tables(text: str, page: str) -> str:
    """The text of a page with each of its tables of results in its place."""
    for name in TABLES[page]:
        text = between(text, page, name, f"{stored(name)}\n")
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
    """Write every file whose content has changed."""
    made: dict[Path, str | bytes] = {**lists(), **figures()}
    for page in TABLES:
        made[ROOT / page] = with_tables((ROOT / page).read_text("utf-8"), page)
    for path, content in made.items():
        new = content.encode() if isinstance(content, str) else content
        if not path.is_file() or path.read_bytes() != new:
            with atomic_path(path) as unfinished:
                unfinished.write_bytes(new)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
