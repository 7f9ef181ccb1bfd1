"""What `check` says: a page in a notebook and text elsewhere, made of the same message."""

import re
import textwrap
from dataclasses import dataclass
from html import escape

from minigrpo.exercises.form import Exercise

COLORS = {"passed": "#007050", "not passed": "#b84f00"}  # white is readable on both
LABEL = "display: inline-block; padding: 0 8px; border-radius: 4px; color: #ffffff"
BESIDE = "display: inline-block; vertical-align: top; box-sizing: border-box; max-width: 100%"
VALUE = "margin: 0 0 8px; overflow-x: auto; white-space: pre; font-family: monospace"
# In a message, two blanks begin a value with its name, and lines further in go on with it.
PART = re.compile(r"^  (\w+) *(.*(?:\n   .*)*)$|^(.+)$", re.MULTILINE)
LINES = 9  # of the inputs that are shown without a click


@dataclass(frozen=True, repr=False)
class Shown:
    """A verdict; where it isn't a pass, the hints are folded beneath it."""

    exercise: Exercise
    status: str
    message: str

    def __repr__(self) -> str:
        stuck = f' Stuck? hint("{self.exercise.key}").'
        return self.message if self.status == "passed" else self.message + stuck

    def _repr_html_(self) -> str:
        title, _, rest = self.message.partition("\n")
        color = COLORS.get(self.status)
        label = f' style="{LABEL}; background-color: {color}"' if color else ""
        page = f"<p><span{label}>{words(title)}</span></p>"
        page += "".join(part(*match.groups()) for match in PART.finditer(rest))
        return page if self.status == "passed" else page + hints(self.exercise)


def words(text: str) -> str:
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(text, quote=False))


def part(name: str | None, value: str, said: str) -> str:
    """A paragraph; or a value, in a fold or, if it's of the three, beside the one before it."""
    if name is None:
        return f"<p>{words(said)}</p>"
    text = textwrap.dedent(" " * 11 + value).strip("\n")  # 11: as far in as an expected value
    value = f'<pre style="{VALUE}">{escape(text, quote=False)}</pre>'
    if name in ("at", "expected", "got"):
        return f'<div style="{BESIDE}; padding-right: 32px"><b>{name}</b>{value}</div>'
    is_open = ' open=""' if text.count("\n") < LINES else ""
    return f"<details{is_open}><summary>{name}</summary>{value}</details>"


def hints(exercise: Exercise) -> str:
    """Each in a fold at the end of the one before it."""
    lines = exercise.hints.strip().splitlines()
    page = f'<p><code>solution("{exercise.key}")</code> prints ours.</p>'
    for number, line in reversed([*enumerate(lines, start=1)]):
        head = f"<summary>Hint {number} of {len(lines)}</summary>"
        page = f"<details>{head}<p>{words(line)}</p>{page}</details>"
    return page
