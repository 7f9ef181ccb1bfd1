"""The HTML page of a notebook: it loads nothing, and the browser draws its formulas (MathML)."""

from __future__ import annotations

import base64
import copy
import html
import re
from collections.abc import Callable
from itertools import count
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from committed import CourseError, describe, read
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
"""In the folder above the notebooks; it gets a page too."""
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
<div class="jp-InputArea-editor">
{{ cell.source | highlight_code(metadata=cell.metadata) }}
</div>
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
        kind = ' class="long"' if len(plain(text)) > LONG else ""
        style = f' style="text-align: {align}"' if align else ""
        name = "th" if head else "td"
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


def attributes(about: dict[str, object]) -> str:
    """Those of a picture: its description and its size."""
    names = [name for name in ("alt", "width", "height") if name in about]
    return "".join(f' {name}="{html.escape(str(about[name]))}"' for name in names)


def picture(output: NotebookNode, kind: str) -> str:
    """A figure with its size and its description, which the template of nbconvert leaves out."""
    data = output.data[kind]
    if kind == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    about = attributes(output.metadata.get(kind, {}))
    image = f'<img src="data:{kind};base64,{"".join(data.split())}"{about}>'
    return f'<div class="jp-RenderedImage jp-OutputArea-output">{image}</div>'


def for_readers(nb: NotebookNode) -> NotebookNode:
    """A copy without the cells that judge, and with a description of every figure."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if cell.cell_type == "code":
            describe(cell)
    nb.cells = [cell for cell in nb.cells if "verdict" not in cell.metadata.get("tags", [])]
    return nb


def neighbors(path: Path, root: Path) -> list[tuple[str, str] | None]:
    """Name and title of the notebook before this one and of the one after it."""
    if path.suffix != ".ipynb":
        return [None, None]
    course = notebooks(root)
    at = [notebook.file for notebook in course].index(path.name)
    beside = [course[at - 1] if at else None, *course[at + 1 : at + 2], None][:2]
    return [n and (n.stem, title_of(read(n.location), n.stem)) for n in beside]


def words(text: str) -> str:
    """The tables of the glossary, each row with an id: `word-` and its first cell."""

    def named(row: re.Match[str]) -> str:
        return f'<tr id="word-{slug(plain(row[2]))}">\n  {row[1]}{row[2]}</td>'

    return re.sub(r"<tr>\s*(<td[^>]*>)(.*?)</td>", named, text)


def documents(root: Path) -> dict[Path, str]:
    """The texts beside the notebooks that get a page too, and its name."""
    paths = [root / GLOSSARY, *sorted((root / "docs").glob("*.md"))]
    paths += [root / "recipes" / "README.md", root / "data" / "README.md"]
    return {
        path: (path.parent.name if path.stem == "README" else path.stem).lower()
        for path in paths
        if path.is_file()
    }


def moved(path: Path, root: Path) -> Callable[[re.Match[str]], str]:
    """How a link of the file `path` is written in its page.

    Pictures are in the page. A notebook or a text that has a page is linked there, and any other
    file of the course to where it is published, so that the folder of the pages is complete.
    """
    pages, address = documents(root), f"https://github.com/{repository(root)}"

    def link(match: re.Match[str]) -> str:
        anchor = match["anchor"] or ""  # JupyterLab and GitHub write the same one in two ways
        here = anchor and "#" + slug(unquote(html.unescape(anchor)))
        if not match["path"]:
            return match["head"] + here
        target = path.parent / unquote(html.unescape(match["path"]))
        if not target.exists():
            return match[0]
        if match["head"].startswith("src"):
            kind, data = guess_type(target.name)[0], base64.b64encode(target.read_bytes())
            return f"{match['head']}data:{kind};base64,{data.decode()}"
        target = target.resolve()
        name = pages.get(target)
        if target.suffix == ".ipynb" and target.parent == root / "notebooks":
            name = target.stem
        if name:
            return f"{match['head']}{name}.html{here}"
        kind, inside = "tree" if target.is_dir() else "blob", target.relative_to(root).as_posix()
        return f"{match['head']}{address}/{kind}/main/{inside}{anchor}"

    return link


def page(nb: NotebookNode, path: Path, root: Path | None = None) -> str:
    """The HTML page of a notebook, or of a text as a notebook of one cell.

    Its links start from `path`; `root` is by default the folder above that of `path`.

    Raises:
        CourseError: a formula cannot be converted.
    """
    root = (root or path.parent.parent).resolve()
    exporter = HTMLExporter(
        template_name="lab",
        template_file="course.html.j2",
        extra_loaders=[DictLoader({"course.html.j2": TEMPLATE})],
    )
    renderer, link = Renderer(), moved(path, root)
    markdown = MarkdownWithMath(renderer=renderer)
    exporter.register_filter("markdown2html", lambda text: LINK.sub(link, markdown.render(text)))
    exporter.register_filter("picture", picture)
    exporter.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3"))
    try:  # without the pass over the finished page that HTMLExporter makes: nothing is left to it
        text, _ = TemplateExporter.from_notebook_node(exporter, for_readers(nb))
    except CourseError as error:
        raise CourseError(f"{path.name}: {error}") from error
    if path.name == GLOSSARY:
        text = words(text)
    name = documents(root).get(path.resolve(), path.stem)
    return shell(name, title_of(nb, path.stem), text, renderer.headings, *neighbors(path, root))
