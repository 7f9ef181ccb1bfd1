"""Reward, advantages, clip, KL, and a first GRPO step"""

import torch
from torch import tensor

from minigrpo import logprobs, objective
from minigrpo.clinic.catalogue import NAMED
from minigrpo.exercises.form import UNDERFLOW, exercise, mask, numbers, texts, whole
from minigrpo.logprobs import masked_mean

POPULATION = "Your std divides by G, as NumPy's does. Here it's G - 1, as torch's .std() has it."
EQUAL = (
    "Only equal rewards go wrong: their float32 mean can miss them by a rounding error, and yours "
    "divides that. Give such a group exactly 0."
)


@exercise("share of a letter", package=lambda x, m, i: masked_mean((x == i).float(), m, dim=-1))
def letter_share(completions, mask, letter_id):
    """completions (N, T) of ids, mask (N, T) with 1 = real token -> (N,), each from 0 to 1"""
    real = mask.bool()
    hits = (completions == letter_id) & real
    return hits.sum(dim=-1) / real.sum(dim=-1)


letter_share.why = """Divide the hits of a row by the real tokens of that row, so that twice the
text isn't worth twice the reward. If you divide by the width of the batch, a short text loses
reward because of its neighbors."""
letter_share.right = ["return (hits / real.sum(dim=-1, keepdim=True)).sum(dim=-1)"]
letter_share.wrong = {
    "return hits.float().mean(dim=-1)": "You divide by the width of the batch.",
    "hits = completions == letter_id": NAMED["mask_in_the_denominator_only"].sentence,
    "hits = completions * mask == letter_id": "You multiply the ids by the mask. That turns "
    "padding into the id 0, which is a letter like any other.",
    "return hits.float().sum(dim=-1)": "You count. Divide by the real tokens.",
}
letter_share.cases = {
    "padding": (tensor([[4, 1, 4, 2], [4, 1, 4, 4]]), tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), 4),
    "the letter has the id 0": (tensor([[0, 5, 7, 0]]), tensor([[1, 1, 1, 0]]).bool(), 0),
    "one hit in 600": (tensor([[128253] * 599 + [128254]]), torch.ones(1, 600), 128254),
    "many hits, large ids": (tensor([[9] * 200 + [128254] * 400]), torch.ones(1, 600), 128254),
}
letter_share.draw = lambda r: (
    whole(r, N := r.randint(1, 3), T := r.randint(1, 5), high=5),
    mask(r, N, T),
    r.randrange(7),
)
letter_share.hints = """
completions == letter_id is True where the letter is, and & combines it with mask.bool().
Sum the hits over dim=-1, and divide by the sum of the mask over dim=-1."""


@exercise("advantages of a group", package=objective.group_advantages)
def group_advantages(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,)"""
    groups = rewards.view(-1, group_size)  # (P, G)
    mean = groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True)
    advantages = (groups - mean) / (std + 1e-4)
    # Rounding may leave a trace of the mean, and dividing by 1e-4 would magnify it.
    equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()


group_advantages.why = """Equal groups need a line of their own: the float32 mean of equal rewards
can miss them by a rounding error, which the division by 1e-4 turns into a signal."""
group_advantages.wrong = {
    ("mean = groups.mean()", "std = groups.std()"): "You compare with all rewards of the batch, "
    "so easy prompts look like good answers. Compare within the group.",
    "std = groups.std(dim=1, keepdim=True, correction=0)": POPULATION,
    "advantages = (groups - mean) / (std + 1e-8)": "The formula adds 1e-4 to the std.",
    "advantages = (groups - mean) / (groups.std(1, correction=0, keepdim=True) + 1e-8)": POPULATION
    + " And almost nothing is added to it. The formula adds 1e-4.",
    "advantages = groups - mean": "What comes out is the reward minus the group's mean, as in Dr. "
    "GRPO. Divide by the std plus 1e-4 too.",
    "std = groups.std()": NAMED["std_over_the_batch"].sentence,
}
group_advantages.cases = {  # their means are exact, so rounding plays no part
    "an easy prompt and a hard one": (tensor([1.0, 1, 1, 0, 0, 0, 1, 0]), 4),
    "all equal": (torch.ones(6), 3),
    "close together": (tensor([1.0, 1.03125, 1.0, 1.0625]), 4),
    "one hit in 128": (tensor([1.0] + [0.0] * 127), 128),
}
group_advantages.draw = lambda r: (whole(r, 12, high=17) / 4 - 2, r.choice((2, 3, 4)))
group_advantages.corners = {
    "equal rewards whose mean is rounded": ((tensor([0.0, 1] * 8 + [5.7] * 16), 16), EQUAL),
    "a tiny difference": ((tensor([0.0, 1e-5]), 2), "Only equal rewards make 0, not close ones."),
}
group_advantages.hints = """
groups = rewards.view(-1, group_size); mean and std with dim=1, keepdim=True.
torch.where puts 0.0 where a group's amax equals its amin (keepdim=True); .flatten() at last."""


