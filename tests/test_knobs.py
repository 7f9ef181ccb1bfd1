"""docs/knobs.md against the TRL that is installed."""

import dataclasses
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from minigrpo.grpo import GRPOConfig
from minigrpo.objective import group_advantages

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "knobs.md").read_text("utf-8")
NAMED = re.compile(r"`(\w+)`(?: \(([^)]*)\))?")  # a setting, and in parentheses its default
trl = pytest.importorskip("trl", reason="the extra `scale` is not installed")
ELSEWHERE = {"reward_funcs"}  # an argument of the trainer


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in lines]


def trl_column(text: str) -> list[tuple[str, str]]:
    """Every setting that stands in the second column of a table, with its default or ""."""
    return [found for row in rows(text) for found in NAMED.findall(row[1])]


def default(told: str) -> object:
    """The value before a colon or comma: 8, 1e-6, "group", None."""
    told = re.split("[:,]", told)[0]
    names = {"None": None, "True": True, "False": False}
    if told in names:
        return names[told]
    return told.strip('"') if told.startswith('"') else float(told)


def differing(text: str) -> dict[str, str]:
    """What the tables say of TRL and the installed version doesn't."""
    fields = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    wrong = {}
    for name, told in trl_column(text):
        if name not in fields:
            wrong[name] = "no such setting"
        elif told and default(told) != fields[name]:
            wrong[name] = f"{told}, but it is {fields[name]}"
    return {name: why for name, why in wrong.items() if name not in ELSEWHERE}


def test_the_first_column_has_the_settings_of_this_course():
    own = {field.name for field in dataclasses.fields(GRPOConfig)}
    named = {word for row in rows(TEXT) for word in re.findall(r"`(\w+)", row[0])}
    assert named <= own | {"eps", "reward_functions", "weights"} and len(named) >= 18
    eps = inspect.signature(group_advantages).parameters["eps"].default
    assert [float(row[1]) for row in rows(TEXT) if row[0].startswith("`eps` 1e-4")] == [eps]


def test_the_tables_name_the_installed_version():
    assert f"TRL {'.'.join(version('trl').split('.')[:2])}" in TEXT


def test_every_name_and_default_is_that_of_the_installed_version():
    assert differing(TEXT) == {}
    with_default = [name for name, told in trl_column(TEXT) if told]
    assert len(with_default) >= 25 and len(set(with_default)) >= 25
