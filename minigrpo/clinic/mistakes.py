"""A mistake is one line instead of another: the form that the clinic, exercises and tests share."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def head(line: str) -> str:
    """How a line begins: its keyword, what it assigns to, or what it calls."""
    line = line.strip()
    if keyword := re.match(r"(return|for|if|elif|else|while|with|assert|raise)\b", line):
        return keyword[0]
    target = re.split(r" [-+*/|&]{0,2}= ", line, maxsplit=1)
    return target[0] if len(target) == 2 else line.split("(")[0]


def replaced(source: str, new: str, old: str | None = None) -> str:
    """The source with one line for another: for `old`, or for the line that begins like the new.

    Of several returns it is the last. Of several statements with `;` between the first decides that
    begins like a line. ValueError: there is no such line, or more than one.
    """
    lines = source.splitlines()
    heads = [line.strip() if old else head(line) for line in lines]
    for begins in [old] if old else map(head, new.split("; ")):
        if heads.count(begins) > 1 and begins != "return":
            raise ValueError(f"more than one line of the code begins with {begins!r}, like `{new}`")
        if begins in heads:
            at = max(i for i, other in enumerate(heads) if other == begins)
            lines[at] = re.match(" *", lines[at])[0] + new
            return "\n".join(lines) + "\n"
    raise ValueError(f"no line of the code begins like `{old or new}`")


def mutant(function: Function, *lines: str | tuple[str, str]) -> Function:
    """The function with other lines, each a new one or a pair (old, new); see `replaced`.

    It lives in the module of the healthy one, which stays as it is.
    """
    healthy = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(healthy))
    for line in lines:
        old, new = line if isinstance(line, tuple) else (None, line)
        source = replaced(source, new, old)
    header = "from __future__ import annotations\n"  # leave the signature's names alone
    code = compile(header + source, f"<{healthy.__name__} with a mistake>", "exec")
    names: dict[str, Function] = {}
    exec(code, vars(sys.modules[healthy.__module__]), names)
    return names[healthy.__name__]
