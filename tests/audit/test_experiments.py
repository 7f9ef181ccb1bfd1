"""The experiments around the run of notebook 07."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minigrpo.arithmetic import TAGS, Arithmetic, completion_ids
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.study import experiments
from minigrpo.study.experiments import EXPERIMENTS, SUMMIT, Experiment, any_thought, only_form, run

SUMMIT_NAME = next(iter(EXPERIMENTS))
TINY = {"steps": 2, "every": 1, "n": 8}


@pytest.fixture(scope="module")
def base():
    return load_policy()


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


def test_supervised_training_takes_as_many_updates_and_leaves_the_base_alone(base, monkeypatch):
    rows, before = [], copy.deepcopy(base.state_dict())
    real = experiments.warmup_batch

    def spy(n, generator, **options):
        rows.append((n, generator.initial_seed(), options))
        return real(n, generator, **options)

    monkeypatch.setattr(experiments, "warmup_batch", spy)
    points = list(run(EXPERIMENTS["supervised, right demonstrations"], base, seed=3, **TINY))
    assert [point.step for point in points] == [0, 1, 2]
    assert points[0].seconds == 0 < points[1].seconds < points[2].seconds
    after = base.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before) and not base.training
    assert rows == [(SUMMIT.prompts_per_step * SUMMIT.group_size, 4, {"complete": 1.0})] * 4
