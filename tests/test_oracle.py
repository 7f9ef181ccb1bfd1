"""The oracle is right, and so is the objective when it is asked."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from minigrpo.objective import VARIANTS, group_advantages, grpo_loss
from minigrpo.sampling import sample
from minigrpo.study.oracle import (
    TablePolicy,
    exact_kl,
    expected_loss,
    expected_reward,
    gradient,
    list_world,
    moments,
    probabilities,
)

WORLD = list_world()
SMALL = list_world(vocab_size=3, max_length=2)  # 7 texts, so that groups of 4 can be listed


def policy(seed: int, vocab_size: int = 5) -> TablePolicy:
    generator = torch.Generator().manual_seed(seed)
    return TablePolicy(torch.randn(vocab_size, vocab_size, generator=generator).double())


def rewards(world, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(world.completions), generator=generator).double()


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def test_every_text_is_listed_once():
    texts = {tuple(c[m].tolist()) for c, m in zip(WORLD.completions, WORLD.mask)}
    assert len(texts) == len(WORLD.completions) == 1 + 4 + 16 + 64 + 4 * 64
    for length in (1, 2, 3, 4):
        for text in itertools.product(range(5), repeat=length):
            ends_once = text.count(4) == 1 and text[-1] == 4
            cut_off = length == 4 and 4 not in text
            assert (text in texts) == (ends_once or cut_off)


def test_probabilities_sum_to_one_and_equal_the_chain_rule():
    table = policy(0)
    p = probabilities(table, WORLD)
    assert_close(p.sum().item(), 1.0, atol=1e-14, rtol=0)
    steps = table.table.softmax(-1)
    row = int((WORLD.completions == torch.tensor([2, 0, 4, 4])).all(1).nonzero()[0])
    assert_close(p[row], steps[4, 2] * steps[2, 0] * steps[0, 4])


def test_kl_equals_the_sum_over_texts_and_is_not_symmetric():
    p, q = policy(0, 3), policy(1, 3)
    total = 0.0
    first, second = p.table.softmax(-1), q.table.softmax(-1)
    for text in ([2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]):
        a = math.prod(first[s, t].item() for s, t in zip([2, *text], text))
        b = math.prod(second[s, t].item() for s, t in zip([2, *text], text))
        total += a * math.log(a / b)
    assert_close(exact_kl(p, q, SMALL).item(), total)
    assert abs(exact_kl(q, p, SMALL).item() - total) > 0.01
    assert exact_kl(p, p, SMALL).item() == 0


def test_moments_of_all_groups_equal_a_loop_over_them():
    """G = 3 in the small world: 343 groups, one backward pass each."""
    table, r = policy(2, 3), rewards(SMALL)
    p = probabilities(table, SMALL).detach()
    mean, square = torch.zeros(9).double(), 0.0
    for group in itertools.product(range(7), repeat=3):
        rows = torch.tensor(group)
        loss = _grpo(SMALL.log_probs(table)[None, rows], SMALL.mask[None, rows], r[None, rows])
        slope = gradient(loss.sum(), table)
        mean += p[rows].prod() * slope
        square += (p[rows].prod() * slope.square().sum()).item()
    exact = moments(_grpo, table, SMALL, r, 3)
    assert_close(exact.mean, mean)
    assert_close(exact.variance, square - mean.square().sum().item())


def _with(**settings):
    """The loss of the package with these settings, all groups at once: it is a mean over rows."""
    advantage = {k: settings.pop(k) for k in ("scale", "baseline") if k in settings}
    assert settings.get("how") != "token_mean"  # groups would weigh as much as they have tokens

    def losses(log_probs: Tensor, mask: Tensor, r: Tensor) -> Tensor:
        A = group_advantages(r.flatten(), r.shape[1], **advantage)
        loss, _ = grpo_loss(log_probs.flatten(0, 1), None, A, mask.flatten(0, 1), **settings)
        return loss.expand(len(r))

    return losses


_grpo = _with(scale="none", level="sequence")


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_centring_scales_the_gradient_by_a_known_factor(group_size):
    """(G - 1) / G, because every reward is in its own baseline; leave-one-out mends that."""
    table, r = policy(4, 3), rewards(SMALL)
    exact = gradient(expected_reward(table, SMALL, r), table)
    centred = moments(_grpo, table, SMALL, r, group_size).mean
    assert_close(centred, -exact * (group_size - 1) / group_size)
    others = _with(scale="none", baseline="leave_one_out", level="sequence")
    assert_close(moments(others, table, SMALL, r, group_size).mean, -exact)


def test_dr_grpo_follows_the_gradient_and_grpo_does_not_quite():
    """The length and the std bend the direction; their absence leaves a factor."""
    table, r = policy(6, 3), rewards(SMALL)
    exact = gradient(expected_reward(table, SMALL, r), table)
    straight = moments(_with(**VARIANTS["dr_grpo"], max_length=2), table, SMALL, r, 3).mean
    assert_close(straight, -exact * (2 / 3) / 2)  # (G - 1) / G, and 1 / max_length
    bent = moments(_with(**VARIANTS["grpo"]), table, SMALL, r, 3).mean
    assert 0.5 < cosine(bent, -exact) < 0.9999


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_sampled_groups_converges_to_the_exact_one(seed):
    """16,000 groups of 4, from sampler to loss: 3/4 of the exact gradient, to 10 percent."""
    table, r = policy(seed), rewards(WORLD, seed)
    exact = gradient(expected_reward(table, WORLD, r), table)
    places = {tuple(text): i for i, text in enumerate(WORLD.completions.tolist())}
    prompts = torch.full((16_000, 1), WORLD.eos_id)
    options = {"max_new_tokens": 4, "eos_id": WORLD.eos_id, "pad_id": WORLD.eos_id}
    generator = torch.Generator().manual_seed(seed)
    drawn = sample(table, prompts, completions_per_prompt=4, generator=generator, **options)
    rows = torch.tensor([places[tuple(text)] for text in drawn.completions.tolist()])
    A = group_advantages(r[rows], 4, scale="none")
    log_probs, mask = WORLD.log_probs(table)[rows], WORLD.mask[rows]
    loss, _ = grpo_loss(log_probs, drawn.log_probs, A, mask, level="sequence")
    found = gradient(-loss, table)
    assert (found - exact * 3 / 4).norm() < 0.1 * exact.norm()  # without the factor 0.26
    assert torch.equal(drawn.completion_mask, mask)


def _token_kl_gradient(p: TablePolicy, q: TablePolicy, **settings) -> Tensor:
    """The KL term of grpo_loss, averaged over samples."""
    log_probs, other = SMALL.log_probs(p), SMALL.log_probs(q)
    zeros, losses = torch.zeros(1).double(), []
    for row in range(len(log_probs)):
        new, mask, ref = (x[row : row + 1] for x in (log_probs, SMALL.mask, other))
        terms = {"ref_log_probs": ref, "kl_weight": 1.0, "how": "constant", "max_length": 1}
        losses.append(grpo_loss(new, new.detach(), zeros, mask, **terms, **settings)[0])
    return gradient(expected_loss(torch.stack(losses), p, SMALL), p)


def _state_kl_gradient(p: TablePolicy, q: TablePolicy, reverse: bool) -> Tensor:
    """Sum over the states that p visits, visits held fixed, of the KL of the next token."""
    first, second = p.table.log_softmax(-1), q.table.log_softmax(-1).detach()
    visits = torch.zeros(3).double()
    weights = probabilities(p, SMALL).detach()
    for text, mask, weight in zip(SMALL.completions, SMALL.mask, weights):
        visits[2] += weight  # every text begins after EOS
        if mask[1]:
            visits[text[0]] += weight
    a, b = (first, second) if reverse else (second, first)
    return gradient((visits * (a.exp() * (a - b)).sum(-1)).sum(), p)


@pytest.mark.parametrize(
    ("settings", "reverse"),
    [
        (dict(estimator="k3"), False),
        (dict(estimator="k2"), True),
        (dict(estimator="k3", kl_correction=True), True),
        (dict(estimator="k1", kl_correction=True), True),
    ],
    ids=["k3", "k2", "k3 x ratio", "k1 x ratio"],
)
def test_token_by_token_the_loss_pulls_along_the_kl_of_every_state(settings, reverse):
    p, q = policy(0, 3), policy(1, 3)
    found = _token_kl_gradient(p, q, **settings)
    wanted, other = (_state_kl_gradient(p, q, side) for side in (reverse, not reverse))
    assert abs(cosine(found, wanted) - 1) < 1e-10
    assert_close(found, wanted)
    assert cosine(found, other) < 0.999


def test_k1_token_by_token_pulls_nowhere():
    assert _token_kl_gradient(policy(0, 3), policy(1, 3), estimator="k1").abs().max() < 1e-15
