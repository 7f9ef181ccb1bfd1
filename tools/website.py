"""The folder of the pages: its index, its search, the pages of the texts, and what is out of date.

The folder is complete in itself, so that it can be read from a disk or be published as it is.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from committed import alts, as_json, figures, read, write
from nbformat import NotebookNode
from pages import documents, page, title_of
from shell import SCRIPT, WEB, Heading, listed, plain, shell

EXPLORER = "explorer"
"""A page that notebook 07 comes with."""
EXPLORES = "one gradient step, token by token, to turn around in your hands"
PARTS = {  # by the first notebook
    "01": ("Part I", "A policy"),
    "04": ("Part II", "The algorithm"),
    "08": ("Part III", "In the wild"),
}
# What you'll have built after each notebook, and the cell whose figure shows it.
CARDS = {
    "01_char_gpt": (
        "A GPT made from its parts and pretrained on Shakespeare, which beats counting letters "
        "and pairs of letters.",
        "loss-figure",
    ),
    "02_sequence_probability": (
        "Log-probs of whole texts, the masks they need, the ratio of two policies, and a sampler "
        "that agrees with the scorer.",
        "ratio-figure",
    ),
    "03_sequence_grpo": (
        "GRPO with one ratio per text. Your GPT learns to love the letter e, and you hold the "
        "leash.",
        "run-figure",
    ),
    "04_policy_gradient": (
        "The token-level loss, changed one line at a time from plain REINFORCE and followed "
        "through the same ten tokens.",
        "ladder-figure",
    ),
    "05_kl_and_family": (
        "The KL as a number and as a gradient, the whole loss, and six published algorithms as "
        "settings of the same code.",
        "variants-figure",
    ),
    "06_a_llama_that_answers": (
        "A tiny Llama with think and answer tokens, a reward that a program can check, and one "
        "that gets hacked.",
        "control-figure",
    ),
    "07_grpo": (
        "The whole algorithm, line by line and token by token, in a run where accuracy and "
        "thought length rise together.",
        "run",
    ),
    "08_bug_clinic": (
        "The habit of measuring first. You diagnose sick runs blind, cure a training loop, and "
        "put your own loss before a judge.",
        "scissors",
    ),
    "09_text_models": (
        "Everything between a string and a reward: tokenizers, chats, padding, positions, "
        "rewards that read text, memory.",
        "positions-figure",
    ),
    "10_scaling_out": (
        "The same task on TRL, on two processes, with a sampler of its own and with stale "
        "rollouts.",
        "bands",
    ),
    "11_a_real_run": (
        "A public model of 135 million parameters, trained by GRPO on two CPU cores, and the "
        "recipes for your own GPU.",
        "run-figure",
    ),
}
LEAD = "Learn GRPO, Group Relative Policy Optimization, by building it, on a laptop without a GPU."
ABOUT = (
    "You begin with a small GPT that reads Shakespeare, and end with a public language model that "
    "learns to solve word problems. On the way you write every core function yourself, and when "
    "one is wrong, the course tells you what it computes instead."
)
SIZE = ("width", "height")
TIMES = {"minutes of prose": "min of prose", "minutes of exercises": "min of exercises"}
LINKED = re.compile(r'data-page="([^"#]+)(#[^"]*)?" href="[^"]*"')
HEADING = re.compile(r'<h([1-4]) id="([^"]*)">(.*)<a [^>]*class="anchor"')
WORD = re.compile(r'<tr id="(word-[^"]+)">\s*<td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>', re.DOTALL)

# ---------------------------------------------------------------------------------------------
# pages of notebooks


def remove_page(path: Path, out: Path) -> None:
    """Remove the page of a notebook and its executed copy."""
    for suffix in (".html", ".ipynb"):
        (out / f"{path.stem}{suffix}").unlink(missing_ok=True)


def remove_stale(folder: Path, out: Path) -> None:
    """Remove the pages of notebooks that have changed since, or are gone, and of texts that are."""

    def sources(path: Path) -> list[str]:
        return [cell.source for cell in read(path).cells]

    known = {"index", EXPLORER, *documents(folder.parent.resolve()).values()}
    for built in sorted({file.stem for file in out.glob("*.*")} - known):
        source, executed = folder / f"{built}.ipynb", out / f"{built}.ipynb"
        complete = source.exists() and executed.exists() and (out / f"{built}.html").exists()
        if not complete or sources(source) != sources(executed):
            remove_page(source, out)
        if not source.exists():
            (out / f"{built}.png").unlink(missing_ok=True)


def write_page(nb: NotebookNode, path: Path, out: Path, seconds: float) -> None:
    """Write the executed notebook and its page to the folder `out`."""
    nb.metadata["minigrpo"] = {"seconds": round(seconds, 1)}
    write(out / f"{path.stem}.html", page(nb, path, out))
    write(out / path.name, as_json(nb))


@cache
def page_of_text(text: str, path: Path, root: Path, out: Path) -> str:
    """The page of a text in Markdown."""
    cell = nbformat.v4.new_markdown_cell(text, id="text")
    return page(nbformat.v4.new_notebook(cells=[cell]), path, out, root)


# ---------------------------------------------------------------------------------------------
# the index


def headings(text: str) -> list[Heading]:
    """The headings of a page that has been built."""
    lines = (line for line in text.splitlines() if line.startswith("<h"))
    matches = filter(None, map(HEADING.match, lines))
    return [Heading(int(match[1]), match[2], plain(match[3])) for match in matches]


def minutes(nb: NotebookNode) -> str:
    """What the table under the title says: minutes of prose and of exercises."""
    text = "\n".join(cell.source for cell in nb.cells[:1])
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    told = dict(zip(rows[0], rows[-1])) if len(rows) == 3 else {}
    return " · ".join(f"{told[name]} {said}" for name, said in TIMES.items() if name in told)


def picture(nb: NotebookNode, path: Path, out: Path) -> str:
    """The figure of a card, written beside the page, or "" if the notebook has none."""
    name = CARDS.get(path.stem, ("", ""))[1]
    for cell in nb.cells:
        drawn = [(o, kind) for o, kind in figures(cell) if kind == "image/png"]
        if cell.id == name and drawn:
            data = base64.b64decode(drawn[0][0].data["image/png"])
            target = out / f"{path.stem}.png"
            if not target.is_file() or target.read_bytes() != data:
                target.write_bytes(data)
            size = drawn[0][0].metadata.get("image/png", {})
            told = {"alt": (alts(cell) or [""])[0], **{k: size[k] for k in SIZE if k in size}}
            attrs = "".join(f' {name}="{html.escape(str(value))}"' for name, value in told.items())
            return f'<img src="{target.name}"{attrs}>'
    return ""


def card(path: Path, out: Path, needs: dict[str, str]) -> str:
    """A notebook on the index: its title, picture, minutes, and sections if there is a page."""
    built = out / f"{path.stem}.html"
    executed = out / path.name
    nb = read(executed if executed.exists() else path)
    title, facts = html.escape(title_of(nb, path.stem)), [minutes(nb)]
    sections = ""
    if executed.exists() and built.exists():
        title = f'<a href="{built.name}">{title}</a>'
        facts.append(f"executed in {nb.metadata.minigrpo.seconds:.0f} s")
        inside = [h for h in headings(built.read_text(encoding="utf-8")) if h.level in (2, 3)]
        if inside:
            sections = f"<details><summary>{len(inside)} sections</summary>\n"
            sections += f"{listed(inside, built.name)}</details>\n"
    else:
        facts.append("not executed yet")
        if path.stem in needs:
            facts[-1] += "; needs make course SCALE=1"
    line = html.escape(CARDS.get(path.stem, ("", ""))[0])
    parts = [f"<h3>{title}</h3>", line and f"<p>{line}</p>"]
    parts.append(f'<p class="facts">{" · ".join(map(html.escape, filter(None, facts)))}</p>')
    text = "\n".join(filter(None, [*parts, sections]))
    shown = picture(nb, path, out)
    return f'<section class="card" id="{path.stem}">\n{shown}<div>\n{text}</div>\n</section>'


def index(paths: list[Path], out: Path, needs: dict[str, str]) -> str:
    """The page that the course is entered by."""
    root = paths[0].parent.parent
    groups: list[tuple[tuple[str, str], list[str]]] = []
    for path in paths:
        part = PARTS.get(path.stem[:2])
        if part or not groups:
            groups.append((part or ("", "Notebooks"), []))
        groups[-1][1].append(card(path, out, needs))
    sections = "\n".join(
        f"<h2><span>{number}</span> {name}</h2>\n{chr(10).join(cards)}"
        for (number, name), cards in groups
    )
    drawing = root / "figures" / "map.svg"
    hero = ""
    if drawing.is_file():
        data = base64.b64encode(drawing.read_bytes()).decode()
        hero = f'<img src="data:image/svg+xml;base64,{data}" alt="{MAP}" width="560" height="276">'
    body = (
        f'<div class="hero"><div>\n<h1>minigrpo</h1>\n<p class="lead">{LEAD}</p>\n<p>{ABOUT}</p>\n'
        f"</div>\n{hero}\n</div>\n{also(root, out)}\n{sections}"
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
# search, and links between pages


def entries(names: list[str], out: Path) -> Iterator[list[str]]:
    """What can be found: each heading and each word of the glossary, its address and its page."""
    for name in names:
        file = out / f"{name}.html"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        page_headings = headings(text)
        title = html.unescape(page_headings[0].text) if page_headings else name
        for heading in page_headings:
            where = f"{name}.html" + (f"#{heading.id}" if heading.level > 1 else "")
            yield [html.unescape(heading.text), where, title, ""]
        for key, word, says in WORD.findall(text) if name == "glossary" else ():
            texts = [html.unescape(plain(part)) for part in (word, says)]
            yield [texts[0], f"{name}.html#{key}", title, texts[1]]


def settle(out: Path) -> None:
    """Let each link between pages lead to its page, or to the index while there is no such page."""

    def link(match: re.Match[str]) -> str:
        name, anchor = match[1], match[2] or ""
        there = f"{name}{anchor}"
        if not (out / name).is_file():
            there = f"index.html#{name.removesuffix('.html')}"
        return f'data-page="{name}{anchor}" href="{there}"'

    for file in sorted(out.glob("*.html")):
        text = file.read_text(encoding="utf-8")
        new = LINKED.sub(link, text)
        if new != text:
            write(file, new)


def write_index(paths: list[Path], out: Path, needs: dict[str, str]) -> None:
    """Write the index, the pages of the texts and the search, and settle the links between pages.

    Args:
        paths: the notebooks of the course in order, whether they have a page yet or not.
        out: the folder of the pages.
        needs: what a notebook needs beyond the packages of requirements.txt.
    """
    root = paths[0].parent.parent.resolve()
    texts = documents(root)
    for path, name in texts.items():
        text = page_of_text(path.read_text(encoding="utf-8"), path, root, out)
        write(out / f"{name}.html", text)
    write(out / "index.html", index(paths, out, needs))
    known = [*entries([p.stem for p in paths] + [*texts.values()], out)]
    if (out / f"{EXPLORER}.html").is_file():
        known.append(["The explorer", f"{EXPLORER}.html", "07", EXPLORES])
    as_json = json.dumps(known, indent=0)
    write(out / SCRIPT, f"const INDEX = {as_json};\n{(WEB / SCRIPT).read_text(encoding='utf-8')}")
    settle(out)
