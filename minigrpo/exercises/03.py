"""Reward, advantages, REINFORCE, the loop, the ratio, an experiment, the clip"""

from types import SimpleNamespace

import torch
from torch import nn, tensor

from minigrpo import objective
from minigrpo.clinic.catalogue import NAMED
from minigrpo.exercises.form import exercise, mask, numbers, texts, whole
from minigrpo.logprobs import masked_mean, sequence_log_probs

POPULATION = "Your std divides by G, as NumPy's does. Here it's G - 1, as torch's .std() has it."
EQUAL = (
    "It's right but for a group of equal rewards. Their float32 mean can miss them by a rounding "
    "error, which yours divides. Give such a group exactly 0."
)


@exercise("fraction of a letter", package=lambda x, m, i: masked_mean((x == i).float(), m, dim=-1))
def letter_share(completions, mask, letter_id):
    """completions (N, T) of ids, mask (N, T) with 1 = real token -> (N,), each from 0 to 1"""
    real = mask.bool()
    hits = (completions == letter_id) & real
    return hits.sum(dim=-1) / real.sum(dim=-1)


letter_share.why = """Divide the hits of a row by the real tokens of that row, so that twice the
text isn't worth twice the reward. If you divide by the width of the batch, a short text loses
reward because of its neighbors."""
letter_share.wrong = {
    "return hits.float().mean(dim=-1)": "You divide by the width of the batch.",
    "hits = completions == letter_id": NAMED["mask_in_the_denominator_only"].sentence,
    "hits = completions * mask == letter_id": "You multiply the ids by the mask. That turns "
    "padding into the id 0, which is a letter like any other.",
    "return hits.float().sum(dim=-1)": "You count. Divide by the real tokens.",
    ("hits = completions == letter_id", "return hits.float().mean(dim=-1)"): "You don't use the "
    "mask, so padding counts as text.",
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
    groups = rewards.view(-1, group_size)  # (prompts, G)
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
    (
        "std = groups.std(dim=1, keepdim=True, correction=0)",
        "advantages = (groups - mean) / (std + 1e-8)",
    ): "Two things. You divide by G, not by G - 1, and the formula adds 1e-4 to the std.",
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


@exercise("loss of REINFORCE", gradient="log_probs")
def reinforce(log_probs, mask, advantages):
    """log_probs, mask (N, T), advantages (N,) -> scalar (), to be minimized"""
    log_p = sequence_log_probs(log_probs, mask)  # (N,), exercise 2.2
    return -(advantages * log_p).mean()


reinforce.why = """Each completion's log-prob is weighted with its advantage, and the minus turns
the hill around for an optimizer, which goes down. The mean is over completions, so a long one
counts once, with all of its tokens."""
reinforce.wrong = {
    "return (advantages * log_p).mean()": "The minus is missing. An optimizer minimizes, so the "
    "bad completions would become more likely.",
    "return -(advantages * log_p).sum()": "You add up the completions. Take their mean.",
    "log_p = masked_mean(log_probs, mask, dim=-1)": "You take the mean log-prob per token. The "
    "log-prob of a completion is the sum.",
    "log_p = log_probs.sum(dim=-1)": "You don't use the mask, so what comes after the end counts.",
    "log_p = sequence_log_probs(log_probs, mask)[:, None]": "An (N, 1) times an (N,) is a table "
    "(N, N), in which each completion meets all advantages. Keep the log-probs (N,).",
}
some, ends = -tensor([[1.0, 2], [3, 0.5], [1, 1]]), tensor([[1, 1], [1, 0], [1, 1]])
reinforce.cases = {
    "a good one, a bad one, an idle one": (some, ends, tensor([1.0, -1, 0])),
    "600 tokens": (torch.full((2, 600), -0.5), torch.ones(2, 600), tensor([0.5, -2.0])),
}
reinforce.garbage = True
reinforce.draw = lambda r: (*(given := texts(r, 1)), numbers(r, len(given[0])))
reinforce.hints = """
sequence_log_probs(log_probs, mask) has one number per completion, and so have the advantages.
Multiply the two, take the mean, and put a minus before it."""


class Writer(nn.Module):
    """A policy small enough to judge a loop by: after prompt p it writes numbers around mean[p]."""

    def __init__(self, copies=0):
        super().__init__()
        self.mean, self.copies = nn.Parameter(tensor([0.0, 1.0])), copies

    def __deepcopy__(self, memo):
        return Writer(self.copies + 1)

    def __eq__(self, other):  # it's there to be changed
        return isinstance(other, Writer)

    __hash__ = nn.Module.__hash__

    def log_prob(self, x):
        return -((x - self.mean[:, None]) ** 2).flatten() / 2


def write_numbers(policy):
    if policy.copies > 1:
        raise ValueError("this is a copy. Train the policy itself")
    x = policy.mean.detach()[:, None] + tensor([-1.0, -0.25, 0.5, 1.5])  # (2, 4)
    return SimpleNamespace(x=x, log_probs=policy.log_prob(x).detach())


def nearness(batch):
    return -((batch.x - tensor([[1.5], [-1.0]])) ** 2).flatten() / 10


def ratio_loss(policy, batch, advantages):
    return -(advantages * (policy.log_prob(batch.x) - batch.log_probs).exp()).mean()


def in_fours(rewards):
    return group_advantages(rewards, 4)


@exercise("the loop", keywords="passes lr")
def train(policy, sample_batch, grade, compare, loss_of, *, passes, lr):
    """passes: a list, the number of updates on each batch -> as many mean rewards"""
    optimizer, history = torch.optim.Adam(policy.parameters(), lr=lr), []
    for updates in passes:  # one batch each
        batch = sample_batch(policy)
        rewards = grade(batch)
        advantages = compare(rewards)
        for _ in range(updates):
            loss = loss_of(policy, batch, advantages)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(rewards.mean().item())
    return history


train.why = """Sampling, reward and comparison happen once per batch, and only the three lines of
the update repeat. What the sampler stored with the batch stays as it was, so from the second pass
on the batch is older than the policy that learns from it."""
train.wrong = {
    "loss = loss_of(policy, sample_batch(policy), advantages)": "You write a new batch for every "
    "update, so the advantages belong to other completions. Keep the batch for all its passes.",
    (("optimizer.zero_grad()", "pass"),): "The old gradients are still there when you call "
    "backward(), and it adds to them. Call zero_grad() before each.",
    "advantages = rewards": "You weight with the raw rewards. Compare them first.",
    (("range(updates)", "range(1)"),): "You take one update per batch, whatever `passes` says.",
    (("compare(rewards)", "compare(rewards); optimizer = torch.optim.Adam([policy.mean], lr)"),): (
        "You make a new Adam for each batch, so it forgets. Make one before the loop."
    ),
    "history.append(grade(sample_batch(policy)).mean().item())": "What you return is measured "
    "after the updates. We want the mean reward of the batch that was learned from.",
}
WORLD = Writer(), write_numbers, nearness, in_fours, ratio_loss
train.cases = {
    "one pass, four batches": (*WORLD, [1, 1, 1, 1], 0.1),
    "three passes": (*WORLD, [3, 3, 3], 0.05),
    "passes that change": (*WORLD, [2, 1, 4, 1, 1], 0.1),
}
train.hints = """
One Adam before the loop. Per batch: sample_batch, grade, compare. Then the passes.
A pass: loss_of(policy, batch, advantages), zero_grad(), backward(), step(). The batch stays."""


@exercise(
    "ratio of two policies",
    package=lambda new, old, m: objective.policy_ratio(new, old, m, level="sequence")[:, 0],
    gradient="log_probs",
)
def sequence_ratio(log_probs, old_log_probs, mask):
    """log_probs, old_log_probs, mask (N, T) -> (N,), new over old"""
    real = mask.bool()
    new = torch.where(real, log_probs, 0.0)
    old = torch.where(real, old_log_probs, 0.0)
    return (new - old).sum(dim=-1).exp()


sequence_ratio.why = """In log space the product of the token ratios is a subtraction and a sum,
with a single exp at the end. If you take exp first and then divide, a long text gives you 0/0."""
sequence_ratio.right = ["return (new.sum(dim=-1) - old.sum(dim=-1)).exp()"]
sequence_ratio.wrong = {
    "return (old - new).sum(dim=-1).exp()": "This is old over new. Turn it around.",
    "return masked_mean((new - old).exp(), mask, dim=-1)": "Multiply the ratios; don't average.",
    "return masked_mean(new - old, mask, dim=-1).exp()": "You divide by the length, as GSPO does "
    "(notebook 05). Here we want the whole product.",
    "return new.sum(dim=-1).exp() / old.sum(dim=-1).exp()": "You take exp first, and then you "
    "divide. For a long text that's 0/0. Subtract first.",
}
sequence_ratio.cases = {
    "far apart": (torch.full((1, 1), -30.0), torch.full((1, 1), -55.0), torch.ones(1, 1)),
    "twice as likely": (torch.tensor([[-1.0]]), torch.tensor([[0.5]]).log() - 1, torch.ones(1, 1)),
    "a long text": (torch.full((1, 600), -0.5), torch.full((1, 600), -0.501), torch.ones(1, 600)),
}
sequence_ratio.garbage = True
sequence_ratio.draw = lambda r: texts(r, 2, low=-2)
FAR_APART = torch.tensor([[-1.0, -150.0]]), torch.tensor([[-150.0, -1.0]]), torch.ones(1, 2)
ONCE = "A token ratio of e^149 is infinite, and times 0 it's NaN. Add up first, then take exp once."
sequence_ratio.corners = {"ratios of e^149 and e^-149": (FAR_APART, ONCE)}
sequence_ratio.hints = """
In log space a quotient is a difference. Mask both before you subtract.
Sum the masked differences over dim=-1, then exp, once, at the very end."""


@exercise("an experiment that decides")
def recovery(new_adam, batches):
    """new_adam True or False, batches in all -> calls of `train`: for each its list of passes"""
    spoiled, healthy = [4], [1] * (batches - 1)
    return [spoiled, healthy] if new_adam else [spoiled + healthy]


recovery.why = """The two runs differ in one thing. Both blow up batch 1, and both go on with one
pass, where every ratio is 1 and can do no harm. A second call of `train` makes a new Adam, so what
differs in the end is Adam's doing."""
recovery.wrong = {
    "spoiled, healthy = [4], [4] * (batches - 1)": "Four passes bring huge ratios in every batch, "
    "whichever Adam it is. If both runs fail, you can't tell the two suspects apart.",
    "return [spoiled + healthy]": "One call makes one Adam, so both of your runs keep the old one.",
    "return [spoiled, healthy]": "Each call makes a new Adam, so both of your runs get a new one.",
    "spoiled, healthy = [4], [1] * batches": "Count again. The blown-up batch is one of them.",
}
recovery.cases = {"the same Adam": (False, 5), "a new Adam": (True, 16)}
recovery.hints = """
With one pass, all ratios are 1. So which passes leave only Adam as a suspect?
[4] + [1] * (batches - 1) is one call. The same numbers in two lists are two calls, two Adams."""


@exercise(
    "clipped objective",
    package=lambda ratio, A, clip: objective.clipped_surrogate(ratio, A, (clip, clip)),
    gradient="ratio",
)
def clipped_objective(ratio, advantages, clip):
    """ratio (N,), advantages (N,), clip a number such as 0.2 -> (N,), to be maximized"""
    good = ratio.clamp(max=1 + clip)  # flat above, so a good one stops being pushed up
    bad = ratio.clamp(min=1 - clip)  # flat below, so a bad one stops being pushed down
    return torch.where(advantages > 0, good, bad) * advantages


clipped_objective.why = """Each sign has one bound, on the side to which its advantage pushes. On
the other side nothing is flat, so a good completion that has become rare is still pulled back. With
both bounds it would get no gradient there."""
clipped_objective.right = [
    "return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)"
]
clipped_objective.wrong = {
    "return ratio * advantages": "Nothing is clipped, so nothing stops a move that goes too far.",
    "return ratio.clamp(1 - clip, 1 + clip) * advantages": NAMED["clamp_without_min"].sentence,
    "return torch.maximum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)": NAMED[
        "max_for_min"
    ].sentence,
    "return good * advantages": "At A < 0 you clip the wrong side.",
    ("good = ratio.clamp(max=clip)", "bad = ratio.clamp(min=clip)"): "The edges are 1 + clip and "
    "1 - clip, because the ratio begins at 1.",
}
clipped_objective.cases = {
    "the four cases": (tensor([1.5, 0.5, 1.5, 0.5]), tensor([1.0, 1, -1, -1]), 0.2),
    "far away": (tensor([0.0, 0.0, 12.0, 12.0]), tensor([1.0, -2, 0.5, -2]), 0.2),
}
clipped_objective.draw = lambda r: (  # never at a bound, where any gradient is fine
    numbers(r, N := r.randint(3, 6), low=0.0, high=r.choice((1.5, 4.0))) + 0.005,
    numbers(r, N),
    r.choice((0, 0.1, 0.2, 0.3, 0.9)),
)
clipped_objective.hints = """
At A > 0, which side is flat? There the ratio has been replaced by a number. By which?
ratio.clamp(max=1 + clip) for A > 0, ratio.clamp(min=1 - clip) otherwise; torch.where chooses."""
