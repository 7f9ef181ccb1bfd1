"""The policy gradient, rung by rung"""

from functools import partial
from random import Random

import torch

from minigrpo import objective as course
from minigrpo.clinic.catalogue import NAMED
from minigrpo.exercises.form import UNDERFLOW, exercise, numbers, texts

advantages = partial(course.group_advantages, scale="none")


@exercise("leave-one-out baseline", package=partial(advantages, baseline="leave_one_out"))
def leave_one_out(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,)"""
    groups = rewards.view(-1, group_size)  # (P, G)
    others = groups.sum(dim=1, keepdim=True) - groups  # the sum without oneself
    baseline = others / (group_size - 1)  # (P, G)
    return (groups - baseline).flatten()


leave_one_out.why = """A reward that's part of its own baseline drags the baseline toward itself.
With the mean of the whole group, 6, 2, 1 gives you 3, -1, -2 instead of 4.5, -1.5, -3."""
leave_one_out.wrong = {
    "baseline = groups.mean(dim=1, keepdim=True)": "Leave the reward itself out.",
    "return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in groups])": "Those are the "
    "advantages of notebook 03. Here nothing is divided, and you subtract the mean of the others.",
    "baseline = rewards.mean()": "You compare with all prompts.",
    "baseline = others / group_size": "You divide by G, but there are only G - 1 others.",
    ("groups = rewards.view(group_size, -1).T", "return (groups - baseline).T.flatten()"): "You "
    "take every P-th reward for a group. The rows come prompt by prompt, so .view(-1, group_size).",
    "return ((groups - baseline) / (groups.std(1, keepdim=True) + 1e-4)).flatten()": "You divide "
    "by the std, as in notebook 03. Here nothing is divided.",
}
leave_one_out.cases = {
    "one prompt": (torch.tensor([6.0, 2.0, 1.0]), 3),
    "an easy prompt, a hard one": (torch.tensor([1.0, 1, 0, 1, 0, 0, -1, 0]), 4),
}
leave_one_out.draw = lambda r: (numbers(r, 12), r.choice((2, 3, 4, 6, 12)))
leave_one_out.hints = """
The sum of the others is groups.sum(dim=1, keepdim=True) - groups. How many are they?
groups = rewards.view(-1, group_size), and the others' sum / (group_size - 1)."""


@exercise(
    "three averages",
    package=lambda *a: course.aggregate(*a[:2], how=a[2], max_length=a[3]),
    gradient="per_token",
)
def average(per_token, mask, how, max_length):
    """per_token, mask (N, T), how "sequence_mean", "token_mean" or "constant" -> scalar ()"""
    real = mask.bool()
    kept = torch.where(real, per_token, 0.0)
    if how == "sequence_mean":
        row_means = kept.sum(dim=-1) / real.sum(dim=-1).clamp(min=1)
        return row_means.mean()
    if how == "token_mean":
        return kept.sum() / real.sum()
    return kept.sum() / (len(mask) * max_length)


average.why = """The first average gives every completion the same weight, the second every token,
and the third divides by a number that no length can change."""
ROWS = "return (kept.sum(dim=-1) / real.sum(dim=-1).clamp(min=1)).mean()"
average.wrong = {
    "kept = per_token": NAMED["mask_in_the_denominator_only"].sentence,
    "row_means = kept.mean(dim=-1)": NAMED["mean_over_the_padding"].sentence,
    (("return kept.sum() / real.sum()", ROWS),): NAMED["row_mean_for_token_mean"].sentence,
    "return kept.sum() / kept.numel()": NAMED["dr_grpo_divides_by_the_width"].sentence,
    ("kept = per_token * mask", "row_means = kept.sum(dim=-1) / real.sum(dim=-1)"): NAMED[
        "masked_row_divides_by_zero"
    ].sentence,
    (("return row_means.mean()", "return row_means[real.any(dim=-1)].mean()"),): NAMED[
        "masked_rows_leave_the_denominator"
    ].sentence,
}
HOWS = "sequence_mean", "token_mean", "constant"
TEXT = torch.tensor([[1.0, 5, 9, 9, 9], [4, 0, 3, 1, 2], [7, -9, 9, 9, 9]])
REAL = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
HOLES = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
LONG = numbers(Random(4), 5, 603, low=1), torch.ones(5, 603)  # odd: counts may be rounded
average.cases = {f"{how}, three rows": (TEXT, REAL, how, 10) for how in HOWS}
average.cases |= {f"{how}, a row without a token": (TEXT, HOLES, how, 4) for how in HOWS}
average.cases |= {f"{how}, long rows": (*LONG, how, 700) for how in HOWS}
average.garbage = True
average.draw = lambda r: (*texts(r, 1, high=4.0), r.choice(HOWS), r.randint(1, 8))
average.hints = """
kept = torch.where(mask.bool(), per_token, 0.0). All three divide sums of kept. By what?
By mask.sum(dim=-1).clamp(min=1), and then .mean(); by mask.sum(); by N * max_length."""


