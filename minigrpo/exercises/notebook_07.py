"""The exercises of notebook 07: code to review. Find the line, and write the test that fails.

WARNING: the functions with plain names are wrong on purpose. What is right is called `_right_...`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from minigrpo.exercises.engine import Answer, Bug, Review, Trial, Weak

Code = Callable[..., object]
TORCH = ("import torch",)


def _expect(condition: bool | Tensor) -> None:
    """An assert for lambdas."""
    if not condition:
        raise AssertionError


def _close(found: Tensor, expected: Tensor | list, atol: float = 1e-4) -> None:
    expected = torch.as_tensor(expected)
    _expect(found.shape == expected.shape and torch.allclose(found, expected, atol=atol))


def _upside_down(trial: Trial) -> bool:
    return trial.upside_down


def _every(condition: Callable[[SimpleNamespace], object]) -> Callable[[Trial], bool]:
    return lambda trial: trial.every(condition)


def _passes(version: Code) -> Callable[[Trial], bool]:
    """The kind of test that accepts even this."""
    return lambda trial: trial.passes(version)


# 7.1 ----------------------------------------------------------------------------------------


def token_log_probs(model, ids):
    """ids (N, S) -> (N, S - 1); column s is the log-prob of ids[:, s + 1], given all before it."""
    logits = model(ids)  # (N, S, V)
    log_p = logits.log_softmax(dim=-1)
    log_p = log_p[:, 1:]  # (N, S - 1, V)
    written = ids[:, 1:]  # (N, S - 1)
    chosen = log_p.gather(-1, written[:, :, None])
    return chosen.squeeze(-1)


def _right_token_log_probs(model, ids):
    """ids (N, S) -> (N, S - 1); column s is the log-prob of ids[:, s + 1], given all before it."""
    logits = model(ids)  # (N, S, V)
    log_p = logits.log_softmax(dim=-1)
    log_p = log_p[:, :-1]  # (N, S - 1, V)
    written = ids[:, 1:]  # (N, S - 1)
    chosen = log_p.gather(-1, written[:, :, None])
    return chosen.squeeze(-1)


def test_token_log_probs(function):
    # row a: how likely each token is after token a
    after = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    ids = torch.tensor([[0, 1, 2]])
    found = function(lambda ids: after[ids].log(), ids)
    expected = torch.tensor([[0.3, 0.7]]).log()  # 1 after 0, 2 after 1
    assert torch.allclose(found, expected)


AFTER = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
ABC = torch.tensor([[0, 1, 2]])


def _table(ids: Tensor) -> Tensor:
    return AFTER.log()[ids]


def _counting(ids: Tensor) -> Tensor:
    """A model that is sure of the next number."""
    return 50.0 * torch.nn.functional.one_hot((ids + 1) % 8, 8)


def _reads_no_future(function: Code) -> None:
    logits = torch.zeros(1, 4, 5, requires_grad=True)
    function(lambda ids: logits, torch.tensor([[1, 2, 3, 4]]))[0, 0].backward()
    _expect(logits.grad[0, 0].any() and not logits.grad[0, 1:].any())


def _same_everywhere(a: SimpleNamespace) -> bool:
    log_p = a.model(a.ids).log_softmax(-1)
    return torch.allclose(log_p[:, 1:], log_p[:, :-1])


SHIFT = Review(
    key="7.1",
    title="log-probs of the tokens",
    code=token_log_probs,
    right=_right_token_log_probs,
    bugs=(
        Bug(
            5,
            token_log_probs,
            "log_p[:, :-1]. The logits at position s predict token s + 1; cut off at the front, "
            "every token is scored by the logits that have already read it.",
        ),
    ),
    reference=test_token_log_probs,
    imports=TORCH,
    others=(
        Answer(
            "a sure model",
            lambda f: _close(f(_counting, torch.tensor([[2, 3, 4, 5]])), torch.zeros(1, 3)),
            "a model that is sure of the next number, and the row 2, 3, 4, 5: every log-prob must "
            "be 0.",
        ),
        Answer(
            "by gradient",
            _reads_no_future,
            "take the logits as a leaf, call backward on the first log-prob: only the logits at "
            "position 0 may have a gradient.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _close(f(_table, ABC), torch.tensor([[0.2, 0.1]]).log()),
            "You expect of each token how likely it is after itself. Column 0 is the probability "
            "of the second token, as the model saw it when it had read the first one only.",
            _upside_down,
        ),
        Weak(
            "one token all along",
            lambda f: _close(f(_table, torch.ones_like(ABC)), AFTER.log()[1, 1].expand(1, 2)),
            "All tokens of a row are the same in your test, so one position says what the other "
            "says. Take different tokens.",
            _every(lambda a: torch.equal(a.ids[:, 1:], a.ids[:, :-1])),
        ),
        Weak(
            "the same at every position",
            lambda f: _close(
                f(lambda ids: torch.zeros(1, 3, 4), ABC), torch.full((1, 2), 0.25).log()
            ),
            "Your model says the same at every position, so it does not matter which position is "
            "asked. Let its logits depend on the token that it has just read.",
            _every(_same_everywhere),
        ),
        Weak(
            "the shape",
            lambda f: _expect(f(_table, ABC).shape == (1, 2)),
            "Your test would also accept a function that returns -7 everywhere: it does not look "
            "at the numbers. Give the model probabilities that you know, and expect their "
            "logarithms.",
            _passes(lambda model, ids: torch.full(ids[:, 1:].shape, -7.0)),
        ),
    ),
    hints=(
        "Take the row a, b, c. Which two numbers must come out, and after which token did the "
        "model say each of them?",
        "You need a model whose answer you know. It can be a table: logits = table[ids], where row "
        "a holds the logits of what comes after token a.",
        "With three different tokens and three different rows of the table, compare with the two "
        "entries table[a][b] and table[b][c] (after the softmax). Does the code pick those rows?",
    ),
)


# 7.2 ----------------------------------------------------------------------------------------


def pad_rows(completions, width, pad_id):
    """Lists of ids, each with the EOS that ends it -> ids (N, width), mask (N, width) bool.

    The mask is True for every token of a completion, its EOS included, and False behind it.
    """
    rows = []
    for completion in completions:
        padding = [pad_id] * (width - len(completion))
        rows.append(completion + padding)
    ids = torch.tensor(rows)
    mask = ids != pad_id
    return ids, mask


def _right_pad_rows(completions, width, pad_id):
    """Lists of ids, each with the EOS that ends it -> ids (N, width), mask (N, width) bool.

    The mask is True for every token of a completion, its EOS included, and False behind it.
    """
    rows = []
    for completion in completions:
        padding = [pad_id] * (width - len(completion))
        rows.append(completion + padding)
    ids = torch.tensor(rows)
    mask = torch.arange(width) < torch.tensor([[len(completion)] for completion in completions])
    return ids, mask


def test_pad_rows(function):
    eos = 2  # this tokenizer pads with its EOS, as many do
    ids, mask = function([[5, 3, eos], [eos]], width=4, pad_id=eos)
    assert ids.tolist() == [[5, 3, eos, eos], [eos, eos, eos, eos]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]


def _mask_of(function: Code, completions: list, width: int, pad_id: int) -> list:
    return function(completions, width, pad_id)[1].tolist()


def _lengths(function: Code, completions: list, width: int, pad_id: int) -> list:
    return function(completions, width, pad_id)[1].sum(dim=1).tolist()


MASK = Review(
    key="7.2",
    title="mask of the completions",
    code=pad_rows,
    right=_right_pad_rows,
    bugs=(
        Bug(
            11,
            pad_rows,
            "make the mask from the lengths, torch.arange(width) < lengths[:, None]. The value of "
            "a token does not say whether it was written: where the padding token is the EOS, the "
            "EOS is masked too, and the policy never learns to stop.",
        ),
    ),
    reference=test_pad_rows,
    imports=TORCH,
    others=(
        Answer(
            "count",
            lambda f: _expect(_lengths(f, [[4, 7, 0], [9, 0]], 5, 0) == [3, 2]),
            "the sums of the rows of the mask are the lengths, with pad_id = EOS.",
        ),
        Answer(
            "padding token inside",
            lambda f: _expect(_mask_of(f, [[5, 0, 5]], 4, 0) == [[True, True, True, False]]),
            "a completion with the id of the padding in its middle: it was written, so it counts.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _expect(_mask_of(f, [[5, 3, 2]], 4, 2) == [[True, True, False, False]]),
            "You expect the EOS to be masked. The policy has written it, and it is how it learns "
            "to stop: True, and False behind it.",
            _upside_down,
        ),
        Weak(
            "only the ids",
            lambda f: _expect(f([[5, 2], [2]], 3, 2)[0].tolist() == [[5, 2, 2], [2, 2, 2]]),
            "Your test would also accept a mask that is False everywhere: it looks at the ids and "
            "not at the mask, or only at its shape.",
            _passes(
                lambda completions, width, pad_id: (
                    _right_pad_rows(completions, width, pad_id)[0],
                    torch.zeros(len(completions), width, dtype=torch.bool),
                )
            ),
        ),
        Weak(
            "a padding token of its own",
            lambda f: _expect(_mask_of(f, [[5, 3, 2], [2]], 3, 0) == [[True] * 3, [1, 0, 0]]),
            "The padding token occurs in none of your completions, and then its value does tell. "
            "Many tokenizers have no padding token of their own. Which one do people take instead?",
            _every(lambda a: not any(a.pad_id in completion for completion in a.completions)),
        ),
    ),
    hints=(
        "What does the mask say about a token that was written and has the same id as the padding?",
        "Many tokenizers have no padding token of their own, and people write pad_id = eos_id. "
        "What happens to the EOS that ends a completion?",
        "Call function([[5, 3, 2]], 4, 2), where 2 is EOS and padding. Three tokens were written. "
        "How many does the mask count?",
    ),
)


# 7.3 ----------------------------------------------------------------------------------------


def clipped_objective(log_probs, old_log_probs, advantages, clip):
    """log_probs, old_log_probs (N, T), advantages (N,) -> PPO's objective of each token (N, T)."""
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    free = ratio * A
    clipped = ratio.clamp(1 - clip, 1 + clip) * A
    return torch.where(A >= 0, torch.minimum(free, clipped), torch.maximum(free, clipped))


