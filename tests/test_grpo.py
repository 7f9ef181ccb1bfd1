"""The loop: what it learns, what it holds fixed, what it refuses, and that it can go on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import Bigram, mutated, tiny_gpt, tiny_llama, uniform
from torch import Tensor, nn
from torch.testing import assert_close

from minigrpo import grpo
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.logprobs import token_log_probs
from minigrpo.objective import VARIANTS, group_advantages, grpo_loss
from minigrpo.study.oracle import TablePolicy, expected_reward, list_world

EOS = 10
SMALL = GRPOConfig(
    steps=3, prompts_per_step=2, group_size=4, max_new_tokens=5, lr=1e-2, inner_epochs=2
)


class Count:
    """Reward: how many tokens are 3, as a share. Prompts of two lengths."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Tensor], list[Tensor]]] = []

    def prompts(self, n, generator):
        starts = torch.randint(1, 9, (n,), generator=generator).tolist()
        return [torch.tensor([5, start] if start % 2 else [start]) for start in starts]

    def reward(self, prompts, completions):
        self.asked.append((prompts, completions))
        return [(completion == 3).double().mean().item() for completion in completions]


class Fault(Count):
    """A task whose reward is given by a function of the number of completions."""

    def __init__(self, reward) -> None:
        super().__init__()
        self._reward = reward

    def reward(self, prompts, completions):
        return self._reward(len(completions))


def run(policy=None, task=None, config=SMALL, **options) -> list[StepMetrics]:
    policy = tiny_gpt() if policy is None else policy
    return list(train_grpo(policy, Count() if task is None else task, config, **options))


def weights(policy: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


# ---------------------------------------------------------------------------------------------
# it learns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_raises_the_reward(variant, seed):
    """Held out from sampling: the exact expected reward of a table policy, before and after."""
    world = list_world(vocab_size=4, max_length=3)
    rewards = ((world.completions == 1) & world.mask).sum(dim=1).double()

    class Ones:
        def prompts(self, n, generator):
            return [torch.tensor([world.eos_id])] * n

        def reward(self, prompts, completions):
            return [(completion == 1).sum().item() for completion in completions]

    policy = TablePolicy(uniform(4, 4, seed=seed))
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
        seed=seed,
    )
    list(train_grpo(policy, Ones(), config))
    after = expected_reward(policy, world, rewards).item()
    assert before < 1.5 < 2.5 < after, f"{before:.2f} -> {after:.2f} of 3"