@exercise(
    "CISPO",
    package=lambda *a: course.grpo_loss(*a[:4], surrogate="cispo", clip=(0, a[4] - 1))[0],
    gradient="log_probs",
)
def cispo_loss(log_probs, old_log_probs, advantages, mask, cap):
    """log_probs, old_log_probs, mask (N, T), advantages (N,), cap a number -> scalar ()"""
    real = mask.bool()
    log_ratio = torch.where(real, log_probs - old_log_probs, 0.0)
    ratio = log_ratio.exp()  # (N, T), new over old
    A = advantages[:, None]  # (N, 1): the same for every token of a row
    objective = ratio.clamp(max=cap).detach() * A * log_probs  # the new line
    row_means = torch.where(real, objective, 0.0).sum(dim=-1) / real.sum(dim=-1)
    return -row_means.mean()


cispo_loss.why = """The capped ratio only decides how much a token counts, so it's detached. Without
the detach the value is the same, but below the cap every gradient is multiplied by 1 + log-prob."""
cispo_loss.right = ["ratio = log_ratio.detach().exp()"]
cispo_loss.wrong = {
    "objective = ratio.clamp(max=cap) * A * log_probs": "The value is correct, but your weight "
    "has a gradient of its own. Detach the capped ratio.",
    "objective = torch.minimum(ratio * A, ratio.clamp(max=cap) * A)": "That's still the clipped "
    "objective. CISPO has no minimum: the capped ratio is a weight of A * log_probs.",
    "objective = ratio.clamp(max=1 + cap).detach() * A * log_probs": "You cap the ratio at "
    "1 + cap. Here cap is the largest weight a token can have.",
    "A = advantages": "You multiply (N, T) by (N,), which fails, or goes wrong without a word "
    "where N equals T. Use advantages[:, None].",
    "return -torch.where(real, objective, 0.0).sum() / real.sum()": "You average over all tokens "
    "at once, as the paper does. Here average each row first, then the rows.",
    "return row_means.mean()": "The minus is missing. An optimizer minimizes, so bad tokens gain.",
}
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -2.0], [-3.0, -1.0, -2.0]])
NEW = torch.tensor([[-0.5, -2.5, -0.6], [-1.0, -0.2, -3.0], [-1.0, -2.5, -0.5]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1]])
A, STILL = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, -0.5]])
cispo_loss.cases = {
    "ratios beyond the cap and below": (NEW, OLD, A, MASK, 1.2),
    "a row with advantage 0, a cap of 5": (NEW, OLD, STILL, MASK.bool(), 5),
    "long rows": (LONG[0][:3] - 3, LONG[0][:3] - 3, A, LONG[1][:3], 2.0),
}
cispo_loss.garbage = True
cispo_loss.draw = lambda r: (
    *(given := texts(r, 2))[:2],
    numbers(r, len(given[2])),
    given[2],
    r.choice((1, 1.2, 2.5, 5.0)),
)
cispo_loss.corners = {"log-probs whose exp is 0": ((NEW - 900, OLD - 900, A, MASK, 1.2), UNDERFLOW)}
cispo_loss.hints = """
All of token_loss can stay but the line of the objective. Should a weight have a gradient?
objective = ratio.clamp(max=cap).detach() * A * log_probs"""
