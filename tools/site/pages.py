"""The HTML page of a notebook: it loads nothing, and the browser draws its formulas (MathML)."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable
from itertools import count
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from committed import CourseError, read
from doors import repository
from jinja2 import DictLoader
from latex2mathml.converter import convert
from listing import notebooks
from nbconvert import HTMLExporter, TemplateExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from shell import Heading, plain, shell, slug

GLOSSARY = "GLOSSARY.md"
LONG = 24  # characters of a table's cell that need room
LINK = re.compile(r"""(?P<head>\b(?:href|src)=")(?P<path>[^"#?:]*)(?P<anchor>#[^"]*)?(?=")""")

# Cells as nbconvert's template has them; everything around them is that of `shell`.
TEMPLATE = """{% extends "lab/base.html.j2" %}
{% block output_group scoped %}
{% if "predict" in cell.metadata.get("tags", []) %}
<details class="predict"><summary>Show the output</summary>
{{ super() }}
</details>
{% else %}{{ super() }}{% endif %}
{% endblock %}
{% block input %}
{% set plot = "plot" in cell.metadata.get("tags", []) %}
{% if plot %}<details class="code"><summary>The code of this figure</summary>{% endif %}
<div class="jp-InputArea-editor">
{{ cell.source | highlight_code(metadata=cell.metadata) }}
</div>
{% if plot %}</details>{% endif %}
{% endblock %}
{% block data_png %}{{ output | picture("image/png") }}{% endblock %}
{% block data_svg %}{{ output | picture("image/svg+xml") }}{% endblock %}
"""

FUNCTION = r"\\(?:log|ln|exp)(?![a-zA-Z])"
REWRITTEN = (  # before the conversion: what latex2mathml has no good form for
    (r"\\lvert(?![a-zA-Z])", r"\\left|"),
    (r"\\rvert(?![a-zA-Z])", r"\\right|"),
    (r"\\sim(?![a-zA-Z])", r"\\thicksim"),
    (r"\\mathcal\s*\{?L\}?", "ℒ"),
    (rf"(?<=[\w)}}\]])\s*(?={FUNCTION})", r"\\,"),  # the thin spaces that TeX sets
    (rf"({FUNCTION})(?!\s*(?:[({{_^]|\\[bB]ig|\\left))", r"\1\\,"),
)
# After it: a minus behind one of ( = , [ and a dot is the sign of a number, not a difference.
SIGN = re.compile(r"((?:&#x000(?:28|3D|2C|5B|B7);|\[)</mo>(?:<mspace[^>]*>)?<mo)(>&#x02212;)")


def mathml(formula: str, display: str) -> str:
    """A LaTeX formula as MathML, "inline" or "block"; a CourseError names one that fails."""
    source = formula = formula.strip()
    for old, new in REWRITTEN:
        source = re.sub(old, new, source)
    try:
        text = SIGN.sub(r'\1 form="prefix"\2', convert(source, display=display))
        if "\\" in "".join(ElementTree.fromstring(text).itertext()):
            raise ValueError("unknown command")  # which latex2mathml has passed on as it is
    except Exception as error:  # its own have no class in common
        why = f"{type(error).__name__} {error}".strip()
        raise CourseError(f"formula {formula!r} cannot be converted: {why}") from error
    return text


class Renderer(IPythonRenderer):
    """Writes formulas as MathML, where nbconvert leaves them to MathJax, and collects headings."""

    def __init__(self) -> None:
        super().__init__(escape=False)
        self.headings: list[Heading] = []

    def heading(self, text: str, level: int, **ignored: object) -> str:
        """A heading with an id that only its words decide, and a link to it."""
        key, taken = slug(plain(text)), {heading.id for heading in self.headings}
        names = (f"{key}-{number}" if number else key for number in count())
        key = next(name for name in names if name not in taken)
        self.headings.append(Heading(level, key, plain(text)))
        link = f'<a class="anchor" href="#{key}" aria-label="Link to this section">#</a>'
        return f'<h{level} id="{key}">{text}{link}</h{level}>\n'

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return mathml(body, "block")

    def table_cell(self, text: str, align: str | None = None, head: bool = False) -> str:
        """A cell with a sentence in it gets some width on a telephone, too."""
        name, kind = "th" if head else "td", ' class="long"' if len(plain(text)) > LONG else ""
        style = f' style="text-align: {align}"' if align else ""
        return f"  <{name}{kind}{style}>{text}</{name}>\n"

    def paragraph(self, text: str) -> str:
        """A caption has a class of its own."""
        kind = ' class="caption"' if text.startswith("<strong>Figure ") else ""
        return f"<p{kind}>{text}</p>\n"


def title_of(nb: NotebookNode, default: str) -> str:
    """The first heading of a notebook."""
    for cell in nb.cells:
        heading = re.search(r"^# +(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return re.sub(r"[`*]", "", heading[1]).strip()
    return default


def image(src: str, about: dict[str, object]) -> str:
    """A picture with its description and its size."""
    told = [(name, about[name]) for name in ("alt", "width", "height") if name in about]
    more = "".join(f' {name}="{html.escape(str(value))}"' for name, value in told)
    return f'<img src="{src}"{more}>'


def inlined(data: bytes, kind: str) -> str:
    """The address of a picture that is in the page."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(output: NotebookNode, kind: str) -> str:
    """A figure with its size and its description, which the template of nbconvert leaves out."""
    data = output.data[kind]
    data = data.encode() if kind == "image/svg+xml" else base64.b64decode(data)
    shown = image(inlined(data, kind), output.metadata.get(kind, {}))
    return f'<div class="jp-RenderedImage jp-OutputArea-output">{shown}</div>'


def neighbors(path: Path, root: Path) -> list[tuple[str, str] | None]:
    """Name and title of the notebook before this one and of the one after it."""
    files = [notebook.location for notebook in notebooks(root)]
    if path not in files:
        return [None, None]
    beside = [None, *files, None][files.index(path) :][:3:2]
    return [file and (file.stem, title_of(read(file), file.stem)) for file in beside]


def words(text: str) -> str:
    """The tables of the glossary, each row with an id: `word-` and its first cell."""

    def named(row: re.Match[str]) -> str:
        return f'<tr id="word-{slug(plain(row[2]))}">\n  {row[1]}{row[2]}</td>'

    return re.sub(r"<tr>\s*(<td[^>]*>)(.*?)</td>", named, text)


def documents(root: Path) -> dict[Path, str]:
    """The texts beside the notebooks that get a page too, and its name."""
    paths = [root / GLOSSARY, *sorted((root / "docs").glob("*.md"))]
    paths += [root / "recipes" / "README.md", root / "data" / "README.md"]
    names = (path.parent.name if path.stem == "README" else path.stem for path in paths)
    return {path: name.lower() for path, name in zip(paths, names) if path.is_file()}


def moved(path: Path, root: Path) -> Callable[[re.Match[str]], str]:
    """How a link of the file `path` is written in its page.

    Pictures are in the page. A notebook or a text that has a page is linked there, and any other
    file of the course to where it is published, so that the folder of the pages is complete.
    """
    pages = documents(root) | {file: file.stem for file in (root / "notebooks").glob("*.ipynb")}

    def link(match: re.Match[str]) -> str:
        anchor = match["anchor"] or ""  # JupyterLab and GitHub write the same one in two ways
        here = anchor and "#" + slug(unquote(html.unescape(anchor)))
        if not match["path"]:
            return match["head"] + here
        target = path.parent / unquote(html.unescape(match["path"]))
        if not target.exists():
            return match[0]
        if match["head"].startswith("src"):
            return match["head"] + inlined(target.read_bytes(), guess_type(target.name)[0])
        target = target.resolve()
        if target in pages:
            return f"{match['head']}{pages[target]}.html{here}"
        kind, inside = "tree" if target.is_dir() else "blob", target.relative_to(root).as_posix()
        address = f"https://github.com/{repository(root)}/{kind}/main/{inside}{anchor}"
        return match["head"] + address

    return link


def page(nb: NotebookNode, path: Path, root: Path | None = None) -> str:
    """The HTML page of a notebook, or of a text as a notebook of one cell.

    Its links start from `path`; `root` is by default the folder above that of `path`.
    """
    root = (root or path.parent.parent).resolve()
    loader = DictLoader({"course.html.j2": TEMPLATE})
    exporter = HTMLExporter(template_file="course.html.j2", extra_loaders=[loader])
    renderer, link = Renderer(), moved(path, root)
    markdown = MarkdownWithMath(renderer=renderer)
    exporter.register_filter("markdown2html", lambda text: LINK.sub(link, markdown.render(text)))
    exporter.register_filter("picture", picture)
    exporter.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3"))
    shown = [cell for cell in nb.cells if "verdict" not in cell.metadata.get("tags", [])]
    nb = NotebookNode({**nb, "cells": shown})
    try:  # without the pass over the finished page that HTMLExporter makes: nothing is left to it
        text, _ = TemplateExporter.from_notebook_node(exporter, nb)
    except CourseError as error:
        raise CourseError(f"{path.name}: {error}") from error
    if path.name == GLOSSARY:
        text = words(text)
    name = documents(root).get(path.resolve(), path.stem)
    return shell(name, title_of(nb, path.stem), text, renderer.headings, *neighbors(path, root))
