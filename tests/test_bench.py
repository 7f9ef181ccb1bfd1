"""The benchmark: each part runs at tiny size, and the tables are made of what is stored."""

from dataclasses import replace
from importlib.util import find_spec

import bench
import pytest
import store

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
STORED = store.load("bench.json")
TINY = {**bench.BODY, "vocab_size": 50}
SHORT = replace(bench.REAL, max_new_tokens=2)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """In this process, on one core; of memory it only counts how often it's asked for."""
    monkeypatch.setattr(bench, "apart", lambda function, *given: function(*given))
    monkeypatch.setattr(bench, "mib", iter(range(1, 99)).__next__)
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 1)


@pytest.mark.parametrize(
    "measure",
    [
        lambda: bench.generate(rounds=1),
        pytest.param(lambda: [bench.trainer(2, 1, replace(bench.TOY, steps=2))], marks=needs_trl),
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


def test_a_ratio_above_1_is_in_our_favor_and_a_row_shows_its_range(monkeypatch):
    less = bench.row("seconds per step", [2.0, 1.0, 4.0], "p", [6.0, 4.00004, 6.0])
    assert less["ours"] == [1.0, 2.0, 4.0] and less["ratio"] == [1.5, 3.0, 4.0]
    more = bench.row("tokens per second", [17700.0], "p", [230.4])
    runs = [{"part": "generate", "measured": "today", "rows": [less, more]}]
    monkeypatch.setattr(store, "load", lambda file: {**STORED, "runs": runs})
    shown = bench.table(bench.TABLES["speed"]).splitlines()
    assert shown[2] == "| seconds per step | 2.00 | 6.00 (p) | 3.00 (1.50 to 4.00) |"
    assert shown[3] == "| tokens per second | 17,700 | 230 (p) | 76.8 |"
    assert "torch 2.13.0+cpu" in shown[5] and shown[7] == "*today.*"


def test_a_part_is_measured_alone_and_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(bench.STORE, "settings", lambda: STORED["settings"])
    monkeypatch.setitem(bench.PARTS, "scoring", lambda: [bench.row("w", [1.0], "p", [4.0])])
    bench.main(["--only", "scoring", "--again"])
    (run,) = bench.STORE.stored()
    assert run["part"] == "scoring" and run["rows"][0]["ratio"] == [4.0] * 3


def test_every_part_of_the_page_has_been_measured_and_its_claims_hold():
    shown = [name for names in bench.TABLES.values() for name in names]
    assert [run["part"] for run in STORED["runs"]] == shown == [*bench.PARTS]
    rows = [row for run in STORED["runs"] for row in run["rows"]]
    assert all(row["ratio"][1] > 1 for row in rows)
    (scoring,) = (row for row in rows if "151,936" in row["what"])
    assert scoring["ours"][1] < 4096
