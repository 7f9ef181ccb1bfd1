"""The runs behind notebook 11: the record is what the settings say; the tool that makes it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import real_run  # noqa: E402

from minigrpo.files import data_folder  # noqa: E402
from minigrpo.text.shots import rows  # noqa: E402


def error(found: dict, way: str) -> float:
    """One standard error of a fraction of right answers."""
    p = found[way]["right"]
    return (p * (1 - p) / found["questions"]) ** 0.5


def test_every_run_is_stored_with_the_present_settings():
    """A change of settings, data or rewards empties the record until it is run again."""
    assert [real_run.name(one) for one in real_run.stored()] == real_run.RUNS
    for one in real_run.stored():
        assert len(one["steps"]) == 20 and list(one["held out"]) == ["0", "10", "20"]
        assert one["held out"]["0"]["questions"] == one["held out"]["20"]["questions"] == 256
        assert all(min(step["seconds"]) >= 0 for step in one["steps"])
        assert 1 < one["peak GiB"] < 24


def test_three_seeds_learn_by_more_than_their_standard_errors():
    seeds = [one for one in real_run.stored() if (one["shots"], one["lr"]) == ("one loss", 1e-5)]
    assert [one["seed"] for one in seeds] == [0, 1, 2]
    for one in seeds:
        before, after = one["held out"]["0"], one["held out"]["20"]
        for way in ("greedy", "sampled"):
            gain = after[way]["right"] - before[way]["right"]
            assert gain > 2 * (error(before, way) + error(after, way))


def test_the_stored_transcripts_are_those_of_the_first_questions_and_graded_as_stored():
    kept = json.loads(real_run.PATH.read_text("utf-8"))["questions"]
    asked = rows(held_out=True)[: real_run.TRANSCRIPTS]
    assert kept == [{k: row[k] for k in ("question", "answer")} for row in asked]
    for one in real_run.stored():
        for found in one["held out"].values():
            for way in ("greedy", "sampled"):
                texts = found[way]["transcripts"]
                hits = sum(real_run.right(asked, texts))
                rest = found["questions"] - len(texts)
                right = found[way]["right"] * found["questions"]
                assert len(texts) == len(asked) and hits <= right + 1e-9 <= hits + rest + 2e-9


def test_the_notebook_opens_with_the_first_transcripts_of_seed_0():
    cells = json.loads((ROOT / "notebooks" / "11_a_real_run.ipynb").read_text("utf-8"))["cells"]
    title = "".join(cells[0]["source"])
    found = real_run.stored()[0]["held out"]
    shown = {way: re.findall(rf"{way} +(<think>.*)", title) for way in ("greedy", "sampled")}
    for way, texts in shown.items():
        assert texts == [found[step][way]["transcripts"][0].strip() for step in ("0", "20")]


@pytest.mark.parametrize(
    "name, value",
    [
        ("HELD_OUT", 128),
        ("TOKENS", 30),
        ("WEIGHTS", (1.0, 1.0, 1.0)),
        ("tags_reward", lambda *_: 0.0),
        ("rows", lambda *_, **given: rows(**given)[1:]),
    ],
)
def test_a_changed_setting_is_noticed(name, value, monkeypatch):
    monkeypatch.setattr(real_run, name, value)
    assert real_run.stored() == []


def test_the_answer_is_worth_more_than_its_form():
    paid = dict(zip((f.__name__ for f in real_run.REWARDS), real_run.WEIGHTS, strict=True))
    assert paid == {"tags_reward": 0.4, "format_reward": 0.1, "answer_reward": 1.0}


@pytest.mark.parametrize("fraction", [0.0, 0.28, 0.5])
def test_losses_are_the_fraction_that_is_asked_for(fraction):
    asked = rows("no loss", held_out=False)
    kept = real_run.with_losses(asked, fraction)
    gains, losses = ([r for r in kept if r["kind"] == kind] for kind in ("gets", "loses"))
    assert gains == [row for row in asked if row["kind"] == "gets"]
    assert losses == [row for row in asked if row["kind"] == "loses"][: len(losses)]
    assert len(losses) / len(kept) == pytest.approx(fraction, abs=1e-3)
    assert fraction != 0.5 or kept == asked  # in their order, to the last row


def test_a_run_is_what_its_name_says():
    config = real_run.config(real_run.Run("no loss", 2e-5, 3), (0,), 0)
    assert (config.lr, config.seed) == (2e-5, 3)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs of two steps on a model that takes seconds."""
    sizes = {"HELD_OUT": 4, "MIDWAY": 2, "TRANSCRIPTS": 2, "ASKED": 2, "TOKENS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(real_run, name, value)
    config = real_run.config

    def briefly(*given, **side):  # the small model has no room for solved problems
        found = rows(*given, **side)[:8]
        return [{**row, "prompt": f"{row['question']}\n"} for row in found]

    def short(*given):
        return replace(config(*given), steps=2, evaluate_every=1, prompts_per_step=2, check=False)

    monkeypatch.setattr(real_run, "SHAPE", {})
    monkeypatch.setattr(real_run, "config", short)
    monkeypatch.setattr(real_run, "rows", briefly)
    monkeypatch.setattr(real_run, "PATH", tmp_path / "real_run.json")
    monkeypatch.setattr(real_run, "RUNS", [real_run.Run("one loss", 1e-5, s) for s in (0, 1)])
    return tmp_path / "real_run.json"


def test_a_run_is_measured_stored_and_not_repeated(small, capsys):
    folder = str(data_folder() / "text_llama")
    real_run.main([folder, "--seed", "1"])
    (one,) = real_run.stored()
    assert one["seed"] == 1 and list(one["held out"]) == ["0", "1", "2"]
    assert [found["questions"] for found in one["held out"].values()] == [4, 2, 4]
    assert len(one["steps"]) == 2 and len(one["steps"][0]["first group"]) == 8
    before = small.read_text("utf-8")
    real_run.main([folder, "--seed", "1"])
    assert small.read_text("utf-8") == before
    real_run.main([folder])
    first, again = real_run.stored()
    assert again == one and first["held out"]["0"] == one["held out"]["0"]


def test_an_evaluation_counts_each_way_and_each_kind():
    """Greedy, every gain is right; sampled, every loss is, and nothing else keeps to the form."""

    class Lab:
        held_out = rows(held_out=True)[:40]

        def write(self, asked, **settings):
            assert settings in ({"top_k": 1}, {})
            kind = "gets" if settings else "loses"
            right = "<think>{thought}</think><answer>{answer}</answer>".format_map
            return [right(row) if row["kind"] == kind else row["answer"] for row in asked]

    kinds = [row["kind"] for row in Lab.held_out[:31]]
    gains, losses = kinds.count("gets"), kinds.count("loses")
    found = real_run.evaluate(Lab(), 31)
    assert found["questions"] == 31 and gains != losses
    for way, n, right in (("greedy", gains, "gets"), ("sampled", losses, "loses")):
        assert found[way]["right"] == found[way]["form"] == pytest.approx(n / 31)
        for kind, count in (("gets", gains), ("loses", losses)):
            assert found[way][kind] == (kind == right)
            assert found[way][f"{kind}, questions"] == count
        assert len(found[way]["transcripts"]) == real_run.TRANSCRIPTS


def test_a_missing_folder_is_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="nowhere: .*tools/smollm2.py"):
        real_run.main([str(tmp_path / "nowhere")])


def test_another_model_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(real_run, "load_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(SystemExit, match="expected SmolLM2-135M-Instruct .*, got a llama of"):
        real_run.main([str(data_folder() / "text_llama")])
    with pytest.raises(SystemExit, match="expected SmolLM2.*, got no config.json"):
        real_run.main([str(tmp_path)])


def test_a_seed_that_has_no_place_in_the_record_is_refused_at_once(capsys, tmp_path):
    with pytest.raises(SystemExit):
        real_run.main([str(tmp_path), "--seed", "7"])
    assert "--seed: invalid choice: 7 (choose from" in capsys.readouterr().err


def test_a_run_that_is_stopped_leaves_the_others_as_they_were(small, monkeypatch):
    folder = str(data_folder() / "text_llama")
    real_run.main([folder, "--seed", "0"])
    before = small.read_text("utf-8")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(real_run, "measure", stopped)
    for more in ([], ["--again"]):
        with pytest.raises(KeyboardInterrupt):
            real_run.main([folder, *more])
    assert small.read_text("utf-8") == before and len(list(small.parent.iterdir())) == 1