def _right_clipped_objective(log_probs, old_log_probs, advantages, clip):
    """log_probs, old_log_probs (N, T), advantages (N,) -> PPO's objective of each token (N, T)."""
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    free = ratio * A
    clipped = ratio.clamp(1 - clip, 1 + clip) * A
    return torch.minimum(free, clipped)


def test_clipped_objective(function):
    ratio = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    advantages = torch.tensor([1.0, -1.0])
    found = function(ratio.log(), torch.zeros(2, 3), advantages, 0.2)
    expected = torch.tensor([[0.5, 1.0, 1.2], [-0.8, -1.0, -1.5]])
    assert torch.allclose(found, expected)


def _objective(function: Code, ratio: list[float], advantage: float) -> Tensor:
    """(T,), with clip 0.2."""
    ratios = torch.tensor([ratio])
    return function(ratios.log(), torch.zeros_like(ratios), torch.tensor([advantage]), 0.2)[0]


def _gradient_stops(function: Code) -> None:
    log_probs = torch.tensor([[0.5, 1.5]]).log().requires_grad_()
    function(log_probs, torch.zeros(1, 2), torch.tensor([-1.0]), 0.2).sum().backward()
    _close(log_probs.grad, [[0.0, -1.5]])


def _never_above(function: Code) -> None:
    for advantage in (1.0, -1.0):
        for ratio in (0.5, 0.9, 1.1, 1.5):
            _expect(_objective(function, [ratio], advantage) <= ratio * advantage + 1e-6)