def test_one_step_is_the_gradient_of_the_loss_by_hand():
    """Adam's first step is lr times the sign of the gradient: sampled, scored and summed here."""
    policy, config = Bigram(uniform(11, 11)), replace(SMALL, steps=1, inner_epochs=1, lr=1e-3)
    before = policy.table.detach().clone()
    (metrics,) = run(policy, config=config)
    rollouts, table = metrics.rollouts, before.clone().requires_grad_()
    assert_close(
        metrics.rewards, (rollouts.completions == 3).double().mean(dim=1), atol=1e-12, rtol=0
    )
    total = 0.0
    for row in range(8):
        group = metrics.rewards[row // 4 * 4 : row // 4 * 4 + 4]
        std = ((group - group.mean()).square().sum() / 3).sqrt()
        A = (metrics.rewards[row] - group.mean()) / (std + 1e-4)
        text = [rollouts.prompt_ids[row, -1].item(), *rollouts.completions[row].tolist()]
        log_probs = [table.log_softmax(-1)[a, b] for a, b in zip(text, text[1:])]
        total = total - A * sum(log_probs) / len(log_probs) / 8
    (gradient,) = torch.autograd.grad(total, table)
    assert_close(metrics.grad_norm, gradient.norm().item())
    moved = policy.table.detach() - before
    touched = gradient.abs() > 1e-6
    assert_close(moved[touched], -1e-3 * gradient[touched].sign(), atol=1e-6, rtol=1e-2)


# ---------------------------------------------------------------------------------------------
# what is held fixed, and what is counted


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
def test_old_log_probs_are_those_of_the_sampler_over_all_epochs(make, monkeypatch):
    policy, seen = make(), []
    config = replace(SMALL, inner_epochs=3, eos_id=EOS, kl_weight=0.1)

    def spy(log_probs, old_log_probs, *args, **kwargs):
        seen.append((log_probs.detach().clone(), old_log_probs.clone(), args[1].clone()))
        return grpo_loss(log_probs, old_log_probs, *args, **kwargs)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    metrics = run(policy, Fault(torch.arange), config)
    assert [m.updates for m in metrics] == [3, 3, 3]
    for step in range(3):
        first, *later = seen[3 * step : 3 * step + 3]
        mask = first[2].bool()
        assert_close(first[0][mask], first[1][mask], atol=1e-6, rtol=0)  # the ratio is 1
        for log_probs, old, _ in later:
            assert torch.equal(old, first[1])
            assert (log_probs - old)[mask].abs().max() > 1e-3
    assert metrics[0].kl is not None and metrics[0].kl > 0


def test_the_kl_is_zero_before_the_first_update_and_needs_a_reference_only_if_weighted(monkeypatch):
    one = replace(SMALL, steps=1, inner_epochs=1)
    (metrics,) = run(config=replace(one, kl_weight=0.5))
    assert abs(metrics.kl) < 1e-9
    policy, copies = tiny_gpt(), []
    monkeypatch.setattr(grpo.copy, "deepcopy", copies.append)
    state = grpo._State(policy, one)
    assert state.reference is None and not copies
    assert next(grpo._steps(state, Count(), None, None)).kl is None


def test_the_reference_stays_as_the_policy_was():
    policy = tiny_gpt()
    before = weights(policy)
    config = replace(SMALL, kl_weight=0.1)
    state = grpo._State(policy, config)
    list(grpo._steps(state, Count(), None, None))
    assert torch.equal(weights(state.reference), before)
    assert not torch.equal(weights(policy), before)


def test_a_strong_penalty_keeps_the_policy_close():
    log_probs, ids = [], torch.arange(8)[None] % 7
    for kl_weight in (0.0, 30.0):
        policy = tiny_gpt()
        run(policy, config=replace(SMALL, steps=15, kl_weight=kl_weight))
        log_probs.append(token_log_probs(policy, ids).detach())
    start = token_log_probs(tiny_gpt(), ids).detach()
    free, held = ((lp - start).abs().mean().item() for lp in log_probs)
    assert held < 0.5 * free


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


def test_groups_of_equal_rewards_are_counted_and_can_be_skipped():
    def rewards(n):
        return [1.0] * 4 + [0.0, 1.0, 0.0, 0.0]  # the first group teaches nothing

    task, one = Fault(rewards), replace(SMALL, steps=1, inner_epochs=1)
    kept, skipped = tiny_gpt(), tiny_gpt()
    (metrics,) = run(kept, task, one)
    assert metrics.frac_reward_zero_std == 0.5
    assert (metrics.advantages[:4] == 0).all() and (metrics.advantages[4:] != 0).all()
    (without,) = run(skipped, task, replace(one, skip_equal_groups=True))
    assert_close(without.grad_norm, 2 * metrics.grad_norm)  # the mean is over half the rows

    policy, all_equal = tiny_gpt(), Fault(lambda n: [0.3] * n)
    before = weights(policy)
    (metrics,) = run(policy, all_equal, replace(one, skip_equal_groups=True))
    assert metrics.updates == 0 and metrics.frac_reward_zero_std == 1
    assert torch.equal(weights(policy), before)
    (metrics,) = run(policy, all_equal, one)
    assert metrics.updates == 1 and metrics.grad_norm == 0
    assert torch.equal(weights(policy), before)


def test_minibatches_take_every_row_once_per_epoch(monkeypatch):
    rows, original = [], grpo._take
    monkeypatch.setattr(grpo, "_take", lambda r, some: rows.append(some) or original(r, some))
    (metrics,) = run(config=replace(SMALL, steps=1, minibatch_size=3))
    assert metrics.updates == 6
    epochs = torch.cat(rows[:3]), torch.cat(rows[3:])
    assert all(torch.equal(epoch.sort().values, torch.arange(8)) for epoch in epochs)
    assert not torch.equal(*epochs)


def test_the_learning_rate_warms_up_and_stays():
    metrics = run(config=replace(SMALL, steps=4, lr=0.02, warmup_steps=2))
    assert [m.lr for m in metrics] == [0.01, 0.02, 0.02, 0.02]


def test_the_gradient_is_clipped(monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    metrics = run(task=Fault(torch.arange), config=replace(SMALL, max_grad_norm=1e-3))
    assert all(norm <= 1e-3 + 1e-6 for norm in norms)
    assert all(m.grad_norm > 1e-3 for m in metrics)


def test_the_evaluation_hook_is_called_when_due():
    calls = []

    def evaluate(policy):
        calls.append(policy.training)
        return {"length": float(len(calls))}

    metrics = run(config=replace(SMALL, steps=5, evaluate_every=2), evaluate=evaluate)
    assert [dict(m.evaluation) for m in metrics] == [{}, {"length": 1}, {}, {"length": 2}] + [
        {"length": 3}
    ]
    assert not any(calls)


def test_any_rollouts_can_be_looked_at_afterwards():
    metrics = run()
    table = metrics[1].table(lambda ids: "".join(map(str, ids.tolist())), rows=[0, 5])
    header, first, second = table.splitlines()
    assert header.split() == ["reward", "advantage", "completion"]
    text = "".join(map(str, metrics[1].rollouts.completions[5].tolist()))
    assert second.split() == [
        f"{metrics[1].rewards[5]:.3f}",
        f"{metrics[1].advantages[5]:+.2f}",
        repr(text),
    ]
    assert len(metrics[0].table(str).splitlines()) == 9
    assert_close(metrics[0].advantages, group_advantages(metrics[0].rewards, 4))


def test_dropout_is_off_and_the_mode_is_put_back():
    policy = tiny_gpt().train()
    modes = []
    run(policy, config=replace(SMALL, steps=1), evaluate=lambda p: modes.append(p.training) or {})
    assert modes == [False] and policy.training


# ---------------------------------------------------------------------------------------------
# faults end in an error that names the cause


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (
            lambda n: [0.0] * 5 + [math.nan] * (n - 5),
            ValueError,
            r"task.reward: expected finite numbers, got nan for completion 5 \(token ids \[",
        ),
        (
            lambda n: [math.inf] * n,
            ValueError,
            "task.reward: expected finite numbers, got inf for completion 0",
        ),
        (
            lambda n: 1 / 0,
            RuntimeError,
            "task.reward raised ZeroDivisionError: division by zero",
        ),
        (
            lambda n: [0.0] * (n - 1),
            ValueError,
            "task.reward: expected 8 rewards, one per completion, got 7",
        ),
        (
            lambda n: torch.zeros(n, 1),
            ValueError,
            r"task.reward: expected 8 rewards, one per completion, got shape \(8, 1\)",
        ),
        (lambda n: 0.5, ValueError, "expected 8 rewards, .* got shape"),
        (lambda n: [None] * n, ValueError, "task.reward: expected one number per completion"),
        (lambda n: None, ValueError, "expected one number per completion, got NoneType"),
    ],
    ids="NaN inf raises too-few shape one-number None-each None".split(),
)
def test_a_faulty_reward_is_named(reward, error, message):
    policy = tiny_gpt()
    before = weights(policy)
    with pytest.raises(error, match=message):
        run(policy, Fault(reward))
    assert torch.equal(weights(policy), before)


