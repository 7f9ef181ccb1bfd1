"""Files: where the shipped data lies, and how a file is written in one piece."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_folder() -> Path:
    """The folder of the shipped data: `data/` of the checkout, or the copy inside a wheel."""
    checkout = _PACKAGE.parent / "data"
    return checkout if (checkout / "README.md").is_file() else _PACKAGE / "data"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Write a file so that it exists only when it is whole.

    Yields a temporary path in the same folder. When the block ends, that file takes the name
    `path` in one step (`os.replace`); when the block raises, it is removed and whatever stood at
    `path` before still stands there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile.mkstemp: its files, and with them the result, are readable by their owner only.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
