"""What a reader has passed, guessed and diagnosed: written down, compared, drawn."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from importlib import import_module
from numbers import Real
from typing import Any

from minigrpo.notebook.kept import recall, remember

PREDICTIONS = {  # the words that the predictions of each notebook go by
    "01": ("positions", "first_loss", "after_100_steps"),
    "02": ("factor",),
    "03": ("steps", "batch_with_four_passes"),
    "04": ("incorrect", "clipped", "capped"),
    "05": ("entropy", "highest_reward", "grpo"),
    "06": ("whole_thought", "correct", "mended"),
    "07": ("groups_that_differ", "bases_of_ten"),
    "08": ("reward", "held_out_accuracy", "drift_with_k1"),
    "09": ("percent_of_groups", "gib_of_states"),
    "10": ("percent_left",),
    "11": ("pass_at_8", "majority_before"),
    "12": ("first_test", "costliest_mistake", "forged_accuracy"),
}


def predict(
    key: str,  # number of the notebook and one of its words, as "02.factor"; else a ValueError
    guess: float | None,  # None as long as there is none; TypeError if it is no number
) -> None:
    """Keep a guess of what a run will show; the first one counts."""
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


def outcome(
    key: str,  # the one of `predict`
    value: Any,  # a number, or a tensor with one entry; None if it didn't happen
) -> None:
    """Print what came out, beside the guess if there is one."""
    word, guess = _word(key), _guess(key)
    if value is None:
        print(f"{word}: it didn't happen.")
    elif guess is None:
        print(f"{word}: it came out at {_number(float(value))}.")
    else:
        remember("outcomes", key, {"value": float(value)})
        print(f"{word}: you guessed {_number(guess)}, and it came out at {_number(float(value))}.")


def clinic_line() -> str:
    """The score of the clinic, in a sentence or two."""
    diagnoses, nights = _diagnoses(), [v for v in recall("clinic").values() if "points" in v]
    line = f"The clinic (notebook 08): no diagnosis yet; {patients()} patients are waiting."
    if diagnoses:
        right = [made["right"] * worth(**made) for made in diagnoses]
        line = f"The clinic (notebook 08): {len(diagnoses)} of {patients()} patients diagnosed, "
        line += f"{sum(map(bool, right))} right at the first attempt, {sum(right)} points."
    if nights:
        points = sum(night["points"] for night in nights)
        line += f" The night shift: {points:g} of {len(nights)}."
    return line


def worth(answer: str, measured: list[str], **_: Any) -> int:
    """Points of a right diagnosis: healthy is never proven, so it doesn't pay to measure less."""
    return 2 if answer == "healthy" else 4 - len(measured)


class Progress:
    """What is remembered, as a drawing for a notebook and as text."""

    def __init__(self) -> None:
        passed, guesses, outcomes = map(recall, ("exercises", "predictions", "outcomes"))
        came_out = {key: _number(outcome["value"]) for key, outcome in outcomes.items()}
        pairs = sorted((key, _number(made["guess"])) for key, made in guesses.items())
        self.guesses = [(key, guess, came_out.get(key, "")) for key, guess in pairs]
        self.rows = [
            (number, title, [k in passed for k in keys]) for number, title, keys in exercises()
        ]
        self.clinic, marks = clinic_line(), [mark for *_, marks in self.rows for mark in marks]
        self.begun = any(marks) or bool(guesses or any(recall("clinic").values()))
        made = f", {len(guesses)} guess{'es' * (len(guesses) != 1)} made" if guesses else ""
        self.headline = f"You've passed {_score(marks)} exercises{made}."
        if not self.begun:
            self.headline = "Your progress will show up here as soon as you pass an exercise, "
            self.headline += "write down a guess, or diagnose a patient in notebook 08."

    def __repr__(self) -> str:
        lines, room = [self.headline], max(len(marks) for *_, marks in self.rows)
        for number, title, marks in self.rows:
            drawn = "".join(".#"[mark] for mark in marks)
            lines.append(f"  {number:2}  {drawn:{room}}  {_score(marks)}  {title}")
        for key, guess, value in self.guesses:
            told = f", and it came out at {value}" if value else ""
            lines.append(f"  {key}: you guessed {guess}{told}")
        return "\n".join([*lines, self.clinic] if self.begun else lines[:1])

    def _repr_html_(self) -> str:
        if not self.begun:
            return f"<p>{self.headline}</p>"
        rows = []
        for number, title, marks in self.rows:  # marks are for the eye, and the score says the same
            drawn = f'<span aria-hidden="true">{"".join("○●"[mark] for mark in marks)}</span>'
            rows.append((f"{number} {html.escape(title)}", drawn, _score(marks)))
        parts = [f"<p>{self.headline}</p>", _table(("notebook", "exercises", "passed"), rows)]
        if self.guesses:
            rows = [(html.escape(k), guess, value or "not yet") for k, guess, value in self.guesses]
            made = _table(("prediction", "your guess", "came out at"), rows)
            parts.append(f"<details><summary>Your guesses</summary>{made}</details>")
        return "".join([*parts, f"<p>{self.clinic}</p>"])


def progress() -> Progress:
    """What you've passed, guessed and diagnosed in the whole course; a notebook draws it."""
    return Progress()


def exercises() -> Iterator[tuple[str, str, list[str]]]:
    """For each notebook its number, what its exercises are about, and their keys."""
    form = import_module("minigrpo.exercises.form")  # its room imports this one
    for number in form.notebooks():
        about = import_module(f"minigrpo.exercises.{number.lower()}").__doc__
        yield number, about.split("\n")[0], [*form.of_notebook(number)]


def patients() -> int:
    """How many there are in the clinic, whose room imports this one, too."""
    return len(import_module("minigrpo.clinic.patients").PATIENTS)


def _diagnoses() -> list[dict[str, Any]]:
    """The first diagnosis of each patient that has one; the section holds measurements, too."""
    return [value for value in recall("clinic").values() if "answer" in value]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Without colors of its own: it takes those of the page it is shown in."""
    left = 'style="text-align: left"'  # JupyterLab has numbers in mind
    lines = ["".join(f'<th scope="col" {left}>{name}</th>' for name in head)]
    for first, *rest in rows:
        cells = "".join(f"<td {left}>{cell}</td>" for cell in rest)
        lines.append(f'<th scope="row" {left}>{first}</th>{cells}')
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _score(marks: list[bool]) -> str:
    return f"{sum(marks)} of {len(marks)}"


def _word(key: str) -> str:
    number, _, word = key.partition(".") if isinstance(key, str) else ("", "", "")
    if word not in PREDICTIONS.get(number, ()):
        known = [f"{number}.{one}" for one in PREDICTIONS.get(number, ())] or "such as 02.factor"
        raise ValueError(f"key: expected a prediction of the course, {known}, got {key!r}")
    return word.replace("_", " ")


def _guess(key: str) -> float | None:
    return recall("predictions").get(key, {}).get("guess")


def _number(value: float) -> str:
    """Three digits; a guess and an outcome look alike."""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    print(progress())
