"""The contract of the notebooks, as far as it can be seen without running them.

Strict nbval passes a notebook that was never executed, whatever it would print. Hence these rules:
each is a function (notebook, path) -> findings.
"""

import copy
import json
import re
import statistics
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from committed import (
    APART,
    FOLDED,
    alts,
    committed_form,
    figures,
    predicted,
    uncommittable,
    with_predicted,
    with_solutions,
)
from nbformat import NotebookNode

from minigrpo.exercises import all_exercises
from minigrpo.notebook.progress import PREDICTIONS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

LONGEST_CELL = 30  # lines
MEDIAN_CELL = 10  # lines
EXERCISES = 3
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_A_FIGURE, MINUTES_A_FORMULA = 165, 9, 2, 0.8
OF_TABLES_A_MINUTE = 25  # words; a cell says much in few
CAPTION_WORDS = 25
SHORTEST_ALT = 40  # characters
FIGURE_WIDTH = 7.0  # inches
# Tight bounding boxes add a tenth of an inch on either side.
FIGURE_PADDING = 0.2
LARGEST_FILE = 1_500_000  # bytes

RANDOM_ID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4,12})*")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}", re.IGNORECASE)
# An absolute path of two parts or more, or a Windows drive; not a URL, a tag or a fraction.
MACHINE_PATH = re.compile(r"(?<![\w./:<>)\]}~-])/[A-Za-z_][\w.-]*/[\w.-]+|\b[A-Za-z]:\\\w")
MARKER = re.compile(r"^\s*#+\s*(NBVAL|PYTEST_VALIDATE)_", re.MULTILINE)
CHECK = re.compile(r"^\w+ = check\(\"([\dA.]+)\", (\w+)", re.MULTILINE)
TABLE = "| what it needs | minutes of reading | minutes of exercises | seconds to run | exercises |"
BUDGET = re.compile(r"[●○]{3}, (\d+) minutes")
CAPTION = re.compile(r"^\*\*Figure (\d+|A)\.(\d+)\*\* (.+)")
DRAWING = re.compile(r"^# @title Drawing\ndrawing\(\"([\w-]+)\"\)$")


RULE = {"nb": NotebookNode, "path": Path, "return": list[str]}


def load(path: Path) -> NotebookNode:
    """A notebook with what answers its questions.

    It's read as it is, since `nbformat.read` would repair what these rules look for.
    """
    return with_predicted(nbformat.reader.reads(path.read_text(encoding="utf-8")), path)


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """The code cells of a notebook."""
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def number_of(path: Path) -> str:
    """The number of a notebook, such as 02; the appendix has a letter."""
    return "A" if is_optional(path) else path.stem.split("_")[0]


def is_optional(path: Path) -> bool:
    """An appendix, outside the order of the course, may have less than the others."""
    return path.stem.startswith("appendix")


def name(cell: NotebookNode) -> str:
    """How a finding calls a cell."""
    return f"cell {cell.get('id', '(without id)')}"


