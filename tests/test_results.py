"""What the pages, notebooks, tables and figures say of the stored runs."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest
import readme
import real_run
import results
import store
import text_runs
import thinking

from minigrpo.objective import VARIANTS
from minigrpo.study.experiments import EXPERIMENTS
from minigrpo.text.shots import rows

ROOT = Path(__file__).resolve().parent.parent
STORED = store.load("results.json")["experiments"]
SUMMIT_NAME = results.SUMMIT_NAME
PAGE = (ROOT / "docs" / "results.md").read_text("utf-8")


def mean(name: str, score: str = "accuracy") -> float:
    """Over the seeds, after the run."""
    return fmean(results.final(STORED[name]["runs"], score))


def stored(family: str, name: str) -> list[dict]:
    return thinking.store_of(family, name).stored()


def ends(family: str, name: str, score: str = "accuracy") -> list[float]:
    return results.final(stored(family, name), score)


def test_what_the_course_promises_holds_for_every_stored_seed():
    for name in (SUMMIT_NAME, "a warm-up of its own for each seed"):
        for one in STORED[name]["runs"]:
            curve = one["curve"]
            assert curve["accuracy"][0] <= 0.40 and curve["accuracy"][-1] >= 0.97
            assert curve["greedy"][-1] >= 0.99 and curve["harder"][-1] >= 0.90
            assert curve["thinking"][-1] >= 3 * curve["thinking"][0]
    for one in STORED["no room to think"]["runs"]:
        assert max(one["curve"]["accuracy"]) < 0.2


def test_the_page_says_what_breaks_and_what_does_not():
    left_out = STORED.keys() - set(readme.SHOWN)
    assert f"The other {len(left_out)} experiments" in PAGE and "0.97 or more" in PAGE
    assert set(VARIANTS) <= left_out and all(round(mean(name), 2) >= 0.97 for name in left_out)
    assert mean("no room to think") < 0.11 and mean("no baseline") >= 0.97
    before = STORED[SUMMIT_NAME]["runs"][0]["curve"]["accuracy"][0]
    for name in ("reward for the form only", "supervised, the same demonstrations"):
        assert abs(mean(name) - before) < 0.02  # "as bad as they were"
    assert f"It gets to {mean('reward for any thought'):.2f}" in PAGE
    assert f"it ends at {mean('KL weight 1'):.2f}" in PAGE
    greedy = [100 * mean(name, "greedy") for name in ("reward for any thought", "KL weight 1")]
    assert "{:.0f} and {:.0f} times in 100".format(*greedy) in PAGE


def test_the_page_says_what_correct_demonstrations_do():
    runs = STORED["supervised, right demonstrations"]["runs"]
    assert all(one["curve"]["accuracy"][1] >= 0.99 for one in runs)
    assert "0.99 or more after ten steps, and ends at 1.00" in PAGE
    assert f"{mean('supervised, right demonstrations'):.2f}" == "1.00"
    slower = stored("equal terms", "shown right answers, lr 0.0001")
    assert {results.steps_to_good(one) for one in slower} == {20}
    assert all(round(one["curve"]["accuracy"][-1], 2) == 1 for one in slower)
    assert {results.steps_to_good(one) for one in STORED[SUMMIT_NAME]["runs"]} == {20, 30}
    assert "take 20 steps to pass 0.9, where the run takes 20 to 30, and end at 1.00 too" in PAGE


def test_the_page_says_what_wrong_grades_and_one_question_do():
    for words, family, name in (
        ("flipped, the run still ends at", "flipped rewards", "0.3"),
        ("nothing to learn from, and it ends at", "flipped rewards", "0.5"),
        ("asked in every step, gets it to", "few questions", "1"),
    ):
        assert f"{words} {fmean(ends(family, name)):.2f}" in PAGE


def test_most_runs_take_as_long_as_the_page_and_the_readme_say():
    runs = [one["runs"] for one in STORED.values()]
    within = [11 <= round(fmean(run["seconds"] for run in seeds)) <= 13 for seeds in runs]
    assert sum(within) > len(within) / 2 and "most of them take 11 to 13 seconds" in PAGE
    seconds = {round(run["seconds"]) for run in STORED[SUMMIT_NAME]["runs"]}
    assert seconds <= {11, 12} and "twelve seconds" in (ROOT / "README.md").read_text("utf-8")


def test_what_the_page_says_of_the_torn_pages():
    runs = stored("torn pages", "0")
    late = [one for one in runs if one["curve"]["accuracy"][-1] < 0.9]
    assert (len(runs), [one["seed"] for one in late]) == (10, [thinking.HARDEST])
    assert late[0]["base"]["whole"] == min(one["base"]["whole"] for one in runs) == 0
    assert thinking.HABIT_QUESTIONS == 1200 and late[0]["curve"]["accuracy"][-1] < 0.15
    hardest = stored("the hardest base, twice as long", "0")
    assert hardest[0]["base"] == runs[thinking.HARDEST]["base"]
    assert min(results.final(hardest, "accuracy")) > 0.95
    assert max(one["base"]["correct"] for one in runs) < 0.13  # chance
    few, many = (ends("torn pages", share, "harder") for share in ("0", "0.1"))
    assert max(few) < min(many)


def test_answering_without_a_thought_stays_at_chance():
    for lr in ("0.001", "0.005"):
        assert max(ends("a thought or none", f"without a thought, lr {lr}")) < 0.15
        assert min(ends("a thought or none", f"after a thought, lr {lr}")) > 0.8


def test_what_notebook_09_says_of_all_six_runs():
    plain = [one for one in text_runs.STORE.stored() if one["arm"] in text_runs.FAMILIES]
    assert len(plain) == 6
    for one in plain:
        form, right, length = (one["curve"][name] for name in text_runs.SCORES)
        assert form[0] < 0.65 and form[-1] > 0.9
        assert right[0] < 0.4 and right[-1] > 0.85
        assert length[-1] > length[0] + 4


def test_soft_tags_bring_the_form_and_no_answers():
    """What notebook 09 says of the runs in which almost no answer is right at first."""
    last = {arm: [] for arm in text_runs.ARMS}
    for one in text_runs.STORE.stored():
        last[one["arm"]].append({name: values[-1] for name, values in one["curve"].items()})
    alone, soft = last["chat, answer"], last["chat, answer and tags"]
    assert min(run["form"] for run in soft) > max(run["form"] for run in alone) > 0.8
    assert all(run["right"] < 0.1 and 7 <= run["length"] < 8 for run in alone + soft)


def test_three_seeds_of_the_real_run_learn_by_more_than_their_standard_errors():
    runs = real_run.STORE.stored()
    settings = [(one["shots"], one["lr"], one["rank"]) for one in runs]
    seeds = [one for one, its in zip(runs, settings) if its == ("one loss", 1e-5, 0)]
    assert [one["seed"] for one in seeds] == [0, 1, 2]
    for one in seeds:
        before, after = one["held out"]["0"], one["held out"]["20"]
        for way in ("greedy", "sampled"):
            errors = [
                (p * (1 - p) / found["questions"]) ** 0.5
                for found in (before, after)
                if (p := found[way]["right"])
            ]
            assert after[way]["right"] - before[way]["right"] > 2 * sum(errors)


def test_the_transcripts_are_those_of_the_first_questions_and_graded_as_stored():
    asked = rows(held_out=True)[: real_run.TRANSCRIPTS]
    kept = real_run.STORE.part()["questions"]
    assert kept == [{k: row[k] for k in ("question", "answer")} for row in asked]
    for one in real_run.STORE.stored():
        for found in one["held out"].values():
            for way in ("greedy", "sampled"):
                texts = found[way]["transcripts"]
                hits = sum(real_run.right(asked, texts))
                rest = found["questions"] - len(texts)
                right = found[way]["right"] * found["questions"]
                assert len(texts) == len(asked) and hits <= right + 1e-9 <= hits + rest + 2e-9


def test_notebook_11_opens_with_the_first_transcripts_of_seed_0():
    cells = json.loads((ROOT / "notebooks" / "11_a_real_run.ipynb").read_text("utf-8"))["cells"]
    title = "".join(cells[0]["source"])
    found = real_run.STORE.stored()[0]["held out"]
    for way in ("greedy", "sampled"):
        shown = re.findall(rf"{way} +(<think>.*)", title)
        assert shown == [found[step][way]["transcripts"][0].strip() for step in ("0", "20")]


@pytest.mark.parametrize("page", readme.TABLES)
def test_the_tables_of_a_page_are_made_of_what_is_stored(page):
    written = (ROOT / page).read_text("utf-8")
    assert readme.with_tables(written, page) == written, (
        "python tools/course/readme.py writes the tables"
    )


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="docs/results.md: expected one pair of .* got 0"):
        readme.with_tables("no place", "docs/results.md")


def fake(accuracy: list[float], seed: int = 0, **more: object) -> dict:
    steps = [10 * i for i in range(len(accuracy))]
    curve = {score: accuracy for score in results.SCORES} | {"step": steps}
    return {"seed": seed, "curve": curve, **more}


def test_the_table_counts_by_hand(monkeypatch):
    runs = [fake([0.2, 0.95, 0.96]), fake([0.2, 0.5, 0.99], 1), fake([0.2, 0.3, 0.92], 2)]
    made_up = {"one": {"runs": runs}, "two": {"runs": [fake([0.1, 0.1])]}}
    monkeypatch.setattr(store, "load", lambda file: {"experiments": made_up})
    lines = results.table(made_up).splitlines()
    assert lines[0].endswith("| steps to 0.9 |")
    assert lines[2] == (
        "| one | 3 | 0.96 (0.92 to 0.99) | 0.96 (0.92 to 0.99) | 0.96 (0.92 to 0.99) "
        "| 1.0 (0.9 to 1.0) | 20 (10 to 20) |"
    )
    assert lines[3] == "| two | 1 | 0.10 | 0.10 | 0.10 | 0.1 | never |"


def test_the_table_of_torn_pages_counts_by_hand(monkeypatch):
    runs = [
        fake([0.0, end], base={"whole": whole, "correct": 0.2})
        for whole, end in ((0.1, 0.5), (0.3, 1.0))
    ]
    monkeypatch.setattr(thinking, "TABLE", {"f": {"v": "mine"}})
    monkeypatch.setattr(store, "load", lambda file: {"f": {"v": {"runs": runs}}})
    (mine,) = thinking.table().splitlines()[2:]
    assert mine == (
        "| mine | 2 | 0.200 (0.100 to 0.300) | 0.20 | 0.75 (0.50 to 1.00) "
        "| 0.75 (0.50 to 1.00) | 0.8 (0.5 to 1.0) |"
    )


def test_the_figure_shows_every_experiment_in_its_group():
    grouped = [name for names in results.GROUPS.values() for name in names]
    assert grouped == [*EXPERIMENTS] and set(results.LABELS) < set(EXPERIMENTS)
    figure = results.experiments_figure(store.load("results.json"))
    for ax, (title, names) in zip(figure.axes, results.GROUPS.items(), strict=True):
        labels = [label.get_text() for label in ax.get_yticklabels()]
        in_order = sorted(names, key=mean, reverse=True)
        expected = names if title == results.ALGORITHMS else in_order  # no ranking of algorithms
        assert labels == [results.LABELS.get(name, name) for name in expected]
        drawn = [line.get_xdata() for line in ax.get_lines() if line.get_marker() == "o"]
        runs = [STORED[name]["runs"] for name in expected]
        assert [list(dots) for dots in drawn] == [results.final(one, "accuracy") for one in runs]
    results.plt.close("all")


def test_the_lines_of_the_run_are_named_at_their_ends():
    left, right = results.summit_figure(store.load("results.json")).axes
    assert len(left.get_lines()) == 4 and len(right.get_lines()) == 2  # with a level in each
    named = {text.get_text(): text.get_color() for text in left.texts}
    scores = {"sampled": "accuracy", "greedy": "greedy", "7 and 8 digits": "harder"}
    for text, score in scores.items():
        (color,) = {
            line.get_color() for line in left.get_lines()
            if line.get_ydata()[-1] == mean(SUMMIT_NAME, score)
        }  # fmt: skip
        assert named[text] == color
    results.plt.close("all")
