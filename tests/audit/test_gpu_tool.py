"""`make gpu` runs on small shapes without a card, and its table is of what is stored."""

from importlib.util import find_spec

import gpu
import memory
import pytest
import store

STORED = store.load("gpu.json")


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_every_part_runs_at_tiny_size(capsys, monkeypatch):
    monkeypatch.setattr(store, "FOLDER", store.FOLDER)
    monkeypatch.setattr(gpu, "TINY", {})
    code = gpu.main(["--tiny"])
    said = capsys.readouterr().out
    failed = [line for line in said.splitlines() if "failed" in line]
    assert all("peft" in line for line in failed) and code == bool(failed)  # LoRA is an extra
    assert [name for name in gpu.PARTS if f"stored: {name}" not in said] == []
    assert said.count("'apart': 0.0") == 12 and said.count("'rms': ") == 2
    assert said.count("'who': 'TRL', 'model': 'Qwen2.5-1.5B'") == 2


def test_without_a_card_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CUDA", False)
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == (
        "error: this measures a CUDA card, and there is none: see --tiny\n"
    )


def test_the_table_shows_what_is_stored_beside_what_is_promised(monkeypatch):
    rows = next(run["rows"] for run in STORED["runs"] if run["part"] == "shapes")
    lines = gpu.table().splitlines()
    assert len(lines) == 2 + len(rows) + 2
    for row, line in zip(rows, lines[2:]):
        *_, peak, promised = line.strip("| ").split(" | ")
        assert abs(float(peak) / row["peak"] - 1) < 0.02 and row["model"] in memory.SHAPES
        assert 0.97 < float(promised) / row["peak"] < 1.1  # what recipes/README.md relies on
    failed = {"part": "shapes", "measured": "", "rows": [{"model": "m", "failed": "no room"}]}
    monkeypatch.setattr(store, "load", lambda file: {**STORED, "runs": [failed]})
    assert "| m | no room |" in gpu.table()
    monkeypatch.setattr(store, "load", lambda file: {})
    assert gpu.table() == "*Not measured yet: `make gpu` does it.*" and gpu.rates() == {}