@exercise(
    "clipped objective",
    package=lambda ratio, A, low, high: objective.clipped_surrogate(ratio, A, (low, high)),
    gradient="ratio",
)
def clipped_objective(ratio, advantages, low, high):
    """ratio (N,), advantages (N,), low and high numbers such as 0.2 -> (N,), to be maximized"""
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


clipped_objective.why = """The smaller of the two products only ever removes a reason to go further,
never the pull back. With the clamped product alone, a good text that has become rare gets no
gradient."""
clipped_objective.wrong = {
    "return ratio * advantages": "Nothing is clipped, so nothing stops a move that goes too far.",
    "return clipped * advantages": NAMED["clamp_without_min"].sentence,
    "return torch.maximum(ratio * advantages, clipped * advantages)": NAMED["max_for_min"].sentence,
    "return torch.minimum(ratio, clipped) * advantages": "At A < 0 you clip the wrong side.",
    "clipped = ratio.clamp(1 - low, 1 + low)": "low is on both sides. The upper bound is 1 + high.",
    "clipped = ratio.clamp(1 - high, 1 + low)": NAMED["clip_low_and_high_swapped"].sentence,
}
clipped_objective.cases = {
    "both sides, both signs": (tensor([2.0, 0.5, 2.0, 0.5]), tensor([2.0, 2, -2, -2]), 0.2, 0.4),
    "far away": (tensor([0.0, 0.0, 12.0, 12.0]), tensor([1.0, -2, 0.5, -2]), 0.2, 0.2),
}
clipped_objective.draw = lambda r: (  # never at a bound, where any gradient is fine
    numbers(r, N := r.randint(3, 6), low=0.0, high=r.choice((1.5, 4.0))) + 0.005,
    numbers(r, N),
    *r.choices((0, 0.1, 0.2, 0.3, 0.9, 1.5), k=2),
)
clipped_objective.hints = """
Which of the two products is smaller, for ratios 0.5 and 1.5 and both signs?
ratio.clamp(1 - low, 1 + high); torch.minimum of the two products."""


@exercise(
    "KL to the reference",
    package=lambda p, q, m: objective.kl_estimate(*(x.where(m.bool(), 0.0) for x in (p, q))),
    gradient="log_probs",
)
def kl_to_reference(log_probs, ref_log_probs, mask):
    """log_probs, ref_log_probs, mask (N, T) -> (N, T), never below 0, and 0 where masked"""
    real = mask.bool()
    log_ratio = torch.where(real, ref_log_probs - log_probs, 0.0)  # reference over policy
    return log_ratio.exp() - log_ratio - 1