CLIP = Review(
    key="7.3",
    title="clipped objective",
    code=clipped_objective,
    right=_right_clipped_objective,
    bugs=(
        Bug(
            7,
            clipped_objective,
            "torch.minimum(free, clipped) for both signs. The minimum is taken after the "
            "multiplication, so the sign is in it already. With the maximum a bad token is pushed "
            "down without end, and one that has become likelier is not pulled back.",
        ),
    ),
    reference=test_clipped_objective,
    imports=TORCH,
    others=(
        Answer(
            "by gradient",
            _gradient_stops,
            "with A = -1 the gradient is 0 at ratio 0.5 (far enough) and -1.5 at ratio 1.5 (back).",
        ),
        Answer(
            "never above",
            _never_above,
            "for ratios on both sides and both signs of A, the objective is never above ratio * A: "
            "the clip may only take away.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _close(_objective(f, [0.5, 1.5], -1.0), [-0.5, -1.2]),
            "PPO is cautious: of the two products it takes the smaller one, whatever the sign of "
            "the advantage. With A = -1 and ratio 0.5 these are -0.5 and -0.8.",
            _upside_down,
        ),
        Weak(
            "ratio 1",
            lambda f: _close(_objective(f, [1.0, 1.0], -2.0), [-2.0, -2.0]),
            "All ratios are 1 in your test, as at the first update. There the clip has nothing to "
            "do: take ratios such as 0.5 and 1.5.",
            _every(lambda a: torch.allclose(a.log_probs, a.old_log_probs)),
        ),
        Weak(
            "inside the bounds",
            lambda f: _close(_objective(f, [0.9, 1.1], -1.0), [-0.9, -1.1]),
            "All your ratios lie within the bounds, where nothing is clipped. Take some beyond "
            "them, on both sides.",
            _every(
                lambda a: ((a.log_probs - a.old_log_probs).exp() - 1).abs().max() <= a.clip + 1e-6
            ),
        ),
        Weak(
            "good tokens only",
            lambda f: _close(_objective(f, [0.5, 1.0, 1.5], 1.0), [0.5, 1.0, 1.2]),
            "No advantage in your test is negative. Two sides and two signs: there are four cases.",
            _every(lambda a: (a.advantages >= 0).all()),
        ),
        Weak(
            "the shape",
            lambda f: _expect(_objective(f, [0.5, 1.5], -1.0).shape == (2,)),
            "Your test would also accept a function that returns 0 everywhere: it does not look at "
            "the numbers.",
            _passes(lambda log_probs, old_log_probs, advantages, clip: 0 * log_probs),
        ),
    ),
    hints=(
        "Four cases: ratio 0.5 or 1.5, advantage +1 or -1. In which of them should a token stop "
        "being pushed?",
        "With A = -1 and ratio 0.5 the token is already much less likely than it was: enough. With "
        "A = -1 and ratio 1.5 it has moved the wrong way: push. Compute both products by hand.",
        "Pass the logarithms of the ratios as log_probs and zeros as old_log_probs. With clip 0.2 "
        "and A = -1 expect min(-0.5, -0.8) and min(-1.5, -1.2).",
    ),
)


# 7.4 ----------------------------------------------------------------------------------------


def kl_per_token(log_probs, ref_log_probs, mask):
    """All (N, T) -> k3 of each token (N, T), 0 where masked. In the mean over tokens that the
    policy draws it is KL(policy || reference).
    """
    log_ratio = log_probs - ref_log_probs
    log_ratio = torch.where(mask, log_ratio, 0.0)
    ratio = log_ratio.exp()
    return ratio - log_ratio - 1


def _right_kl_per_token(log_probs, ref_log_probs, mask):
    """All (N, T) -> k3 of each token (N, T), 0 where masked. In the mean over tokens that the
    policy draws it is KL(policy || reference).
    """
    log_ratio = ref_log_probs - log_probs
    log_ratio = torch.where(mask, log_ratio, 0.0)
    ratio = log_ratio.exp()
    return ratio - log_ratio - 1