def test_a_reward_that_raises_keeps_its_cause():
    with pytest.raises(RuntimeError) as caught:
        run(task=Fault(lambda n: {}["answer"]))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([torch.tensor([1])], "task.prompts: expected 2 prompts, got 1"),
        ([torch.tensor([1]), torch.tensor([])], "task.prompts: expected rows of token ids"),
        ([torch.tensor([1]), torch.tensor([[2]])], "task.prompts: expected rows of token ids"),
    ],
    ids=["too few", "empty", "shape"],
)
def test_faulty_prompts_are_named(prompts, message):
    task = Count()
    task.prompts = lambda n, generator: prompts
    with pytest.raises(ValueError, match=message):
        run(task=task)


def test_a_policy_that_never_ends_is_named():
    table = uniform(11, 11)
    table[:, EOS] = -math.inf
    with pytest.raises(RuntimeError, match="none of the 8 completions .* ended with eos_id = 10"):
        run(Bigram(table), config=replace(SMALL, eos_id=EOS))
    metrics = run(Bigram(table), config=replace(SMALL, eos_id=EOS, check=False))
    assert metrics[0].truncated == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(group_size=1), "group_size: expected a whole number of 2 or more"),
        (dict(group_size=2.0), "group_size: expected a whole number"),
        (dict(group_size=0), "group_size: expected a whole number of 2 or more, got 0"),
        (dict(steps=0), "steps: expected a whole number of 1 or more, got 0"),
        (dict(minibatch_size=0), "minibatch_size: expected a whole number of 1 or more"),
        (dict(inner_epochs=1.5), "inner_epochs: expected a whole number"),
        (dict(warmup_steps=-1), "warmup_steps: expected a whole number of 0 or more"),
        (dict(lr=0.0), "lr: expected a number above 0"),
        (dict(lr=math.nan), "lr: expected a number above 0"),
        (dict(temperature=0), "temperature: expected a finite number above 0"),
        (dict(level="row"), "level: expected one of token, sequence, geometric, got 'row'"),
        (dict(scale="std"), "scale: expected one of group, batch, none"),
        (dict(clip=0.2), "clip: expected two numbers"),
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

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits * (1.5 if torch.is_grad_enabled() else 1.0)
        return output


