"""The HTML page of a notebook: it loads nothing, and the browser draws its formulas (MathML)."""

from __future__ import annotations

import base64
import copy
import html
import os
import re
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from committed import CourseError, alts, describe, figures
from jinja2 import DictLoader
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

GLOSSARY = "GLOSSARY.md"
"""In the folder above the notebooks; it gets a page too."""
LINK = re.compile(r"""(?P<head>\b(?:href|src)=")(?P<path>[^"#?:]+)(?P<anchor>#[^"]*)?(?=")""")

# The page is laid out for telephones too, where wide tables, formulas, code and outputs scroll in
# themselves. On a dark screen it is dark, and the figures keep the white ground they are drawn on.
TEMPLATE = """{% extends "lab/index.html.j2" %}
{% block output_group scoped %}
{% if "predict" in cell.metadata.get("tags", []) %}
<details class="predict"><summary>Show the output</summary>
{{ super() }}
</details>
{% else %}{{ super() }}{% endif %}
{% endblock %}
{% block data_png %}{{ output | picture("image/png") }}{% endblock %}
{% block data_svg %}{{ output | picture("image/svg+xml") }}{% endblock %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_css %}
{{ resources.include_css("static/theme-dark.css")
   | replace("<style", '<style media="(prefers-color-scheme: dark)"') }}
<style>
:root { color-scheme: light dark; }
body.jp-Notebook { margin: 0 auto; max-width: 66em; padding: 0 1em; overflow: visible; }
.jp-RenderedHTMLCommon { overflow-wrap: break-word; }
.jp-OutputArea .jp-RenderedHTMLCommon.jp-RenderedHTML :is(td, th) { text-align: left; }
.jp-RenderedHTMLCommon table { display: block; max-width: 100%; overflow-x: auto; }
.jp-RenderedHTMLCommon img, .jp-RenderedImage img {
    box-sizing: border-box; max-width: 100%; height: auto;
}
.jp-RenderedMarkdown img { display: block; margin: 1em auto; }
.jp-RenderedMarkdown .caption { font-size: 0.93em; }
.jp-RenderedMarkdown pre {
    font-size: var(--jp-code-font-size); overflow-x: auto; white-space: pre;
}
.jp-RenderedMarkdown .highlight {
    background: var(--jp-cell-editor-background); padding: 0.5em; margin: 0.8em 0;
}
.jp-RenderedMarkdown .highlight pre { background: none; }
details > summary { cursor: pointer; color: var(--jp-content-link-color); }
details.predict > summary {
    font: var(--jp-content-font-size1) var(--jp-content-font-family);
    margin: 0.5em 0.5em 0.5em calc(var(--jp-cell-prompt-width) + 0.8em);
}
.jp-RenderedText pre, .jp-InputArea-editor pre { overflow-x: auto; }
math {
    font: 1.1em "STIX Two Math", "Latin Modern Math", "Cambria Math", "DejaVu Math TeX Gyre", math;
}
mtext[mathvariant="monospace"] { font-family: monospace; }
math[display="block"] { margin: 0.8em 0; overflow: auto hidden; }
@media (prefers-color-scheme: dark) {
    :root {
        --jp-mirror-editor-comment-color: #5fb0b0;
        --jp-mirror-editor-operator-color: #c98bff;
        --jp-mirror-editor-meta-color: #c98bff;
    }
    img[src^="data:image/png"] { background: #fff; border-radius: 0.5em; padding: 0.5em; }
}
@media (max-width: 40em) {
    .jp-InputPrompt, .jp-OutputPrompt { display: none; }
    details.predict > summary { margin-left: 0; }
    .jp-RenderedText pre { white-space: pre; }
    .jp-RenderedHTMLCommon :is(p, ul, ol) { overflow: auto hidden; } /* formulas do not wrap */
}
</style>
{% endblock %}
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
    """A LaTeX formula as MathML; `display` is "inline" or "block".

    Raises:
        CourseError: names the formula that cannot be converted.
    """
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
    """Writes formulas as MathML, where nbconvert leaves them to MathJax."""

    def inline_math(self, body: str) -> str:
        """`$...$`."""
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        """`$$...$$`."""
        return mathml(body, "block")

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


def caption(cell: NotebookNode | None) -> str:
    """The paragraph of a markdown cell that says what the figure beside it shows, or ""."""
    text = cell.source if cell and cell.cell_type == "markdown" else ""
    found = re.search(r"\*?Figure: (.+?)\*?(?:\n\n|$)", text, re.DOTALL)
    return " ".join(re.sub(r"[`*$]", "", found[1]).split()) if found else ""


def picture(output: NotebookNode, kind: str) -> str:
    """A figure with its size and its description, which the template of nbconvert leaves out."""
    data, about = output.data[kind], output.metadata.get(kind, {})
    if kind == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    names = [name for name in ("alt", "width", "height") if name in about]
    told = "".join(f' {name}="{html.escape(str(about[name]))}"' for name in names)
    image = f'<img src="data:{kind};base64,{"".join(data.split())}"{told}>'
    return f'<div class="jp-RenderedImage jp-OutputArea-output">{image}</div>'


def for_readers(nb: NotebookNode) -> NotebookNode:
    """A copy without the cells that judge, and with a description of every figure."""
    nb = copy.deepcopy(nb)
    for before, cell, after in zip([None, *nb.cells], nb.cells, [*nb.cells[1:], None]):
        if cell.cell_type == "code":
            if told := not alts(cell) and (caption(after) or caption(before)):
                cell.metadata["alt"] = [told] * len(figures(cell))
            describe(cell)
    nb.cells = [cell for cell in nb.cells if "verdict" not in cell.metadata.get("tags", [])]
    return nb


def page(nb: NotebookNode, path: Path, out: Path) -> str:
    """The HTML page of an executed notebook, to be written to the folder `out`.

    Links to the other notebooks lead to their pages, links to other files still to those files.
    Drawings are in the page, so that it loads nothing.

    Raises:
        CourseError: a formula cannot be converted.
    """
    name = title_of(nb, path.stem)
    exporter = HTMLExporter(
        template_name="lab",
        template_file="course.html.j2",
        extra_loaders=[DictLoader({"course.html.j2": TEMPLATE})],
    )
    markdown = MarkdownWithMath(renderer=Renderer(escape=False))
    exporter.register_filter("markdown2html", markdown.render)
    exporter.register_filter("picture", picture)
    try:
        text, _ = exporter.from_notebook_node(
            for_readers(nb), resources={"metadata": {"name": name}}
        )
    except CourseError as error:
        raise CourseError(f"{path.name}: {error}") from error

    def moved(link: re.Match[str]) -> str:
        target = path.parent / unquote(html.unescape(link["path"]))
        if not target.exists():
            return link[0]
        if link["head"].startswith("src"):
            kind, data = guess_type(target.name)[0], base64.b64encode(target.read_bytes())
            return f"{link['head']}data:{kind};base64,{data.decode()}"
        if target.name == GLOSSARY:
            new = "glossary.html"
        elif target.parent.resolve() == path.parent.resolve() and target.suffix == ".ipynb":
            new = f"{target.stem}.html"
        else:
            new = Path(os.path.relpath(target, out)).as_posix()
        return f"{link['head']}{new}{link['anchor'] or ''}"

    return LINK.sub(moved, text)