def test_kl_per_token(function):
    policy = torch.tensor([[0.5, 0.5]])  # of the only two tokens there are
    reference = torch.tensor([[0.8, 0.2]])
    k3 = function(policy.log(), reference.log(), torch.ones(1, 2, dtype=torch.bool))
    kl = (policy * (policy / reference).log()).sum()  # 0.2231
    assert torch.isclose((policy * k3).sum(), kl)


def _k3(function: Code, log_probs: list[float], ref_log_probs: list[float]) -> Tensor:
    """(T,)"""
    mask = torch.ones(1, len(log_probs), dtype=torch.bool)
    return function(torch.tensor([log_probs]), torch.tensor([ref_log_probs]), mask)[0]


def _k3_gradient(function: Code) -> None:
    log_probs = torch.zeros(1, 1, requires_grad=True)
    function(log_probs, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).sum().backward()
    _close(log_probs.grad, [[1 - 2.71828]])


K3 = Review(
    key="7.4",
    title="k3, the KL of each token",
    code=kl_per_token,
    right=_right_kl_per_token,
    bugs=(
        Bug(
            5,
            kl_per_token,
            "ref_log_probs - log_probs. In k3 the reference stands on top, exp(ref - new). Turned "
            "round, it is still never negative and 0 for equal policies, but its mean is another "
            "number.",
            also=(6, 8),
        ),
    ),
    reference=test_kl_per_token,
    imports=TORCH,
    others=(
        Answer(
            "by hand",
            lambda f: _close(_k3(f, [0.0, 1.0], [1.0, 0.0]), [0.71828, 0.36788]),
            "two tokens by hand: ref - new = 1 gives e - 2 = 0.7183, ref - new = -1 gives "
            "1 / e = 0.3679.",
        ),
        Answer(
            "by gradient",
            _k3_gradient,
            "with ref - new = 1 the derivative with respect to log_probs is 1 - e: lowering k3 "
            "raises a token that the reference likes better.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _close(_k3(f, [0.0], [-1.0]), [0.71828]),
            "You expect exp(d) - d - 1 with d = policy minus reference. It is d = reference minus "
            "policy: the mean is taken over what the policy draws, and only so is it the KL.",
            _upside_down,
        ),
        Weak(
            "equal policies",
            lambda f: _close(_k3(f, [-1.0, -2.0], [-1.0, -2.0]), [0.0, 0.0]),
            "Policy and reference are the same in your test. Every estimate of a KL is 0 there, "
            "and so is a wrong one.",
            _every(lambda a: torch.equal(a.log_probs, a.ref_log_probs)),
        ),
        Weak(
            "all masked",
            lambda f: _expect(
                not f(torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2).bool()).any()
            ),
            "Every position is masked in your test, so all that comes out is 0. Masking is right "
            "here; look at the real tokens.",
            _every(lambda a: not a.mask.any()),
        ),
        Weak(
            "almost equal",
            lambda f: _close(_k3(f, [-1.0], [-1.01]), [0.00005], atol=1e-5),
            "Your policies hardly differ. Close to 0 k3 is half the square of the log-ratio, and a "
            "square does not know the sign. Let a log-prob differ by 1 or so.",
            _every(lambda a: (a.log_probs - a.ref_log_probs).abs()[a.mask].max() < 0.1),
        ),
        Weak(
            "never negative",
            lambda f: _expect((_k3(f, [0.0, -1.0], [-1.0, 0.0]) >= 0).all()),
            "Your test would also accept a function that returns 1 for every real token. Not to be "
            "negative is not enough: compute a number by hand.",
            _passes(lambda log_probs, ref_log_probs, mask: mask.double()),
        ),
    ),
    hints=(
        "A value that is never negative, and 0 for equal policies: that is true of more than one "
        "formula. What must its mean be?",
        "Take a vocabulary of two tokens, so that you can compute the KL exactly: the sum of "
        "p * log(p / ref). The mean of k3 is the sum of p * k3.",
        "p = (0.5, 0.5), ref = (0.8, 0.2): the KL is 0.2231. Or one token by hand: new = 0, "
        "ref = 1 gives exp(1) - 1 - 1 = 0.7183.",
    ),
)


# 7.5 ----------------------------------------------------------------------------------------


def group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    Equal rewards in a group give advantage 0.
    """
    groups = rewards.view(group_size, -1)
    mean = groups.mean(dim=1, keepdim=True)
    advantages = (groups - mean) / groups.std(dim=1, keepdim=True)
    return advantages.flatten()


def _mixed_group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    Equal rewards in a group give advantage 0.
    """
    groups = rewards.view(group_size, -1)
    mean = groups.mean(dim=1, keepdim=True)
    scaled = (groups - mean) / (groups.std(dim=1, keepdim=True) + 1e-4)
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # rounding may leave a std above 0
    advantages = torch.where(equal, 0.0, scaled)
    return advantages.flatten()


def _bare_group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    Equal rewards in a group give advantage 0.
    """
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    advantages = (groups - mean) / groups.std(dim=1, keepdim=True)
    return advantages.flatten()


def _right_group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    Equal rewards in a group give advantage 0.
    """
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    scaled = (groups - mean) / (groups.std(dim=1, keepdim=True) + 1e-4)
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # rounding may leave a std above 0
    advantages = torch.where(equal, 0.0, scaled)
    return advantages.flatten()


def test_group_advantages(function):
    rewards = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])  # two prompts, three completions each
    found = function(rewards, 3)
    expected = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])  # the std of 0, 0, 3 is 1.732
    assert torch.allclose(found, expected, atol=1e-3)


