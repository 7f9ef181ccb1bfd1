"""What a function reads from around it, and which of that is data of the notebook."""

from __future__ import annotations

import ast
import dis
import linecache
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Number
from typing import Any

import torch
from torch import nn

PLAIN = (Number, str, bytes, type(None), re.Pattern, range, types.ModuleType)
PLAIN += (torch.dtype, torch.device, torch.Size, type(Ellipsis))
"""Values that nothing can change."""


def notebook_data(function: Callable, unwrap: Callable[[Any], Any]) -> str | None:
    """The first name outside the function that it reads and that is data of the notebook, or None.

    Functions, classes and modules are fine, the reader's own are looked into. So is whatever is
    defined in the same cell, and a loss such as nn.MSELoss(). Where the cell cannot be had, what
    nothing can change counts as defined with the function.

    Args:
        function: the reader's.
        unwrap: what is behind a solved exercise or a decorator.
    """
    home = getattr(unwrap(function), "__globals__", None)
    seen: set[int] = set()
    waiting = [unwrap(function)]
    while waiting and home is not None:
        current = waiting.pop()
        if id(current) in seen or getattr(current, "__globals__", None) is not home:
            continue
        seen.add(id(current))
        beside = defined_beside(current)
        for name, value, inner in names_outside(current):
            value = unwrap(value)
            if isinstance(value, types.FunctionType):
                waiting.append(value)
            elif isinstance(value, type):
                waiting.extend(map(unwrap, vars(value).values()))
            elif is_code(value) or name in (beside or ()):
                continue
            elif beside is not None and not inner or not is_constant(value):
                return name
    return None


def is_code(value: Any) -> bool:
    """Modules, what can be called, and numbers of `math`; a model with weights is data."""
    if isinstance(value, nn.Module):
        return not value.state_dict()
    numbers = any(value is constant for constant in vars(math).values())
    return numbers or callable(value) or isinstance(value, types.ModuleType | torch.dtype)


def is_constant(value: Any) -> bool:
    """Numbers, texts, patterns and collections of such; no tensor and no array."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_constant, value))
    return isinstance(value, PLAIN) or is_code(value)


def defined_beside(function: types.FunctionType) -> set[str] | None:
    """The names that the function's own cell or file binds; None if its source cannot be had."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    with suppress(SyntaxError, ValueError):
        found = set()
        for statement in ast.parse("".join(lines)).body:
            if isinstance(statement, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in statement.names}
            elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                found |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        return found if lines else None
    return None


def names_outside(function: types.FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """The (name, value, whether it is a function's) of all that a function reads around it."""
    for name in names_read(function.__code__):
        if name in function.__globals__:  # not a builtin
            yield name, function.__globals__[name], False
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # an empty cell: a name that nobody has set
            yield name, cell.cell_contents, True


def names_read(code: types.CodeType) -> Iterator[str]:
    """The global names that code reads, the functions inside it included."""
    for instruction in instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval


def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Of the code and of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from instructions(constant)