kl_to_reference.why = """The log-ratio is reference over policy; only then is its mean over the
policy's tokens the KL. The other way around a token that went from 0.001 to 0.9 costs 890 instead
of 6."""
kl_to_reference.right = ["return log_ratio.expm1() - log_ratio"]
kl_to_reference.wrong = {
    "return (-log_ratio).exp() + log_ratio - 1": "The log-ratio is upside down. The reference "
    "goes on top: exp(ref - new) - (ref - new) - 1.",
    "return -log_ratio": "That's k1. Its mean is the KL, but it's negative for many tokens, and "
    "as a loss it pulls nowhere on average.",
    "log_ratio = ref_log_probs - log_probs": "What comes after the end gets into the penalty.",
    "return torch.nn.functional.kl_div(log_probs, ref_log_probs, reduction='none')": "Is it "
    "F.kl_div? Without log_target=True it takes the logarithm of a log-prob, which is NaN, and "
    "with it you get the other direction.",
    "return (log_probs - ref_log_probs).expm1() - (log_probs - ref_log_probs)": "The log-ratio is "
    "upside down. And you don't use the mask.",
    "return ref_log_probs.exp() * log_ratio": "You weight the log-ratio with the reference's "
    "probability, as F.kl_div does. That's a term of KL(reference || policy).",
}
kl_to_reference.cases = {
    "a fair coin": (tensor([[0.5, 0.5]]).log(), tensor([[0.8, 0.2]]).log(), tensor([[1, 1]])),
    "one padded": (tensor([[0.0, -3.0]]), tensor([[-0.5, 0.0]]), tensor([[1.0, 0.0]])),
}
kl_to_reference.garbage = True
kl_to_reference.draw = lambda r: texts(r, 2, low=-6)
kl_to_reference.corners = {
    "rare tokens": (
        (tensor([[-1.0, -30.0]]), tensor([[-40.0, -2.0]]), torch.ones(1, 2)),
        "At log-probs of -30 or -40 yours is a different number. What you cap has no gradient.",
    ),
    "log-probs whose exp is 0": ((*tensor([[[-110.0]], [[-110.5]]]), torch.ones(1, 1)), UNDERFLOW),
}
kl_to_reference.hints = """
With x = ref_log_probs - log_probs, the three terms are exp(x), -x and -1.
Mask first, then take exp: x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0)."""


def package_loss(log_probs, old_log_probs, advantages, mask, clip):
    ratio = objective.policy_ratio(log_probs, old_log_probs, mask, level="sequence")[:, 0]
    return -objective.clipped_surrogate(ratio, advantages, (clip, clip)).mean()


@exercise("loss of sequence GRPO", package=package_loss, gradient="log_probs", keywords="clip")
def sequence_grpo_loss(log_probs, old_log_probs, advantages, mask, clip):
    """log_probs, old_log_probs, mask (N, T), advantages (N,), clip a number -> scalar ()"""
    real = mask.bool()
    log_ratio = torch.where(real, log_probs - old_log_probs, 0.0)  # new over old
    ratio = log_ratio.sum(dim=-1).exp()  # (N,), one per row
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


sequence_grpo_loss.why = """A text has one ratio here, so its log-ratios are summed before the exp.
The mean of the token ratios 1.2 and 1.1 escapes a clip of 0.2, although the text is 1.32 times as
likely."""
sequence_grpo_loss.wrong = {
    "ratio = log_ratio.sum(dim=-1, keepdim=True).exp()": "Your ratio has the shape (N, 1) and the "
    "advantages (N,), so their product is a table (N, N). Sum without keepdim.",
    "return torch.minimum(ratio * advantages, clipped * advantages).mean()": "The minus is "
    "missing. An optimizer minimizes, so the bad completions would become more likely.",
    (
        "ratio = log_ratio.exp(); advantages = advantages[:, None]",
        "return -masked_mean((ratio * advantages).minimum(clipped * advantages), mask, 1).mean()",
    ): "You clip a ratio for every token. Here a completion has one: sum its log-ratios, then exp.",
    "ratio = (log_ratio.sum(dim=-1) / mask.sum(dim=-1)).exp()": "You divide the log-ratio by the "
    "length, as GSPO does (notebook 05). Here the ratio is the product of all.",
    "ratio = torch.exp((log_probs * real).sum(-1)) / torch.exp((old_log_probs * real).sum(-1))": (
        "A long text's probability underflows to 0, and 0/0 is NaN. Subtract first, then take exp."
    ),
    "return (-ratio * advantages).minimum(-clipped * advantages).mean()": "You keep the "
    "larger product. Keep the smaller one, and then take minus the mean.",
}
new, old = -tensor([[0.5, 0.5, 0.1], [1, 1, 1]]), -tensor([[1, 1, 0.9], [0.5, 0.5, 0.5]])
A, ends, ones = tensor([-2.0, 2.0]), tensor([[1, 1, 0], [1, 1, 1]]), torch.ones(1, 600)
sequence_grpo_loss.cases = {
    "two texts that moved the wrong way": (new, old, A, ends, 0.2),
    "an advantage of 0": (new, old, tensor([0.0, 2.0]), ends.bool(), 0.1),
    "a wide clip": (new, old, A.abs(), ends.float(), 1.25),
    "600 tokens": (-ones, -ones - 2**-10, tensor([-1.0]), ones, 0.2),
}
sequence_grpo_loss.garbage = True
sequence_grpo_loss.draw = lambda r: (
    *(given := texts(r, 2, low=-1))[:2],
    numbers(r, len(given[2])),
    given[2],
    r.choice((0, 0.1, 0.2, 0.9, 1.25)),
)
sequence_grpo_loss.hints = """
torch.where(mask.bool(), log_probs - old_log_probs, 0.0), summed over dim=-1, then exp.
The rest is exercise 3.3, with clip on both sides. Take minus the mean over the rows."""


