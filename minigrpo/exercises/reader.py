"""What a reader calls: check an answer, ask for a hint, read the solution, see code to review."""

import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from minigrpo.exercises.form import Exercise, Function, notebooks, of_notebook
from minigrpo.exercises.judge import NOT_YET, Checked, judge_exercise, judge_line
from minigrpo.exercises.shown import Shown
from minigrpo.notebook.kept import recall, remember

Lines = int | Iterable[int] | None
_hints_given: dict[str, int] = {}


def check(key: str, function: Function, line: Lines = None) -> Checked:
    """Try the reader's function on the cases of an exercise, and print what it really does.

    In a review the function is a test, and `line` the number of the wrong line, or several. Raises
    KeyError for an unknown key, and with MINIGRPO_STRICT=1 AssertionError for all but a pass.
    """
    exercise, again = find(key), isinstance(function, Checked)
    function = function.attempt if again else function
    status, message, right = _judged(exercise, function, line)
    if os.environ.get("MINIGRPO_STRICT") == "1" and status != "passed":
        raise AssertionError(message)
    if again:  # after a SyntaxError above, or a `def` of another name
        message = f"{key} ({exercise.title}): {status}, but nothing new since the last check."
        message += f"\nDid the cell that defines {exercise.reference.__name__} run?"
    ours, ipython = not right and status == "not passed", sys.modules.get("IPython")
    message += "\nThe notebook goes on with the course's version." * ours
    (ipython.display.display if ipython else print)(Shown(exercise, status, message))
    module = str(getattr(inspect.unwrap(function), "__module__", ""))
    if status == "passed" and not module.startswith("minigrpo."):  # the course's own are no pass
        before = recall("exercises").get(key, {}).get("source", "")
        remember("exercises", key, {"source": _written(inspect.unwrap(function)) or before})
    return Checked(key, function if right else exercise.reference, status, function)


def judge(key: str, function: Function, line: Lines = None) -> tuple[str, str]:
    """What `check` would say, without showing it: passed, not passed or not attempted, and why."""
    return _judged(find(key), function, line)[:2]


def _judged(exercise: Exercise, function: Function, line: Lines) -> tuple[str, str, bool]:
    """Status, message, and whether the function is right, whatever the line."""
    status, message = judge_exercise(exercise, function)
    right = status == "passed"
    if exercise.bugs and status != "not attempted":
        found, about_line = judge_line(exercise, line)
        if right and not found:
            status, message = "not passed", message.replace("passed, your", f"{NOT_YET}Your")
        message += f"\n{about_line}"
    return status, message, right


def _written(function: Function) -> str:
    """The cell that a function is written in, or of a file its own lines; "" if there are none."""
    with suppress(Exception):
        code = function.__code__
        if Path(code.co_filename).exists():
            return textwrap.dedent(inspect.getsource(function)).strip("\n")
        return "".join(linecache.getlines(code.co_filename, function.__globals__)).strip("\n")
    return ""


def hint(key: str) -> None:
    """Print the next hint of an exercise."""
    hints = find(key).hints.strip().splitlines()
    number = _hints_given[key] = _hints_given.get(key, 0) + 1
    if number > len(hints):
        print(f'There are no more than {len(hints)}. solution("{key}") shows the solution.')
    else:
        print(f"Hint {number} of {len(hints)} for {key}: {hints[number - 1]}")


def answer(key: str) -> None:
    """Print the last answer of yours that passed, ready to be pasted in place of the stub."""
    passed = recall("exercises").get(find(key).key)
    nothing = f"No answer of yours to {key} has passed yet."
    lost = f"Your answer to {key} has passed, but its source couldn't be found."
    print(nothing if passed is None else passed.get("source") or lost)


def solution(key: str) -> None:
    """Print a solution with its imports, and why; in a review the lines and their cure, too."""
    exercise = find(key)
    ways = [f"# Another way: {way}" for way in exercise.right if isinstance(way, str)]
    print(solution_source(key), comment(exercise.why.strip()), *ways, sep="\n")


def solution_source(key: str) -> str:
    """The source that, put in place of the stub, solves the exercise; in a review with the cure."""
    exercise = find(key)
    cures = [f"Line {n}: {cure}" for n, cure in zip(exercise.line, exercise.bugs.values())]
    return "\n".join([exercise.source, *map(comment, cures)])


def comment(text: str) -> str:
    """A paragraph as a comment of Python."""
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 90, break_on_hyphens=False))


def show(key: str) -> None:
    """Print the code of a review with line numbers."""
    exercise = find(key)
    if not exercise.bugs:
        raise KeyError(f"key: expected the key of a review, got {key!r}, which shows no code")
    print(*(f"{n:2}  {line}".rstrip() for n, line in enumerate(exercise.shown, 1)), sep="\n")


def all_exercises() -> list[Exercise]:
    """All exercises of the course, in order."""
    return [exercise for number in notebooks() for exercise in of_notebook(number).values()]


def find(key: str) -> Exercise:
    """One exercise; KeyError, with those there are, if it is none."""
    begins = str(key).split(".")[0]
    here = next((of_notebook(n) for n in notebooks() if n.lstrip("0") == begins), {})
    if key in here:
        return here[key]
    keys = ", ".join(map(repr, here or (exercise.key for exercise in all_exercises())))
    raise KeyError(f"key: expected the key of an exercise ({keys}), got {key!r}")
