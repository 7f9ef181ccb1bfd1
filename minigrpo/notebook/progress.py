"""What a reader has passed, guessed and diagnosed: written down, compared, drawn."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any

from minigrpo.notebook.kept import recall, remember

RECORDS = Path(__file__).parent.parent / "exercises"
PATIENTS = 25
KEY = re.compile(r"(?:0[1-9]|1\d)\.[a-z][a-z0-9_]*")


def predict(key: str, guess: float | None) -> None:
    """Keep a guess of what a run will show; the first one counts.

    Args:
        key: number of the notebook and a word, such as "07.accuracy".
        guess: a number; None as long as there is none.

    Raises:
        ValueError: the key is of another form.
        TypeError: the guess is no number.
    """
    word = _word(key)
    if guess is not None:
        number = isinstance(guess, Real) and not isinstance(guess, bool)
        if not number or not math.isfinite(guess):
            raise TypeError(f"guess: expected a number, such as 0.6, got {guess!r}")
        remember("predictions", key, {"guess": float(guess)})
    if (first := _guess(key)) is None:
        print(f"{word}: put a number in place of None, and run this cell again.")
    elif guess in (None, first):
        print(f"{word}: your guess is {_number(first)}.")
    else:
        print(f"{word}: your first guess counts, and it was {_number(first)}.")


def outcome(key: str, value: Any) -> None:
    """Print what came out, beside the guess if there is one.

    Args:
        key: the one of `predict`.
        value: a number, or a tensor with one entry; None if it didn't happen.

    Raises:
        ValueError: the key is of another form.
    """
    word, guess = _word(key), _guess(key)
    if value is None:
        print(f"{word}: it didn't happen.")
        return
    value = float(value)
    if guess is None:
        print(f"{word}: it came out at {_number(value)}.")
        return
    remember("outcomes", key, {"value": value})
    print(f"{word}: you guessed {_number(guess)}, and it came out at {_number(value)}.")


def clinic_line(patients: int = PATIENTS) -> str:
    """The score of the clinic, in a sentence."""
    diagnoses = recall("clinic").values()
    if not diagnoses:
        return f"The clinic (notebook 08): no diagnosis yet; {patients} patients are waiting."
    right = sum(bool(diagnosis.get("right")) for diagnosis in diagnoses)
    used = sum(len(diagnosis.get("measured", ())) for diagnosis in diagnoses) / len(diagnoses)
    diagnosed = f"The clinic (notebook 08): {len(diagnoses)} of {patients} patients diagnosed"
    return f"{diagnosed}, {right} right at the first attempt, {used:.1f} measurements per patient."


class Progress:
    """What is remembered, as a drawing for a notebook and as text."""

    def __init__(self) -> None:
        passed, guesses, outcomes = map(recall, ("exercises", "predictions", "outcomes"))
        self.rows = [
            (number, title, [key in passed for key in keys]) for number, title, keys in exercises()
        ]
        self.guesses = [
            (
                key,
                _number(prediction["guess"]),
                _number(outcomes[key]["value"]) if key in outcomes else "",
            )
            for key, prediction in sorted(guesses.items())
        ]
        self.clinic = clinic_line()
        self.passed, self.of = (sum(map(f, self.rows)) for f in (_passed, _of))
        self.begun = bool(self.passed or guesses or recall("clinic"))

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.begun:
            yield self._invitation()
            return
        yield self._headline()
        room = max(len(marks) for *_, marks in self.rows)
        for row in self.rows:
            number, title, marks = row
            drawn = "".join(".#"[mark] for mark in marks)
            yield f"  {number:02}  {drawn:{room}}  {_passed(row)} of {_of(row)}  {title}"
        for key, guess, value in self.guesses:
            yield f"  {key}: you guessed {guess}" + (f", and it came out at {value}" * bool(value))
        yield self.clinic

    def _repr_html_(self) -> str:
        if not self.begun:
            return f"<p>{self._invitation()}</p>"
        parts = [f"<p>{self._headline()}</p>"]
        parts.append(_table(("notebook", "exercises", "passed"), map(_cells, self.rows)))
        if self.guesses:
            rows = (
                (html.escape(key), guess, value or "not yet") for key, guess, value in self.guesses
            )
            made = _table(("prediction", "your guess", "came out at"), rows)
            parts.append(f"<details><summary>Your guesses</summary>{made}</details>")
        return "".join([*parts, f"<p>{self.clinic}</p>"])

    def _headline(self) -> str:
        guessed = len(self.guesses)
        made = f", {guessed} {'guess' if guessed == 1 else 'guesses'} made" if guessed else ""
        return f"You've passed {self.passed} of {self.of} exercises{made}."

    def _invitation(self) -> str:
        return (
            f"Your progress will show up here as soon as you pass one of the {self.of} exercises, "
            f"write down a guess, or diagnose one of the {PATIENTS} patients in notebook 08."
        )


def progress() -> Progress:
    """What you've passed, guessed and diagnosed in the whole course; a notebook draws it."""
    return Progress()


def exercises() -> Iterator[tuple[int, str, list[str]]]:
    """For each notebook its number, what its exercises are about, and their keys."""
    for path in sorted(RECORDS.glob("[0-9][0-9].py")):
        text = path.read_text(encoding="utf-8")  # not imported: that loads torch, which is slow
        number = int(path.stem)
        of = len(re.findall(r"^@exercise\(", text, re.MULTILINE))
        title = text[: text.index("\n")].strip('"')
        yield number, title, [f"{number}.{place}" for place in range(1, of + 1)]


def _cells(row: tuple[int, str, list[bool]]) -> tuple[str, ...]:
    """In HTML: the marks are for the eye, and the count says the same."""
    number, title, passed = row
    marks = "".join("○●"[mark] for mark in passed)
    name, score = f"{number:02} {html.escape(title)}", f"{_passed(row)} of {_of(row)}"
    return name, f'<span aria-hidden="true">{marks}</span>', score


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Without colors of its own: it takes those of the page it is shown in."""
    left = 'style="text-align: left"'  # JupyterLab has numbers in mind
    lines = ["".join(f'<th scope="col" {left}>{name}</th>' for name in head)]
    for first, *rest in rows:
        cells = "".join(f"<td {left}>{cell}</td>" for cell in rest)
        lines.append(f'<th scope="row" {left}>{first}</th>{cells}')
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _passed(row: tuple[int, str, list[bool]]) -> int:
    return sum(row[2])


def _of(row: tuple[int, str, list[bool]]) -> int:
    return len(row[2])


def _word(key: str) -> str:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(f'key: expected a notebook and a word, such as "07.accuracy", got {key!r}')
    return key[3:].replace("_", " ")


def _guess(key: str) -> float | None:
    return recall("predictions").get(key, {}).get("guess")


def _number(value: float) -> str:
    """Three digits; a guess and an outcome look alike."""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    print(progress())
