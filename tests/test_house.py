"""The house: how large a room may grow, who imports whom, an algorithm that fits on a screen."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minigrpo"
# Lines of Python at most, blank ones and docstrings included. The core is what stands flat. When a
# room is full, something goes.
ROOMS = {
    "core": 1950,
    "study": 400,
    "turns": 180,
    "notebook": 700,
    "clinic": 2002,
    "judge": 2291,  # clinic/judge, which is used without the course
    "text": 550,
    "scaling": 340,
    "exercises": 950,
    "records": 2600,
}
FILES = {path: path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    if path.stem.isdecimal() or path.stem == "a":
        return "records"  # of the exercises, one file for each notebook
    rooms = FILES[path].parts[:-1]
    judges = "judge" in rooms or path.name == "__main__.py"  # python -m minigrpo.clinic
    return "judge" if judges else rooms[0] if rooms else "core"


def lines(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef))


def length(node: ast.FunctionDef, body: bool = False) -> int:
    """Lines of a function, decorators aside; of the body without its docstring."""
    first = node.body[1 if ast.get_docstring(node) else 0] if body else node
    return node.end_lineno - first.lineno + 1


def imports(path: Path) -> set[Path]:
    """The files of the package that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides whose file it takes"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = {ROOT / Path(*name.split(".")) for name in names if name.startswith("minigrpo.")}
    return {file for at in found for file in (at.with_suffix(".py"), at / "__init__.py")} & {*FILES}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_to_its_budget(room):
    there = lines(*(path for path in FILES if room_of(path) == room))
    assert there <= ROOMS[room], f"{room}: {there - ROOMS[room]} lines too many: something goes"


def test_every_file_has_its_room_and_the_loop_its_size():
    assert {room_of(path) for path in FILES} == {*ROOMS}
    assert lines(PACKAGE / "grpo.py") <= 250


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(FILES[path]))
def test_a_file_imports_its_own_room_and_those_before_it(path):
    order = [*ROOMS]
    for other in imports(path):
        assert order.index(room_of(other)) <= order.index(room_of(path)), FILES[other]


def test_no_file_imports_itself_by_way_of_others():
    packages = {path for path in FILES if path.stem == "__init__"}  # they gather, and are no step
    graph = {path: imports(path) - packages for path in FILES if path not in packages}
    order = [*TopologicalSorter(graph).static_order()]  # CycleError names the circle
    assert len(order) == len(graph) and any(graph.values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(FILES[path]))
def test_no_function_is_longer_than_a_page(path):
    long = [node.name for node in functions(path) if length(node) > 70]
    assert long == []


@pytest.mark.parametrize(
    ("file", "name"), [("objective", "grpo_loss"), ("grpo", "train_grpo"), ("grpo", "learn")]
)
def test_the_loss_and_the_loop_fit_on_a_screen(file, name):
    (node,) = (node for node in functions(PACKAGE / f"{file}.py") if node.name == name)
    assert length(node, body=True) <= 45
