"""What a reader calls: check an answer, ask for a hint, read the solution, see code to review."""

from __future__ import annotations

import inspect
import linecache
import os
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from minigrpo.exercises.judge import Checked, Exercise, Function, judge_exercise, unwrapped
from minigrpo.exercises.records import notebooks, records
from minigrpo.exercises.review import Review, code_lines, judge_review
from minigrpo.notebook.kept import recall, remember

Lines = int | Iterable[int] | None


def check(key: str, function: Function, line: Lines = None) -> Checked:
    """Try the reader's function on the cases of an exercise, and print what was found.

    In a review the function is a test, tried on the right version of the code and the buggy ones.
    A pass is remembered, with the source of the function.

    Nothing that the function does is raised. With the environment variable MINIGRPO_STRICT=1
    everything but a pass raises AssertionError instead.

    Args:
        key: such as "2.3".
        function: the reader's.
        line: in a review, the number of the wrong line, or all of them if there are several.

    Raises:
        KeyError: there is no such exercise.
        AssertionError: strict, and not passed.
    """
    exercise = find(key)
    if isinstance(function, Checked):
        function = function.attempt
    status, message, right = _judged(exercise, function, line)
    if os.environ.get("MINIGRPO_STRICT") == "1" and status != "passed":
        raise AssertionError(message)
    print(message)
    if status == "passed":
        _keep(key, function)
    use = function if right else exercise.reference
    return Checked(key, use, status, attempt=function)


def judge(key: str, function: Function, line: Lines = None) -> tuple[str, str]:
    """What `check` would say, without printing.

    Returns the status ("passed", "not passed", "not attempted") and the message.

    Raises:
        KeyError: there is no such exercise.
    """
    return _judged(find(key), function, line)[:2]


def _keep(key: str, function: Function) -> None:
    """Remember a pass. The course's own functions are none; no source replaces none."""
    plain, module = unwrapped(function), ""
    with suppress(Exception):  # whatever has a __call__ is taken
        module = str(plain.__module__)
    if not module.startswith("minigrpo."):
        before = recall("exercises").get(key, {}).get("source", "")
        remember("exercises", key, {"source": _written(plain) or before})


def _written(function: Function) -> str:
    """The cell that a function is written in, or of a file its own lines; "" if there are none."""
    with suppress(Exception):
        code = function.__code__
        if Path(code.co_filename).exists():
            return textwrap.dedent(inspect.getsource(function)).strip("\n")
        return "".join(linecache.getlines(code.co_filename, function.__globals__)).strip("\n")
    return ""


def _judged(exercise: Exercise | Review, function: Function, line: Lines) -> tuple[str, str, bool]:
    """Status, message, and whether the function is right (in a review whatever the line)."""
    if isinstance(exercise, Review):
        return judge_review(exercise, function, line)
    status, message = judge_exercise(exercise, function)
    return status, message, status == "passed"


_hints_given: dict[str, int] = {}


def hint(key: str, number: int | None = None) -> None:
    """Print the next hint of an exercise, or the one with this number (1, 2, ...).

    Raises:
        KeyError: there is no such exercise.
        ValueError: there is no such hint.
    """
    hints = find(key).hints
    if number is None:
        number = min(_hints_given.get(key, 0) + 1, len(hints))
    if not 1 <= number <= len(hints):
        raise ValueError(f"number: expected 1 to {len(hints)}, got {number}")
    _hints_given[key] = number
    print(f"Hint {number} of {len(hints)} for {key}: {hints[number - 1]}")


def answer(key: str) -> None:
    """Print the last answer of yours that passed, ready to be pasted in place of the stub.

    Raises:
        KeyError: there is no such exercise.
    """
    kept = recall("exercises").get(find(key).key)
    nothing = f"No answer of yours to {key} has passed yet."
    if kept is not None:
        nothing = f"Your answer to {key} has passed, but its source couldn't be found."
    print((kept or {}).get("source") or nothing)


def solution(key: str) -> None:
    """Print the source of an exercise's reference, which the tests run, its imports, and why.

    In a review also the wrong lines and their cure.

    Raises:
        KeyError: there is no such exercise.
    """
    others = [f"Another way: {other.sentence}" for other in find(key).others]
    print(solution_source(key), *map(comment, [find(key).why, *others]), sep="\n")


def solution_source(key: str) -> str:
    """The source that, put in place of the stub, solves the exercise; in a review with the cure."""
    exercise = find(key)
    source = inspect.getsource(exercise.reference)
    cures = [comment(f"Line {bug.line}: {bug.cure}") for bug in getattr(exercise, "bugs", ())]
    return "\n".join([*exercise.imports, "", "", source, *cures])


def comment(text: str) -> str:
    """A paragraph as a comment of Python."""
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 90, break_on_hyphens=False))


def show(key: str) -> None:
    """Print the code of a review with line numbers.

    Raises:
        KeyError: there is no such exercise, or it has no code to review.
    """
    review = find(key)
    if not isinstance(review, Review):
        raise KeyError(f"key: expected the key of a review, got {key!r}, which shows no code")
    for number, line in enumerate(code_lines(review), start=1):
        print(f"{number:2}  {line}".rstrip())


def all_exercises() -> list[Exercise | Review]:
    """All exercises of the course, in order."""
    return [exercise for number in notebooks() for exercise in records(number).values()]


def find(key: str) -> Exercise | Review:
    """The record of one exercise.

    Raises:
        KeyError: there is no such exercise; the message lists those there are.
    """
    notebook = str(key).split(".")[0]
    here = records(int(notebook)) if notebook.isdecimal() else {}
    if key in here:
        return here[key]
    keys = ", ".join(here or (exercise.key for exercise in all_exercises()))
    raise KeyError(f"key: expected the key of an exercise ({keys}), got {key!r}")
