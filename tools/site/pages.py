"""The HTML page of a notebook: it loads nothing, and the browser draws its formulas (MathML)."""

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

from committed import CourseError
from doors import repository
from jinja2 import DictLoader
from latex2mathml.converter import convert
from nbconvert import HTMLExporter, TemplateExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from shell import Heading, elsewhere, plain, shell, slug
from update import CHECK, STUB

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
{% block input %}{% if cell.source %}
{% set fold = cell.metadata.get("fold") %}
{% if fold %}<details class="code"><summary>{{ fold }}</summary>{% endif %}
<div class="jp-InputArea-editor">
{{ cell.source | highlight_code(metadata=cell.metadata) }}
</div>
{% if fold %}</details>{% endif %}
{% endif %}{% endblock %}
{% block data_png %}{{ output | picture("image/png") }}{% endblock %}
{% block data_svg %}{{ output | picture("image/svg+xml") }}{% endblock %}
"""

TITLE = re.compile(r"\A# @title (.*)\n*")  # of a form in Colab
ONLINE = re.compile(r"^\[Read it online\]\(\S+\) · ", re.MULTILINE)
GUESS = re.compile(r'^predict\("([\w.]+)", None\)(?:  # (.*))?$', re.MULTILINE)
# Lines of outputs that ask a reader for what a page cannot do.
ASKED = re.compile(r".*(?:in place of None|lists them|waits for).*\n?")
EXERCISE = """<section class="exercise">

**Exercise {key}.** Write it {where}, where it gets checked.

```python
{code}
```
{hints}

</section>"""
PATIENT = "Measure and diagnose it [in the clinic](clinic.html)."
HINT = "\n<details><summary>Hint {}</summary>\n\n{}\n\n</details>\n"

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
    about = output.metadata.get("image/png", {}) | output.metadata.get(kind, {})
    shown = image(inlined(data, kind), about)
    return f'<div class="jp-RenderedImage jp-OutputArea-output">{shown}</div>'


def for_readers(cells: list[NotebookNode], where: str) -> list[NotebookNode]:
    """The cells as a page shows them: it runs nothing, so it asks for nothing to be run.

    `where` says where an exercise can be written.
    """
    shown: list[NotebookNode] = []
    for cell in copy.deepcopy(cells):
        tags = cell.metadata.get("tags", [])
        if "verdict" in tags or cell.source.startswith("progress()"):
            continue
        cell.source = ONLINE.sub("", cell.source)
        if cell.cell_type == "code":
            title = TITLE.match(cell.source)
            cell.metadata["fold"] = title[1] if title and {"plot", "setup"} & {*tags} else ""
            cell.source = "" if "drawing" in tags else TITLE.sub("", cell.source)
            check = CHECK.search(cell.source)
            if check and shown and STUB.search(shown[-1].source):
                box = exercise(check[1], shown.pop().source, where)
                shown.append(new_markdown_cell(box))
                cell.source = re.sub(r".*\bcheck\(.*\n*", "", cell.source)
                cell.outputs = [output for output in cell.outputs if "text" in output]
            for output in cell.outputs:
                if "text" in output:
                    output.text = ASKED.sub("", output.text)
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
            if 'diagnose("...")' in cell.source and not cell.outputs:
                cell = new_markdown_cell(PATIENT)
            if guesses := GUESS.findall(cell.source):
                cell = new_markdown_cell("\n".join(guess(*asked) for asked in guesses))
        if cell.source or cell.get("outputs"):
            shown.append(cell)
    return shown


def exercise(key: str, stub: str, where: str) -> str:
    """The box of an exercise, with its hints to be opened."""
    from minigrpo.exercises.reader import find  # loads torch, which is slow

    hints = enumerate(find(key).hints.strip().splitlines(), start=1)
    folds = "".join(HINT.format(*hint) for hint in hints)
    return EXERCISE.format(key=key, where=where, code=stub, hints=folds)


def guess(key: str, note: str) -> str:
    """Where a reader's number goes: course.js makes it a field."""
    word, note = key.partition(".")[2].replace("_", " "), f" ({note})" if note else ""
    return f'<p class="guess" data-key="{key}">Write down your guess: <b>{word}</b>{note}</p>'


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
    source = path.resolve().relative_to(root).as_posix()
    cells = for_readers(nb.cells, elsewhere(source, root))
    try:  # without the pass over the finished page that HTMLExporter makes: nothing is left to it
        nb = NotebookNode({**nb, "cells": cells})
        text, _ = TemplateExporter.from_notebook_node(exporter, nb)
    except CourseError as error:
        raise CourseError(f"{path.name}: {error}") from error
    if path.name == GLOSSARY:
        text = words(text)
    name = documents(root).get(path.resolve(), path.stem)
    title = html.unescape(renderer.headings[0].text) if renderer.headings else path.stem
    return shell(name, title, text, source, root, renderer.headings)
