"""What is remembered between kernels: a small JSON file, which nothing depends on.

MINIGRPO_PROGRESS names the file; without it, it is where programs keep a user's data. A file that
can't be read or written costs a sentence, and never a notebook. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

Kept = dict[str, dict[str, dict[str, Any]]]

VERSION = 1
FIRST = {"clinic", "predictions"}
"""Sections in which what came first counts; in the others it's the latest."""
TYPES = {"measured": list, "source": str, "at": (int, float), "guess": (int, float)}
TYPES["value"] = (int, float)
PATIENCE = 5.0
"""Seconds to wait for another kernel."""

_here: dict[str, Kept] = {}  # for each file what this kernel knows, whatever becomes of the file
_told: set[str] = set()  # sentences that were printed


class Broken(ValueError):
    """The file isn't what was written here."""


def path() -> Path:
    """The file."""
    if named := os.environ.get("MINIGRPO_PROGRESS", "").strip():
        return Path(named).expanduser()
    places = {"win32": "AppData/Local", "darwin": "Library/Application Support"}
    variable = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_DATA_HOME")
    place = Path.home() / places.get(sys.platform, ".local/share")
    return Path(os.environ.get(variable) or place) / "minigrpo" / "progress.json"


def remember(section: str, key: str, value: dict[str, Any]) -> None:
    """Keep a value. In the sections of FIRST it has to be the first one for this key."""
    section_here = _known_here().setdefault(section, {})
    if section not in FIRST:
        section_here[key] = {**value, "at": time.time()}
    section_here.setdefault(key, value)
    try:
        file = path()
        with _locked(file):
            try:
                stored = _read(file)
            except Broken:
                _set_aside(file)
                stored = {}
            _known_here().update(_merged(stored, _known_here()))
            _write(file, _known_here())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there's no home folder
        _say(f"Your progress can't be kept: {error}.")


def recall(section: str) -> dict[str, dict[str, Any]]:
    """What is remembered, of this kernel and of those before it."""
    try:
        _known_here().update(_merged(_read(path()), _known_here()))
    except (OSError, ValueError, RuntimeError) as error:
        _say(f"Your progress can't be read: {error}.")
    return _known_here().get(section, {})


def _known_here() -> Kept:
    """What this kernel knows."""
    try:
        return _here.setdefault(str(path()), {})
    except RuntimeError:
        return _here.setdefault("", {})


def _merged(stored: Kept, here: Kept) -> Kept:
    """Everything there is; of two values for a key the first or the latest."""

    def wins(section: str, key: str) -> bool:
        if section in FIRST or key not in here.get(section, {}):
            return True
        return stored[section][key].get("at", 0) >= here[section][key].get("at", 0)

    return {
        section: {
            **here.get(section, {}),
            **{key: value for key, value in stored.get(section, {}).items() if wins(section, key)},
        }
        for section in {*stored, *here}
    }


def _read(file: Path) -> Kept:
    """The sections of the file; those that only another edition knows as well.

    Raises:
        Broken: it isn't what was written here.
        OSError: it can't be read, or a newer edition has written it.
    """
    try:
        stored = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        stored = None
    version = stored.pop("version", VERSION) if isinstance(stored, dict) else VERSION
    if isinstance(version, int) and version > VERSION:
        raise OSError(f"a newer edition of the course has written {file}, and it stays as it is")
    parts = stored.values() if isinstance(stored, dict) else [None]
    records = [
        record for part in parts for record in (part.values() if isinstance(part, dict) else [0])
    ]
    if not isinstance(version, int) or not all(map(_sound, records)):
        raise Broken(f"{file} isn't what was written there")
    return stored


def _sound(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(record[name], kind) for name, kind in TYPES.items() if name in record
    )


def _write(file: Path, sections: Kept) -> None:
    """In one step. There's one writer at a time, so a name that is always the same will do."""
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(f"{file} is read-only")
    unfinished = file.with_name(f".{file.name}.part")
    text = json.dumps({"version": VERSION, **sections}, indent=1, sort_keys=True)
    # On Windows a file that somebody is reading can't be replaced.
    busy = PermissionError if sys.platform == "win32" else ()
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        _patiently(lambda: os.replace(unfinished, file), busy)
    finally:
        unfinished.unlink(missing_ok=True)


def _set_aside(file: Path) -> None:
    """Give a broken file another name, under which it stays."""
    number, aside = 1, file
    while aside.exists():
        aside = file.with_name(f"{file.stem}.broken-{number}{file.suffix}")
        number += 1
    file.rename(aside)
    _say(
        f"{file} can't be read any more. It's now called {aside.name}, and a new one begins with "
        "what this notebook knows."
    )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One kernel at a time; the system takes the lock from a kernel that dies.

    Raises:
        OSError: another kernel has held it for too long. Nothing may be written then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("ab") as lock:
        _patiently(lambda: _lock(lock), (BlockingIOError, PermissionError))
        yield


def _lock(lock: IO[bytes]) -> None:
    """Until the file is closed."""
    if "fcntl" in globals():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError("another kernel is busy with it") from None
        except OSError:  # a file system without locks: rather no lock than nothing kept
            pass
    else:
        lock.seek(0)
        msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)


def _patiently(act: Callable[[], None], busy: Any) -> None:
    """Try until it is no longer refused, for some seconds at most."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return act()
        except busy:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _say(sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        print(sentence)