def _prompts_apart(function: Code) -> None:
    rewards = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    found = function(rewards, 4)
    _expect(torch.allclose(found[:4], found[4:]) and (found[:4].diff() > 0).all())
    _expect(not function(torch.ones(8), 4).any())


def _three_calls(function: Code) -> None:
    _close(function(torch.tensor([0.0, 1, 7, 8, 3, 4]), 2), [-0.7070, 0.7070] * 3, atol=1e-3)
    _close(function(torch.tensor([2.0, 2, 2, 0, 1, 2]), 3)[:3], [0.0, 0, 0])


def _no_rounding(function: Code) -> None:
    _expect(not function(torch.full((6,), 0.7), 3).any())
    found = function(torch.tensor([0.0, 1, 1, 10, 11, 11]), 3)
    _expect(torch.allclose(found[:3], found[3:], atol=1e-3))


def _rows(a: SimpleNamespace) -> Tensor:
    return a.rewards.view(-1, a.group_size)


def _uneven(a: SimpleNamespace) -> bool:
    """Whether every group has two different rewards."""
    return bool((_rows(a) != _rows(a)[:, :1]).any(dim=1).all())


GROUPS = Review(
    key="7.5",
    title="group advantages, two bugs",
    code=group_advantages,
    right=_right_group_advantages,
    bugs=(
        Bug(
            6,
            _mixed_group_advantages,
            "rewards.view(-1, group_size). A row is a group: view(group_size, -1) has rows as long "
            "as there are prompts, and mixes the prompts.",
        ),
        Bug(
            8,
            _bare_group_advantages,
            "divide by the std + 1e-4, and give equal rewards exactly 0: their std is 0, and 0 / 0 "
            "is NaN, or it is a rounding error, and then the quotient is anything.",
        ),
    ),
    reference=test_group_advantages,
    imports=TORCH,
    others=(
        Answer(
            "shifted rewards",
            _prompts_apart,
            "two prompts with the same rewards, one of them 10 higher: both groups must get the "
            "same advantages; and equal rewards give zeros.",
        ),
        Answer(
            "equal rewards that are no round number",
            _no_rounding,
            "three times 0.7 has a mean that is not 0.7; two groups of it must still give zeros, "
            "and two groups with the same differences the same advantages.",
        ),
        Answer(
            "one call for each bug",
            _three_calls,
            "one call with three groups of two, and another with a group of equal rewards.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _expect(f(torch.tensor([0.0, 1, 5, 5, 5, 5]), 3)[3:].isnan().all()),
            "You expect what the code does now. Look at each prompt on its own: a reward is "
            "compared with the others of its prompt, and equal rewards get 0.",
            _upside_down,
        ),
        Weak(
            "equal rewards only",
            lambda f: _close(f(torch.ones(6), 3), torch.zeros(6)),
            "All your rewards are equal, so all that must come out is 0, whoever is compared with "
            "whom. Add a group with different rewards.",
            _every(lambda a: bool((a.rewards == a.rewards[0]).all())),
        ),
        Weak(
            "as many prompts as members",
            lambda f: _close(f(torch.tensor([0.0, 1, 5, 5]), 2), [-0.7070, 0.7070, 0, 0], 1e-3),
            "You have as many groups as members of a group. Then rows and columns are equally "
            "many, and a wrong shape goes unnoticed. Take two groups of three, for instance.",
            _every(lambda a: len(a.rewards) == a.group_size**2),
        ),
        Weak(
            "every group has a winner",
            lambda f: _close(
                f(torch.tensor([0.0, 0, 3, 0, 3, 3]), 3),
                [-0.577, -0.577, 1.155, -1.155, 0.577, 0.577],
                atol=1e-3,
            ),
            "In each of your groups the rewards differ. What if all completions of a prompt are "
            "right, or all are wrong? That happens in every batch.",
            _every(_uneven),
        ),
        Weak(
            "the shape",
            lambda f: _expect(f(torch.tensor([0.0, 1, 2, 2, 2, 2]), 3).shape == (6,)),
            "Your test would also accept NaN everywhere: it does not look at the numbers.",
            _passes(lambda rewards, group_size: rewards * torch.nan),
        ),
    ),
    hints=(
        "Two bugs, so two questions. Is every reward compared with those of its own prompt? And "
        "what comes out where nothing differs?",
        "Take six rewards and group_size 3, print rewards.view(group_size, -1), and see who sits "
        "in a row. For the other one: what is the std of 5, 5, 5?",
        "One call finds both: rewards 0, 0, 3, 5, 5, 5 with group_size 3. By hand: -0.577, -0.577, "
        "1.155, 0, 0, 0. Leave a tolerance of 1e-3.",
    ),
)


# 7.6 ----------------------------------------------------------------------------------------


def answer_reward(prompt, completion, label):
    """1.0 if the policy's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    text = prompt + completion
    found = re.search(r"<answer>(.*)</answer>", text)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


def _prompt_answer_reward(prompt, completion, label):
    """1.0 if the policy's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    text = prompt + completion
    found = re.search(r"<answer>(.*?)</answer>", text)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


def _greedy_answer_reward(prompt, completion, label):
    """1.0 if the policy's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    text = completion
    found = re.search(r"<answer>(.*)</answer>", text)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


def _right_answer_reward(prompt, completion, label):
    """1.0 if the policy's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    text = completion
    found = re.search(r"<answer>(.*?)</answer>", text)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