def texts(nb: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """Every (cell, text) a reader sees: sources, and outputs that are text."""
    for cell in nb.cells:
        yield cell, cell.source
    for cell, output in ((c, output) for c in code_cells(nb) for output in c.outputs):
        yield cell, output.get("text", "")
        yield cell, "\n".join([output.get("evalue", ""), *output.get("traceback", [])])
        for kind, value in output.get("data", {}).items():
            if isinstance(value, str) and not kind.startswith(("image/png", "image/jpeg")):
                yield cell, value


def valid_format(nb: NotebookNode, path: Path) -> list[str]:
    """Format 4.5, the one that has cell ids."""
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        return [f"format {nb.nbformat}.{nb.nbformat_minor} instead of 4.5"]
    errors = nbformat.validator.iter_validate(nb)
    return [f"not valid: {error.message}" for error in errors]


def readable_ids(nb: NotebookNode, path: Path) -> list[str]:
    """Ids are there, differ, and were given by a person."""
    ids = [cell.get("id", "") for cell in nb.cells]
    findings = [f"id {i!r} occurs twice" for i in sorted(set(ids)) if ids.count(i) > 1]
    return findings + [f"id {i!r} says nothing" for i in ids if RANDOM_ID.fullmatch(i) or not i]


def as_committed(nb: NotebookNode, path: Path) -> list[str]:
    """Run in order, with nothing stored that `make execute` would refuse or leave out."""
    kept = nb == committed_form(copy.deepcopy(nb))
    return uncommittable(nb) + ([] if kept else ["not as `make execute` writes it"])


def no_trace_of_a_machine(nb: NotebookNode, path: Path) -> list[str]:
    """A memory address is another one in each run, and a path from the root is on one machine.

    A page in a frame is a file of the package, and its packed data may look like either.
    """
    return [
        f"{name(cell)} shows {found[0]}"
        for cell, text in texts(nb)
        for pattern in (ADDRESS, MACHINE_PATH)
        if (found := pattern.search(re.sub("srcdoc='[^']*'", "", text)))
    ]


def known_markers(nb: NotebookNode, path: Path) -> list[str]:
    """nbval is told by tags, which these rules see, and is never told to skip."""
    cells, skipping = code_cells(nb), {"nbval-skip", "skip-execution"}
    findings = [f"{name(c)} marks itself in a comment" for c in cells if MARKER.search(c.source)]
    return findings + [f"{name(c)} is skipped" for c in cells if skipping & set(tags(c))]


def no_long_cell(nb: NotebookNode, path: Path) -> list[str]:
    """A cell fits a screen."""
    lengths = [(cell, len(untitled(cell).splitlines())) for cell in code_cells(nb)]
    return [f"{name(cell)} has {n} lines" for cell, n in lengths if n > LONGEST_CELL]


def untitled(cell: NotebookNode) -> str:
    """The source without the line that is seen of it where it's folded."""
    return re.sub(r"^# @title .*\n", "", cell.source)


def short_median(nb: NotebookNode, path: Path) -> list[str]:
    """Most cells are a few lines."""
    lengths = [len(cell.source.splitlines()) for cell in code_cells(nb)]
    median = statistics.median(lengths) if lengths else 0
    return [f"the median code cell has {median} lines"] if median > MEDIAN_CELL else []


def verdict_follows(nb: NotebookNode, path: Path) -> list[str]:
    """What a machine may change is judged by one of the next two code cells, which is compared."""
    cells = code_cells(nb)

    def is_verdict(cell: NotebookNode) -> bool:
        judges = "verdict" in tags(cell) or re.search(r"^\s*assert\b", cell.source, re.MULTILINE)
        return bool(judges) and "nbval-ignore-output" not in tags(cell)

    return [
        f"{name(cell)} ignores its output, but no verdict follows"
        for i, cell in enumerate(cells)
        if "nbval-ignore-output" in tags(cell) and not any(map(is_verdict, cells[i + 1 : i + 3]))
    ]


def has_exercises(nb: NotebookNode, path: Path) -> list[str]:
    """Those on record for this notebook, in their order, each check with its stub above it."""
    number = number_of(path).lstrip("0")
    wanted = [e.key for e in all_exercises() if e.key.split(".")[0] == number]
    keys, findings, above = [], [], ""
    for cell in code_cells(nb):
        for key, function in CHECK.findall(cell.source):
            keys.append(key)
            if not re.search(rf"def {function}\([^§]*raise NotImplementedError", above):
                findings.append(f"{name(cell)} has no stub of {function} above it")
        above += f"\n§\n{cell.source}"  # a stub is one cell
    if keys != wanted or (len(keys) < EXERCISES and not is_optional(path)):
        findings.append(f"exercises {keys}, on record are {wanted}")
    return findings


def guesses_meet_outcomes(nb: NotebookNode, path: Path) -> list[str]:
    """A guess is asked for with None, under a key of the notebook, and a later cell answers it."""
    findings, asked, cells = [], [], code_cells(nb)
    for i, cell in enumerate(cells):
        for key, guess in re.findall(r"^predict\(\"([^\"]+)\", (.+?)\)", cell.source, re.MULTILINE):
            answer = f"{key[3:].replace('_', ' ')}: it came out at "
            later = [output.get("text", "") for c in cells[i + 1 :] for output in c.outputs]
            if guess != "None":
                findings.append(f"{name(cell)} makes the reader's guess {key}")
            asked.append(key)
            if not any(line.startswith(answer) for text in later for line in text.splitlines()):
                findings.append(f"{name(cell)} asks for {key}, and no later cell answers")
    known = [f"{path.stem[:2]}.{word}" for word in PREDICTIONS.get(path.stem[:2], ())]
    if sorted(asked) != sorted(known):
        findings.append(f"the guesses asked for are {asked}, and `predict` knows {known}")
    return findings


def solutions_below(nb: NotebookNode, path: Path) -> list[str]:
    """After each check stands the solution of its record, and nowhere else."""
    wanted = with_solutions(nb.cells)
    missing = [cell for cell in wanted if cell not in nb.cells]
    findings = [f"{name(cell)} is missing after its check" for cell in missing]
    findings += [f"{name(cell)} belongs to no check" for cell in nb.cells if cell not in wanted]
    return findings or ([] if wanted == nb.cells else ["the solutions are not after their checks"])


def is_figure(cell: NotebookNode) -> bool:
    """Neither the map, nor a picture of a page to click through, has a number."""
    return cell.id != "map" and 'drawing("page_' not in cell.source


def captions(nb: NotebookNode, path: Path) -> list[str]:
    """Figures and drawings have a lesson below them, and their numbers run through both."""
    findings, numbers = [], []
    shown = [cell for cell in nb.cells if "verdict" not in tags(cell)]
    for i, cell in enumerate(shown):
        paragraphs = cell.source.split("\n\n") if cell.cell_type == "markdown" else []
        below = [CAPTION.match(paragraph) for paragraph in paragraphs]
        numbers += [found.groups()[:2] for found in below if found]
        if figures(cell) and is_figure(cell):
            after = shown[i + 1].source if shown[i + 1].cell_type == "markdown" else ""
            if not CAPTION.match(after):
                findings.append(f"{name(cell)} has a figure without a caption below it")
        long = [found[3] for found in below if found and len(found[3].split()) > CAPTION_WORDS]
        findings += [f"{name(cell)} has a caption of {len(text.split())} words" for text in long]
    many = sum(bool(figures(cell)) for cell in nb.cells if is_figure(cell))
    wanted = [(number_of(path).lstrip("0"), str(k)) for k in range(1, many + 1)]
    return findings + ([] if numbers == wanted else [f"figures {numbers}, not {wanted}"])


def described_in_alt(nb: NotebookNode, path: Path) -> list[str]:
    """What is in a picture is said to those who cannot see it."""
    findings = []
    for cell in code_cells(nb):
        told, drawn = alts(cell), figures(cell)
        stored = [output.get("metadata", {}).get(kind, {}).get("alt") for output, kind in drawn]
        if told != stored:
            findings.append(f"{name(cell)} describes its figures otherwise than their outputs do")
        short = [alt for alt in told if len(alt) < SHORTEST_ALT]
        findings += [f"{name(cell)} says too little of a picture: {alt!r}" for alt in short]
    return findings


def title_table(nb: NotebookNode, path: Path) -> list[str]:
    """The title says truly what the notebook needs."""
    _, found, below = nb.cells[0].source.partition(f"{TABLE}\n|---|---|---|---|---|\n")
    row = [entry.strip() for entry in below.split("\n")[0].strip("|").split("|")]
    if not found or len(row) != 5:
        return [f"the title has no table {TABLE}"]
    markdown = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    minutes = [int(number) for number in BUDGET.findall(markdown)]
    keys = sum(len(re.findall(r"\bcheck\(\"[\dA]", cell.source)) for cell in code_cells(nb))
    findings = [] if row[0] and re.search(r"\d", row[3]) else ["the title leaves a column empty"]
    if len(minutes) != keys:
        findings.append(f"{keys} exercises, of which {len(minutes)} say how many minutes they take")
    if row[4] != str(keys):
        findings.append(f"the title promises {row[4]} exercises, there are {keys}")
    if row[2] != str(sum(minutes)):
        findings.append(f"the title says {row[2]} minutes of exercises, together {sum(minutes)}")
    if row[1] != str(reading(nb)):
        findings.append(f"the title says {row[1]} minutes of reading, not {reading(nb)}")
    return findings


def reading(nb: NotebookNode) -> int:
    """Minutes for prose, tables, code that isn't folded, figures and formulas, in fives."""
    shown = [cell for cell in code_cells(nb) if not FOLDED & {*tags(cell)}]
    lines = sum(bool(line.strip()) for cell in shown for line in cell.source.splitlines())
    drawn = sum(bool(CAPTION.search(line)) for line in _lines(nb))
    rows = " ".join(line for line in _lines(nb) if line.startswith("|"))
    minutes = len(words(prose(nb))) / WORDS_A_MINUTE + len(words(rows)) / OF_TABLES_A_MINUTE
    displayed = sum(line.count("$$") for line in _lines(nb)) / 2
    minutes += lines / LINES_A_MINUTE + MINUTES_A_FIGURE * drawn + MINUTES_A_FORMULA * displayed
    return 5 * round(minutes / 5)


def _lines(nb: NotebookNode) -> list[str]:
    return [line for c in nb.cells if c.cell_type == "markdown" for line in c.source.splitlines()]


def opens_with_the_map(nb: NotebookNode, path: Path) -> list[str]:
    """The course is drawn with this notebook's part lit."""
    drawn = [DRAWING.findall(cell.source) for cell in nb.cells if cell.id == "map"]
    return [] if drawn == [[f"map_{number_of(path)}"]] else ["no cell `map` draws the map"]


def holds_when_opened_alone(nb: NotebookNode, path: Path) -> list[str]:
    """Nothing that is shown lies beside the file; a drawing is there as it is, as SVG and PNG."""
    findings = []
    for cell in nb.cells:
        if re.search(r"!\[[^\]]*\]\((?!https:)|<img ", cell.source):
            findings.append(f"{name(cell)} shows a picture that lies beside the file")
        if "drawing" in tags(cell):
            kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
            if not DRAWING.match(cell.source) or not {"image/svg+xml", "image/png"} <= kinds:
                findings.append(f"{name(cell)} isn't a drawing as SVG and as PNG")
        for drawn in re.findall(r'^drawing\("(\w+)"', cell.source, re.M):
            png = b64encode((ROOT / "figures" / f"{drawn}.png").read_bytes()).decode()
            stored = [o.get("data", {}).get("image/png", "").strip() for o in cell.outputs]
            findings += [] if png in stored else [f"{name(cell)} stores a former {drawn}"]
    size = path.stat().st_size
    return findings + ([] if size < LARGEST_FILE else [f"the file has {size:,} bytes"])


def folded_under_a_title(nb: NotebookNode, path: Path) -> list[str]:
    """What is folded says in its first line what it is; the setup and the imports are."""
    findings = [
        f"{name(cell)} is folded and has no title"
        for cell in code_cells(nb)
        if {*tags(cell)} & FOLDED and not cell.source.startswith("# @title ")
    ]
    plain = [cell for cell in code_cells(nb) if cell.id in ("setup", "imports")]
    return findings + [f"{name(cell)} isn't folded" for cell in plain if "setup" not in tags(cell)]


def closed(nb: NotebookNode, path: Path) -> list[str]:
    """What answers a question isn't stored below it, but in a file beside the tests."""
    raw = nbformat.reader.reads(path.read_text(encoding="utf-8"))
    asked = [cell.id for cell in code_cells(nb) if APART & {*tags(cell)}]
    there = json.loads(predicted(path).read_text("utf-8")) if predicted(path).is_file() else {}
    findings = [f"{name(c)} stores its answer" for c in raw.cells if c.id in asked and c.outputs]
    if sorted(there) != sorted(asked):
        findings.append(f"{predicted(path).name} has {sorted(there)}, the notebook asks {asked}")
    telling = [c for c in code_cells(nb) if re.search(r"^\s*outcome\(", c.source, re.MULTILINE)]
    findings += [f"{name(c)} lacks the tag predict" for c in telling if c.id not in asked]
    empty = [c for c in code_cells(nb) if "outcome(" in c.source and not c.outputs]
    return findings + [f"{name(c)} has told nothing" for c in empty]


def prose(nb: NotebookNode) -> str:
    """The sentences of a notebook: no code, formulas, tables, headings or solutions."""
    shown = [c for c in nb.cells if c.cell_type == "markdown" and "solution" not in tags(c)]
    text = "\n\n".join(cell.source.rstrip(":") for cell in shown)
    for found, instead in (
        (r"(?s)```.*?```", " "),
        (r"(?s)\$\$.*?\$\$", " formula "),
        (r"\$[^$\n]*\$", "x"),
        (r"`[^`\n]*`", "code"),
        (r"!?\[([^\]]*)\]\([^)]*\)", r"\1"),
        (r"(?m)^\s*(?:\||#|<|>>>).*$", ""),
        (r"[*_]", ""),
    ):
        text = re.sub(found, instead, text)
    return text


def words(text: str) -> list[str]:
    """The words of a text; a number is none."""
    return re.findall(r"[A-Za-z][\w'’-]*", text)


def narrow_figures(nb: NotebookNode, path: Path) -> list[str]:
    """Figures fit the column of text: a hundred of their pixels are an inch."""
    most = 100 * (FIGURE_WIDTH + FIGURE_PADDING)
    drawn = [(cell, *figure) for cell in code_cells(nb) for figure in figures(cell)]
    widths = [(cell, output.metadata.get(kind, {}).get("width", 0)) for cell, output, kind in drawn]
    return [f"{name(c)} has a figure {width} px wide" for c, width in widths if width > most]


def linked_neighbours(nb: NotebookNode, path: Path) -> list[str]:
    """The notebooks before and after are one click away; an appendix has none."""
    every = sorted(other for other in path.parent.glob("*.ipynb") if not is_optional(other))
    if path not in every:
        return []
    i = every.index(path)
    markdown = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    neighbours = every[max(i - 1, 0) : i] + every[i + 1 : i + 2]
    return [f"no link to {n.name}" for n in neighbours if f"]({n.name}" not in markdown]


RULES = [rule for rule in globals().values() if getattr(rule, "__annotations__", {}) == RULE]
assert len(RULES) > 15  # no rule may go without a word


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_contract(path, rule):
    findings = rule(load(path), path)
    assert not findings, f"{path.name}:\n  " + "\n  ".join(findings)


def printing(text: str, **fields: object) -> Callable[[NotebookNode], None]:
    """Let the second code cell print something."""
    output = nbformat.v4.new_output("stream", text=text, **fields)
    return lambda nb: code_cells(nb)[1].outputs.append(output)


def with_tag(nb: NotebookNode, tag: str) -> NotebookNode:
    """The first cell that has the tag."""
    return next(cell for cell in nb.cells if tag in tags(cell))


BROKEN = [  # what nbval would pass
    (valid_format, lambda nb: nb.update(nbformat_minor=4)),
    (readable_ids, lambda nb: nb.cells[1].update(id="1f0c9a3b")),
    (as_committed, lambda nb: code_cells(nb)[3].update(execution_count=None)),
    (as_committed, lambda nb: code_cells(nb)[1].outputs.append(ERROR)),
    (as_committed, lambda nb: code_cells(nb)[1].outputs.append(WIDGET)),
    (as_committed, printing("warning", name="stderr")),
    (as_committed, lambda nb: nb.metadata.language_info.update(version="3.11.7")),
    (as_committed, lambda nb: nb.cells[0].metadata.update(vscode={})),
    (no_trace_of_a_machine, printing("<object at 0x7f3a2c90>")),
    (no_trace_of_a_machine, printing("saved in /home/someone/x")),
    (known_markers, lambda nb: code_cells(nb)[1].metadata.update(tags=["nbval-skip"])),
    (verdict_follows, lambda nb: code_cells(nb)[-1].metadata.update(tags=["nbval-ignore-output"])),
    (has_exercises, lambda nb: nb.cells.remove(next(c for c in nb.cells if "check(" in c.source))),
    (solutions_below, lambda nb: nb.cells.remove(with_tag(nb, "solution"))),
]
ERROR = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
WIDGET = nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}})


@pytest.mark.parametrize(("rule", "spoil"), BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_notices_what_nbval_passes(rule, spoil):
    nb = load(NOTEBOOKS[1])
    spoil(nb)
    assert rule(nb, NOTEBOOKS[1])
