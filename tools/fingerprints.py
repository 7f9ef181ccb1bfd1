"""What decides how a stored run went, as checksums: folders, data, and the code of functions."""

from __future__ import annotations

import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

IGNORED = {tokenize.COMMENT, tokenize.NL}
FSTRING = re.compile(r"(?i)(f|rf|fr)[\"']")
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # from Python 3.12 on


def of_folder(folder: Path) -> str:
    """All files of a model: weights, tokenizer, chat template, settings of generation."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return of_data({path.name: sha256(path.read_bytes()).hexdigest() for path in files})


def of_data(data: Any) -> str:
    """Anything that JSON can hold."""
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def of_code(*functions: Callable[..., Any]) -> dict[str, str]:
    """Each function by name. Comments, empty lines and wrapped lines don't count.

    ValueError: one has an f-string, which Python 3.12 reads in other pieces than 3.11.
    """
    return {function.__name__: of_data(_tokens(function)) for function in functions}


def _tokens(function: Callable[..., Any]) -> list[str]:
    lines = io.StringIO(textwrap.dedent(inspect.getsource(function)))
    tokens = [t for t in tokenize.generate_tokens(lines.readline) if t.type not in IGNORED]
    if any(FSTRING.match(t.string) or t.type == FSTRING_START for t in tokens):
        raise ValueError(f"{function.__name__} has an f-string")
    return [t.string for t in tokens]
