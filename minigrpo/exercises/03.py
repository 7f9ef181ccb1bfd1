"""Reward, advantages, clip, KL, and a first GRPO step"""

import torch
from torch import tensor

from minigrpo import logprobs, objective
from minigrpo.exercises.form import exercise, mask, numbers, whole
from minigrpo.logprobs import masked_mean

POPULATION = "Your std divides by G, as NumPy's does. Here it's G - 1, as torch's .std() has it."
EQUAL = (
    "Only rewards that are all equal go wrong. In float32 their mean can miss them by a rounding "
    "error, and dividing that makes a signal out of nothing, so give such a group exactly 0."
)
MASKED = (
    "Under a 0 of the mask there may be an infinity or NaN. A product keeps it (0 * inf is NaN), "
    "and torch.where at the very end keeps it in the gradient. Mask the log-ratio, before the exp."
)
GARBAGE = tensor([[-1.0, -float("inf"), float("nan")]]), tensor([[-2.0, -1.0, float("inf")]])


@exercise("share of a letter", package=lambda x, m, i: masked_mean((x == i).float(), m, dim=-1))
def letter_share(completions, mask, letter_id):
    """completions (N, T) of ids, mask (N, T) with 1 = real token -> (N,), each from 0 to 1"""
    real = mask.bool()
    hits = (completions == letter_id) & real
    return hits.sum(dim=-1) / real.sum(dim=-1)


letter_share.why = """Divide the hits of a row by the real tokens of that same row, so that twice
the text isn't worth twice the reward. If you divide by the width of the batch instead, a short text
loses reward because of the padding that its neighbors need."""
letter_share.right = {
    "return (hits / real.sum(dim=-1, keepdim=True)).sum(dim=-1)": "one part for every hit, summed.",
}
letter_share.wrong = {
    "return hits.float().mean(dim=-1)": "You divide by the width of the batch, padding included, "
    "so a short completion gets less for the same text. Divide by the real tokens of its row.",
    "hits = completions == letter_id": "You count the letter under the padding as well, so the "
    "fraction can exceed 1. Count where the mask is 1.",
    "return (completions == letter_id).float().mean(dim=-1)": "You don't use the mask, so what "
    "comes after the end of a row is rewarded like text.",
    "hits = completions * mask == letter_id": "You multiply the ids by the mask. That turns "
    "padding into the id 0, which is a letter like any other. Combine the hits with the mask.",
    "return hits.float().sum(dim=-1)": "You count, so twice the text earns twice the reward. "
    "Divide by the number of real tokens.",
}
letter_share.cases = {
    "padding": (tensor([[4, 1, 4, 2], [4, 1, 4, 4]]), tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), 4),
    "the letter has the id 0": (tensor([[0, 5, 7, 0]]), tensor([[1, 1, 1, 0]]).bool(), 0),
    "many hits, large ids": (tensor([[9] * 200 + [128254] * 400]), torch.ones(1, 600), 128254),
    "one hit in 600": (tensor([[128253] * 599 + [128254]]), torch.ones(1, 600), 128254),
}
letter_share.draw = lambda r: (
    whole(r, N := r.randint(1, 3), T := r.randint(1, 5), high=5),
    mask(r, N, T, holes=True),
    r.randrange(7),
)
letter_share.hints = [
    "Take one row on paper. Which tokens may you count, and by what do you divide?",
    "completions == letter_id is True where the letter is, and & combines it with mask.bool().",
    "Sum the hits over dim=-1, and divide by the sum of the mask over dim=-1.",
]


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


