"""Files: where the shipped data is, and how a file is written in one piece."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_folder() -> Path:
    """The folder of the shipped data: `data/` of the checkout, or the copy inside a wheel."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "data"
    return checkout if (checkout / "README.md").is_file() else package / "data"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` in one step if the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile.mkstemp: its files, and with them the result, are readable by their owner only.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
