"""What stands around the text of every page: the bar, the contents, the way on, the style."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

WEB = Path(__file__).resolve().parent / "web"
SCRIPT = "course.js"  # beside the pages, the search; without it every page is complete
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M3 12V9m5 3V6m5 6V3' stroke='%230072b2' stroke-width='3'/%3E%3C/svg%3E"
)
BAR = {"index": "minigrpo", "glossary": "Glossary", "cheatsheet": "Cheat sheet"}


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


def shell(
    name: str,
    title: str,
    body: str,
    headings: Iterable[Heading] = (),
    before: tuple[str, str] | None = None,
    after: tuple[str, str] | None = None,
) -> str:
    """The whole page `name`.html; the ones before and after it are names and titles.

    Its contents are there twice, a column for wide screens and a fold for narrow ones.
    """
    links = ""
    if before:
        links += f'<a rel="prev" href="{before[0]}.html">← {html.escape(before[1])}</a>\n'
    if after:
        links += f'<a rel="next" href="{after[0]}.html">{html.escape(after[1])} →</a>\n'
    steps = '<nav class="steps {0}" aria-label="Previous and next notebook, {0}">\n{1}</nav>\n'
    top, bottom = (steps.format(where, links) if links else "" for where in ("top", "bottom"))
    items = listed(inside := [heading for heading in headings if heading.level in (2, 3)])
    column = f'<nav class="contents column" aria-label="Contents">\n{items}</nav>\n'
    fold = '<nav class="contents fold" aria-label="Contents">'
    fold += f"<details><summary>On this page</summary>\n{items}</details></nav>\n"
    here = ' aria-current="page"'
    bar = "\n".join(
        f'<a{here if key == name else ""} href="{key}.html">{text}</a>' for key, text in BAR.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title if name == "index" else f"{title} · minigrpo")}</title>
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
{column if inside else ""}<main id="main" tabindex="-1">
{top}{fold if inside else ""}<article>
{body}
</article>
{bottom}</main>
</div>
</body>
</html>
"""