group_advantages.why = """Equal groups need a line of their own, because the float32 mean of equal
rewards can miss them by a rounding error, which the division by 1e-4 turns into a signal. If you
use the mean of the whole batch instead of the group's, every answer to an easy prompt looks
good."""
group_advantages.right = {
    "return torch.cat([(r - r.mean()) / (r.std() + 1e-4) * (r != r[0]).any() for r in groups])": (
        "split the rewards into groups, and treat one after the other."
    ),
}
group_advantages.wrong = {
    ("mean = groups.mean()", "std = groups.std()"): "You compare with all rewards of the batch. "
    "Compare with the answers to the same prompt, or easy prompts look like good answers.",
    "std = groups.std(dim=1, keepdim=True, correction=0)": POPULATION,
    "advantages = (groups - mean) / (std + 1e-8)": "Nothing, or almost nothing, is added to the "
    "std. The formula adds 1e-4, so that a rounding error in equal rewards stays small.",
    "advantages = (groups - mean) / (groups.std(1, correction=0, keepdim=True) + 1e-8)": (
        f"{POPULATION} And almost nothing is added to it, where the formula adds 1e-4."
    ),
    "advantages = groups - mean": "What comes out is the reward minus the group's mean, as in Dr. "
    "GRPO. Divide by the std plus 1e-4 too. (If you do, is it the root of a mean of squares?)",
    ("groups = rewards.view(group_size, -1).T", "return advantages.T.flatten()"): "You take every "
    "P-th reward for a group. The rows come prompt by prompt, so use .view(-1, group_size).",
}
group_advantages.cases = {  # their means are exact, so rounding plays no part
    "an easy prompt and a hard one": (tensor([1.0, 1, 1, 0, 0, 0, 1, 0]), 4),
    "penalties, and equal rewards": (tensor([-1.0, -2, 0, -1, -1, -1, -1, -1, 0, -2, -2, 0]), 4),
    "all equal": (torch.ones(6), 3),
    "one of three": (tensor([3.0, 0, 0]), 3),
    "close together": (tensor([1.0, 1.03125, 1.0, 1.0625]), 4),
    "one hit in 128": (tensor([1.0] + [0.0] * 127), 128),
}
group_advantages.draw = lambda r: (
    tensor([r.sample(range(-8, 9), 4) for _ in range(r.randint(1, 3))]).flatten() / 4,
    r.choice((2, 4)),
)
group_advantages.corners = {
    "equal rewards whose mean is rounded": ((tensor([0.0, 1] * 8 + [5.7] * 16), 16), EQUAL),
    "a millionth apart": (
        (tensor([1.0, 1.000001]), 2),
        "Rewards a millionth apart aren't equal. Does yours take them for it? Compare with ==.",
    ),
}
group_advantages.hints = [
    "Which rewards may a completion be compared with? Bring them into one row each.",
    "groups = rewards.view(-1, group_size); mean and std with dim=1, keepdim=True.",
    "torch.where puts 0.0 where a group's amax equals its amin (keepdim=True); .flatten() at last.",
]


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
never the pull back. If you keep the clamped product alone, a good text that has become rare (ratio
0.5) gets no gradient, and nothing brings it back."""
clipped_objective.right = {
    "return advantages * torch.where(advantages > 0, ratio.clamp(max=1 + high), ratio.clamp(1 - low"
    "))": "a positive advantage needs the upper bound only, a negative one the lower only.",
}
clipped_objective.wrong = {
    "return ratio * advantages": "Nothing is clipped, so nothing stops a move that goes too far.",
    "return clipped * advantages": "You clamp, but you don't take the minimum. Where the policy "
    "has moved the wrong way (ratio 0.5, advantage 1), the gradient is 0, and it can't come back.",
    "return torch.maximum(ratio * advantages, clipped * advantages)": "Take the smaller one.",
    "return torch.minimum(ratio, clipped) * advantages": "You clip a negative advantage on the "
    "wrong side. Take the minimum of the two products with the advantage, whatever its sign.",
    "clipped = ratio.clamp(1 - low, 1 + low)": "low is on both sides. The upper bound is 1 + high.",
    "return -torch.minimum(ratio * advantages, clipped * advantages)": "That's a loss, minus the "
    "objective. The minus comes in exercise 3.5.",
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
clipped_objective.hints = [
    "Take ratio 1.5 and advantage -1. Is the policy where it should be? Should it move?",
    "Which of the two products is smaller, for ratios 0.5 and 1.5 and both signs?",
    "ratio.clamp(1 - low, 1 + high); torch.minimum of the two products.",
]


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


kl_to_reference.why = """The log-ratio is reference over policy, and only then does the mean over
the policy's tokens come out as the KL. If you turn it around, $k_3$ is still never negative, but a
token that went from 0.001 to 0.9 costs about 890 instead of 6."""
kl_to_reference.right = {"return log_ratio.expm1() - log_ratio": "expm1(x) is exp(x) - 1."}
kl_to_reference.wrong = {
    "return (-log_ratio).exp() + log_ratio - 1": "The log-ratio is upside down. The tokens were "
    "drawn from the policy, so the reference goes on top: exp(ref - new) - (ref - new) - 1.",
    "return -log_ratio": "That's the plain log-ratio, known as k1. Its mean is correct, but it's "
    "negative for many tokens, and as a loss its mean gradient is 0, so it pulls nowhere.",
    "return log_ratio.exp() + log_ratio - 1": "You add the log-ratio ref - new. Subtract it.",
    "log_ratio = ref_log_probs - log_probs": "You don't use the mask, so what comes after the end "
    "of a row gets into the penalty.",
    "return torch.where(real, torch.nn.functional.kl_div(log_probs, ref_log_probs, reduction='none'"
    "), 0.0)": "Is it F.kl_div? It takes the logarithm of its second argument, and that of a "
    "log-prob is NaN. With log_target=True it's the other direction. Write out the three terms.",
    "return ref_log_probs.exp() * log_ratio": "You weight the log-ratio with the reference's "
    "probability, as F.kl_div does. That's a term of KL(reference || policy), the other direction.",
}
kl_to_reference.cases = {
    "a fair coin": (tensor([[0.5, 0.5]]).log(), tensor([[0.8, 0.2]]).log(), tensor([[1, 1]])),
    "one padded": (tensor([[0.0, -3.0]]), tensor([[-0.5, 0.0]]), tensor([[1.0, 0.0]])),
    "padding alone": (tensor([[-1.0, -3.0]]), tensor([[-0.5, 0.0]]), torch.zeros(1, 2)),
}
kl_to_reference.draw = lambda r: (
    numbers(r, N := r.randint(1, 3), T := r.randint(1, 5), low=-6, high=0),
    numbers(r, N, T, low=-6, high=0),
    mask(r, N, T, holes=True),
)
kl_to_reference.corners = {
    "an infinity under the mask": ((*GARBAGE, tensor([[1, 0, 0]])), MASKED),
    "rare tokens": (
        (tensor([[-1.0, -30.0]]), tensor([[-40.0, -2.0]]), torch.ones(1, 2)),
        "At log-probs of -30 or -40 yours is a different number. If you cap something there (many "
        "do), its gradient is 0, and a token that the policy has lost never comes back.",
    ),
}
kl_to_reference.hints = [
    "What should you get for a token that both policies find equally likely?",
    "With x = ref_log_probs - log_probs, the three terms are exp(x), -x and -1.",
    "Mask first, then take exp: x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0).",
]


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
If you average the token ratios instead, a text with token ratios 1.2 and 1.1 gets 1.15 and escapes
a clip of 0.2, although it has become 1.32 times as likely."""
sequence_grpo_loss.right = {
    "return torch.maximum(-advantages * ratio, -advantages * clipped).mean()": "the minus first.",
}
sequence_grpo_loss.wrong = {
    "ratio = log_ratio.sum(dim=-1, keepdim=True).exp()": "Your ratio has the shape (N, 1) and the "
    "advantages have (N,), so their product is a table (N, N). Sum over dim=-1 without keepdim.",
    "return torch.minimum(ratio * advantages, clipped * advantages).mean()": "The minus is "
    "missing, so an optimizer, which minimizes, would make the bad completions more likely.",
    "return torch.minimum(-ratio * advantages, -clipped * advantages).mean()": "You take the "
    "minimum after the minus. Minus the minimum is the maximum of the two losses.",
    "return -(masked_mean(torch.minimum((x := log_ratio.exp()) * (A := advantages[:, None]), "
    "x.clamp(1 - clip, 1 + clip) * A), mask, dim=1)).mean()": "You clip a ratio for every token, "
    "as in notebook 04. Here a completion has one. Sum its log-ratios, then take exp.",
    "ratio = (log_ratio.sum(dim=-1) / mask.sum(dim=-1)).exp()": "You divide the log-ratio by the "
    "length, as GSPO does (notebook 05). Here the ratio is the product of all token ratios.",
    "ratio = torch.exp((log_probs * real).sum(-1)) / torch.exp((old_log_probs * real).sum(-1))": (
        "A long text's probability underflows to 0, and 0/0 is NaN. Subtract first, then take exp."
    ),
}
new, old = -tensor([[0.5, 0.5, 0.1], [1, 1, 1]]), -tensor([[1, 1, 0.9], [0.5, 0.5, 0.5]])
A, ends, ones = tensor([-2.0, 2.0]), tensor([[1, 1, 0], [1, 1, 1]]), torch.ones(1, 600)
sequence_grpo_loss.cases = {
    "two texts that moved the wrong way": (new, old, A, ends, 0.2),
    "a wide clip": (new, old, A.abs(), ends.float(), 1.25),
    "an advantage of 0": (new, old, tensor([0.0, 2.0]), ends.bool(), 0.1),
    "600 tokens": (-ones, -ones - 2**-10, tensor([-1.0]), ones, 0.2),
}
sequence_grpo_loss.draw = lambda r: (
    numbers(r, N := r.randint(1, 3), T := r.randint(1, 5), low=-1, high=0),
    numbers(r, N, T, low=-1, high=0),
    numbers(r, N),
    mask(r, N, T, holes=True),
    r.choice((0, 0.1, 0.2, 0.9, 1.25)),
)
sequence_grpo_loss.corners = {"garbage": ((*GARBAGE, A[:1], tensor([[1, 0, 0]]), 0.2), MASKED)}
sequence_grpo_loss.hints = [
    "What is the ratio of a whole completion, if you have the log-probs of its tokens?",
    "torch.where(mask.bool(), log_probs - old_log_probs, 0.0), summed over dim=-1, then exp; the "
    "rest is exercise 3.3, with clip on both sides.",
    "Take minus the mean over the rows, because an optimizer minimizes.",
]


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
log-prob, and autograd adds up several draws of one token. If you write `logits[tokens] += ...` by
hand, a token that was drawn twice counts only once."""
grpo_step.right = {
    "loss = -(advantages * (log_p - log_p.detach()).exp()).mean()": "the ratio exp(log_p - "
    "log_p.detach()) is 1, and has the gradient of log_p.",
    "return logits.index_add(0, tokens, lr * advantages / len(tokens))": "the advantages of a "
    "group sum to 0, so the softmax, the same for all, drops out.",
}
grpo_step.wrong = {
    "return policy.detach() + lr * gradient": "You step the wrong way, so the good tokens become "
    "rarer. Descend on the loss, logits - lr * gradient, and mind the minus in the loss itself.",
    "advantages = rewards": "You weight with the raw rewards. Add 10 to all of them, and the step "
    "changes, though no token is better than before. Use advantages.",
    "advantages = rewards - rewards.mean()": "You don't divide by the std (plus 1e-4).",
    "scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)": POPULATION,
    "loss = -(advantages * log_p).sum()": "You sum, so the step grows with G. Take the mean.",
    "new = logits.clone(); new[tokens] += lr * advantages / len(tokens); return new": "A token "
    "drawn twice counts once, because only the last write to a place stays. Let autograd add up.",
}
grpo_step.cases = {
    "section 9": (torch.zeros(4), tensor([0, 1, 2, 0]), tensor([1.0, 0, 0, 1]), 1.0),
    "all wrong": (tensor([1.0, 0, -0.5]), tensor([0, 2]), torch.zeros(2), 0.5),
    "all correct": (tensor([0.5, 0, 0]), tensor([0, 1, 0]), torch.ones(3), 0.5),
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
grpo_step.hints = [
    "Which of the tokens should become more likely, and what are they compared with?",
    "Differentiate in a copy, policy = logits.detach().clone().requires_grad_(), minus the mean of "
    "advantage times policy.log_softmax(dim=-1)[tokens].",
    "torch.autograd.grad(loss, policy) returns a tuple with the gradient. Subtract lr times that.",
]
