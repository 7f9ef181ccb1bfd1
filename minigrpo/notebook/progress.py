"""What is remembered between kernels: a small JSON file, which nothing depends on.

`progress()` prints it. MINIGRPO_PROGRESS names the file; without it, it is where programs keep a
user's data. A file that can't be read or written costs a sentence, and never a notebook.
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

Kept = dict[str, dict[str, Any]]
_here: Kept = {}  # what this kernel knows, whatever becomes of the file
_told: set[str] = set()  # sentences that were printed


def path() -> Path:
    """The file."""
    if named := os.environ.get("MINIGRPO_PROGRESS", "").strip():
        return Path(named)
    places = {"win32": "AppData/Local", "darwin": "Library/Application Support"}
    variable = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_DATA_HOME")
    place = Path.home() / places.get(sys.platform, ".local/share")
    return Path(os.environ.get(variable) or place) / "minigrpo" / "progress.json"


def remember(section: str, key: str, value: Any) -> None:
    """Keep a value, unless there is one for this key: what came first counts."""
    _here.setdefault(section, {}).setdefault(key, value)
    try:
        with _locked(path()), atomic_path(path()) as unfinished:
            text = json.dumps({"version": 1, **_merged()}, indent=1, sort_keys=True)
            unfinished.write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there's no home folder
        _say(f"Your progress can't be kept: {error}")


def recall(section: str) -> dict[str, Any]:
    """What is remembered, of this kernel and of those before it."""
    try:
        return _merged().get(section, {})
    except (OSError, ValueError, RuntimeError) as error:
        _say(f"Your progress can't be read: {error}")
        return _here.get(section, {})


def clinic_line(patients: int = 25) -> str:
    """The score of the clinic, in a sentence."""
    seen = recall("clinic").values()
    if not seen:
        return f"The clinic (notebook 08): no diagnosis yet; {patients} patients are waiting."
    right = sum(bool(one.get("right")) for one in seen)
    used = sum(len(one.get("measured", ())) for one in seen) / len(seen)
    diagnosed = f"The clinic (notebook 08): {len(seen)} of {patients} patients diagnosed"
    return f"{diagnosed}, {right} right at the first attempt, {used:.1f} measurements per patient."


def progress() -> None:
    """Print what is remembered."""
    print(clinic_line())


def _merged() -> Kept:
    """The file, and after it what this kernel knows. ValueError: it is not a file of ours."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _here
    except ValueError:
        found = None
    version = found.pop("version", 1) if isinstance(found, dict) else 1
    if version != 1:
        raise ValueError(f"{path()} is of version {version}, and this course knows version 1")
    parts = found.values() if isinstance(found, dict) else [None]
    records = [one for part in parts for one in (part.values() if isinstance(part, dict) else [0])]
    if not all(isinstance(x, dict) and isinstance(x.get("measured", []), list) for x in records):
        raise ValueError(f"{path()} isn't what was written here; delete it to start anew")
    return {part: {**_here.get(part, {}), **found.get(part, {})} for part in {*_here, *found}}


@contextmanager
def _locked(file: Path, patience: float = 5.0) -> Iterator[None]:
    """One kernel at a time; a lock that a dead one has left behind is ignored after a while."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, until = file.with_name(f".{file.name}.lock"), time.monotonic() + patience
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except (FileExistsError, PermissionError):  # Windows: the other one is deleting it
            if not os.access(file.parent, os.W_OK):
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