def package_step(logits, tokens, rewards, lr):
    policy = logits.clone().requires_grad_()
    log_probs = logprobs.next_token_log_probs(policy)[tokens][:, None]  # (G, 1)
    advantages = objective.group_advantages(rewards, len(rewards))
    objective.grpo_loss(log_probs, None, advantages, torch.ones_like(log_probs))[0].backward()
    return logits - lr * policy.grad


@exercise("one GRPO step", package=package_step, keywords="lr")
def grpo_step(logits, tokens, rewards, lr):
    """logits (V,), tokens (G,) drawn from them, rewards (G,), lr -> (V,), without gradient"""
    scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    equal = rewards.max() == rewards.min()
    advantages = torch.where(equal, 0.0, scaled)  # equal rewards: nothing to learn
    policy = logits.detach().clone().requires_grad_()
    log_p = policy.log_softmax(dim=-1)[tokens]  # (G,)
    loss = -(advantages * log_p).mean()
    (gradient,) = torch.autograd.grad(loss, policy)
    return policy.detach() - lr * gradient


grpo_step.why = """At ratio 1 the gradient is the mean of advantage times the gradient of the
log-prob, and autograd adds up several draws of one token. `logits[tokens] += ...` counts them
once."""
grpo_step.right = ["return logits.index_add(0, tokens, lr * advantages / len(tokens))"]
grpo_step.wrong = {
    "return policy.detach() + lr * gradient": "You step the wrong way, so the good tokens become "
    "rarer. It's logits - lr * gradient, of a loss with a minus.",
    "advantages = rewards": "You weight with the raw rewards. Add 10 to all of them, and the step "
    "changes, though no token is better than before.",
    "scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)": POPULATION,
    "loss = -(advantages * log_p).sum()": "You sum, so the step grows with G. Take the mean.",
    "new = logits.clone(); new[tokens] += lr * advantages / len(tokens); return new": "A token "
    "drawn twice counts once, because only the last write to a place stays. Let autograd add up.",
}
grpo_step.cases = {
    "section 9": (torch.zeros(4), tensor([0, 1, 2, 0]), tensor([1.0, 0, 0, 1]), 1.0),
    "all wrong": (tensor([1.0, 0, -0.5]), tensor([0, 2]), torch.zeros(2), 0.5),
    "close together": (torch.zeros(3), tensor([0, 1, 1]), tensor([1.0, 1.03125, 1.0625]), 10.0),
    "one hit in 128": (torch.zeros(3), tensor([2] + [0] * 127), tensor([1.0] + [0.0] * 127), 30.0),
}
grpo_step.draw = lambda r: (
    numbers(r, V := r.randint(2, 5), low=-4, high=4),
    whole(r, G := r.randint(2, 6), high=r.randint(1, V)),
    numbers(r, G),
    r.choice((0.1, 0.5, 1.0, 4.0)),
)
grpo_step.corners = {
    "a rounded mean": ((torch.zeros(3), tensor([0, 1] * 8), tensor([5.7] * 16), 10.0), EQUAL),
}
grpo_step.hints = """
In a copy that requires a gradient: minus the mean of advantage times log_softmax(dim=-1)[tokens].
torch.autograd.grad(loss, policy) returns a tuple with the gradient. Subtract lr times that."""