def test_answer_reward(function):
    prompt = "For example: 2 + 2 is <answer>4</answer>. What is 3 + 1?"
    assert function(prompt, "No idea.", "4") == 0.0
    assert function("What is 3 + 1?", "<answer>4</answer> or <answer>5</answer>", "4") == 1.0


def _example_and_answer(function: Code) -> None:
    prompt = "<answer>4</answer> is an example. "
    _expect(function(prompt, "<answer>7</answer>", "7") == 1.0)
    _expect(function("", "<answer>7</answer> It ends with </answer>", "7") == 1.0)


def _nothing_to_pay(function: Code) -> None:
    for completion in ("", "4", "<answer>", "no"):
        _expect(function("<answer>4</answer>", completion, "4") == 0.0)
    _expect(function("", "<answer>1</answer><answer>2</answer>", "1</answer><answer>2") == 0.0)


REWARD = Review(
    key="7.6",
    title="reward for an answer, two bugs",
    code=answer_reward,
    right=_right_answer_reward,
    bugs=(
        Bug(
            3,
            _prompt_answer_reward,
            "text = completion. A reward never reads the prompt: an example in it is paid to "
            "whoever writes anything, or nothing.",
        ),
        Bug(
            4,
            _greedy_answer_reward,
            "(.*?) with the question mark, which stops at the first </answer>. Without it the star "
            "is greedy, and takes everything up to the last one.",
        ),
    ),
    reference=test_answer_reward,
    imports=("import re",),
    others=(
        Answer(
            "the example is another number",
            _example_and_answer,
            "an example with the answer 4 in the prompt, a right 7 in the completion: 1.0; and a "
            "second </answer> behind the right answer: 1.0.",
        ),
        Answer(
            "nothing to pay",
            _nothing_to_pay,
            "the answer stands only in the prompt, and the completion is empty or junk: 0.0; and a "
            "label with two tags in it is what only a greedy star finds.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _expect(f("like <answer>2</answer>", "nothing", "2") == 1.0),
            "You expect a reward that the policy has not earned, or none where it has. Paid is "
            "what stands in the completion, in its first pair of tags.",
            _upside_down,
        ),
        Weak(
            "the type",
            lambda f: _expect(isinstance(f("1 + 1?", "<answer>2</answer>", "2"), float)),
            "Your test would also accept a function that always pays 0.5: it does not look at the "
            "reward.",
            _passes(lambda prompt, completion, label: 0.5),
        ),
        Weak(
            "no example and one answer",
            lambda f: _expect(
                (f("1 + 1?", "<answer>2</answer>", "2"), f("1 + 1?", "3", "2")) == (1.0, 0.0)
            ),
            "You test the easy cases. What may stand in a prompt that also stands in an answer? "
            "And what if a completion closes its answer more than once?",
            _every(lambda a: "<answer>" not in a.prompt and a.completion.count("</answer>") < 2),
        ),
        Weak(
            "no example in the prompt",
            lambda f: _expect(f("1 + 1?", "<answer>2</answer> <answer>3</answer>", "2") == 1.0),
            "There are no tags in any prompt of yours. Many prompts show an example of the format. "
            "Who gets paid then?",
            _every(lambda a: "<answer>" not in a.prompt),
        ),
        Weak(
            "one answer",
            lambda f: _expect(f("like <answer>2</answer>", "nothing", "2") == 0.0),
            "None of your completions closes its answer more than once. A policy that is paid for "
            "tags will write many of them.",
            _every(lambda a: a.completion.count("</answer>") < 2),
        ),
    ),
    hints=(
        "Two bugs. Which text does the function read? And how much of it does the pattern take?",
        "Give it a prompt that shows an example of the format, and a completion without any "
        "answer. Then a completion with two answers, one behind the other.",
        "With the prompt <answer>4</answer>, the completion 'No idea.' and the label 4 the reward "
        "is 0. With <answer>4</answer> or <answer>5</answer> and the label 4 it is 1.",
    ),
)


# 7.7 ----------------------------------------------------------------------------------------


def sequence_mean(losses, mask):
    """losses, mask (N, T), mask 1 for a real token -> (): mean of each row, then of the rows."""
    real = mask.bool()
    lengths = real.sum(dim=-1)
    sums = losses.sum(dim=-1)
    means = sums / lengths
    return means.mean()


def _right_sequence_mean(losses, mask):
    """losses, mask (N, T), mask 1 for a real token -> (): mean of each row, then of the rows."""
    real = mask.bool()
    lengths = real.sum(dim=-1)
    sums = torch.where(real, losses, 0.0).sum(dim=-1)
    means = sums / lengths
    return means.mean()


def test_sequence_mean(function):
    losses = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.isclose(function(losses, mask), torch.tensor(2.75))  # the mean of 1.5 and 4


RAGGED = torch.tensor([[1, 1, 0], [1, 0, 0]])


def _no_gradient_behind(function: Code) -> None:
    losses = torch.ones(2, 3, requires_grad=True)
    function(losses, RAGGED).backward()
    _expect(not losses.grad[RAGGED == 0].any())


def _garbage_does_not_matter(function: Code) -> None:
    losses = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, -torch.inf]])
    _close(function(losses, RAGGED), 2.75)


