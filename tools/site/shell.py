"""What stands around the text of every page: the bar, the contents, the way on, the style."""

import html
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from doors import repository, site
from listing import notebooks

from minigrpo import __version__

WEB = Path(__file__).resolve().parent / "web"
SCRIPT = "course.js"  # beside the pages, the search; without it every page is complete
THEME = 'try { document.documentElement.dataset.theme = localStorage.theme || "auto"; } catch {}'
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M3 12V9m5 3V6m5 6V3' stroke='%230072b2' stroke-width='3'/%3E%3C/svg%3E"
)
BAR = {"index": "minigrpo", "glossary": "Glossary", "cheatsheet": "Cheat sheet"}
HERE = ' aria-current="page"'
LEAD = """Learn GRPO, Group Relative Policy Optimization, by building it, on a laptop without a \
GPU."""
TEXTS = {
    "glossary": ("Symbols and glossary", "every letter and word, and the notebook it's from"),
    "cheatsheet": ("Cheat sheet", "the loop, the losses and the debugging tree on two pages"),
    "results": ("Results", "what was measured, with its seeds"),
    "notebooks": ("What's in each notebook", "with its minutes and seconds"),
    "knobs": ("The same knob under four names", "settings here, in TRL, verl and OpenRLHF"),
    "judge": ("The judge of losses", "is your own loss right?"),
    "judged": ("What the judge says of other trainers", "project by project"),
    "speed": ("Speed", "beside TRL and transformers"),
    "recipes": ("Recipes", "complete scripts for a real run"),
    "reading": ("Where to go from here", "papers, books, libraries, three projects"),
    "data": ("Models and data", "what ships with the course"),
    "help": ("Help", "when something doesn't work"),
}


class Heading(NamedTuple):
    """A heading of a page: `text` is HTML without tags."""

    level: int
    id: str
    text: str


def plain(text: str) -> str:
    """HTML without its tags, in one line."""
    return " ".join(re.sub(r"<[^>]*>", "", text).split())


def slug(text: str) -> str:
    """The id of a heading, as GitHub makes it: `3 What's new?` is `3-whats-new`."""
    words = re.sub(r"[^\w\- ]", "", html.unescape(text).strip().lower())
    return words.replace(" ", "-")


def listed(headings: Iterable[Heading], page: str = "") -> str:
    """Headings as a list of links, those of level 3 set in."""
    items = (
        f'<li{" class=deep" if level > 2 else ""}><a href="{page}#{key}">{text}</a></li>\n'
        for level, key, text in headings
    )
    return f"<ol>\n{''.join(items)}</ol>"


def elsewhere(source: str, root: Path) -> str:
    """Links to where a notebook runs, at the end of a sentence."""
    file = f"{repository(root)}/blob/main/{source}"
    return (
        f'in <a href="https://colab.research.google.com/github/{file}">Colab</a>, in '
        f'<a href="https://kaggle.com/kernels/welcome?src=https://github.com/{file}">Kaggle</a> or '
        '<a href="help.html#the-commands">on your machine</a>'
    )


@cache
def edition(root: Path) -> str:
    """The version of the course, and the day of its last commit where git knows it."""
    day = subprocess.getoutput(f'git -C "{root}" log -1 --format=%cs')
    return f"Edition {__version__}" + (f" of {day}" if re.fullmatch(r"[\d-]+", day) else "")


def footer(source: str, root: Path) -> str:
    """Which edition this is, where its source is, and where to say that it's wrong."""
    address = f"https://github.com/{repository(root)}"
    run = f"<span>Run it {elsewhere(source, root)}</span>\n" if source.endswith(".ipynb") else ""
    return f"""<footer>
{run}<a href="{address}/blob/main/{source}">Source of this page</a>
<a href="{address}/issues/new?template=mistake.yml">Found a mistake?</a>
<span>{edition(root)}</span>
</footer>
"""


def preview(name: str, title: str, says: str, root: Path, picture: str = "map") -> str:
    """What a link to the page `name`.html shows where it is shared."""
    told = {"title": title, "description": says, "url": f"{site(root)}{name}.html"}
    told["image"] = f"{site(root)}{picture}.png"
    lines = (f'<meta property="og:{k}" content="{html.escape(v)}">\n' for k, v in told.items())
    return f'<meta name="description" content="{html.escape(says)}">\n' + "".join(lines)


def shell(
    name: str, title: str, body: str, source: str, root: Path, headings: Iterable[Heading] = ()
) -> str:
    """The whole page `name`.html, which is made of the file `source` of the course.

    Its contents are there twice, a fold for narrow screens and a column for wide ones. The column
    comes after the text, so that Tab reaches the text first.
    """
    course = {n.stem: html.escape(f"{n.number} {n.title}") for n in notebooks(root)}
    beside = [None, *course, None][[*course].index(name) :][:3:2] if name in course else []
    links = "".join(
        f'<a rel="{way}" href="{stem}.html">{text.format(course[stem])}</a>\n'
        for way, text, stem in zip(("prev", "next"), ("← {}", "{} →"), beside)
        if stem
    )
    if links:
        links = f'<nav class="steps" aria-label="Previous and next notebook">\n{links}</nav>\n'
    bar, items = (
        "".join(
            f'{before}<a{HERE if key == name else ""} href="{key}.html">{text}</a>\n'
            for key, text in pages.items()
        )
        for before, pages in (("", BAR), ("<li>", course))
    )
    items = f"<b>The course</b>\n<ol>\n{items}</ol>"
    if inside := [heading for heading in headings if heading.level in (2, 3)]:
        items += f"\n<b>On this page</b>\n{listed(inside)}"
    contents = '<nav class="contents {}" aria-label="Contents">\n{}</nav>\n'
    column = contents.format("column", items)
    fold = contents.format("fold", f"<details><summary>Contents</summary>\n{items}</details>")
    if name == "index":
        column = fold = ""
    says = {n.stem: n.card for n in notebooks(root)}
    says |= {key: f"{what}: {about}" for key, (what, about) in TEXTS.items()}
    picture = name if name in course else "map"
    head = preview(name, title, says.get(name, LEAD), root, picture)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title if name == "index" else f"{title} · minigrpo")}</title>
{head}<link rel="icon" href="{ICON}">
<script>{THEME}</script>
<style>
{(WEB / "course.css").read_text(encoding="utf-8")}</style>
<script src="{SCRIPT}" defer></script>
</head>
<body class="{name}">
<a class="skip" href="#main">Skip to the text</a>
<header class="bar"><div>
<nav aria-label="Course">
{bar}</nav>
</div></header>
<div class="layout{" wide" if column else ""}">
<main id="main" tabindex="-1">
{fold}<article>
{body}
</article>
{links}{footer(source, root)}</main>
{column}</div>
</body>
</html>
"""
