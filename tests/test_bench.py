"""The benchmark: each part runs at tiny size, and the tables are made of what is stored."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec

import bench
import pytest
import store

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
STORED = bench.load()
TINY = {**bench.BODY, "vocab_size": 50}
SHORT = replace(bench.REAL, max_new_tokens=2)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """In this process, on one core; of memory it only counts how often it's asked for."""
    monkeypatch.setattr(bench, "apart", lambda function, *given: function(*given))
    monkeypatch.setattr(bench, "mib", iter(range(1, 99)).__next__)
    monkeypatch.setattr(bench, "require_trl", lambda: None)
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 1)


@pytest.mark.parametrize(
    "measure",
    [
        lambda: bench.generate(rounds=1),
        pytest.param(lambda: [bench.trainer(2, rounds=1, steps=1)], marks=needs_trl),
        lambda: bench.scoring(V=50),
        pytest.param(lambda: bench.real_model(TINY, SHORT), marks=needs_trl),
    ],
    ids=["generate", "trainer", "scoring", "real_model"],
)
def test_a_part_runs_at_tiny_size(measure):
    for one in measure():
        assert min(one["ours"] + one["theirs"] + one["ratio"]) > 0
        assert one["what"] in [row["what"] for run in STORED["runs"] for row in run["rows"]] or (
            "V = 50" in one["what"]
        )


def test_a_ratio_above_1_is_in_our_favor():
    less = bench.row("seconds", [2.0, 1.0, 4.0], "p", [6.0, 4.00004, 6.0])
    assert less["ours"] == [1.0, 2.0, 4.0] and less["ratio"] == [1.5, 3.0, 4.0]
    more = bench.row("per second", [17700.0], "p", [230.4], more=True)
    assert bench.line(more) == "| per second | 17,700 | 230 (p) | 76.8 |"
    assert bench.line(less) == "| seconds | 2.00 | 6.00 (p) | 3.00 (1.50 to 4.00) |"


def test_a_part_keeps_the_range_of_its_runs_and_the_page_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(bench.STORE, "settings", lambda: STORED["settings"])
    for ours in (1.0, 4.0, 2.0):
        monkeypatch.setattr(bench, "scoring", lambda ours=ours: [bench.row("w", [ours], "p", [4])])
        bench.main(["--only", "scoring", "--again"])
    (run,) = bench.load()["runs"]
    assert run["rows"][0]["ratio"] == [1.0, 2.0, 4.0] and run["rows"][0]["ours"] == [2.0] * 3
    day = r"\d{4}-\d\d-\d\d, \S.*"
    assert re.fullmatch(f"{day}; before that {day}; before that {day}", run["measured"])
    shown = bench.table(bench.load(), "real size").splitlines()
    assert shown[2] == "| w | 2.00 | 4.00 (p) | 2.00 (1.00 to 4.00) |"
    assert "torch 2.13.0+cpu" in shown[4] and shown[6] == f"*{run['measured']}.*"
    monkeypatch.setattr(bench, "generate", lambda rounds: [bench.row("g", [1.0], "p", [4.0])])
    bench.main(["--only", "generate", "--quick"])
    assert len(bench.load()["runs"]) == 1


def test_every_part_of_the_page_has_been_measured_and_its_claims_hold():
    assert [run["part"] for run in STORED["runs"]] == [one.part for one in bench.PARTS]
    rows = [row for run in STORED["runs"] for row in run["rows"]]
    assert all(row["ratio"][1] > 1 for row in rows)
    (scoring,) = (row for row in rows if "151,936" in row["what"])
    assert scoring["ours"][1] < 4096