MEAN = Review(
    key="7.7",
    title="mean over the real tokens",
    code=sequence_mean,
    right=_right_sequence_mean,
    bugs=(
        Bug(
            5,
            sequence_mean,
            "torch.where(real, losses, 0.0).sum(dim=-1). The lengths count the real tokens only, "
            "but the sums run over the padding too, which is trained like text.",
        ),
    ),
    reference=test_sequence_mean,
    imports=TORCH,
    others=(
        Answer(
            "by gradient",
            _no_gradient_behind,
            "after backward the gradient at every masked position must be 0.",
        ),
        Answer(
            "garbage",
            _garbage_does_not_matter,
            "put NaN and infinities where the mask is 0: the same number must come out.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _close(f(torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), RAGGED), 14.0),
            "You count what stands behind the end of a row. Only the real tokens are added up, and "
            "divided by their number.",
            _upside_down,
        ),
        Weak(
            "full mask",
            lambda f: _close(f(torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.ones(2, 2)), 2.5),
            "Your mask is full: no completion is shorter than another. Nearly every bug of a mask "
            "hides there. Take rows of different lengths.",
            _every(lambda a: a.mask.bool().all()),
        ),
        Weak(
            "zeros behind the end",
            lambda f: _close(f(torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]]), RAGGED), 2.75),
            "Where your mask is 0, your losses are 0 as well, so it does no harm to add them. In a "
            "real batch something else stands there.",
            lambda trial: (
                trial.every(lambda a: not a.losses[a.mask == 0].any())
                and not any(call.differentiated for call in trial.right.calls)
            ),
        ),
        Weak(
            "a scalar",
            lambda f: _expect(f(torch.ones(2, 3), RAGGED).shape == ()),
            "Your test would also accept a function that always returns 0: it does not look at the "
            "number.",
            _passes(lambda losses, mask: 0 * losses.nan_to_num(0, 0, 0).sum()),
        ),
    ),
    hints=(
        "A mean is a sum divided by a number. Which tokens are in the sum, and which are counted?",
        "On a full mask everything is right. Take two rows of different lengths, and put a number "
        "behind the end of the shorter one that would be noticed.",
        "losses 1, 2, 9 and 4, 9, 9 with the masks 1, 1, 0 and 1, 0, 0: the means of the rows are "
        "1.5 and 4, together 2.75.",
    ),
)


# 7.8 ----------------------------------------------------------------------------------------


def train_on_batch(score, optimizer, advantages, epochs):
    """Several updates on one batch. score() -> log-probs (N,) of its tokens under the policy of
    this moment; advantages (N,). The clip holds the policy near the one that wrote the batch.
    """
    for _ in range(epochs):
        old = score().detach()
        new = score()
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _right_train_on_batch(score, optimizer, advantages, epochs):
    """Several updates on one batch. score() -> log-probs (N,) of its tokens under the policy of
    this moment; advantages (N,). The clip holds the policy near the one that wrote the batch.
    """
    old = score().detach()
    for _ in range(epochs):
        new = score()
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_train_on_batch(function):
    policy = torch.zeros(1, requires_grad=True)  # the log-prob of its only token
    optimizer = torch.optim.SGD([policy], lr=0.1)
    function(lambda: 1 * policy, optimizer, torch.tensor([1.0]), epochs=20)
    assert policy.exp() < 1.4  # 20 free steps lead to exp(2) = 7.4


def _after(function: Code, advantage: float, epochs: int, lr: float = 0.1) -> Tensor:
    """(), the log-prob of the only token, which was 0."""
    policy = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([policy], lr=lr)
    function(lambda: 1 * policy, optimizer, torch.tensor([advantage]), epochs)
    return policy.detach()[0]


def _once(score: Code, optimizer: torch.optim.Optimizer, advantages: Tensor, epochs: int) -> None:
    _right_train_on_batch(score, optimizer, advantages, min(epochs, 1))


LOOP = Review(
    key="7.8",
    title="several updates from one batch",
    code=train_on_batch,
    right=_right_train_on_batch,
    bugs=(
        Bug(
            6,
            train_on_batch,
            "it belongs before the loop. Computed anew in every epoch, old follows new, the ratio "
            "is always 1, and nothing is ever clipped.",
        ),
    ),
    reference=test_train_on_batch,
    imports=TORCH,
    others=(
        Answer(
            "two steps by hand",
            lambda f: _close(_after(f, 1.0, 2), 0.1 + 0.1 * 1.10517),
            "two steps by hand: the gradient is the ratio, first 1 and then exp(0.1), so plain SGD "
            "with learning rate 0.1 leads to 0.1 + 0.1 * 1.105.",
        ),
        Answer(
            "downwards",
            lambda f: _expect(_after(f, -1.0, 30) > -0.4),
            "a negative advantage: after 30 updates the token must not be far below the lower "
            "bound.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            lambda f: _close(_after(f, 1.0, 20), 2.0),
            "You expect that every epoch moves the policy as far as the first one. When the ratio "
            "to the policy that wrote the batch has left the bounds, a token has moved enough.",
            _upside_down,
        ),
        Weak(
            "one epoch",
            lambda f: _close(_after(f, 1.0, 1), 0.1),
            "You train for a single epoch. In the first one the policy still is the one that wrote "
            "the batch, and the ratio has to be 1. Take more.",
            _every(lambda a: a.epochs <= 1),
        ),
        Weak(
            "no advantage",
            lambda f: _close(_after(f, 0.0, 20), 0.0),
            "All your advantages are 0, so nothing moves.",
            _every(lambda a: not a.advantages.any()),
        ),
        Weak(
            "it learns",
            lambda f: _expect(_after(f, 1.0, 20) > 0),
            "Your test asks whether the policy moves, and in which direction, for which one step "
            "is enough; or its steps are so small that no ratio comes near the clip. The question "
            "is how far it gets in many.",
            _passes(_once),
        ),
    ),
    hints=(
        "Write down the ratio of the first epoch, and of the second. When can it be anything "
        "but 1?",
        "The smallest policy is a tensor that is its own log-prob: policy = torch.zeros(1, "
        "requires_grad=True), score = lambda: 1 * policy, and plain SGD.",
        "Train on one token with advantage 1 for 20 epochs with learning rate 0.1. With a clip of "
        "0.2 the probability cannot get much beyond 1.2 times what it was.",
    ),
)


