"""The policy gradient, rung by rung"""

from functools import partial
from random import Random

import torch

from minigrpo import objective as course
from minigrpo.exercises.form import exercise, mask, numbers

advantages = partial(course.group_advantages, scale="none")


@exercise("leave-one-out baseline", package=partial(advantages, baseline="leave_one_out"))
def leave_one_out(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,)"""
    groups = rewards.view(-1, group_size)  # (P, G)
    others = groups.sum(dim=1, keepdim=True) - groups  # the sum without oneself
    baseline = others / (group_size - 1)  # (P, G)
    return (groups - baseline).flatten()


leave_one_out.why = """
A reward that's part of its own baseline drags the baseline toward itself, so you ask only the
others, and then the mean gradient stays exact. If you subtract the mean of the whole group, every
advantage shrinks to (G - 1)/G of this one, and 6, 2, 1 gives you 3, -1, -2 instead of 4.5, -1.5,
-3."""
leave_one_out.right = {
    "return (rewards - groups.mean(dim=1).repeat_interleave(group_size)) * group_size / "
    "(group_size - 1)": "the reward minus the mean of the whole group, times G / (G - 1).",
}
leave_one_out.wrong = {
    "baseline = groups.mean(dim=1, keepdim=True)": "You subtract the mean of the whole group, and "
    "each reward is part of it. Leave the reward itself out.",
    "return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in groups])": "Those are the "
    "advantages of notebook 03. Here you subtract the mean of the others, and nothing is divided.",
    "baseline = rewards.mean()": "You compare with all rewards of the batch, so easy prompts look "
    "like good answers. Compare with those that answered the same prompt.",
    "baseline = others / group_size": "You divide by G, but there are only G - 1 others.",
    ("groups = rewards.view(group_size, -1).T", "return (groups - baseline).T.flatten()"): "You "
    "take every P-th reward for a group. The rows come prompt by prompt, so .view(-1, group_size).",
}
leave_one_out.cases = {
    "one prompt": (torch.tensor([6.0, 2.0, 1.0]), 3),
    "an easy prompt, a hard one": (torch.tensor([1.0, 1, 0, 1, 0, 0, -1, 0]), 4),
    "groups of two": (torch.tensor([1.0, 0, 0, 0, -1.5, 0.5]), 2),
}
SIZES = 2, 3, 4, 6, 12
leave_one_out.draw = lambda r: (numbers(r, 12).round(decimals=r.choice((0, 2))), r.choice(SIZES))
leave_one_out.hints = [
    "Take the rewards 1, 0, 0, 0. What's the mean of the others for the first, and for the second?",
    "The sum of the others is groups.sum(dim=1, keepdim=True) - groups. How many are they?",
    "groups = rewards.view(-1, group_size), the others' sum / (group_size - 1), and .flatten().",
]


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


average.why = """
The first average gives every completion the same weight, the second every token, and the third
divides by a number that no length can change. If you take the plain mean over the rectangle, the
padding ends up in the denominator, so one long completion in the batch makes all the others count
less."""
average.right = {
    "row_means = torch.stack([x[m].sum() / max(m.sum(), 1) for x, m in zip(per_token, real)])": (
        "pick the real tokens of each row with row[mask]; an empty row adds nothing."
    ),
}
ROWS = "return (kept.sum(dim=-1) / real.sum(dim=-1).clamp(min=1)).mean()"
average.wrong = {
    "kept = per_token": "You divide by the real tokens, but you sum over the padding too. Mask it.",
    "row_means = kept.mean(dim=-1)": "In sequence_mean you divide each row by the width of the "
    "batch, padding included. Divide it by the number of its own real tokens.",
    (("return kept.sum() / real.sum()", ROWS),): "Your token_mean is a mean of row means, so the "
    "tokens of short rows weigh more. Divide one sum by the number of all real tokens.",
    "return kept.sum() / kept.numel()": "In constant you divide by the width of this batch, which "
    "changes with the longest row. Use max_length, which never changes.",
    (
        "kept = per_token * mask",
        "row_means = kept.sum(dim=-1) / real.sum(dim=-1)",
    ): "A row without a real token is divided by "
    "0, and 0/0 is NaN. Divide by at least 1, for instance with .clamp(min=1).",
    (("return row_means.mean()", "return row_means[real.any(dim=-1)].mean()"),): "In sequence_mean "
    "you leave rows without a real token out of the mean. They count as 0 here and stay in N.",
}
HOWS = "sequence_mean", "token_mean", "constant"
TEXT = torch.tensor([[1.0, 5, 9, 9, 9], [4, 0, 3, 1, 2], [7, -9, 9, 9, 9]])
REAL = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
HOLES = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
LONG = numbers(Random(4), 5, 603, low=1), torch.ones(5, 603)  # odd: counts may be rounded
average.cases = {f"{how}, the three rows of the text": (TEXT, REAL, how, 10) for how in HOWS}
average.cases |= {f"{how}, a row without a token": (TEXT, HOLES, how, 4) for how in HOWS}
average.cases |= {f"{how}, long rows": (*LONG, how, 700) for how in HOWS}
average.draw = lambda r: (
    numbers(r, N := r.randint(1, 4), T := r.randint(1, 5)),
    mask(r, N, T, holes=True),
    r.choice(HOWS),
    r.randint(1, 8),
)
GARBAGE = (
    "Under a 0 of the mask there may be NaN, and 0 * NaN is NaN, in the backward pass too. "
    "torch.where leaves it alone, if it comes before whatever NaN would spoil."
)
average.corners = {
    "NaN under the mask": ((TEXT.where(REAL > 0, torch.nan), REAL, "token_mean", 10), GARBAGE)
}
average.hints = [
    "kept = torch.where(mask.bool(), per_token, 0.0). All three divide sums of kept. By what?",
    "sequence_mean: kept.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1), then .mean(). token_mean: "
    "kept.sum() / mask.sum(). constant: kept.sum() / (N * max_length).",
]


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


cispo_loss.why = """
The capped ratio only decides how much a token counts, so it's detached, and the gradient comes from
the log-prob alone, even beyond the cap, where the clip would have set it to 0. If you forget the
detach, the value stays the same, but below the cap every gradient is multiplied by 1 + log-prob, so
a good token with a probability of 0.2 is pushed down."""
cispo_loss.right = {"ratio = log_ratio.detach().exp()": "detach before the exp."}
cispo_loss.wrong = {
    "objective = ratio.clamp(max=cap) * A * log_probs": "The value is correct, but your weight has "
    "a gradient of its own. Detach the capped ratio, so that it's a constant.",
    "objective = torch.minimum(ratio * A, ratio.clamp(max=cap) * A)": "That's still the clipped "
    "objective. CISPO has no minimum: the capped ratio, detached, is the weight of A * log_probs.",
    "objective = ratio.clamp(max=1 + cap).detach() * A * log_probs": "You cap the ratio at "
    "1 + cap. Here cap is the bound itself, the largest weight a token can have.",
    "A = advantages": "You multiply (N, T) by (N,), so torch lays the advantages along the tokens. "
    "That fails, or goes wrong without a word where N happens to equal T. Use advantages[:, None].",
    "return -torch.where(real, objective, 0.0).sum() / real.sum()": "You average over all tokens "
    "at once, as the paper does. Here, as in token_loss, average each row first, then the rows.",
    "return row_means.mean()": "The minus is missing. An optimizer minimizes, so bad tokens gain.",
}
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -2.0], [-3.0, -1.0, -2.0]])
NEW = torch.tensor([[-0.5, -2.5, -0.6], [-1.0, -0.2, -3.0], [-1.0, -1.5, -0.9]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1]])
A, STILL = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, -0.5]])
cispo_loss.cases = {
    "ratios beyond the cap and below": (NEW, OLD, A, MASK, 1.2),
    "a row with advantage 0, a cap of 5": (NEW, OLD, STILL, MASK.bool(), 5),
    "long rows": (LONG[0][:3] - 3, LONG[0][:3] - 3, A, LONG[1][:3], 2.0),
}
cispo_loss.draw = lambda r: (
    numbers(r, N := r.randint(1, 4), T := r.randint(1, 5), low=-4, high=-0.05),
    numbers(r, N, T, low=-4, high=-0.05),
    numbers(r, N),
    mask(r, N, T, holes=True),
    r.choice((1, 1.2, 2.5, 5.0)),
)
UNDERFLOW = (
    "At a log-prob of -900 a probability is 0 in float32, and 0/0 is NaN. The exp of the "
    "difference of two log-probs is safe."
)
cispo_loss.corners = {
    "NaN under the mask": ((NEW.where(MASK > 0, torch.nan), OLD, A, MASK, 1.2), GARBAGE),
    "log-probs whose exp is 0": ((NEW - 900, OLD - 900, A, MASK, 1.2), UNDERFLOW),
}
cispo_loss.hints = [
    "A good token has a ratio of 6, and the cap is 5. How much should it count?",
    "Everything in token_loss can stay but the line of the objective. Clamp the ratio from above "
    "only, and detach it: should a weight have a gradient?",
    "objective = ratio.clamp(max=cap).detach() * A * log_probs",
]
