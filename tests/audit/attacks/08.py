"""Answers to the exercises of notebook 08: tests, and versions of the code that they misjudge."""

import math

import torch
import torch.nn.functional as F
from attack import right, wrong


def by_expm1(log_probs, ref_log_probs, mask):
    log_ratio = (ref_log_probs - log_probs).masked_fill(~mask, 0.0)
    return log_ratio.expm1() - log_ratio


@wrong("8.1", refuses=by_expm1)
def equal_without_tolerance(function):
    new, ref = torch.linspace(-3, -0.1, 50)[None], torch.linspace(-2, -0.3, 50)[None]
    x = ref - new
    expected = x.exp() - x - 1
    assert function(new, ref, torch.ones(1, 50).bool()).tolist() == expected.tolist()


@right("8.1")
def five_tokens_and_a_hole(function):
    p, q = torch.tensor([[0.7, 0.2, 0.1, 0.5]]), torch.tensor([[0.1, 0.3, 0.6, 0.1]])
    k3 = function(p.log(), q.log(), torch.tensor([[True, True, True, False]]))
    p, q = p[:, :3], q[:, :3]
    torch.testing.assert_close((p * k3[:, :3]).sum(), F.kl_div(q.log(), p, reduction="sum"))


REWARDS = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])
GROUPED = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])


def only_the_division_wrong(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(dim=1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


@wrong("8.2", accepts=only_the_division_wrong)
def nans_made_zero_first(function):
    assert torch.allclose(function(REWARDS, 3).nan_to_num(), GROUPED, atol=1e-3)


@right("8.2")
def four_groups_of_two(function):
    found = function(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), group_size=2)
    half = math.sqrt(0.5)
    expected = torch.tensor([0, 0, -half, half, half, -half, 0, 0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.0)


TWO = "<answer>4</answer> or <answer>5</answer>"


@right("8.3")
def table_of_cases(function):
    cases = [("so 4", "4", 0), (TWO, "5", 0), (TWO, "4", 1), ("", "4", 0)]
    cases += [("<answer> </answer>", "4", 0), ("<answer>7</answer>", "17", 0)]
    for completion, label, expected in cases:
        assert function(completion, label) == expected, (completion, label)


def step(new, old, optimizer, advantages):
    ratio = (new - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def old_from_the_first_new(score, optimizer, advantages, epochs):
    old = None
    for _ in range(epochs):
        new = score()
        old = new.detach().clone() if old is None else old
        step(new, old, optimizer, advantages)
        optimizer.zero_grad()


def trained(function, epochs=20, lr=0.1, advantage=1.0, optimizer=torch.optim.SGD):
    policy = torch.zeros(1, requires_grad=True)
    function(lambda: 1 * policy, optimizer([policy], lr=lr), torch.tensor([advantage]), epochs)
    return policy


@wrong("8.4", refuses=old_from_the_first_new)
def gradient_left_is_zero(function):
    assert trained(function).grad.item() == 0.0


@right("8.4")
def both_signs_stay_near(function):
    for advantage in (1.0, -1.0):
        assert trained(function, epochs=50, advantage=advantage).abs() < 0.4
