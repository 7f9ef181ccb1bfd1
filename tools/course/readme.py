"""Bring the pages up to date: what they list and count, their tables, their figures, the maps.

    python tools/course/readme.py

README.md, docs/notebooks.md, CITATION.cff and the maps of the notebooks follow course.toml. Each
drawing of figures/ has a PNG beside it, for where no SVG is shown; resvg-py (of `dev`) draws it. A
table between two comments such as `results: begin` and `results: end` is made of what data/results/
holds; the table `results` shows the experiments that SHOWN names. An image
`figures/01_char_gpt.loss-figure.png` in README.md or docs/ is what cell `loss-figure` of notebook
01_char_gpt has drawn.
"""

import base64
import hashlib
import io
import json
import re
import sys
from functools import partial
from pathlib import Path

from committed import few_colors, read, with_predicted
from committed import figures as drawn_by
from doors import repository, site
from listing import ROOT, notebooks
from PIL import Image, PngImagePlugin

from minigrpo.files import atomic_path

sys.path += [str(ROOT / "tools" / "experiments"), str(ROOT / "recipes")]
import bench
import gpu
import judge_field
import memory
import results
import thinking
import turns

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
TABLES = {
    "docs/results.md": {
        "results": lambda: results.table(SHOWN),
        "thinking": thinking.table,
        "turns": turns.table,
    },
    "docs/speed.md": {name: partial(bench.table, parts) for name, parts in bench.TABLES.items()},
    "docs/judged.md": {
        "judged counts": judge_field.counts,
        "judged table": judge_field.table,
        "judged missed": judge_field.missed,
        "judged names": judge_field.names,
    },
    "recipes/README.md": {"memory": partial(memory.table, memory.SHAPES), "gpu": gpu.table},
}
CALCULATOR = "minigrpo/notebook/interactive/calculator.html"
MEASURED = r"(?<=const MEASURED = )[^;\n]*(?=; // data/results/gpu.json)"
IMAGE = re.compile(r"!\[[^\]]*\]\((?:\.\./)?(figures/([\w-]+)\.([\w-]+)\.png)\)")
NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty""".split()
PART = re.compile(r'class="part" data-notebooks="([\w ]*)"')  # of figures/map.svg


def put(text: str, page: str, place: str, made: str) -> str:
    """The text of a page with `made` in its one place, which is a pattern; or a ValueError."""
    if (count := len(re.findall(place, text, re.DOTALL))) != 1:
        raise ValueError(f"{page}: expected one pair of comments or words {place!r}, got {count}")
    return re.sub(place, lambda _: made, text, flags=re.DOTALL)


def between(name: str) -> str:
    """The place between two comments."""
    return rf"(?<=<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)"


def places() -> dict[str, list[tuple[str, str]]]:
    """What course.toml decides of each page: a place, and what should stand there."""
    short = "| notebook | what you'll have built | minutes, reading + exercises |\n|---|---|---|\n"
    long = "| | notebook | what's in it | path | minutes of reading | minutes of exercises "
    long += f"| seconds to run | exercises |\n{8 * '|---'}|\n"
    course, colab = notebooks(), "https://colab.research.google.com/github/"
    colab += f"{repository()}/blob/main/notebooks"
    minutes = [[n.told[f"minutes of {what}"] for what in ("reading", "exercises")] for n in course]
    for n, (prose, practice) in zip(course, minutes):
        short += f"| {n.number} [{n.title}]({site()}{n.stem}.html) ([Colab]({colab}/{n.file}), "
        short += f"[file](notebooks/{n.file})) "
        short += f"| {n.built} | {prose} + {practice} |\n"
        long += f"| {n.number} | [{n.title}](../notebooks/{n.file}) | {n.inside} | {n.path} "
        long += f"| {prose} | {practice} | {n.seconds} | {n.exercises} |\n"
    many = NUMBERS[len(course)].capitalize()
    hours = [NUMBERS[round(sum(map(int, column)) / 60)] for column in zip(*minutes)]
    return {
        "README.md": [
            (between("notebooks"), short),
            (r"(?<=\*\* )\w+(?= notebooks that run on a laptop CPU)", many),
            (r"(?<=There are )\d+(?=\. Your function)", str(sum(n.exercises for n in course))),
            (r"(?<=That's about )\w+(?= hours of reading)", hours[0]),
            (r"(?<=hours of reading and )\w+(?= of exercises)", hours[1]),
        ],
        "docs/notebooks.md": [(between("notebooks"), long)],
        "CITATION.cff": [(r"(?<=abstract: >-\n  )\w+(?= notebooks)", many)],
    }


def lit(source: str, number: str) -> str:
    """The map of the course, with the parts of one notebook lit; else only the title differs."""

    def light(part: re.Match[str]) -> str:
        return f'class="{"part lit" if number in part[1].split() else "part"}"'

    title = "<title>Map of the course"
    return PART.sub(light, source).replace(title, f"{title}: notebook {number}")


def lists() -> dict[Path, str]:
    """Each file that course.toml has a part in, as it should be."""
    source = (ROOT / "figures" / "map.svg").read_text("utf-8")
    made = {ROOT / f"figures/map_{n.number}.svg": lit(source, n.number) for n in notebooks()}
    for page, inside in places().items():
        made[ROOT / page] = (ROOT / page).read_text("utf-8")
        for place, what in inside:
            made[ROOT / page] = put(made[ROOT / page], page, place, what)
    return made


def with_tables(text: str, page: str) -> str:
    """The text of a page with each of its tables of results in its place."""
    for name, table in TABLES[page].items():
        text = put(text, page, between(name), f"{table()}\n")
    return text


def figures(root: Path = ROOT) -> dict[Path, bytes]:
    """Each image of README.md and docs/ that a notebook has drawn, with the PNG it holds.

    A ValueError names a cell that has no figure.
    """
    images = {}
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    named = [match for page in pages for match in IMAGE.findall(page.read_text("utf-8"))]
    for path, notebook, cell_id in named:
        file = root / "notebooks" / f"{notebook}.ipynb"
        cells = with_predicted(read(file), file).cells
        drawn = [figure for cell in cells if cell.id == cell_id for figure in drawn_by(cell)]
        pngs = [output.data[kind] for output, kind in drawn if kind == "image/png"]
        if len(pngs) != 1:
            raise ValueError(f"{path}: cell {cell_id!r} of {notebook} has {len(pngs)} figures")
        images[root / path] = base64.b64decode(pngs[0])
    return images


def drawings(root: Path = ROOT) -> dict[Path, bytes]:
    """The PNG of each drawing that has none, or that of another state of it: it names its SVG."""
    made = {}
    for svg in sorted({*(root / "figures").glob("*.svg")} - {*(root / "figures").glob("badge-*")}):
        name, out, about = svg.with_suffix(".png"), io.BytesIO(), PngImagePlugin.PngInfo()
        about.add_text("svg", drawn := hashlib.sha256(svg.read_bytes()).hexdigest())
        if name.is_file() and Image.open(name).info.get("svg") == drawn:
            continue
        import resvg_py

        image = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_path=str(svg), zoom=2))))
        few_colors(image).save(out, "PNG", optimize=True, pnginfo=about)
        made[name] = out.getvalue()
    return made


def main() -> None:
    """Write every file whose content has changed."""
    made = {path: text.encode() for path, text in lists().items()} | figures() | drawings()
    for page in TABLES:
        made[ROOT / page] = with_tables((ROOT / page).read_text("utf-8"), page).encode()
    page, told = ROOT / CALCULATOR, json.dumps(gpu.rates())
    made[page] = put(page.read_text("utf-8"), CALCULATOR, MEASURED, told).encode()
    for path, new in made.items():
        if not path.is_file() or path.read_bytes() != new:
            with atomic_path(path) as unfinished:
                unfinished.write_bytes(new)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
