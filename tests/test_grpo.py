"""The loop: what it learns, what it holds fixed, what it refuses, and that its parts add up."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import Bigram, tiny_gpt, tiny_llama, uniform, weights
from torch import Tensor, nn
from torch.testing import assert_close

from minigrpo import grpo
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.logprobs import token_log_probs
from minigrpo.objective import VARIANTS, group_advantages, grpo_loss
from minigrpo.sampling import Rollouts
from minigrpo.study.oracle import TablePolicy, expected_reward, list_world

EOS = 10
SMALL = GRPOConfig(
    steps=3, prompts_per_step=2, group_size=4, max_new_tokens=5, lr=1e-2, inner_epochs=2
)


class Count:
    """Prompts of two lengths; how many tokens are 3, as a share, or a function of the number."""

    def __init__(self, reward: Callable | None = None) -> None:
        self.of_number, self.asked = reward, []

    def prompts(self, n, generator):
        starts = torch.randint(1, 9, (n,), generator=generator).tolist()
        return [torch.tensor([5, start] if start % 2 else [start]) for start in starts]

    def reward(self, prompts, completions):
        self.asked.append((prompts, completions))
        if self.of_number:
            return self.of_number(len(completions))
        return [(completion == 3).double().mean().item() for completion in completions]


def run(policy=None, task=None, config=SMALL, **options) -> list[StepMetrics]:
    policy = tiny_gpt() if policy is None else policy
    return list(train_grpo(policy, Count() if task is None else task, config, **options))


def ragged_batch(policy: nn.Module, config: GRPOConfig) -> tuple[Rollouts, Tensor]:
    """Completions of several lengths, one group of equal rewards."""
    config = replace(config, eos_id=EOS, prompts_per_step=3)
    order = torch.Generator().manual_seed(0)
    rollouts, rewards = grpo.rollout(policy, task := Count(), task.prompts(3, order), config, order)
    assert len({*rollouts.completion_mask.sum(dim=1).tolist()}) > 1
    return rollouts, torch.cat([torch.zeros(config.group_size).double(), rewards[4:]])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_raises_the_reward(variant):
    """Held out from sampling: the exact expected reward of a table policy, before and after."""
    world = list_world(vocab_size=4, max_length=3)
    rewards = ((world.completions == 1) & world.mask).sum(dim=1).double()

    class Ones:
        def prompts(self, n, generator):
            return [torch.tensor([world.eos_id])] * n

        def reward(self, prompts, completions):
            return [(completion == 1).sum().item() for completion in completions]

    policy = TablePolicy(uniform(4, 4))
    before = expected_reward(policy, world, rewards).item()
    config = GRPOConfig(
        **VARIANTS[variant],
        steps=60,
        prompts_per_step=4,
        group_size=8,
        max_new_tokens=3,
        eos_id=world.eos_id,
        lr=0.1,
        inner_epochs=2,
    )
    list(train_grpo(policy, Ones(), config))
    after = expected_reward(policy, world, rewards).item()
    assert before < 1.5 < 2.5 < after, f"{before:.2f} -> {after:.2f} of 3"


def test_a_step_shows_the_mean_of_its_updates_and_the_extremes_of_the_ratio():
    rollouts, rewards = ragged_batch(tiny_gpt(), SMALL)
    names = "loss kl entropy clip_ratio/low_mean clip_ratio/high_mean grad_norm ratio/min ratio/max"
    updates = [dict(zip(names.split(), range(first, first + 8))) for first in (1, 11)]
    config = replace(SMALL, eos_id=EOS, kl_weight=0.1)
    m = grpo.measure(3, 0.0, rollouts, rewards, rewards, updates, config)
    assert (m.loss, m.kl, m.entropy, m.clip_low, m.clip_high, m.grad_norm) == (6, 7, 8, 9, 10, 11)
    assert (m.step, m.ratio_min, m.ratio_max) == (3, 7, 18)


def test_the_seconds_of_a_step_leave_the_evaluation_out(monkeypatch):
    """By a clock that goes on by a second whenever it is read, and by an hour in an evaluation."""
    clock = [0]

    def evaluate(policy):
        clock[0] += 3600
        return {}

    def read():
        clock[0] += 1
        return clock[0]

    monkeypatch.setattr(grpo, "time", SimpleNamespace(perf_counter=read))
    metrics = run(config=replace(SMALL, steps=3, evaluate_every=1), evaluate=evaluate)
    assert all(0 < m.seconds < 60 for m in metrics)


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
def test_old_log_probs_are_those_of_the_sampler_over_all_epochs(make, monkeypatch):
    policy, seen = make(), []
    config = replace(SMALL, inner_epochs=3, eos_id=EOS, kl_weight=0.1)

    def spy(log_probs, old_log_probs, *args, **kwargs):
        seen.append((log_probs.detach().clone(), old_log_probs.clone(), args[1].clone()))
        return grpo_loss(log_probs, old_log_probs, *args, **kwargs)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    metrics = run(policy, Count(torch.arange), config)
    assert len(seen) == 9
    for step in range(3):
        first, *later = seen[3 * step : 3 * step + 3]
        mask = first[2].bool()
        assert_close(first[0][mask], first[1][mask], atol=1e-6, rtol=0)  # the ratio is 1
        for log_probs, old, _ in later:
            assert torch.equal(old, first[1])
            assert (log_probs - old)[mask].abs().max() > 1e-3
    assert metrics[0].kl is not None and metrics[0].kl > 0


class Forgetful(Bigram):
    """A policy with dropout."""

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = nn.functional.dropout(output.logits, 0.5, self.training)
        return output


def test_the_kl_is_zero_before_the_first_update_and_needs_a_reference_only_if_weighted(monkeypatch):
    """The reference has no dropout either."""
    one = replace(SMALL, steps=1, inner_epochs=1)
    (metrics,) = run(Forgetful(uniform(11, 11)).train(), config=replace(one, kl_weight=0.5))
    assert abs(metrics.kl) < 1e-9
    monkeypatch.setattr(grpo, "frozen_copy", lambda policy: pytest.fail("nobody asked for it"))
    assert run(config=one)[0].kl is None


def test_the_reference_stays_as_the_policy_was(monkeypatch):
    policy, made, original = tiny_gpt(), [], grpo.frozen_copy
    before = weights(policy)
    monkeypatch.setattr(grpo, "frozen_copy", lambda p: made.append(original(p)) or made[0])
    run(policy, config=replace(SMALL, kl_weight=0.1))
    assert len(made) == 1 and torch.equal(weights(made[0]), before)
    assert not torch.equal(weights(policy), before)


def test_completions_reach_the_reward_without_padding_and_prompt_major():
    task = Count()
    metrics = run(task=task, config=replace(SMALL, eos_id=EOS, pad_id=3, steps=2, max_new_tokens=9))
    for (prompts, completions), m in zip(task.asked, metrics):
        assert len(prompts) == len(completions) == 8
        for row, (prompt, completion) in enumerate(zip(prompts, completions)):
            assert torch.equal(prompt, prompts[row // 4 * 4])
            mask = m.rollouts.completion_mask[row]
            assert torch.equal(completion, m.rollouts.completions[row][mask])
            assert (completion[:-1] != EOS).all()
            assert len(completion) == 9 or completion[-1] == EOS
    lengths = [len(completion) for completion in task.asked[0][1]]
    assert len(set(lengths)) > 1
    assert metrics[0].mean_length == sum(lengths) / 8
    ended = sum(int(completion[-1] == EOS) for completion in task.asked[0][1])
    assert metrics[0].truncated == 1 - ended / 8


def test_the_seed_decides_what_is_asked_and_what_is_written():
    asked, written = [], []
    for seed in (0, 0, 1):
        task, same = Count(), Count()
        same.prompts = lambda n, generator: [torch.tensor([1])] * n
        config = replace(SMALL, steps=1, prompts_per_step=4, seed=seed)
        run(task=task, config=config)
        asked.append([prompt.tolist() for prompt in task.asked[0][0]])
        written.append(run(task=same, config=config)[0].rollouts.completions.tolist())
    for first, again, other in (asked, written):
        assert first == again != other


def test_groups_of_equal_rewards_are_counted_and_teach_nothing():
    one = replace(SMALL, steps=1, inner_epochs=1)
    (metrics,) = run(task=Count(lambda n: [1.0] * 4 + [0.0, 1.0, 0.0, 0.0]), config=one)
    assert metrics.frac_reward_zero_std == 0.5
    assert (metrics.advantages[:4] == 0).all() and (metrics.advantages[4:] != 0).all()
    policy = tiny_gpt()
    before = weights(policy)
    (metrics,) = run(policy, Count(lambda n: [0.3] * n), one)
    assert metrics.frac_reward_zero_std == 1 and metrics.grad_norm == 0
    assert torch.equal(weights(policy), before)


def test_the_gradient_is_clipped_and_the_optimizer_is_told_its_settings(monkeypatch):
    norms, told = [], []
    original = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        told.extend((g["lr"], g["betas"], g["weight_decay"]) for g in self.param_groups)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    config = replace(SMALL, max_grad_norm=1e-3, lr=0.03, betas=(0.5, 0.6))
    metrics = run(task=Count(torch.arange), config=config)
    assert all(norm <= 1e-3 + 1e-6 for norm in norms)
    assert all(m.grad_norm > 1e-3 for m in metrics)
    assert len(told) == 6 and {*told} == {(0.03, (0.5, 0.6), 0.0)}


def test_the_evaluation_hook_is_called_when_due():
    calls = []

    def evaluate(policy):
        calls.append(policy.training)
        return {"length": float(len(calls))}

    metrics = run(config=replace(SMALL, steps=5, evaluate_every=2), evaluate=evaluate)
    assert [m.evaluation.get("length") for m in metrics] == [None, 1, None, 2, 3]
    assert not any(calls)


def test_any_rollouts_can_be_looked_at_afterwards():
    metrics = run()
    table = metrics[1].table(lambda ids: "".join(map(str, ids.tolist())), rows=[0, 5])
    header, first, second = table.splitlines()
    assert header.split() == ["reward", "advantage", "completion"]
    text = "".join(map(str, metrics[1].rollouts.completions[5].tolist()))
    numbers = f"{metrics[1].rewards[5]:.3f} {metrics[1].advantages[5]:+.2f}"
    assert second.split() == [*numbers.split(), repr(text)]
    assert len(metrics[0].table(str).splitlines()) == 9
    assert_close(metrics[0].advantages, group_advantages(metrics[0].rewards, 4))


def test_dropout_is_off_and_the_mode_is_put_back():
    policy = tiny_gpt().train()
    modes = []
    run(policy, config=replace(SMALL, steps=1), evaluate=lambda p: modes.append(p.training) or {})
    assert modes == [False] and policy.training
    steps = train_grpo(policy, Count(), SMALL)
    next(steps)
    assert not policy.training
    steps.close()  # as a loop does that is left early
    assert policy.training
    with pytest.raises(ValueError):
        run(policy, Count(lambda n: [math.nan] * n))
    assert policy.training


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda n: [0.0] * 5 + [math.nan] * (n - 5), r"rewards: expected P \* 4 finite, got \[0"),
        (lambda n: [math.inf] * n, r"rewards: expected P \* 4 finite, got \[inf"),
        (lambda n: [0.0] * (n - 1), r"task.reward: expected shape \(8,\), got \(7,\)"),
        (lambda n: [0.0] * (2 * n), r"task.reward: expected shape \(8,\), got \(16,\)"),
        (lambda n: torch.zeros(n, 1), r"task.reward: expected shape \(8,\), got \(8, 1\)"),
    ],
    ids="NaN inf too-few too-many shape".split(),
)
def test_a_faulty_reward_is_named(reward, message):
    policy = tiny_gpt()
    before = weights(policy)
    with pytest.raises(ValueError, match=message):
        run(policy, Count(reward))
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([[1]], "task.prompts: expected 2, got 1"), ([[1], []], "expected padding on the left")],
)
def test_too_few_prompts_and_an_empty_one_are_named(prompts, message):
    task = Count()
    task.prompts = lambda n, generator: [torch.tensor(ids).long() for ids in prompts]
    with pytest.raises(ValueError, match=message):
        run(task=task)


def test_a_policy_that_never_ends_is_named():
    table = uniform(11, 11)
    table[:, EOS] = -math.inf
    with pytest.raises(RuntimeError, match="none of the 8 completions .* ended with eos_id = 10"):
        run(Bigram(table), config=replace(SMALL, eos_id=EOS))
    metrics = run(Bigram(table), config=replace(SMALL, eos_id=EOS, check=False))
    assert metrics[0].truncated == 1
    policy = Bigram(uniform(11, 11))
    steps = train_grpo(policy, Count(), replace(SMALL, eos_id=EOS))
    assert next(steps).truncated < 1
    policy.table.data = table
    assert next(steps).truncated == 1  # one that has forgotten it may learn it again


COUNTED = "steps prompts_per_step max_new_tokens inner_epochs rows_per_pass evaluate_every".split()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(group_size=1), "group_size: expected a whole number of 2 or more"),
        (dict(group_size=2.0), "group_size: expected a whole number"),
        *((dict([(name, 0)]), f"{name}: expected a whole number of 1 or more") for name in COUNTED),
        (dict(lr=0.0), "lr: expected a number above 0"),
        (dict(lr=math.nan), "lr: expected a number above 0"),
        (dict(temperature=0), "temperature: expected a finite number above 0"),
        (dict(level="row"), "level: expected one of token, sequence, geometric, got 'row'"),
        (dict(scale="std"), "scale: expected one of group, batch, none"),
        (dict(clip=(-0.2, 0.2)), "clip: expected two numbers"),
        (dict(max_grad_norm=0), "max_grad_norm: expected a number above 0"),
        (dict(how="mean"), "how: expected one of"),
        (dict(estimator="k4"), "estimator: expected one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_work_is_refused_at_once(setting, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**setting)


class Noisy(Bigram):
    """Samples from one distribution and is scored with another, as with dropout."""

    def __init__(self, table, noise: float = 1.5) -> None:
        super().__init__(table)
        self.noise = noise

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits * (self.noise if torch.is_grad_enabled() else 1.0)
        return output


def test_the_ratio_is_checked_closely_and_at_every_step():
    policy = Noisy(uniform(11, 11), noise=1.002)
    with pytest.raises(RuntimeError, match="the ratio at a first update is off 1 by 0.00"):
        run(policy)
    assert len(run(policy, config=replace(SMALL, check=False))) == 3
    policy.noise = 1.0
    steps = train_grpo(policy, Count(), SMALL)
    next(steps)
    policy.noise = 1.5
    with pytest.raises(RuntimeError, match="the ratio at a first update is off 1 by"):
        next(steps)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_the_loss_gets_the_settings_of_the_config(weight, monkeypatch):
    """The check of the ratio sees to it that sampling and scoring share the temperature."""
    seen, settings = [], dict(temperature=0.6, max_new_tokens=20, entropy_weight=weight)

    def spy(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        seen.append((kwargs["max_length"], kwargs["entropy"].requires_grad, metrics))
        return loss, metrics

    policy, task = Bigram(uniform(11, 11)), Count(torch.arange)
    config = replace(SMALL, steps=1, how="constant", eos_id=(EOS, 1, 2, 4, 5, 6), **settings)
    monkeypatch.setattr(grpo, "grpo_loss", spy)
    (metrics,) = run(policy, task, config)
    assert [given[:2] for given in seen] == [(20, weight > 0)] * 2
    assert metrics.rollouts.completions.shape[1] < 20  # not the width of the batch
    ratios = [given[2]["ratio/max"] for given in seen]
    assert metrics.ratio_max == max(ratios) > min(ratios)
    r = metrics.rollouts
    scores = token_log_probs(
        Bigram(uniform(11, 11)), r.input_ids, r.attention_mask, temperature=0.6
    )
    assert_close(
        scores[:, -r.completions.shape[1] :][r.completion_mask], r.log_probs[r.completion_mask]
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("gradient", "the gradient's norm is (inf|nan): expected a finite"),
        ("loss", "the loss is nan: .*the ratio is between 1 and 1"),
    ],
)
def test_what_is_not_finite_stops_before_the_update(broken, message, monkeypatch):
    policy = tiny_gpt()
    before = weights(policy)

    def no_number(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        return loss * math.nan, metrics

    if broken == "loss":
        monkeypatch.setattr(grpo, "grpo_loss", no_number)
    else:
        policy.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match=message):
        run(policy)
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_refused(half):
    with pytest.raises(ValueError, match="policy: expected weights in float32.*round to none"):
        run(tiny_gpt().to(half))


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("weights", [(0, 0), (0.1, 0), (0, 0.1), (0.1, 0.1)])
@pytest.mark.parametrize("rows_per_pass", [1, 5])
def test_the_gradients_of_the_parts_add_up(how, level, weights, rows_per_pass):
    """To that of one loss of the whole batch, to rounding in float64; its metrics, too."""
    policy, old, reference = (tiny_gpt(seed=seed, std=0.1).double() for seed in (0, 1, 2))
    kl_weight, entropy_weight = weights
    config = replace(
        SMALL, how=how, level=level, kl_weight=kl_weight, entropy_weight=entropy_weight,
        rows_per_pass=rows_per_pass, check=False, max_grad_norm=1e9,
    )  # fmt: skip
    rollouts, rewards = ragged_batch(old, config)
    advantages = grpo.group_advantages(rewards, config.group_size)
    assert 0 < (advantages == 0).sum() < len(advantages)  # some rows are left out
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    ref = reference if kl_weight else None
    found = grpo.learn(policy, ref, still, rollouts, advantages, config)[0]
    parts = [p.grad.clone() for p in policy.parameters()]

    log_probs, entropy = grpo.score(policy, rollouts, replace(config, entropy_weight=1.0))
    loss, metrics = grpo.grpo_loss(
        log_probs, rollouts.log_probs, advantages, rollouts.completion_mask,
        ref_log_probs=grpo.score(reference, rollouts, config)[0] if ref else None,
        entropy=entropy, **config.loss_settings,
    )  # fmt: skip
    whole = torch.autograd.grad(loss, list(policy.parameters()))
    largest = max(g.abs().max() for g in whole)
    for a, b in zip(parts, whole):
        assert (a - b).abs().max() < 1e-10 * largest
    metrics["loss"] = loss.item()
    metrics["grad_norm"] = torch.cat([g.flatten() for g in whole]).norm().item()
    if weights == (0, 0):  # these four are over what was scored
        some = advantages != 0
        scored = (log_probs[some], rollouts.log_probs[some], advantages[some], rollouts.own[some])
        _, of_some = grpo.grpo_loss(*scored, entropy=entropy[some], **config.loss_settings)
        for name in ("entropy", "ratio/min", "ratio/max", "ratio/mean"):
            metrics[name] = of_some[name]
    for name in metrics:
        assert found[name] == pytest.approx(metrics[name], abs=1e-10), name


def scored_rows(monkeypatch) -> list[tuple[nn.Module, int, bool]]:
    """What is scored from now on: the policy, the number of rows, whether gradients are on."""
    seen, score = [], grpo.completion_log_probs_and_entropy

    def spy(policy, *text, **options):
        seen.append((policy, len(text[0]), torch.is_grad_enabled()))
        return score(policy, *text, **options)

    monkeypatch.setattr(grpo, "completion_log_probs_and_entropy", spy)
    return seen


@pytest.mark.parametrize(
    ("second", "settings", "rows"),
    [
        ([0, 1, 0, 0], {}, [3, 1]),  # the four rows of the group that differs
        ([1, 1, 1, 1], {}, [1]),  # a single one, where no group differs
        ([0, 1, 0, 0], {"kl_weight": 0.1}, [3, 3, 2]),
        ([0, 1, 0, 0], {"entropy_weight": 0.1}, [3, 3, 2]),
        ([0, 1, 0, 0], {"baseline": "none", "scale": "none"}, [3, 2]),  # the five with a reward
    ],
    ids=str,
)
def test_rows_without_a_gradient_are_not_scored(second, settings, rows, monkeypatch):
    seen, policy = scored_rows(monkeypatch), tiny_gpt()
    one = replace(SMALL, steps=1, inner_epochs=1, rows_per_pass=3, **settings)
    (metrics,) = run(policy, Count(lambda n: [1.0] * 4 + second), one)
    assert [n for scored, n, on in seen if scored is policy and on] == rows
    others = [(n, on) for scored, n, on in seen if scored is not policy]
    assert others == ([(n, False) for n in rows] if "kl_weight" in settings else [])
    assert metrics.mean_length == 5 and len(metrics.rewards) == 8


def test_without_rows_that_teach_the_optimizer_goes_on_by_its_averages():
    """As it would if all rows were scored: a gradient of zero is no missing gradient."""
    ends = []
    for weight in (0.0, 1e-30):  # a KL that weighs nothing has all rows scored
        rewards, policy = iter([[1.0] * 4 + [0.0, 1.0, 0.0, 0.0], [1.0] * 8]), tiny_gpt().double()
        config = replace(SMALL, steps=2, inner_epochs=1, kl_weight=weight)
        steps = train_grpo(policy, Count(lambda n, rewards=rewards: next(rewards)), config)
        (_, first), (m, second) = [(m, weights(policy).clone()) for m in steps]
        assert m.grad_norm < 1e-20 and m.entropy > 0 and m.ratio_max == pytest.approx(1)
        assert (second - first).abs().max() > 1e-3
        ends.append(second)
    assert_close(*ends, atol=1e-9, rtol=0)


def test_parts_drop_the_columns_that_none_of_their_rows_has(monkeypatch):
    policy = tiny_gpt()
    config = replace(SMALL, rows_per_pass=1, kl_weight=0.1)
    rollouts, rewards = ragged_batch(policy, config)
    batches = grpo.micro_batches(None, rollouts, rewards, config)
    lengths = rollouts.completion_mask.sum(dim=1).tolist()
    assert [written.completions.shape[1] for written, *_ in batches] == lengths
