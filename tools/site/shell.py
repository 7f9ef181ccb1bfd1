"""What stands around the text of every page: the bar, the contents, the way on, the style."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WEB = Path(__file__).resolve().parent / "web"
SCRIPT = "course.js"
"""Beside the pages: the search and its index. Without it every page is complete."""
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M3 12V9m5 3V6m5 6V3' stroke='%230072b2' stroke-width='3'/%3E%3C/svg%3E"
)
BAR = {"index": "minigrpo", "glossary": "Glossary", "cheatsheet": "Cheat sheet"}
TAGS = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Heading:
    """A heading of a page: `text` is HTML without tags."""

    level: int
    id: str
    text: str


def plain(text: str) -> str:
    """HTML without its tags, in one line."""
    return " ".join(TAGS.sub("", text).split())


def slug(text: str) -> str:
    """The id of a heading, as GitHub makes it: `3 What's new?` is `3-whats-new`."""
    words = re.sub(r"[^\w\- ]", "", html.unescape(text).strip().lower())
    return words.replace(" ", "-")


def listed(headings: Iterable[Heading], page: str = "") -> str:
    """Headings as a list of links, those of level 3 set in."""
    items = (
        f"<li{' class=deep' if heading.level > 2 else ''}>"
        f'<a href="{page}#{heading.id}">{heading.text}</a></li>'
        for heading in headings
    )
    return f"<ol>\n{''.join(f'{item}{chr(10)}' for item in items)}</ol>"


def contents(headings: list[Heading]) -> tuple[str, str]:
    """The contents twice: a column for wide screens, a fold for narrow ones. CSS shows one."""
    items = listed(headings)
    return (
        f'<nav class="contents column" aria-label="Contents"><p>On this page</p>\n{items}</nav>\n',
        f'<nav class="contents fold" aria-label="Contents"><details><summary>On this page</summary>'
        f"\n{items}</details></nav>\n",
    )


def steps(before: tuple[str, str] | None, after: tuple[str, str] | None, where: str) -> str:
    """The way to the page before and the one after, each a name and a title."""
    if not (before or after):
        return ""
    links = ""
    for step, kind, word in ((before, "previous", "Previous"), (after, "next", "Next")):
        if step:
            name, title = step[0], html.escape(step[1])
            shown = f"<span>{word}</span> {title}"
            if where == "top":
                shown = f"← {title}" if kind == "previous" else f"{title} →"
            links += f'<a class="{kind}" rel="{kind[:4]}" href="{name}.html">{shown}</a>\n'
    label = f"Previous and next notebook, {where}"
    return f'<nav class="steps {where}" aria-label="{label}">\n{links}</nav>\n'


def shell(
    name: str,
    title: str,
    body: str,
    headings: Iterable[Heading] = (),
    before: tuple[str, str] | None = None,
    after: tuple[str, str] | None = None,
) -> str:
    """The whole page `name`.html around its text. The page loads nothing but the script."""
    inside = [heading for heading in headings if heading.level in (2, 3)]
    column, fold = contents(inside) if inside else ("", "")
    here = ' aria-current="page"'
    bar = "\n".join(
        f'<a class="{"home" if key == "index" else key}"{here if key == name else ""} '
        f'href="{key}.html">{text}</a>'
        for key, text in BAR.items()
    )
    whole = title if name == "index" else f"{title} · minigrpo"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(whole)}</title>
<link rel="icon" href="{ICON}">
<style>
{(WEB / "course.css").read_text(encoding="utf-8")}</style>
<script src="{SCRIPT}" defer></script>
</head>
<body class="{name}">
<a class="skip" href="#main">Skip to the text</a>
<header class="bar"><div>
<nav aria-label="Course">
{bar}
</nav>
<div class="search" role="search" hidden></div>
</div></header>
<div class="layout{" wide" if inside else ""}">
{column}<main id="main" tabindex="-1">
{steps(before, after, "top")}{fold}<article>
{body}
</article>
{steps(before, after, "bottom")}</main>
</div>
</body>
</html>
"""