def test_a_ratio_that_is_not_one_at_the_first_update_stops_the_run():
    with pytest.raises(RuntimeError, match="the ratio at the first update of step 1 is off 1 by"):
        run(Noisy(uniform(11, 11)))
    assert len(run(Noisy(uniform(11, 11)), config=replace(SMALL, check=False))) == 3


def test_a_reference_that_is_another_model_stops_the_run():
    state = grpo._State(tiny_gpt(), replace(SMALL, kl_weight=0.1))
    state.reference = tiny_gpt(seed=1)
    with pytest.raises(RuntimeError, match="the KL to the reference before the first update is"):
        list(grpo._steps(state, Count(), None, None))


def test_a_loss_that_is_not_finite_stops_before_the_update(monkeypatch):
    policy = tiny_gpt()
    before = weights(policy)

    def broken(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        return loss * math.nan, metrics

    monkeypatch.setattr(grpo, "grpo_loss", broken)
    with pytest.raises(
        FloatingPointError, match="the loss is nan at step 1: .*the ratio is between 1 and 1"
    ):
        run(policy)
    assert torch.equal(weights(policy), before)


# ---------------------------------------------------------------------------------------------
# an interrupted run goes on


def numbers(metrics: list[StepMetrics]) -> list[tuple]:
    return [(m.step, m.reward, m.loss, m.kl, m.entropy, m.grad_norm, m.ratio_max) for m in metrics]


@pytest.mark.parametrize("kl_weight", [0.0, 0.2])
def test_an_interrupted_run_resumes_with_identical_numbers(tmp_path, kl_weight):
    config = replace(SMALL, steps=6, save_every=2, minibatch_size=3, kl_weight=kl_weight)
    whole, whole_policy = [], tiny_gpt()
    whole = run(whole_policy, config=config)

    path = tmp_path / "run.pt"
    first = tiny_gpt()
    for m in train_grpo(first, Count(), config, checkpoint=path):
        if m.step == 5:  # after the checkpoint of step 4
            break
    second = tiny_gpt()  # a new process would load the same start
    rest = run(second, config=config, checkpoint=path)
    assert [m.step for m in rest] == [5, 6]
    assert numbers(rest) == numbers(whole[4:])
    assert torch.equal(weights(second), weights(whole_policy))


@pytest.mark.parametrize("part", ["sampling", "order", "optimizer"])
def test_every_part_of_the_checkpoint_is_needed(tmp_path, part):
    """What if one part were not put back? Then the numbers would differ."""
    config = replace(SMALL, steps=4, save_every=2, minibatch_size=3)
    whole = run(config=config)
    path = tmp_path / "run.pt"
    stopped = train_grpo(tiny_gpt(), Count(), config, checkpoint=path)
    for _ in range(2):
        next(stopped)
    line = {
        "sampling": "self.sampling.set_state(sampling.cpu())",
        "order": "self.order.set_state(order.cpu())",
        "optimizer": "self.optimizer.load_state_dict(optimizer)",
    }[part]
    with mutated(grpo._State.load, line, "pass"):
        rest = run(config=config, checkpoint=path)
    assert numbers(rest) != numbers(whole[2:])


def test_a_finished_run_yields_nothing_and_a_longer_one_goes_on(tmp_path):
    path = tmp_path / "run.pt"
    run(checkpoint=path)
    policy = tiny_gpt()
    assert run(policy, checkpoint=path) == []
    assert [m.step for m in run(policy, config=replace(SMALL, steps=5), checkpoint=path)] == [4, 5]


def test_checkpoints_that_do_not_belong_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    run(checkpoint=path)
    with pytest.raises(ValueError, match=r"written with lr = 0.01, but this run has 0.02"):
        run(config=replace(SMALL, lr=0.02), checkpoint=path)
    with pytest.raises(ValueError, match="belongs to another policy"):
        run(tiny_gpt(vocab_size=12), checkpoint=path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="checkpoint: expected one written by train_grpo"):
        run(checkpoint=path)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    run(config=replace(SMALL, steps=1), checkpoint=path)
    before = path.read_bytes()

    def half(state, target):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        run(checkpoint=path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_numbers_of_numpy_do_no_harm_to_a_checkpoint(tmp_path):
    config = replace(
        SMALL,
        check=False,
        lr=np.float64(1e-2),
        seed=np.int64(3),
        clip=(np.float64(0.2), 0.2),
        eos_id=[np.int64(2)],
    )
    assert type(config.lr) is float and type(config.clip[0]) is float and config.eos_id == [2]
    run(config=replace(config, steps=2), checkpoint=tmp_path / "run.pt")
    assert [m.step for m in run(config=config, checkpoint=tmp_path / "run.pt")] == [3]


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="checkpoint: expected the name of a file, got the folder"):
        train_grpo(tiny_gpt(), Count(), SMALL, checkpoint=tmp_path)


def test_several_processes_share_a_checkpoint_only_if_they_share_the_random_numbers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(grpo.parallel, "world_size", lambda: 2)
    monkeypatch.setattr(grpo, "_check_parallel", lambda policy, config: None)
    with pytest.raises(ValueError, match="checkpoint: expected split_invariant=True"):
        train_grpo(tiny_gpt(), Count(), SMALL, checkpoint=tmp_path / "run.pt")
    train_grpo(
        tiny_gpt(), Count(), replace(SMALL, split_invariant=True), checkpoint=tmp_path / "run.pt"
    )


def test_a_policy_of_half_precision_passes_the_check(monkeypatch):
    """Its cached and uncached sums differ by more than those of float32, and that is no bug."""
    offs = []
    check = grpo._check_first_update

    def watched(policy, log_probs, batch, *rest):
        off = torch.where(batch.completion_mask, log_probs.detach() - batch.log_probs, 0.0)
        offs.append(off.abs().max().item())
        check(policy, log_probs, batch, *rest)

    monkeypatch.setattr(grpo, "_check_first_update", watched)
    policy = tiny_gpt(std=0.7).to(torch.bfloat16)
    run(policy, config=replace(SMALL, steps=1, max_new_tokens=16, lr=1e-4))
    assert 1e-3 < offs[0] < 0.2


def test_the_evaluation_hook_sees_the_policy_itself(monkeypatch):
    """And not what several processes wrap it in."""
    policy, seen = tiny_gpt(), []
    wrapped = nn.ModuleList([policy])
    monkeypatch.setattr(grpo.parallel, "unwrapped", lambda p: policy if p is wrapped else p)
    wrapped.forward = policy.forward
    run(wrapped, config=replace(SMALL, steps=1), evaluate=lambda p: seen.append(p) or {})
    assert seen == [policy]
