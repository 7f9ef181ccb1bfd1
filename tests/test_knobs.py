"""docs/knobs.md against the TRL that is installed."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "knobs.md").read_text("utf-8")
NAMED = re.compile(r"`(\w+)`(?: \(([^)]*)\))?")  # a setting, and in parentheses its default
trl = pytest.importorskip("trl", reason="the extra `scale` is not installed")
ELSEWHERE = {"reward_funcs"}  # an argument of the trainer


def trl_column(text: str) -> list[tuple[str, str]]:
    """Every setting that stands in the second column of a table, with its default or ""."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [found for row in rows for found in NAMED.findall(row[1])]


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


def test_the_tables_name_the_installed_version():
    assert f"TRL {'.'.join(version('trl').split('.')[:2])}" in TEXT


def test_every_name_and_default_is_that_of_the_installed_version():
    assert differing(TEXT) == {}
    with_default = [name for name, told in trl_column(TEXT) if told]
    assert len(with_default) >= 25 and len(set(with_default)) >= 25


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("`beta` (0.0)", "`beta` (0.04)", "beta"),
        ("`delta` (None)", "`delta` (3.0)", "delta"),
        ('`loss_type` ("dapo")', '`loss_type` ("grpo")', "loss_type"),
        ("`num_iterations` (1)", "`num_epochs` (1)", "num_epochs"),
    ],
)
def test_a_wrong_entry_is_found(before, after, name):
    assert before in TEXT
    assert list(differing(TEXT.replace(before, after))) == [name]
