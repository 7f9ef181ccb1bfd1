"""Read the exercises of a notebook from their text, `NN.md` beside this file.

A wrong answer is a line that replaces the line of the reference that begins alike, or one text in
it that becomes another. The key of an exercise is the number of its file and its place in it.
"""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigrpo.exercises.judge import Answer, Case, Exercise, Function
from minigrpo.exercises.review import Bug, Review, Trial, Weak
from minigrpo.study.mistakes import replaced

FOLDER = Path(__file__).parent
FIELDS = {"package", "gradient", "number", "list", "keywords", "tolerance"}
SECTIONS = {"Helpers", "Bugs", "Test", "Right too", "Wrong", "Lapses", "Same", "Cases", "Hints"}
SECTIONS |= {"Also right", "Also wrong", "Why"}
SAME = re.compile(r"`(?P<line>[^`]+)` (?P<reason>.+)")
EDIT = r"`([^`]+)`(?: -> `([^`]+)`)?"
ITEM = re.compile(rf"(?P<edits>(?:{EDIT} ?)*)(?:when `(?P<when>[^`]+)` ?)?(?P<sentence>.*)")
CASE = re.compile(r"(?P<name>[^`]+): (?P<arguments>`.+`)(?P<how>, as given|, one by one)?")
FIELD = re.compile(r"(\w+): (.+)")
CURE = re.compile(r"(?:\(also lines? (?P<also>[\d and]+)\) )?(?P<sentence>.+)")


def wave(*shape: int) -> Tensor:
    """Numbers without a pattern, between -2 and 2, the same on every machine; for the cases."""
    return (2 * torch.sin(torch.arange(1, math.prod(shape) + 1) ** 2 * 0.7)).view(shape)


IN_CASES = {**vars(torch), "nan": math.nan, "inf": math.inf, "wave": wave}


@cache
def records(notebook: int) -> dict[str, Exercise | Review]:
    """The exercises of one notebook by key; empty if it has none.

    Raises:
        ValueError: something in the text is not understood; the message names file, key and line.
    """
    path = FOLDER / f"{notebook:02d}.md"
    return read(path.read_text("utf-8"), notebook) if path.is_file() else {}


def notebooks() -> list[int]:
    """The numbers of the notebooks that have exercises."""
    return sorted(int(path.stem) for path in FOLDER.glob("[0-9][0-9].md"))


def read(text: str, notebook: int) -> dict[str, Exercise | Review]:
    """The exercises of a file by their keys; {.2} in the text is the key of its second one."""
    text = re.sub(r"\{\.(\d+)\}", rf"{notebook}.\1", text)
    setup, *parts = re.split(r"^## (.+)\n", text, flags=re.M)
    titles = [plain(title) for title in parts[::2]]
    names: dict[str, Any] = {"__name__": __name__}
    with located(f"{notebook:02d}.md"):
        for code, _ in entries(re.sub(r"^# .+\n", "", setup)):
            run(code, f"<exercises of notebook {notebook}>", names)
    found = {}
    for place, (title, body) in enumerate(zip(titles, parts[1::2]), start=1):
        key = f"{notebook}.{place}"
        with located(f"{notebook:02d}.md, {key} ({title})"):
            if titles.count(title) > 1:
                raise ValueError("two exercises of this file have this title")
            found[key] = Text(key, title, body, names).record()
    return found


@contextmanager
def located(where: str) -> Iterator[None]:
    """Whatever goes wrong in the block is a ValueError that says where."""
    try:
        yield
    except Exception as error:  # the text is code as well
        raise ValueError(f"{where}: {error}") from error


def plain(text: str) -> str:
    r"""A paragraph in one line; \< stands for <, which would begin HTML in Markdown."""
    return re.sub(r"\s*\n\s*", " ", text).strip().replace("\\<", "<")


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Each block of code with the paragraph after it, and each item of a list without code."""
    pieces = ["", *re.split(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)]
    for code, prose in zip(pieces[::2], pieces[1::2]):
        paragraph, *items = (plain(part) for part in re.split(r"^- ", prose, flags=re.M))
        if code:
            yield code, paragraph
        elif paragraph:
            raise ValueError(f"{paragraph!r} is neither an item of a list nor below its code")
        yield from (("", item) for item in items)


def defined(source: str) -> str:
    """The name of the last function that the source defines."""
    if found := re.findall(r"^def (\w+)", source, re.M):
        return found[-1]
    raise ValueError(f"a block of code with a function is expected, got {source!r}")


def matched(pattern: re.Pattern, text: str) -> re.Match:
    if found := pattern.fullmatch(text):
        return found
    raise ValueError(f"{text!r} is not understood here")


def run(source: str, filename: str, names: dict[str, Any]) -> None:
    """Execute it, so that `inspect.getsource` and a traceback find its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), names)