# 7.9 ----------------------------------------------------------------------------------------


def policy_loss(log_probs, advantages, old_log_probs=None):
    """log_probs (N, T), advantages (N,) -> (). Without old_log_probs this is the first update."""
    if old_log_probs is None:
        old_log_probs = log_probs
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * A, clipped * A).mean()


def _right_policy_loss(log_probs, advantages, old_log_probs=None):
    """log_probs (N, T), advantages (N,) -> (). Without old_log_probs this is the first update."""
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * A, clipped * A).mean()


def test_policy_loss(function):
    log_probs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    function(log_probs, torch.tensor([1.0, -1.0])).backward()
    # minus advantage, over two tokens: the first becomes likelier, the second less likely
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


def _leaf() -> Tensor:
    return torch.tensor([[-1.0, -0.5], [-2.0, -3.0]], requires_grad=True)


SIGNS = torch.tensor([1.0, -1.0])


def _same_as_given(function: Code) -> None:
    first, second = _leaf(), _leaf()
    function(first, SIGNS).backward()
    function(second, SIGNS, second.detach()).backward()
    _close(first.grad, second.grad)


def _learns(function: Code) -> None:
    (gradient,) = torch.autograd.grad(function(leaf := _leaf(), SIGNS), leaf)
    _expect(gradient.norm() > 0.1)


def _has_gradient(function: Code) -> None:
    function(leaf := _leaf(), SIGNS).backward()
    _expect(leaf.grad is not None)


def _gradient_is_zero(function: Code) -> None:
    function(leaf := _leaf(), SIGNS).backward()
    _expect(not leaf.grad.any())


def _given(function: Code) -> None:
    function(leaf := _leaf(), SIGNS, leaf.detach()).backward()
    _close(leaf.grad, [[-0.25, -0.25], [0.25, 0.25]])


def _zero_advantages(function: Code) -> None:
    function(leaf := _leaf(), torch.zeros(2)).backward()
    _expect(not leaf.grad.any())


FIRST_UPDATE = Review(
    key="7.9",
    title="the first update",
    code=policy_loss,
    right=_right_policy_loss,
    bugs=(
        Bug(
            4,
            policy_loss,
            "log_probs.detach(). The ratio has the value 1 either way, but without the detach it "
            "is exp(x - x), whose gradient is 0: nothing is learned.",
            also=(5,),
        ),
    ),
    reference=test_policy_loss,
    imports=TORCH,
    others=(
        Answer(
            "as if it were given",
            _same_as_given,
            "the gradient without old_log_probs is the one with old_log_probs = a detached copy.",
        ),
        Answer(
            "it learns",
            _learns,
            "the gradient is not 0, with advantages that are not.",
        ),
    ),
    wrong=(
        Weak(
            "what the code says",
            _gradient_is_zero,
            "You expect a gradient of 0. The value of the ratio is 1, but the loss still has to "
            "say in which direction each token should go.",
            _upside_down,
        ),
        Weak(
            "old log-probs given",
            _given,
            "You give old_log_probs in every call. Leave them out: the first update is where the "
            "bug is.",
            _every(lambda a: a.old_log_probs is not None),
        ),
        Weak(
            "no advantage",
            _zero_advantages,
            "Your advantages are all 0, and then the gradient is 0 as well, as it should be.",
            _every(lambda a: not a.advantages.any()),
        ),
        Weak(
            "the value",
            lambda f: _close(f(_leaf(), torch.tensor([1.0, -3.0])), 1.0),
            "Your test looks at the value of the loss, and that is the same in both versions. What "
            "a loss teaches is its gradient: call backward, and look there.",
            lambda trial: not any(call.differentiated for call in trial.right.calls),
        ),
        Weak(
            "a gradient of any kind",
            _has_gradient,
            "Your test would also accept a gradient of zeros. Ask what numbers it holds.",
            _passes(
                lambda log_probs, advantages, old_log_probs=None: (
                    (0 * log_probs).sum() - advantages.mean()
                )
            ),
        ),
    ),
    hints=(
        "What is the value of the ratio at the first update? And what is its derivative?",
        "The value is right in both versions, so call backward on the result, and look at "
        "log_probs.grad.",
        "With two rows of one token and the advantages 1 and -1 the gradient is -0.5 and 0.5: "
        "minus the advantage, divided by the number of tokens.",
    ),
)

EXERCISES = (SHIFT, MASK, CLIP, K3, GROUPS, REWARD, MEAN, LOOP, FIRST_UPDATE)
