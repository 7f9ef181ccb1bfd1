"""The folder of the pages, complete in itself: notebooks, texts, the index, and the search."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from committed import as_json, figures, read, write
from listing import Notebook, notebooks
from nbformat import NotebookNode
from pages import documents, image, inlined, page, title_of
from shell import SCRIPT, WEB, Heading, listed, plain, shell

FRAME = re.compile(r"""<iframe class="(\w+)" title="([^"]*)"[^>]*? srcdoc='([^']*)'""")
NAVIGATION = """<body>
<nav aria-label="The course">
<a href="index.html">All notebooks</a> · <a href="{stem}.html">Notebook {stem:.2}</a>
</nav>"""
HERO = """<div class="hero"><div>
<h1>minigrpo</h1>
<p class="lead">Learn GRPO, Group Relative Policy Optimization, by building it, on a laptop \
without a GPU.</p>
<p>You begin with a small GPT that reads Shakespeare, and end with a public language model that \
learns to solve word problems. On the way you write every core function yourself, and when one is \
wrong, the course tells you what it computes instead.</p>
</div>
{map}
</div>
"""
MAP = """The loop of GRPO. Prompts go to the policy, the policy writes completions, completions \
get rewards, rewards become advantages, and the loss made from them and the log-probs drives an \
update of the policy. Each part carries the number of its notebook."""
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
HEADING = re.compile(r'^<h([1-4]) id="([^"]*)">(.*)<a [^>]*class="anchor"', re.MULTILINE)
WORD = re.compile(r'<tr id="(word-[^"]+)">\s*<td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>', re.DOTALL)


def write_page(nb: NotebookNode, path: Path, out: Path, seconds: float | None = None) -> None:
    """Write a notebook and its page to the folder `out`; `seconds` if it was executed for that."""
    if seconds is not None:
        nb.metadata["minigrpo"] = {"seconds": round(seconds, 1)}
    write(out / f"{path.stem}.html", page(nb, path))
    write(out / path.name, as_json(nb))


def begin(root: Path, out: Path) -> None:
    """Write all pages anew, those of the notebooks with their stored outputs."""
    for file in out.glob("*.*"):
        file.unlink()
    for path, name in documents(root).items():
        text = nbformat.v4.new_markdown_cell(path.read_text(encoding="utf-8"), id="text")
        nb = nbformat.v4.new_notebook(cells=[text])
        write(out / f"{name}.html", page(nb, path, root))
    for notebook in notebooks(root):
        write_page(read(notebook.location), notebook.location, out)
    write_index(root, out)


def write_interactive(root: Path, out: Path) -> dict[str, tuple[str, str]]:
    """Write what notebooks show in a frame as pages too: name -> (title, what it is)."""
    written = {}
    for notebook in notebooks(root):
        file = out / notebook.file
        cells = read(file).cells if file.exists() else []
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            if frame := FRAME.search(output.get("data", {}).get("text/html", "")):
                name, title, text = map(html.unescape, frame.groups())
                above = NAVIGATION.format(stem=notebook.stem)
                write(out / f"{name}.html", text.replace("<body>", above, 1))
                written[name] = (
                    title,
                    f"to turn around in your hands, from notebook {notebook.number}",
                )
    return written


def headings(page: Path) -> list[Heading]:
    """The headings of a page that has been built."""
    found = HEADING.findall(page.read_text(encoding="utf-8"))
    return [Heading(int(level), key, plain(text)) for level, key, text in found]


def card(notebook: Notebook, out: Path) -> str:
    """A notebook on the index: its title, picture, minutes, and sections."""
    nb, name, shown = read(out / notebook.file), f"{notebook.stem}.html", ""
    drawn = [figure for cell in nb.cells if cell.id == notebook.figure for figure in figures(cell)]
    for output, kind in drawn[:1]:
        (out / f"{notebook.stem}.png").write_bytes(base64.b64decode(output.data[kind]))
        shown = image(f"{notebook.stem}.png", output.metadata[kind])
    table = [(what, notebook.told.get(f"minutes of {what}")) for what in ("reading", "exercises")]
    facts = [f"{minutes} min of {what}" for what, minutes in table if minutes]
    if "minigrpo" in nb.metadata:
        facts.append(f"executed in {nb.metadata.minigrpo.seconds:.0f} s")
    elif notebook.needs:
        facts.append("outputs as stored; make course SCALE=1 executes it")
    inside = [heading for heading in headings(out / name) if heading.level in (2, 3)]
    return f"""<section class="card" id="{notebook.stem}">
{shown}<div>
<h3><a href="{name}">{html.escape(title_of(nb, notebook.stem))}</a></h3>
<p>{html.escape(notebook.card)}</p>
<p class="facts">{" · ".join(facts)}</p>
<details><summary>{len(inside)} sections</summary>
{listed(inside, name)}</details>
</div>
</section>"""


def index(root: Path, out: Path, there: dict[str, tuple[str, str]]) -> str:
    """The page that the course is entered by; `there` are the texts beside the notebooks."""
    items = (
        f'<li><a href="{name}.html">{title}</a> <span>{says}</span></li>\n'
        for name, (title, says) in there.items()
    )
    drawing = inlined((root / "figures" / "map.svg").read_bytes(), "image/svg+xml")
    hero = HERO.format(map=image(drawing, {"alt": MAP, "width": 560, "height": 276}))
    sections = []
    for notebook in notebooks(root):
        if notebook.part or not sections:
            number, _, name = notebook.part.partition(": ")
            sections.append(f"<h2><span>{number}</span> {name}</h2>")
        sections.append(card(notebook, out))
    body = [hero, f'<ul class="also">\n{"".join(items)}</ul>', *sections]
    return shell("index", "minigrpo: GRPO from scratch", "\n".join(body))


def entries(page: Path) -> Iterator[list[str]]:
    """What can be found: each heading and each word of the glossary, its address and its page."""
    found = headings(page)
    title = html.unescape(found[0].text)
    for level, key, text in found:
        yield [html.unescape(text), page.name + (f"#{key}" if level > 1 else ""), title, ""]
    for key, *texts in WORD.findall(page.read_text("utf-8")):
        word, says = (html.unescape(plain(text)) for text in texts)
        yield [word, f"{page.name}#{key}", title, says]


def write_index(root: Path, out: Path) -> None:
    """Write the index and the search of the pages that there are."""
    framed = write_interactive(root, out)
    texts = [*documents(root).values()]
    there = framed | {name: told for name, told in TEXTS.items() if name in texts}
    write(out / "index.html", index(root, out, there))
    names = [notebook.stem for notebook in notebooks(root)] + texts
    known = [entry for name in names for entry in entries(out / f"{name}.html")]
    known += [[title, f"{name}.html", "", says] for name, (title, says) in framed.items()]
    script = (WEB / SCRIPT).read_text(encoding="utf-8")
    write(out / SCRIPT, f"const INDEX = {json.dumps(known, indent=0)};\n{script}")