def changed(source: str, edits: str) -> str:
    """The source with every edit made: `new line`, or `old text` -> `new text`."""
    for old, new in re.findall(EDIT, edits):
        before = source
        if new:
            if source.count(old) != 1:
                raise ValueError(f"`{old}` stands {source.count(old)} times in the code, not once")
            source = source.replace(old, new)
        else:
            source = replaced(source, old)
        if source == before:
            raise ValueError(f"`{new or old}` changes nothing")
    return source


class Text:
    """An exercise as it stands in the file: its key, its title, and what follows."""

    def __init__(self, key: str, title: str, body: str, names: dict[str, Any]) -> None:
        self.key, self.title, self.names = key, title, dict(names)
        pieces = re.split(r"^### ([\w ]+?)(?: in `(\w+)`)?\n", body, flags=re.M)
        self.sections = list(zip(pieces[1::3], pieces[2::3], pieces[3::3]))
        if not pieces[0].lstrip().startswith("```python"):
            raise ValueError("below the title a block of code is expected")
        (self.code, _), *fields = entries(pieces[0])
        self.fields = dict(matched(FIELD, text).groups() for _, text in fields)
        self.bases: dict[str, str] = {}
        there = {name for name, _, _ in self.sections}
        self.is_review = "Bugs" in there
        for name in sorted(there - SECTIONS | self.fields.keys() - FIELDS):
            raise ValueError(f"{name!r} is no section and no field of an exercise")
        needed = {"Why", "Right too", "Wrong", "Hints", "Test" if self.is_review else "Cases"}
        if missing := [f"### {name}" for name in sorted(needed - there)]:
            raise ValueError(f"{', '.join(missing)} is missing")
        if not (self.is_review or "package" in self.fields):
            raise ValueError("the field `- package: ` is missing")

    def record(self) -> Exercise | Review:
        for code, _ in self.entries("Helpers"):
            run(code, f"<helpers of {self.key}>", self.names)
        return self.review() if self.is_review else self.exercise()

    def entries(self, section: str) -> Iterator[tuple[str, str]]:
        for name, _, text in self.sections:
            yield from entries(text) if name == section else ()

    def function(self, source: str, what: str) -> Function:
        names = dict(self.names)
        run(source, f"<{self.key}, {what}>", names)
        return names[defined(source)]

    def solve(self, code: str) -> dict[str, Any]:
        """What exercises and reviews have in common; from here on code may call the reference."""
        self.bases[""] = code
        reference = self.function(code, "reference")
        self.names[reference.__name__] = reference
        imports = code[: code.index(f"def {reference.__name__}(")].strip().splitlines()
        return {
            "key": self.key,
            "title": self.title,
            "reference": reference,
            "imports": tuple(imports),
            "others": tuple(answer for answer, _ in self.answers("Right too")),
            "hints": tuple(text for _, text in self.entries("Hints")),
            "why": plain(next(text for name, _, text in self.sections if name == "Why")),
        }

    def answers(self, section: str) -> Iterator[tuple[Answer, str | None]]:
        """Each answer of the sections of this name, and in a review when a test is of its kind."""
        for name, base, text in self.sections:
            for code, item in entries(text) if name == section else ():
                if (base := base or "") not in self.bases:
                    raise ValueError(f"{section} in `{base}`: no right way has this name")
                found = matched(ITEM, item)
                edits, sentence, when = found["edits"].strip(), found["sentence"], found["when"]
                if not (code or edits):
                    raise ValueError(f"{item!r} names no line and stands below no code")
                source = code or changed(self.bases[base], edits)
                name = edits or defined(source)
                if bool(sentence) == (section == "Lapses"):
                    raise ValueError(
                        f"{name}: a sentence is {'too much' if sentence else 'missing'}"
                    )
                if bool(when) != (self.is_review and section == "Wrong"):
                    raise ValueError(f"{name}: when `...` is {'too much' if when else 'missing'}")
                self.bases[name] = source
                yield Answer(name, self.function(source, f"{section}: {name}"), sentence), when

    def exercise(self) -> Exercise:
        common = self.solve(self.code)
        signature = inspect.signature(common["reference"])
        parameters = list(signature.parameters)
        items = (matched(CASE, text) for _, text in self.entries("Cases"))
        cases = [case for item in items for case in self.case(item)]
        for case in cases:
            with located(f"case {case.name!r}"):
                signature.bind(*case.arguments)
        gradient, keywords = (
            tuple(name for name in self.fields.get(field, "").split(", ") if name)
            for field in ("gradient", "keywords")
        )
        return Exercise(
            **common,
            package=eval(
                f"lambda {str(signature)[1:-1]}: {self.fields['package'].strip('`')}", self.names
            ),
            wrong=tuple(answer for answer, _ in self.answers("Wrong")),
            lapses=tuple(answer.function for answer, _ in self.answers("Lapses")),
            cases=tuple(cases),
            gradient=tuple(parameters.index(name) for name in gradient),
            number="number" in self.fields,
            sequence="list" in self.fields,
            keywords=keywords,
            same=tuple(matched(SAME, item).groups() for _, item in self.entries("Same")),
            tolerance=float(self.fields.get("tolerance", 1e-6)),
        )

    def case(self, found: re.Match) -> Iterator[Case]:
        """One, or as many as its lists are long."""
        arguments = tuple(map(self.argument, re.findall(r"`([^`]+)`", found["arguments"])))
        rows = zip(*arguments, strict=True) if found["how"] == ", one by one" else [arguments]
        yield from (Case(found["name"], row, found["how"] == ", as given") for row in rows)

    def argument(self, text: str) -> Any:
        """What the Python says; a list of numbers is a tensor."""
        with located(f"`{text}`"):
            value = first = eval(text, {**IN_CASES, **self.names})
        while isinstance(first, list) and first:
            first = first[0]
        numbers = isinstance(value, list) and isinstance(first, int | float)
        return torch.tensor(value) if numbers else value

    def review(self) -> Review:
        cures = [matched(ITEM, text) for _, text in self.entries("Bugs")]
        shown = self.function(self.code, "shown")
        right = changed(self.code, "".join(cure["edits"] for cure in cures))
        self.names["right"] = self.function(right, "right")
        ((test, _),) = self.entries("Test")
        return Review(
            **self.solve(test),
            code=shown,
            right=self.names["right"],
            bugs=tuple(self.bug(cure, [c for c in cures if c is not cure]) for cure in cures),
            wrong=tuple(
                Weak(answer.name, answer.function, answer.sentence, self.kind(when))
                for answer, when in self.answers("Wrong")
            ),
            also_right=self.versions("Also right", right),
            also_wrong=self.versions("Also wrong", right),
            lapses=tuple(answer.function for answer, _ in self.answers("Lapses")),
        )

    def versions(self, section: str, right: str) -> tuple[Answer, ...]:
        """The right code with edits, or other code, each with what to say to a test it refutes."""
        found = []
        for code, item in self.entries(section):
            parts = matched(ITEM, item)
            name = parts["edits"].strip() or defined(code)
            source = code or changed(right, parts["edits"])
            found.append(Answer(name, self.function(source, name), parts["sentence"]))
        return tuple(found)

    def bug(self, cure: re.Match, others: list[re.Match]) -> Bug:
        """The line that its cure changes, and the code with the others cured."""
        lines = zip(self.code.splitlines(), changed(self.code, cure["edits"]).splitlines())
        line = next(number for number, (old, new) in enumerate(lines, start=1) if old != new)
        version = changed(self.code, "".join(other["edits"] for other in others))
        said = matched(CURE, cure["sentence"])
        also = tuple(map(int, re.findall(r"\d+", said["also"] or "")))
        return Bug(line, self.function(version, f"bug in line {line}"), said["sentence"], also)

    def kind(self, when: str) -> Any:
        """Whether a trial is of the kind that the Python describes in the trial's own names."""
        code = compile(when, f"<{self.key}, when>", "eval")

        def holds(trial: Trial) -> bool:
            own = {name: getattr(trial, name) for name in dir(trial) if name[0] != "_"}
            return eval(code, {**own, **self.names})

        return holds
