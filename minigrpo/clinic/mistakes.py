"""One piece of code instead of another: the form of a mistake in clinic, exercises and tests."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Function = Callable[..., Any]
Line = tuple[Function, str, str]
"""A function, a piece of its code that occurs once, and what stands there instead."""

_source = cache(inspect.getsource)


def source_of(function: Function) -> str:
    """Of the code that it has just now."""
    return _source(inspect.unwrap(function).__code__)


def head(line: str) -> str:
    """How a line begins: its keyword, what it assigns to, or what it calls."""
    line = line.strip()
    if keyword := re.match(r"(return|for|if|elif|else|while|with|assert|raise)\b", line):
        return keyword[0]
    target = re.split(r" [-+*/|&]{0,2}= ", line, maxsplit=1)
    return target[0] if len(target) == 2 else line.split("(")[0]


def replaced(source: str, new: str, old: str | None = None) -> str:
    """The source with `new` for `old`, which occurs once, or for the line that begins like `new`.

    Of several returns it is the last. Of several statements with `;` between the first decides that
    begins like a line. ValueError: there is nothing like it, or more than one.
    """
    if old is not None:
        if (count := source.count(old)) != 1:
            raise ValueError(f"expected once in the code, found {count} times: `{old}`")
        return source.replace(old, new)
    lines = source.splitlines()
    heads = [head(line) for line in lines]
    for begins in map(head, new.split("; ")):
        if heads.count(begins) > 1 and begins != "return":
            raise ValueError(f"more than one line of the code begins with {begins!r}, like `{new}`")
        if begins in heads:
            at = max(i for i, other in enumerate(heads) if other == begins)
            lines[at] = re.match(" *", lines[at])[0] + new
            return "\n".join(lines) + "\n"
    raise ValueError(f"no line of the code begins like `{new}`")


def sick_sources(lines: Iterable[Line]) -> dict[Function, str]:
    """Of every function that these are lines of, the source with them in it.

    ValueError: one of them is not in the code, or another has taken its place.
    """
    sources: dict[Function, str] = {}
    for function, old, new in lines:
        source = sources.get(function) or source_of(function)
        sources[function] = replaced(source, new, old)
    return sources


@contextmanager
def exchanged(*lines: Line) -> Iterator[None]:
    """For the length of a block, put these lines into the code.

    The code object is exchanged, not the name, so whoever imported the function meets them too.
    """
    healthy: dict[Function, Any] = {}
    try:
        for function, source in sick_sources(lines).items():
            function = inspect.unwrap(function)
            header = "from __future__ import annotations\n"  # leave the signature's names alone
            file = f"<{function.__name__} with a mistake>"
            names: dict[str, Function] = {}
            code = compile(header + textwrap.dedent(source), file, "exec")
            exec(code, vars(sys.modules[function.__module__]), names)
            healthy[function] = function.__code__
            function.__code__ = inspect.unwrap(names[function.__name__]).__code__
        yield
    finally:
        for function, code in healthy.items():
            function.__code__ = code
