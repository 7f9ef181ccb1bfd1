"""The folder of the pages: those of notebooks and texts, the index, and the search.

The folder is complete in itself, so that it can be read from a disk or be published as it is.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from committed import alts, as_json, figures, read, write
from listing import Notebook, notebooks
from nbformat import NotebookNode
from pages import attributes, documents, page, title_of
from shell import SCRIPT, WEB, Heading, listed, plain, shell

EXPLORER, EXPLORED = "explorer", "07_grpo"
"""A page of its own, and the notebook in which it is an output."""
EXPLORES = "one gradient step, token by token, to turn around in your hands"
FRAME = re.compile(r"""<iframe class="explorer"[^>]*? srcdoc='([^']*)'""")
NAVIGATION = f"""<body>
<nav aria-label="The course">
<a href="index.html">All notebooks</a> · <a href="{EXPLORED}.html">Notebook {EXPLORED[:2]}</a>
</nav>"""
LEAD = "Learn GRPO, Group Relative Policy Optimization, by building it, on a laptop without a GPU."
ABOUT = (
    "You begin with a small GPT that reads Shakespeare, and end with a public language model that "
    "learns to solve word problems. On the way you write every core function yourself, and when "
    "one is wrong, the course tells you what it computes instead."
)
TIMES = {"minutes of prose": "min of prose", "minutes of exercises": "min of exercises"}
HEADING = re.compile(r'<h([1-4]) id="([^"]*)">(.*)<a [^>]*class="anchor"')
WORD = re.compile(r'<tr id="(word-[^"]+)">\s*<td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>', re.DOTALL)

# ---------------------------------------------------------------------------------------------
# pages of notebooks


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


def write_explorer(out: Path) -> bool:
    """Take the explorer out of its notebook, as a page of its own; whether there is one."""
    file = out / f"{EXPLORED}.ipynb"
    cells = read(file).cells if file.exists() else []
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    shown = [FRAME.search(output.get("data", {}).get("text/html", "")) for output in outputs]
    if frame := next(filter(None, shown), None):
        explorer = html.unescape(frame[1]).replace("<body>", NAVIGATION, 1)
        write(out / f"{EXPLORER}.html", explorer)
    else:
        (out / f"{EXPLORER}.html").unlink(missing_ok=True)
    return bool(frame)


# ---------------------------------------------------------------------------------------------
# the index


def headings(text: str) -> list[Heading]:
    """The headings of a page that has been built."""
    lines = (line for line in text.splitlines() if line.startswith("<h"))
    matches = filter(None, map(HEADING.match, lines))
    return [Heading(int(match[1]), match[2], plain(match[3])) for match in matches]


def picture(notebook: Notebook, nb: NotebookNode, out: Path) -> str:
    """The figure of a card, written beside the page, or "" if the notebook has none."""
    for cell in nb.cells:
        drawn = [o for o, kind in figures(cell) if kind == "image/png"]
        if cell.id == notebook.figure and drawn:
            (out / f"{notebook.stem}.png").write_bytes(base64.b64decode(drawn[0].data["image/png"]))
            told = {"alt": (alts(cell) or [""])[0], **drawn[0].metadata.get("image/png", {})}
            return f'<img src="{notebook.stem}.png"{attributes(told)}>'
    return ""


def card(notebook: Notebook, out: Path) -> str:
    """A notebook on the index: its title, picture, minutes, and sections."""
    nb, name = read(out / notebook.file), f"{notebook.stem}.html"
    facts = [f"{notebook.told[key]} {said}" for key, said in TIMES.items() if key in notebook.told]
    if "minigrpo" in nb.metadata:
        facts.append(f"executed in {nb.metadata.minigrpo.seconds:.0f} s")
    elif notebook.needs:
        facts.append("outputs as stored; make course SCALE=1 executes it")
    inside = [h for h in headings((out / name).read_text("utf-8")) if h.level in (2, 3)]
    text = (
        f'<h3><a href="{name}">{html.escape(title_of(nb, notebook.stem))}</a></h3>\n'
        f"<p>{html.escape(notebook.card)}</p>\n"
        f'<p class="facts">{" · ".join(map(html.escape, facts))}</p>\n'
        f"<details><summary>{len(inside)} sections</summary>\n{listed(inside, name)}</details>\n"
    )
    shown = picture(notebook, nb, out)
    return f'<section class="card" id="{notebook.stem}">\n{shown}<div>\n{text}</div>\n</section>'


