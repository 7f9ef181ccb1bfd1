"""What is remembered between kernels: a small JSON file, which nothing depends on.

`progress()` prints it. MINIGRPO_PROGRESS names the file; without it, it is in the folder where
programs of the user keep their data. A file that can't be read or written costs a sentence, and
never a notebook.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minigrpo.files import atomic_path

VERSION = 1
_here: dict[str, dict[str, Any]] = {}  # what this kernel knows, whatever becomes of the file
_told: set[str] = set()


def path() -> Path:
    """The file."""
    if named := os.environ.get("MINIGRPO_PROGRESS", "").strip():
        return Path(named)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    else:
        folder = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(folder) / "minigrpo" / "progress.json"


def remember(section: str, key: str, value: Any) -> None:
    """Keep a value, unless there is one for this key: what came first counts."""
    _here.setdefault(section, {}).setdefault(key, value)
    try:
        with _locked(path()):
            known = _merged(_read())
            text = json.dumps({"version": VERSION, **known}, indent=1, sort_keys=True)
            with atomic_path(path()) as unfinished:
                unfinished.write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        _say(f"Your progress can't be kept in {path()}: {error}")


def recall(section: str) -> dict[str, Any]:
    """What is remembered, of this kernel and of those before it."""
    try:
        known = _merged(_read())
    except (OSError, ValueError) as error:
        _say(f"Your progress can't be read from {path()}: {error}")
        known = _here
    return known.get(section, {})


def clinic_line(patients: int = 25) -> str:
    """The score of the clinic, in a sentence."""
    seen = recall("clinic").values()
    if not seen:
        return f"The clinic (notebook 08): no diagnosis yet; {patients} patients are waiting."
    right = sum(bool(one.get("right")) for one in seen)
    used = sum(len(one.get("measured", ())) for one in seen)
    return (
        f"The clinic (notebook 08): {len(seen)} of {patients} patients diagnosed, {right} right at "
        f"the first attempt, {used / len(seen):.1f} measurements per patient."
    )


def progress() -> None:
    """Print what is remembered."""
    print(clinic_line())


def _read() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ValueError("it isn't the JSON that was written here; delete it") from error
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise ValueError("it was written by a different version of the course")
    if not all(isinstance(x, dict) and all(map(_record, x.values())) for x in found.values()):
        raise ValueError("it isn't the JSON that was written here; delete it")
    return found


def _record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("measured", []), list)


def _merged(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What stands in the file goes before what this kernel knows."""
    return {part: {**_here.get(part, {}), **known.get(part, {})} for part in {*_here, *known}}


@contextmanager
def _locked(file: Path, patience: float = 5.0) -> Iterator[None]:
    """One kernel at a time; a lock that a dead one has left behind is ignored after a while."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, until = file.with_name(f".{file.name}.lock"), time.monotonic() + patience
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except (FileExistsError, PermissionError):  # Windows: the other one is deleting it
            if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
                raise
            if time.monotonic() > until:
                break
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _say(sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        print(sentence)
