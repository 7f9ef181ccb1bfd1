"""The runs behind notebooks 06 and 07: they do what they are named for, and theirs is stored."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import thinking
import torch
from thinking import Variant

from minigrpo import arithmetic, grpo
from minigrpo.arithmetic import Arithmetic, is_held_out, read_question, running_totals
from minigrpo.grpo import rollout, train_grpo
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.study.experiments import SUMMIT, WARMUP, any_thought, warm_up

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


def test_the_base_that_failed_is_the_one_that_thinks_to_the_end_least_often():
    runs = thinking.stored()["torn pages"]["0"]["runs"]
    assert min(runs, key=lambda one: one["base"]["whole"])["seed"] == thinking.HARDEST
    (again,) = thinking.stored()["the hardest base, twice as long"]["0"]["runs"][:1]
    assert again["base"] == runs[thinking.HARDEST]["base"]


def test_a_changed_setting_changes_what_is_stored(monkeypatch):
    shipped, torn = Variant(), Variant(torn=0.1)
    untrained = thinking.control("right answers", 1e-3, 40)
    for name, value, concerned in (
        ("SUMMIT", replace(SUMMIT, lr=3e-4), (shipped, torn)),
        ("WARMUP", replace(WARMUP, weight_decay=0.5), (torn, untrained)),
        ("WARMUP_ROWS", 64, (torn,)),
        ("HABIT_QUESTIONS", 8, (shipped, torn, untrained)),
        ("base_checksum", lambda: "another", (shipped,)),
    ):
        all_of_them = (shipped, torn, untrained)
        before = [thinking.settings(one) for one in all_of_them]
        with monkeypatch.context() as patch:
            patch.setattr(thinking, name, value)
            after = [thinking.settings(one) for one in all_of_them]
        changed = [one for one, b, a in zip(all_of_them, before, after) if a != b]
        assert changed == [*concerned], name
    intervals = replace(SUMMIT, evaluate_every=7)
    before = thinking.settings(shipped)
    monkeypatch.setattr(thinking, "SUMMIT", intervals)
    assert thinking.settings(shipped) == before


# ---------------------------------------------------------------------------------------------
# storing


def short(**changes) -> dict:
    """One family of one run of a step."""
    small = {"steps": 1, "prompts_per_step": 2, "group_size": 2}
    return {"f": {"v": Variant(seeds=(0,), changes=small | changes, every=1)}}


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


def test_a_measurement_keeps_the_scores_and_the_loss_where_it_looks(monkeypatch):
    steps = [(1, 0.5), (2, 0.25), (3, None), (4, 0.05)]
    monkeypatch.setattr(thinking, "train", lambda *given: iter(steps))
    monkeypatch.setattr(thinking, "evaluate", lambda policy: dict.fromkeys(thinking.SCORES, 0.5))
    monkeypatch.setattr(thinking, "habits", lambda policy: {"whole": 0.25})
    found = thinking.measured(replace(thinking.shown("right answers", 1e-3), every=2), 1)
    curve = {name: [0.5] * 3 for name in thinking.SCORES} | {"step": [0, 2, 4]}
    habits = dict.fromkeys(("base", "after"), {"whole": 0.25})
    assert found == {"seed": 1, **habits, "loss": [0.25, 0.05], "curve": curve}


def test_a_command_measures_one_family_or_tells_what_is_stored(tmp_path, monkeypatch, capsys):
    asked = []

    def measured(variant, seed):
        asked.append((variant.every, seed))
        curve = {name: [0.0, 0.25 + seed / 2] for name in thinking.SCORES}
        return {"seed": seed, "base": {"whole": 0.5}, "curve": curve}

    monkeypatch.setattr(thinking, "PATH", tmp_path / "thinking.json")
    families = {
        name: {"v": Variant(seeds=(0, 1), every=every)} for name, every in (("f", 1), ("g", 2))
    }
    monkeypatch.setattr(thinking, "FAMILIES", families)
    monkeypatch.setattr(thinking, "measured", measured)
    thinking.main(["--only", "g"])
    assert asked == [(2, 0), (2, 1)]
    capsys.readouterr()
    thinking.main(["--summary"])
    assert len(asked) == 2
    *empty, title, line = capsys.readouterr().out.strip().splitlines()
    assert empty == ["f", ""] and title == "g"
    assert "v " in line and "2 seeds  accuracy 0.500 (0.250 to 0.750)" in line
    assert line.endswith("base whole 0.5000")
    thinking.main([])
    assert asked[2:] == [(1, 0), (1, 1)]


def test_a_new_run_leaves_the_stored_ones_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(thinking, "PATH", tmp_path / "thinking.json")
    for seed in (2, 0):
        thinking.add("few questions", "1", {"seed": seed})
    thinking.add("torn pages", "0", {"seed": 1})
    thinking.add("few questions", "1", {"seed": 2, "again": True})
    found = thinking.stored()
    assert found["few questions"]["1"]["runs"] == [{"seed": 0}, {"seed": 2, "again": True}]
    assert [one["seed"] for one in found["torn pages"]["0"]["runs"]] == [1]


# ---------------------------------------------------------------------------------------------
# tasks and documents


def test_a_noisy_grader_flips_so_many_rewards_and_others_each_time():
    prompts = Arithmetic().prompts(1, torch.Generator().manual_seed(0)) * 4000
    total = running_totals(read_question(prompts[0]))[-1]
    rows = [torch.tensor(arithmetic.completion_ids([], (total + i) % 10)) for i in (0, 1)] * 2000
    for p in (0.0, 0.3, 1.0):
        task = thinking.task_of(Variant(flip=p), 1)
        once, again = (torch.tensor(task.reward(prompts, rows)) for _ in range(2))
        right, wrong = (once[i::2].mean() for i in (0, 1))
        assert abs(right - (1 - p)) < 0.04 and abs(wrong - p) < 0.04
        assert once.equal(again) == (p in (0.0, 1.0))


@pytest.mark.parametrize("n", [1, 4])
def test_a_run_on_few_questions_asks_the_same_ones_and_none_held_out(n):
    task, generator = thinking.task_of(Variant(questions=n), 3), torch.Generator().manual_seed(0)
    asked = {read_question(p) for _ in range(20) for p in task.prompts(16, generator)}
    assert len(asked) == n and not any(map(is_held_out, asked))
    other = thinking.task_of(Variant(questions=n), 4).prompts(64, generator)
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


def asked_for(variant: Variant, monkeypatch, seed: int = 5):
    """The task and the settings that a variant gives to `train_grpo`."""
    seen = []
    monkeypatch.setattr(thinking, "train_grpo", lambda policy, *rest: seen.append(rest) or ())
    list(thinking.train(variant, torch.nn.Identity(), seed))
    ((task, config),) = seen
    return task, config


def test_each_rewarded_family_changes_what_its_name_says(monkeypatch):
    families = thinking.FAMILIES
    plain = replace(SUMMIT, seed=5)
    for name, variant in families["flipped rewards"].items():
        task, config = asked_for(variant, monkeypatch)
        assert (task.flip, config) == (float(name), plain)
    for name, variant in families["few questions"].items():
        task, config = asked_for(variant, monkeypatch)
        assert (task.questions, task.seed, config) == (int(name), 5, plain)
    for name, variant in families["paid for any thought"].items():
        task, config = asked_for(variant, monkeypatch)
        assert task.grade is any_thought
        assert config == replace(plain, kl_weight=float(name.removeprefix("KL weight ")))
    for name, variant in families["group size"].items():
        task, config = asked_for(variant, monkeypatch)
        n, group_size = map(int, name.split(" x "))
        assert (task, n * group_size) == (Arithmetic(), 128)
        assert config == replace(plain, prompts_per_step=n, group_size=group_size)
    for name, variant in families["torn pages"].items():
        assert asked_for(variant, monkeypatch) == (Arithmetic(), plain)
        assert (variant.torn, variant.torn_seed) == (float(name), None)
    (twice,) = families["the hardest base, twice as long"].values()
    assert asked_for(twice, monkeypatch) == (Arithmetic(), replace(plain, steps=200))
    assert (twice.torn, twice.torn_seed) == (0.0, thinking.HARDEST)
    rewarded = families["equal terms"]["rewarded, lr 0.001"]
    assert asked_for(rewarded, monkeypatch) == (Arithmetic(), replace(plain, lr=1e-3))


def test_nothing_changed_is_the_run_of_notebook_07(base):
    mine, other = copy.deepcopy(base), copy.deepcopy(base)
    list(thinking.train(Variant(changes={"steps": 2}), mine, 5))
    list(train_grpo(other, Arithmetic(), replace(SUMMIT, seed=5, steps=2)))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters()))


def optimizers(monkeypatch) -> list:
    """The optimizers that are made from now on, with the norms of the gradients they are given."""
    made = []
    real = torch.optim.AdamW

    class Spy(real):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.norms, self.rates = [], []
            made.append(self)

        def step(self, *args):
            parameters = self.param_groups[0]["params"]
            self.norms.append(torch.stack([p.grad.norm() for p in parameters]).norm().item())
            self.rates.append(self.param_groups[0]["lr"])
            super().step(*args)

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    monkeypatch.setattr(grpo, "AdamW", Spy)
    return made


@pytest.mark.parametrize("name", ["shown right answers, lr 0.001", "rejection sampling"])
def test_equal_terms_are_equal(name, base, monkeypatch):
    """The optimizer, its learning rate and clipping, the updates and the rows are those of GRPO."""
    monkeypatch.setattr(thinking, "SUMMIT", replace(SUMMIT, steps=3, max_grad_norm=0.1))
    made, variant = optimizers(monkeypatch), thinking.FAMILIES["equal terms"][name]
    lr = variant.lr
    assert lr == (1e-3 if "0.001" in name else SUMMIT.lr)
    list(thinking.train(variant, copy.deepcopy(base), 0))
    config = replace(thinking.SUMMIT, lr=lr)
    list(train_grpo(copy.deepcopy(base), Arithmetic(), config))
    mine, theirs = made
    for setting in ("betas", "weight_decay", "lr", "eps"):
        assert mine.param_groups[0][setting] == theirs.param_groups[0][setting]
    assert mine.rates == theirs.rates == [lr] * 6  # three steps, two updates each, constant
    assert max(mine.norms) == pytest.approx(0.1, rel=1e-3) == max(theirs.norms)


def test_imitation_sees_new_rows_each_step_and_none_of_the_shipped_warm_up(base, monkeypatch):
    monkeypatch.setattr(thinking, "SUMMIT", replace(SUMMIT, steps=2))
    seen = []
    for name, real in dict(thinking.DOCUMENTS).items():
        spy = lambda n, generator, real=real: seen.append(real(n, generator)) or seen[-1]  # noqa: E731
        monkeypatch.setitem(thinking.DOCUMENTS, name, spy)
    for name in ("shown right answers, lr 0.0001", "shown the warm-up again, lr 0.001"):
        seen.clear()
        variant = thinking.FAMILIES["equal terms"][name]
        losses = [loss for _, loss in thinking.train(variant, copy.deepcopy(base), 0)]
        assert [len(ids) for ids, _ in seen] == [128, 128] and losses[1] != losses[0]
        assert seen[0][0].shape != seen[1][0].shape or not seen[0][0].equal(seen[1][0])
        at_0 = thinking.DOCUMENTS[variant.documents](128, torch.Generator().manual_seed(0))
        assert not at_0[0].equal(seen[0][0])
    right = thinking.DOCUMENTS["right answers"](8, torch.Generator().manual_seed(0))
    assert right[1].sum(dim=1).min() >= 3 + 5  # totals, and the five tokens after them


def test_the_control_has_the_schedule_of_the_warm_up(monkeypatch):
    seen = []
    monkeypatch.setattr(thinking, "pretrain", lambda *rest: seen.append(rest) or ())
    for name, variant in thinking.FAMILIES["a thought or none"].items():
        list(thinking.train(variant, torch.nn.Identity(), 2))
        _, documents, config = seen.pop()
        steps = 400 if name.startswith("after") else 2000
        lr = float(name.split()[-1])
        assert config == replace(WARMUP, steps=steps, lr=lr, seed=3)
        ids, mask = documents(torch.Generator().manual_seed(0))
        assert len(ids) == 128
        shortest = mask.sum(dim=1).min().item()
        assert shortest == (3 + 5 if name.startswith("after") else 5)


def after_a_step(base, monkeypatch, rewards):
    """By how much a step of rejection sampling raises each of the texts that it sampled."""
    policy, seen = copy.deepcopy(base), {}

    def sampled(policy, task, prompts, *rest):
        seen["questions"] = [read_question(prompt) for prompt in prompts]
        seen["rollouts"], _ = rollout(policy, task, prompts, *rest)
        return seen["rollouts"], rewards

    monkeypatch.setattr(thinking, "rollout", sampled)
    next(thinking.by_rejection(policy, 3))
    with torch.no_grad():
        before, after = (thinking.score(p, seen["rollouts"], SUMMIT)[0] for p in (base, policy))
    return (after - before).sum(dim=1), seen


def test_rejection_sampling_imitates_the_right_ones(base, monkeypatch):
    rewards = torch.zeros(thinking.ROWS, dtype=torch.float64)
    gained, seen = after_a_step(base, monkeypatch, rewards)
    assert gained.count_nonzero() == 0 and not any(map(is_held_out, seen["questions"]))
    first = next(train_grpo(copy.deepcopy(base), Arithmetic(), replace(SUMMIT, seed=3)))
    assert seen["rollouts"].completions.equal(first.rollouts.completions)
    rewards[17] = 1.0
    gained, _ = after_a_step(base, monkeypatch, rewards)
    assert gained[17] > 0.01 and gained[17] > gained.mean()


def test_rejection_sampling_takes_the_mean_over_the_tokens_it_keeps(base, monkeypatch):
    losses = []
    monkeypatch.setattr(thinking, "descend", lambda policy, optimizer, loss: losses.append(loss))
    rewards = torch.zeros(thinking.ROWS, dtype=torch.float64)
    rewards[[4, 9]] = 1.0
    _, seen = after_a_step(base, monkeypatch, rewards)
    rows = seen["rollouts"][torch.tensor([4, 9])]
    log_probs = thinking.score(base, rows, SUMMIT)[0][rows.completion_mask]
    assert len(losses) == 2
    torch.testing.assert_close(losses[0], -log_probs.mean())


# ---------------------------------------------------------------------------------------------
# starts and habits


def test_a_start_is_random_shipped_or_warmed_up_with_its_own_pages(base, monkeypatch):
    asked = []
    monkeypatch.setattr(
        thinking, "warm_up", lambda p, config, **own: iter([asked.append((config.seed, own))])
    )
    thinking.own_base.cache_clear()
    one = Variant(torn=0.03)
    same = tiny_llama(4).state_dict()
    assert all(torch.equal(same[k], v) for k, v in thinking.start(one, 4).state_dict().items())
    for seed in (4, 5):  # one base for both
        start = thinking.start(replace(one, torn_seed=7), seed)
        start.lm_head.weight.data.zero_()
    assert thinking.start(replace(one, torn_seed=7), 6).lm_head.weight.any()
    thinking.own_base.cache_clear()
    assert asked == [(4, {"torn": 0.03}), (7, {"torn": 0.03})]
    shipped = thinking.start(Variant(), 4).state_dict()
    assert all(torch.equal(shipped[k], v) for k, v in base.state_dict().items())
    random = thinking.start(thinking.control("right answers", 1e-3, 20), 4).state_dict()
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
    questions = []

    def spy(policy, asked, **settings):
        questions.extend(asked)
        seen.append(real(policy, asked, **settings))
        return seen[-1]

    monkeypatch.setattr(thinking, "ask", spy)
    found = thinking.habits(base)
    (r,) = seen
    assert all(map(is_held_out, questions)) and len(found["goes_on"]) == 3
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


def test_the_dial_at_a_tenth_is_how_the_shipped_base_was_made():
    by_hand, shipped = tiny_llama(0), tiny_llama(0)
    next(iter(warm_up(by_hand, WARMUP, torn=0.1)))
    next(iter(warm_up(shipped, WARMUP)))
    assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), shipped.parameters()))


# ---------------------------------------------------------------------------------------------
# the table of docs/results.md


def test_what_the_page_of_results_says_of_the_torn_pages():
    runs = thinking.stored()["torn pages"]["0"]["runs"]
    late = [one for one in runs if one["curve"]["accuracy"][-1] < 0.9]
    assert (len(runs), [one["seed"] for one in late]) == (10, [thinking.HARDEST])
    assert late[0]["base"]["whole"] == 0 and thinking.HABIT_QUESTIONS == 1200
    assert late[0]["curve"]["accuracy"][-1] < 0.15
    assert min(ends("the hardest base, twice as long", "0")) > 0.95
    assert max(one["base"]["correct"] for one in runs) < 0.13  # chance
    few, many = (ends("torn pages", share, "harder") for share in ("0", "0.1"))
    assert max(few) < min(many)


def test_the_table_counts_by_hand(monkeypatch):
    def run(seed, whole, correct, end):
        curve = {"step": [0, 10], **{name: [0.0, end] for name in thinking.SCORES}}
        return {"seed": seed, "base": {"whole": whole, "correct": correct}, "curve": curve}

    runs = [run(0, 0.1, 0.2, 0.5), run(1, 0.3, 0.2, 1.0)]
    monkeypatch.setattr(thinking, "TABLE", {"mine": ("f", "v"), "later": ("f", "w")})
    monkeypatch.setattr(thinking, "stored", lambda: {"f": {"v": {"runs": runs}, "w": {"runs": []}}})
    *_, mine, later = thinking.table().splitlines()
    assert mine == (
        "| mine | 2 | 0.200 (0.100 to 0.300) | 0.20 | 0.75 (0.50 to 1.00) "
        "| 0.75 (0.50 to 1.00) | 0.8 (0.5 to 1.0) |"
    )
    assert later == "| later | 0 | not run yet | | | | |"