def index(root: Path, out: Path) -> str:
    """The page that the course is entered by."""
    sections = []
    for notebook in notebooks(root):
        if notebook.part or not sections:
            number, _, name = notebook.part.partition(": ")
            sections.append(f"<h2><span>{number}</span> {name}</h2>")
        sections.append(card(notebook, out))
    data = base64.b64encode((root / "figures" / "map.svg").read_bytes()).decode()
    hero = f'<img src="data:image/svg+xml;base64,{data}" alt="{MAP}" width="560" height="276">'
    body = (
        f'<div class="hero"><div>\n<h1>minigrpo</h1>\n<p class="lead">{LEAD}</p>\n<p>{ABOUT}</p>\n'
        f"</div>\n{hero}\n</div>\n{also(root, out)}\n" + "\n".join(sections)
    )
    return shell("index", "minigrpo: GRPO from scratch", body)


MAP = (
    "The loop of GRPO. Prompts go to the policy, the policy writes completions, completions get "
    "rewards, rewards become advantages, and the loss made from them and the log-probs drives an "
    "update of the policy. Each part carries the number of its notebook."
)
TEXTS = {
    "glossary": ("Symbols and glossary", "every letter and word, and the notebook it's from"),
    "cheatsheet": ("Cheat sheet", "the loop, the losses and the debugging tree on two pages"),
    "results": ("Results", "what was measured, with its seeds"),
    "notebooks": ("What's in each notebook", "with its minutes and seconds"),
    "knobs": ("The same knob under four names", "settings here, in TRL, verl and OpenRLHF"),
    "speed": ("Speed", "beside TRL and transformers"),
    "recipes": ("Recipes", "complete scripts for a real run"),
    "reading": ("Where to go from here", "papers, books, libraries, three projects"),
    "data": ("Models and data", "what ships with the course"),
    "help": ("Help", "when something doesn't work"),
}


def also(root: Path, out: Path) -> str:
    """Links to what stands beside the notebooks, as far as it is there."""
    there = {*documents(root).values()}
    items = [
        f'<li><a href="{name}.html">{title}</a> <span>{says}</span></li>'
        for name, (title, says) in TEXTS.items()
        if name in there
    ]
    if (out / f"{EXPLORER}.html").is_file():
        link = f'<a href="{EXPLORER}.html">The explorer</a>'
        items.insert(0, f"<li>{link} <span>{EXPLORES}</span></li>")
    return f'<ul class="also">\n{chr(10).join(items)}\n</ul>' if items else ""


# ---------------------------------------------------------------------------------------------
# search


def entries(names: list[str], out: Path) -> Iterator[list[str]]:
    """What can be found: each heading and each word of the glossary, its address and its page."""
    for name in names:
        text = (out / f"{name}.html").read_text(encoding="utf-8")
        title = html.unescape(headings(text)[0].text)
        for heading in headings(text):
            where = f"{name}.html" + (f"#{heading.id}" if heading.level > 1 else "")
            yield [html.unescape(heading.text), where, title, ""]
        for key, word, says in WORD.findall(text) if name == "glossary" else ():
            texts = [html.unescape(plain(part)) for part in (word, says)]
            yield [texts[0], f"{name}.html#{key}", title, texts[1]]


def write_index(root: Path, out: Path) -> None:
    """Write the index and the search of the pages that there are."""
    explorer = write_explorer(out)
    write(out / "index.html", index(root, out))
    names = [notebook.stem for notebook in notebooks(root)] + [*documents(root).values()]
    known = [*entries(names, out)]
    if explorer:
        known.append(["The explorer", f"{EXPLORER}.html", EXPLORED[:2], EXPLORES])
    as_json = json.dumps(known, indent=0)
    write(out / SCRIPT, f"const INDEX = {as_json};\n{(WEB / SCRIPT).read_text(encoding='utf-8')}")
