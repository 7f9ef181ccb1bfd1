"""The experiments around the run of notebook 07, and the results that are stored and shown."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import ppo
import pytest
import readme
import real_run
import results
import reuse
import scaling_runs
import text_runs
import thinking
import torch

from minigrpo.arithmetic import TAGS, Arithmetic, completion_ids
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.objective import VARIANTS
from minigrpo.pretrain import documents_batch
from minigrpo.study import experiments
from minigrpo.study.experiments import (
    EXPERIMENTS,
    SUMMIT,
    Experiment,
    any_thought,
    only_form,
    run,
)

ROOT = Path(__file__).resolve().parent.parent
SUMMIT_NAME = next(iter(EXPERIMENTS))
STORED = results.load()
PAGE = (ROOT / "docs" / "results.md").read_text("utf-8")
TINY = {"steps": 2, "every": 1, "n": 8}


@pytest.fixture(scope="module")
def base():
    return load_policy()


# ---------------------------------------------------------------------------------------------
# what the experiments are


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_changes_the_summit_and_is_a_valid_config(name):
    one = EXPERIMENTS[name]  # its `config` refuses what is wrong
    different = one.config != SUMMIT or replace(one, changes={}) != Experiment()
    assert different == (name != SUMMIT_NAME) or name in VARIANTS


def test_the_variants_are_those_of_the_objective():
    assert [*EXPERIMENTS][-len(VARIANTS) :] == [*VARIANTS]
    for name, settings in VARIANTS.items():
        assert EXPERIMENTS[name].changes == settings


def test_the_two_other_rewards_do_not_look_at_the_answer():
    thought, guess = torch.tensor(completion_ids([7, 1], 1)), torch.tensor(completion_ids([], 3))
    for answer in range(10):
        assert only_form(thought, answer, TAGS, given=1) == 1.0
        assert only_form(guess, answer, TAGS, given=1) == 1.0
        assert any_thought(thought, answer, TAGS, given=1) == 1.0
        assert any_thought(guess, answer, TAGS, given=1) == 0.0
    wordy = torch.cat([thought[:-2], thought[-3:]])  # an answer of two tokens
    assert any_thought(wordy, 1, TAGS, given=1) == 0.0
    for grade in (only_form, any_thought):
        assert grade(thought[:-1], 1, TAGS, given=1) == 0.0  # without its end


# ---------------------------------------------------------------------------------------------
# how they are run


@pytest.mark.parametrize(
    "name", ["no room to think", "supervised, the same demonstrations", "no baseline", "gspo"]
)
def test_a_run_measures_before_during_and_after_and_leaves_the_base_alone(base, name):
    before = copy.deepcopy(base.state_dict())
    points = list(run(EXPERIMENTS[name], base, seed=1, **TINY))
    assert [point.step for point in points] == [0, 1, 2]
    assert points[0].seconds == 0 < points[1].seconds < points[2].seconds
    assert all(set(point.scores) >= set(results.SCORES) for point in points)
    after = base.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before) and not base.training


def test_the_same_seed_gives_the_same_run_and_another_another(base, monkeypatch):
    experiment = Experiment({"lr": 1e-3})
    one, again, other = (
        [p.scores for p in run(experiment, base, seed=s, **{**TINY, "n": 64})] for s in (0, 0, 1)
    )
    assert one == again and one[0] == other[0] and one != other


@pytest.mark.parametrize("name", ["no room to think", "reward for the form only", "KL weight 1"])
def test_a_run_trains_on_its_own_task_and_is_measured_on_it(base, monkeypatch, name):
    seen = []

    def spy(policy, task, config, *, evaluate):
        seen.append((task, config, evaluate.keywords))
        for step, seconds, found in ((1, 1.5, None), (2, 0.5, {"accuracy": 1.0})):
            yield SimpleNamespace(step=step, seconds=seconds, evaluation=found)

    monkeypatch.setattr(experiments, "train_grpo", spy)
    monkeypatch.setattr(experiments, "evaluate", lambda policy, **asked: {})
    one = replace(EXPERIMENTS[name], own_base=None)
    points = list(run(one, base, seed=3, **TINY))
    assert points == [experiments.Point(0, 0.0, {}), experiments.Point(2, 2.0, {"accuracy": 1.0})]
    asked = {key: value for key, value in one.task.items() if key != "grade"}
    config = replace(one.config, seed=3, steps=2, evaluate_every=1)
    assert seen == [(Arithmetic(**one.task), config, {"n": 8, **asked})]


def test_a_base_of_its_own_is_warmed_up_with_its_settings(base, monkeypatch):
    asked = []

    def warm_up(policy, config, **settings):
        same = tiny_llama(config.seed).state_dict()
        new = policy.state_dict()
        asked.append((config.seed, settings, all(torch.equal(same[k], new[k]) for k in same)))
        yield from ()  # which does nothing, like the real one, until somebody asks for its steps

    monkeypatch.setattr(experiments, "warm_up", warm_up)
    # An untrained policy never ends, and the check of the first step would stop the run.
    experiment = Experiment({"check": False}, own_base={"complete": 0.2})
    list(run(experiment, base, seed=3, **TINY))
    assert asked == [(3, {"complete": 0.2}, True)]


def test_documents_are_stacked_with_their_loss_mask():
    ids, mask = documents_batch([([5], [6, 7]), ([1, 2, 3], [4])], pad_id=9)
    assert ids.tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]


def test_supervised_training_takes_as_many_updates(base, monkeypatch):
    rows = []
    real = experiments.warmup_batch

    def spy(n, generator, **options):
        rows.append((n, generator.initial_seed(), options))
        return real(n, generator, **options)

    monkeypatch.setattr(experiments, "warmup_batch", spy)
    list(run(EXPERIMENTS["supervised, right demonstrations"], base, seed=3, **TINY))
    assert rows == [(SUMMIT.prompts_per_step * SUMMIT.group_size, 4, {"complete": 1.0})] * 4


# ---------------------------------------------------------------------------------------------
# what is stored


def test_the_stored_results_are_of_the_experiments_as_they_are():
    """A changed setting, or another base model, asks for `make results`."""
    assert STORED["base"] == results.base_checksum()
    assert [*STORED["experiments"]] == [*EXPERIMENTS]
    for name, experiment in EXPERIMENTS.items():
        now = json.loads(json.dumps(results.settings(experiment)))
        then = {key: value for key, value in STORED["experiments"][name].items() if key != "runs"}
        assert then == now, f"{name}: measured with other settings"


def test_enough_seeds_are_stored():
    for name, experiment in STORED["experiments"].items():
        seeds = [one["seed"] for one in experiment["runs"]]
        assert seeds == list(range(5 if name == SUMMIT_NAME else 3)), name
        for one in experiment["runs"]:
            assert one["curve"]["step"] == list(range(0, 101, 10))
            assert {len(values) for values in one["curve"].values()} == {11}


def test_what_the_course_promises_holds_for_every_stored_seed():
    for name in (SUMMIT_NAME, "a warm-up of its own for each seed"):
        for one in STORED["experiments"][name]["runs"]:
            curve = one["curve"]
            assert curve["accuracy"][0] <= 0.40 and curve["accuracy"][-1] >= 0.97
            assert curve["greedy"][-1] >= 0.99 and curve["harder"][-1] >= 0.90
            assert curve["thinking"][-1] >= 3 * curve["thinking"][0]
            assert one["seconds"] < 30
    for one in STORED["experiments"]["no room to think"]["runs"]:
        assert max(one["curve"]["accuracy"]) < 0.2


def test_the_tables_of_the_page_are_made_of_the_stored_results():
    written = readme.with_tables(PAGE, "docs/results.md")
    assert written == PAGE, "docs/results.md: python tools/course/readme.py writes the tables again"


def mean(name: str, score: str = "accuracy") -> float:
    """Over the seeds, after the run."""
    return fmean(results.final(STORED["experiments"][name]["runs"], score))


def test_the_page_leaves_out_what_the_task_cannot_tell_apart():
    left_out = STORED["experiments"].keys() - set(readme.SHOWN)
    assert f"The other {len(left_out)} experiments" in PAGE and "0.97 or more" in PAGE
    assert set(VARIANTS) <= left_out
    assert all(round(mean(name), 2) >= 0.97 for name in left_out)


def test_the_page_says_what_breaks_and_what_does_not():
    assert mean("no room to think") < 0.11  # a guess
    before = STORED["experiments"][SUMMIT_NAME]["runs"][0]["curve"]["accuracy"][0]
    for name in ("reward for the form only", "supervised, the same demonstrations"):
        assert abs(mean(name) - before) < 0.02  # "as bad as they were"
    assert f"It gets to {mean('reward for any thought'):.2f}" in PAGE
    assert f"it ends at {mean('KL weight 1'):.2f}" in PAGE
    greedy = [100 * mean(name, "greedy") for name in ("reward for any thought", "KL weight 1")]
    assert "{:.0f} and {:.0f} times in 100".format(*greedy) in PAGE
    assert mean("no baseline") >= 0.97


def test_the_page_says_what_correct_demonstrations_do():
    runs = STORED["experiments"]["supervised, right demonstrations"]["runs"]
    assert all(one["curve"]["accuracy"][1] >= 0.99 for one in runs)
    assert "0.99 or more after the first ten steps, and ends at 1.00" in PAGE
    assert f"{mean('supervised, right demonstrations'):.2f}" == "1.00"
    slower = thinking.stored()["equal terms"]["shown right answers, lr 0.0001"]["runs"]
    assert {results.steps_to_good(one) for one in slower} == {20}
    assert all(round(one["curve"]["accuracy"][-1], 2) == 1 for one in slower)
    ours = STORED["experiments"][SUMMIT_NAME]["runs"]
    assert median(map(results.steps_to_good, ours)) == 20
    assert "take 20 steps to pass 0.9, as many as the run, and end at 1.00 too" in PAGE


def test_the_page_says_what_wrong_grades_and_one_question_do():
    stored = thinking.stored()
    for words, family, name in (
        ("flipped, the run still ends at", "flipped rewards", "0.3"),
        ("nothing to learn from, and it ends at", "flipped rewards", "0.5"),
        ("asked in every step, gets it to", "few questions", "1"),
    ):
        ends = [one["curve"]["accuracy"][-1] for one in stored[family][name]["runs"]]
        assert f"{words} {fmean(ends):.2f}" in PAGE


def test_most_runs_take_as_long_as_the_page_and_the_readme_say():
    runs = [one["runs"] for one in STORED["experiments"].values()]
    within = [11 <= round(fmean(run["seconds"] for run in seeds)) <= 13 for seeds in runs]
    assert sum(within) > len(within) / 2 and "most of them take 11 to 13 seconds" in PAGE
    seconds = {round(run["seconds"]) for run in STORED["experiments"][SUMMIT_NAME]["runs"]}
    assert seconds <= {11, 12} and "twelve seconds" in (ROOT / "README.md").read_text("utf-8")


def test_another_result_makes_another_table(monkeypatch):
    changed = copy.deepcopy(STORED)
    changed["experiments"][SUMMIT_NAME]["runs"][2]["curve"]["accuracy"][-1] = 0.42
    monkeypatch.setattr(results, "load", lambda: changed)
    assert "0.42" in readme.with_tables(PAGE, "docs/results.md") != PAGE


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="docs/results.md: expected one pair of .* got 0"):
        readme.with_tables("no place", "docs/results.md")


# ---------------------------------------------------------------------------------------------
# how they are stored


def fake(accuracy: list[float], seed: int = 0) -> dict:
    steps = [10 * i for i in range(len(accuracy))]
    curve = {score: accuracy for score in results.SCORES} | {"step": steps}
    return {"seed": seed, "seconds": 1.0, "curve": curve}


def test_the_table_counts_by_hand():
    runs = [fake([0.2, 0.95, 0.96]), fake([0.2, 0.5, 0.99], 1), fake([0.2, 0.3, 0.92], 2)]
    lines = results.table({"experiments": {"one": {"runs": runs}}}).splitlines()
    assert lines[0].endswith("| steps to 0.9 |")
    assert lines[2] == (
        "| one | 3 | 0.96 (0.92 to 0.99) | 0.96 (0.92 to 0.99) | 0.96 (0.92 to 0.99) "
        "| 1.0 (0.9 to 1.0) | 20 |"
    )
    never = results.table({"experiments": {"two": {"runs": [fake([0.1, 0.1])]}}}).splitlines()[2]
    assert never == "| two | 1 | 0.10 | 0.10 | 0.10 | 0.1 | never |"


def test_what_is_saved_is_loaded_again(tmp_path):
    names = list(EXPERIMENTS)[:2]
    stored = {
        "base": "abc",
        "experiments": {
            name: {**results.settings(EXPERIMENTS[name]), "runs": [fake([0.1]), fake([0.2], 1)]}
            for name in names[::-1]
        },
    }
    results.save(stored, tmp_path)
    loaded = results.load(tmp_path)
    assert loaded == json.loads(json.dumps(stored)) and [*loaded["experiments"]] == names
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert results.load(tmp_path / "nowhere") == {"experiments": {}}


@pytest.mark.parametrize(
    "tool",
    [ppo, real_run, results, reuse, scaling_runs, text_runs, thinking],
    ids=lambda t: t.__name__,
)
def test_an_interrupted_write_leaves_what_was_stored(tool, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("what was stored")

    def half(self, *text):
        self.write_bytes(b"{")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        if tool is results:
            results.save({"base": "", "experiments": {}}, tmp_path)
        else:
            monkeypatch.setattr(tool, "PATH", path)
            tool.save({} if tool in (ppo, thinking) else [])
    assert path.read_text() == "what was stored" and [*tmp_path.iterdir()] == [path]


def test_a_measurement_runs_every_seed(monkeypatch, capsys):
    asked = []

    def one(experiment, base, *, seed):
        asked.append(seed)
        scores = dict.fromkeys(results.SCORES, 0.123456)
        yield experiments.Point(0, 0.0, scores)
        yield experiments.Point(10, 1.26, scores)

    monkeypatch.setattr(results, "run", one)
    measured = results.measure("dapo", range(2))
    assert asked == [0, 1]
    assert measured["runs"][1]["seconds"] == 1.3
    assert measured["runs"][1]["curve"]["accuracy"] == [0.1235, 0.1235]
    assert measured["config"]["clip"] == list(VARIANTS["dapo"]["clip"])
    assert capsys.readouterr().out.count("dapo") == 2


def test_the_figures_show_every_experiment_in_its_group():
    grouped = [name for names in results.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(EXPERIMENTS) and set(results.LABELS) < set(EXPERIMENTS)
    figure = results.experiments_figure(STORED)
    for ax, (title, names) in zip(figure.axes, results.GROUPS.items(), strict=True):
        labels = [label.get_text() for label in ax.get_yticklabels()]
        in_order = sorted(names, key=mean, reverse=True)
        expected = names if title == results.ALGORITHMS else in_order  # no ranking of algorithms
        assert labels == [results.LABELS.get(name, name) for name in expected]
        drawn = [line.get_xdata() for line in ax.get_lines() if line.get_marker() == "o"]
        runs = [STORED["experiments"][name]["runs"] for name in expected]
        assert [list(dots) for dots in drawn] == [results.final(one, "accuracy") for one in runs]
    results.plt.close("all")


def test_the_lines_of_the_run_are_named_at_their_ends():
    left, right = results.summit_figure(STORED).axes
    assert len(left.get_lines()) == 4 and len(right.get_lines()) == 2  # with a level in each
    named = {text.get_text(): text.get_color() for text in left.texts}
    runs = STORED["experiments"][SUMMIT_NAME]["runs"]
    for text, score in {
        "sampled": "accuracy",
        "greedy": "greedy",
        "7 and 8 digits": "harder",
    }.items():
        end = fmean(results.final(runs, score))
        (color,) = {line.get_color() for line in left.get_lines() if line.get_ydata()[-1] == end}
        assert named[text] == color
    results.plt.close("all")
