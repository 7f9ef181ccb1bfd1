"""Run a recipe as its command line does, in this process, and note which of its lines ran."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def load(name: str) -> ModuleType:
    """A recipe as a module, with its neighbors to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPES)
        return importlib.import_module(name)


def run(name: str, *arguments: object) -> None:
    """`python recipes/NAME ...`; SystemExit if it ends with an exit code."""
    path = str(RECIPES / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, arguments)])
        patch.syspath_prepend(RECIPES)
        # Without a network the hub's libraries would try for half a minute.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        if "datasets" in sys.modules:
            patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        runpy.run_path(path, run_name="__main__")


@contextmanager
def noted(name: str) -> Iterator[set[int]]:
    """The numbers of the lines of a recipe that run within the block."""
    path, lines = str(RECIPES / name), set()

    def watch(frame, event, argument):
        if frame.f_code.co_filename != path:
            return None
        lines.add(frame.f_lineno)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield lines
    finally:
        sys.settrace(before)


def left_out(name: str, ran: set[int]) -> list[str]:
    """The lines of a recipe that could have run, and didn't; those with cuda in them aside."""
    text = (RECIPES / name).read_text(encoding="utf-8")

    def numbers(code: CodeType) -> Iterator[int]:
        yield from (number for *_, number in code.co_lines() if number)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from numbers(inner)

    lines = text.splitlines()
    missing = sorted({*numbers(compile(text, name, "exec"))} - ran)
    return [f"{n}: {lines[n - 1].strip()}" for n in missing if "cuda" not in lines[n - 1]]
