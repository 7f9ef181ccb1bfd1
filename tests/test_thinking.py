"""The runs behind notebooks 06 and 07: they do what they are named for, and theirs is stored."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import thinking
import torch

from minigrpo import arithmetic
from minigrpo.arithmetic import Arithmetic, is_held_out, read_question, running_totals
from minigrpo.grpo import rollout, train_grpo
from minigrpo.llama import WARMUP, load_policy, tiny_llama, warm_up
from minigrpo.study.experiments import SUMMIT

EVERY = [(family, name) for family, variants in thinking.FAMILIES.items() for name in variants]


@pytest.fixture(scope="module")
def base():
    return load_policy()


# ---------------------------------------------------------------------------------------------
# what is stored


@pytest.mark.parametrize("family, name", EVERY)
def test_every_run_is_stored_with_the_present_settings(family, name):
    """A changed setting, or another base model, asks for `make results`."""
    variant = thinking.FAMILIES[family][name]
    runs = thinking.stored()[family][name]["runs"]
    assert [one["seed"] for one in runs] == [*variant.seeds]
    for one in runs:
        steps = one["curve"]["step"]
        assert steps[0] == 0 and {b - a for a, b in zip(steps, steps[1:])} == {variant.every}
        assert {len(values) for values in one["curve"].values()} == {len(steps)}


def test_nothing_else_is_stored():
    """Neither families that are gone, nor seeds that nobody asked for."""
    assert json.loads(thinking.PATH.read_text("utf-8")) == thinking.stored()


def test_the_torn_pages_have_seeds_enough():
    assert {name: len(v.seeds) >= 5 for name, v in thinking.FAMILIES["torn pages"].items()} == {
        "0.1": True,
        "0.03": True,
        "0": True,
    }


def test_the_hardest_base_is_the_one_that_thinks_to_the_end_least_often():
    runs = thinking.stored()["torn pages"]["0"]["runs"]
    least = min(runs, key=lambda one: one["base"]["whole"])
    assert least["seed"] == thinking.HARDEST
    (again,) = thinking.FAMILIES["the hardest base, twice as long"].values()
    assert (again.torn, again.torn_seed) == (0.0, thinking.HARDEST)


def test_group_sizes_cost_the_same():
    for variant in thinking.FAMILIES["group size"].values():
        sizes = variant.settings["grpo"]
        assert sizes["prompts_per_step"] * sizes["group_size"] == thinking.ROWS


# ---------------------------------------------------------------------------------------------
# storing


def short(**changes) -> dict:
    """One family of one run of a step."""
    one = thinking.grpo_variant((0,), steps=1, prompts_per_step=2, group_size=2, **changes)
    return {"f": {"v": replace(one, every=1)}}


def test_a_stored_run_is_not_repeated_and_one_of_other_settings_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(thinking, "PATH", tmp_path / "thinking.json")
    monkeypatch.setattr(thinking, "FAMILIES", short())
    monkeypatch.setattr(thinking, "HABIT_QUESTIONS", 8)
    thinking.main([])
    (first,) = thinking.stored()["f"]["v"]["runs"]
    assert first["curve"]["step"] == [0, 1] and first["base"].keys() == first["after"].keys()
    monkeypatch.setattr(thinking, "measured", lambda *args: pytest.fail("measured again"))
    thinking.main([])
    monkeypatch.setattr(thinking, "FAMILIES", short(lr=1e-3))
    assert thinking.stored()["f"]["v"]["runs"] == []
    assert "v, seed 0" in capsys.readouterr().out


def test_what_another_process_stored_meanwhile_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(thinking, "PATH", tmp_path / "thinking.json")
    for seed in (2, 0):
        thinking.add("few questions", "1", {"seed": seed})
    thinking.add("torn pages", "0", {"seed": 1})
    found = thinking.stored()
    assert [one["seed"] for one in found["few questions"]["1"]["runs"]] == [0, 2]
    assert [one["seed"] for one in found["torn pages"]["0"]["runs"]] == [1]


# ---------------------------------------------------------------------------------------------
# tasks and documents


def test_a_noisy_grader_flips_so_many_rewards_and_no_others():
    prompts = Arithmetic().prompts(1, torch.Generator().manual_seed(0)) * 4000
    total = running_totals(read_question(prompts[0]))[-1]
    rows = [torch.tensor(arithmetic.completion_ids([], (total + i) % 10)) for i in (0, 1)] * 2000
    for p in (0.0, 0.3, 1.0):
        task = thinking.NoisyArithmetic(flip=p, generator=torch.Generator().manual_seed(1))
        right, wrong = (torch.tensor(task.reward(prompts, rows))[i::2].mean() for i in (0, 1))
        assert abs(right - (1 - p)) < 0.04 and abs(wrong - p) < 0.04


@pytest.mark.parametrize("n", [1, 4])
def test_a_run_on_few_questions_asks_the_same_ones_and_none_held_out(n):
    task, generator = thinking.FewQuestions(questions=n, seed=3), torch.Generator().manual_seed(0)
    asked = {read_question(p) for _ in range(20) for p in task.prompts(16, generator)}
    assert len(asked) == n and not any(map(is_held_out, asked))
    other = thinking.FewQuestions(questions=n, seed=4).prompts(64, generator)
    assert {read_question(p) for p in other} != asked


@pytest.mark.parametrize("thinks", [True, False])
def test_solved_documents_are_right_and_only_the_completion_is_learned(thinks):
    ids, mask = thinking.solved(64, torch.Generator().manual_seed(0), thinking=thinks)
    for row, learn in zip(ids, mask):
        given = int(learn.int().argmax())
        question, written = read_question(row[:given]), row[learn].tolist()
        totals = running_totals(question)
        assert written == arithmetic.completion_ids(totals if thinks else [], totals[-1])
        assert not is_held_out(question)


# ---------------------------------------------------------------------------------------------
# ways to train


def test_nothing_changed_is_the_run_of_notebook_07(base):
    mine, other = copy.deepcopy(base), copy.deepcopy(base)
    list(thinking.by_grpo(mine, 5, steps=2))
    list(train_grpo(other, Arithmetic(), replace(SUMMIT, seed=5, steps=2)))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters()))


def log_probs_after_a_step(base, rewards, monkeypatch):
    """By how much a step of rejection sampling raises each of the texts that it sampled."""
    policy, seen = copy.deepcopy(base), {}

    def sampled(*args):
        seen["rollouts"], _ = rollout(*args)
        return seen["rollouts"], rewards

    monkeypatch.setattr(thinking, "rollout", sampled)
    next(iter(thinking.by_rejection(policy, 0)))
    before, after = (thinking.score(p, seen["rollouts"], SUMMIT)[0].sum(1) for p in (base, policy))
    return (after - before).detach()


def test_rejection_sampling_imitates_the_right_ones(base, monkeypatch):
    rewards = torch.zeros(thinking.ROWS, dtype=torch.float64)
    assert log_probs_after_a_step(base, rewards, monkeypatch).count_nonzero() == 0
    rewards[17] = 1.0
    gained = log_probs_after_a_step(base, rewards, monkeypatch)
    assert gained[17] > 0.01 and gained[17] > gained.mean()


def test_imitation_counts_its_updates(base):
    policy = copy.deepcopy(base)
    settings = {"lr": 1e-3, "updates": 4, "per_step": 2}
    documents = thinking.partial(thinking.solved, thinking=True)
    steps = list(thinking.by_imitation(policy, 0, documents=documents, **settings))
    assert [step for step, _ in steps] == [1, 2] and steps[-1][1] < steps[0][1]


# ---------------------------------------------------------------------------------------------
# starts and habits


def test_a_start_is_random_shipped_or_warmed_up_with_its_own_pages(base, monkeypatch):
    asked = []
    monkeypatch.setattr(
        thinking, "warm_up", lambda p, config, **own: iter([asked.append((config.seed, own))])
    )
    thinking.own_base.cache_clear()
    one = thinking.torn_variant(0.03, (0, 1))
    same = tiny_llama(4).state_dict()
    assert all(torch.equal(same[k], v) for k, v in thinking.start(one, 4).state_dict().items())
    for seed in (4, 5):  # one base for both
        start = thinking.start(replace(one, torn_seed=7), seed)
        start.lm_head.weight.data.zero_()
    assert thinking.start(replace(one, torn_seed=7), 6).lm_head.weight.any()
    thinking.own_base.cache_clear()
    assert asked == [(4, {"torn": 0.03}), (7, {"torn": 0.03})]
    shipped = thinking.start(thinking.grpo_variant(), 4).state_dict()
    assert all(torch.equal(shipped[k], v) for k, v in base.state_dict().items())
    random = thinking.start(thinking.control(True, 1e-3, 20), 4).state_dict()
    assert all(torch.equal(same[k], v) for k, v in random.items()) and len(asked) == 2


def test_no_torn_page_means_no_whole_thought_to_imitate():
    """With the dial of notebook 07 at 0, no document thinks to the end after a prompt."""
    generator = torch.Generator().manual_seed(0)
    for torn, some in ((0.0, False), (0.1, True)):
        whole = 0
        for given, learned in arithmetic.warmup_documents(4000, generator, torn=torn):
            if given[0] == arithmetic.BOS:
                totals = running_totals(read_question(torch.tensor(given)))
                whole += learned[: len(totals)] == totals
        assert (whole > 0) == some


def test_habits_agree_with_a_count_by_hand(base, monkeypatch):
    monkeypatch.setattr(thinking, "HABIT_QUESTIONS", 200)
    seen = []
    real = thinking.ask
    monkeypatch.setattr(thinking, "ask", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1])
    found = thinking.habits(base)
    (r,) = seen
    assert sorted(set(r.lengths.tolist())) == [3, 4, 5, 6] and len(r.lengths) == 200
    rows = [*zip(r.thinking.tolist(), r.lengths.tolist(), r.correct.tolist())]
    whole = [right for thought, terms, right in rows if thought == terms]
    assert found["whole"] == round(len(whole) / 200, 4)
    assert found["correct_if_whole"] == round(sum(whole) / len(whole), 4)
    begun = [thought for thought, *_ in rows if thought >= 1]
    assert found["goes_on"][0] == round(len(begun) / 200, 4)
    assert found["goes_on"][1] == round(sum(t >= 2 for t in begun) / len(begun), 4)
    assert found["correct"] == round(sum(right for *_, right in rows) / 200, 4)


# ---------------------------------------------------------------------------------------------
# what the notebooks say of the stored runs


def ends(family, name, score="accuracy"):
    runs = thinking.stored()[family][name]["runs"]
    return [one["curve"][score][-1] for one in runs]


def test_answering_without_a_thought_stays_at_chance():
    for lr in ("0.001", "0.005"):
        assert max(ends("a thought or none", f"without a thought, lr {lr}")) < 0.15
        assert min(ends("a thought or none", f"after a thought, lr {lr}")) > 0.8


def test_the_warm_up_of_a_base_is_the_one_that_ships():
    """The dial at 0.1 is the setting of the base that ships."""
    policy = tiny_llama(0)
    next(iter(warm_up(policy, WARMUP, torn=0.1)))
    other = tiny_llama(0)
    next(iter(warm_up(other, WARMUP)))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters()))
