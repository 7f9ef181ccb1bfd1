"""The folder of the pages, complete in itself: notebooks, texts, the index, and the search."""

import base64
import html
import json
import re
from pathlib import Path

import nbformat
from committed import as_json, figures, read, with_predicted, write
from listing import Notebook, notebooks
from nbformat import NotebookNode
from pages import documents, image, inlined, page
from shell import LEAD, SCRIPT, TEXTS, WEB, Heading, listed, plain, preview, shell, slug

FRAME = re.compile(r"""<iframe class="(\w+)" title="([^"]*)"[^>]*? srcdoc='([^']*)'""")
NAVIGATION = """<body>
<nav aria-label="The course">
<a href="index.html">All notebooks</a> · <a href="{stem}.html{anchor}">Notebook {number}</a>
</nav>"""
HERO = """<div class="hero"><div>
<h1>minigrpo</h1>
<p class="lead">{lead}</p>
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
HANDS = {
    "group_sandbox": "Reward four texts, update, and see which becomes more likely",
    "ladder": "What each rung of the loss wants of ten tokens, one switch at a time",
    "kl": "Drag a policy, and see both KLs and what k1, k2 and k3 do with its draws",
    "stop_tree": "When the Llama stops thinking, and which way the gradient pulls",
    "explorer": "Follow one question through a run, and see what pushes each token",
    "calculator": "The memory, the hours and the price of GRPO on your card",
    "episode": "Who wrote each token of an episode with a tool, and how it's pushed",
    "clinic": "Sick training runs: three measurements each, and your diagnosis",
}
HEADING = re.compile(r'^<h([1-4]) id="([^"]*)">(.*)<a [^>]*class="anchor"', re.MULTILINE)
# What the search finds on a page: its headings, words of the glossary, and pieces of text.
FOUND = re.compile(
    r'<h[1-4] id="([^"]*)">(.*?)<a [^>]*class="anchor"|<tr id="(word-[^"]+)">(.*?)</tr>'
    r"|<(p|li|tr)\b[^>]*>(.*?)</\5>",
    re.DOTALL,
)


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
        nb = with_predicted(read(notebook.location), notebook.location)
        write_page(nb, notebook.location, out)
    write_index(root, out)


def write_interactive(root: Path, out: Path) -> dict[str, tuple[str, str]]:
    """Write what notebooks show in a frame as pages too: name -> (title, what it is)."""
    known, written = {}, {}
    for notebook in notebooks(root):
        file = out / notebook.file
        cells = read(file).cells if file.exists() else []
        anchor = ""
        for cell, output in ((c, o) for c in cells for o in c.get("outputs") or [{}]):
            for section in re.findall("^## (.+)$", cell.source, re.MULTILINE) * (not output):
                anchor = f"#{slug(section)}"
            frame = FRAME.search(output.get("data", {}).get("text/html", ""))
            name, title, text = map(html.unescape, frame.groups() if frame else ("", "", ""))
            if not frame or text in known.values():
                continue
            says = f"{HANDS.get(name, title)}. From notebook {notebook.number}, {notebook.title}."
            if name in known:  # another recording
                name, title = f"{name}_{notebook.number}", f"{title}, in notebook {notebook.number}"
            known[name], written[name] = text, (title, says)
            above = NAVIGATION.format(stem=notebook.stem, number=notebook.number, anchor=anchor)
            head = preview(name, title, says, root)
            text = text.replace("</title>", f"</title>\n{head}", 1).replace("<body>", above, 1)
            write(out / f"{name}.html", text)
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
    title, *inside = (heading for heading in headings(out / name) if heading.level <= 3)
    return f"""<section class="card" id="{notebook.stem}">
{shown}<div>
<h3><a href="{name}">{title.text}</a></h3>
<p>{html.escape(notebook.card)}</p>
<p class="facts">{" · ".join(facts)}</p>
<details><summary>{len(inside)} sections</summary>
{listed(inside, name)}</details>
</div>
</section>"""


def links(told: dict[str, tuple[str, str]]) -> str:
    """Pages with their titles and what they are, as a list."""
    items = (
        f'<li><a href="{name}.html">{html.escape(title)}</a> <span>{html.escape(says)}</span></li>'
        for name, (title, says) in told.items()
    )
    return '<ul class="also">\n{}\n</ul>'.format("\n".join(items))


def index(root: Path, out: Path, framed: dict[str, tuple[str, str]]) -> str:
    """The page that the course is entered by; `framed` are the pages that answer to a hand."""
    drawing = inlined((root / "figures" / "map.svg").read_bytes(), "image/svg+xml")
    hero = HERO.format(lead=LEAD, map=image(drawing, {"alt": MAP, "width": 560, "height": 276}))
    there = documents(root).values()
    body = [hero, links({name: told for name, told in TEXTS.items() if name in there})]
    if framed:
        body += [f"<h2>To hold in your hands</h2>\n{links(framed)}"]
    for number, notebook in enumerate(notebooks(root)):
        if notebook.part or not number:
            part, _, name = notebook.part.partition(": ")
            body.append(f"<h2><span>{part}</span> {name}</h2>")
        body.append(card(notebook, out))
    return shell("index", "minigrpo: GRPO from scratch", "\n".join(body), "course.toml", root)


def entries(page: Path) -> list[list[str]]:
    """What can be found on a page: [anchor, heading, "", text, ...] and [anchor, word, meaning].

    The texts are those below the heading. What is folded is not among them.
    """
    text = page.read_text("utf-8").partition("<article>")[2].partition("</article>")[0]
    text = re.sub("<details.*?</details>", "", text, flags=re.DOTALL)
    found, section = [], []
    for key, heading, word, row, _, block in FOUND.findall(text):
        says = html.unescape(plain(block))
        if key:
            found.append(section := [key, html.unescape(plain(heading)), ""])
        elif word:
            cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)[:2]
            found.append([word, *(html.unescape(plain(cell)) for cell in cells)])
        elif section and says and not re.search("<th|colab.research", block):
            section.append(says)
    return found


def write_index(root: Path, out: Path) -> None:
    """Write the index and the search of the pages that there are."""
    framed = write_interactive(root, out)
    for picture in (root / "figures").glob("map.png"):
        (out / picture.name).write_bytes(picture.read_bytes())
    write(out / "index.html", index(root, out, framed))
    names = [notebook.stem for notebook in notebooks(root)] + [*documents(root).values()]
    known = [[f"{name}.html", entries(out / f"{name}.html")] for name in names]
    known += [[f"{name}.html", [["", title, says]]] for name, (title, says) in framed.items()]
    script = (WEB / SCRIPT).read_text(encoding="utf-8")
    told = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    write(out / SCRIPT, f"const INDEX = {told};\n{script}")
