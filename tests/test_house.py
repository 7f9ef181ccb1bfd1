"""The house: which rooms there are, how large each may grow, and that the core imports none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "minigrpo"
ROOMS = ("study", "clinic", "text", "scaling", "notebook", "exercises")
CORE = sorted(path for path in PACKAGE.glob("*.py"))


def imports(path: Path) -> set[str]:
    """The modules of minigrpo that a file imports anywhere, such as "minigrpo.text.models"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("minigrpo")}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_imports_no_room(path):
    rooms = {name.split(".")[1] for name in imports(path) if "." in name} & set(ROOMS)
    assert not rooms, f"{path.name} imports {sorted(rooms)}"
