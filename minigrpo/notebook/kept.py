"""What is remembered between kernels: one small SQLite file, which nothing depends on.

MINIGRPO_PROGRESS names the file; without it, it is where programs keep a user's data. A file that
can't be read or written costs a sentence, and never a notebook. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

FIRST = {"clinic", "predictions"}  # where what came first counts; elsewhere it's the latest
TABLE = "CREATE TABLE IF NOT EXISTS kept (section, key, value, PRIMARY KEY (section, key))"
INSERT = "INSERT OR {} INTO kept VALUES (?, ?, ?)"
SECTION = "SELECT key, value FROM kept WHERE section = ? ORDER BY rowid"
PATIENCE = 10.0  # seconds to wait for another kernel

_unwritten: dict[tuple[str, str], dict[str, Any]] = {}  # by section and key: what has to wait


def path() -> Path:
    """The file. A name that ends in .json is of the edition before; this one's ends in .db."""
    if named := os.environ.get("MINIGRPO_PROGRESS", "").strip():
        file = Path(named).expanduser()
        return file.with_suffix(".db") if file.suffix == ".json" else file
    places = {"win32": "AppData/Local", "darwin": "Library/Application Support"}
    variable = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_DATA_HOME")
    place = Path.home() / places.get(sys.platform, ".local/share")
    return Path(os.environ.get(variable) or place) / "minigrpo" / "progress.db"


def remember(section: str, key: str, value: dict[str, Any]) -> None:
    """Keep a value. In the sections of FIRST it has to be the first one for this key."""
    if section not in FIRST or (section, key) not in _unwritten:
        _unwritten[section, key] = value
    recall(section)


def recall(section: str) -> dict[str, dict[str, Any]]:
    """What is remembered, of this kernel and of those before it, in the order in which it came."""
    here = {key: value for (part, key), value in _unwritten.items() if part == section}
    stored, where = {}, ""
    try:
        file, before = path(), path().with_suffix(".json")
        where = f" in {file}"
        if _unwritten or file.exists() or before.exists():  # who only looks gets no file
            file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(file, timeout=PATIENCE)) as store, store:
                if not store.execute("SELECT * FROM sqlite_master").fetchall():
                    _begin(store, before)
                rows = store.execute(SECTION, (section,)).fetchall()
                stored = {key: json.loads(value) for key, value in rows}
                _write(store)
    except (OSError, ValueError, RuntimeError, sqlite3.Error) as error:  # RuntimeError: no home
        _say(f"Your progress can't be kept or read{where}: {error}.")
    return {**stored, **here, **(stored if section in FIRST else {})}


def _begin(store: sqlite3.Connection, before: Path) -> None:
    """Make the table, with what the edition before has kept; its file stays as it is."""
    store.execute("BEGIN IMMEDIATE")
    store.execute(TABLE)
    with suppress(OSError, ValueError, AttributeError, TypeError):  # there's none, or it's broken
        known = json.loads(before.read_bytes()).items()
        for section, part in (entry for entry in known if entry[0] != "version"):
            for key, value in part.items():
                store.execute(INSERT.format("IGNORE"), (section, key, json.dumps({**value})))


def _write(store: sqlite3.Connection) -> None:
    for (section, key), value in _unwritten.items():
        how = "IGNORE" if section in FIRST else "REPLACE"
        store.execute(INSERT.format(how), (section, key, json.dumps(value)))
    store.commit()
    _unwritten.clear()


@cache
def _say(sentence: str) -> None:
    print(sentence)
