"""The KL, the entropy, and the family"""

from random import Random

import torch

from minigrpo import logprobs
from minigrpo import objective as course
from minigrpo.exercises.form import exercise, mask, numbers


def kl_of_the_package(new, old, ref, mask):
    new, old, ref = (table.masked_fill(mask == 0, 0.0) for table in (new, old, ref))
    return course.policy_ratio(new, old, mask) * course.kl_estimate(new, ref)


@exercise("KL with the right gradient", package=kl_of_the_package, gradient="log_probs")
def corrected_kl(log_probs, old_log_probs, ref_log_probs, mask):
    """log_probs, old_log_probs, ref_log_probs, mask (N, T) -> (N, T), 0 where masked"""
    real = mask.bool()
    log_ratio = torch.where(real, log_probs - old_log_probs, 0.0)
    ratio = log_ratio.exp()  # policy over old
    x = torch.where(real, ref_log_probs - log_probs, 0.0)  # reference over policy
    k3 = x.exp() - x - 1
    return ratio * k3


corrected_kl.why = """
The gradient of k3 leaves out that the policy also decides which tokens get drawn, and the ratio
brings that part back through the product rule. If you detach the ratio, every value stays the same,
but at the first update your gradient is that of plain k3 again, which on average is the gradient of
the forward KL."""
corrected_kl.right = {
    "return (x + log_ratio).exp() - ratio * (x + 1)": "ref over old, minus new over old (x + 1).",
}
corrected_kl.wrong = {
    "return k3": "That's k3 alone. At the first update its value is correct, but its gradient is "
    "that of the other direction. Multiply by the ratio.",
    "ratio = log_ratio.exp().detach()": "The value is correct, but your ratio is a constant. The "
    "policy also changes which tokens are drawn, so leave the ratio attached.",
    "log_ratio = torch.where(real, log_probs - log_probs.detach(), 0.0)": "You divide the policy "
    "by itself, which is right at the first update only. Later the tokens are the old policy's.",
    "x = torch.where(real, log_probs - ref_log_probs, 0.0)": "Inside k3 the log-ratio is upside "
    "down. The reference goes on top: exp(ref - new) - (ref - new) - 1.",
    "k3 = -x": "You multiply k1, new - ref, by the ratio. On average it has the same value and "
    "gradient, but single tokens come out negative and noisy. Use k3 here.",
    ("log_ratio = log_probs - old_log_probs", "x = ref_log_probs - log_probs"): "You don't use the "
    "mask, so what comes after the end of a row gets into the penalty.",
}
MASK = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]])
NEW = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -0.25, -3.0], [-0.5, -1.0, -2.0]])
OLD = torch.tensor([[-1.0, -1.0, -0.25], [-2.0, -0.25, -2.5], [-1.0, -1.5, -0.5]])
REF = torch.tensor([[-1.5, -1.0, -1.5], [-0.5, -1.25, -30.0], [-1.0, -0.5, -0.5]])
LONG = [numbers(Random(seed), 3, 603, low=-3, high=-0.05) for seed in range(3)]
corrected_kl.cases = {
    "the first update": (NEW, NEW, REF, MASK),
    "a later update": (NEW, OLD, REF, MASK > 0),
    "long rows": (*LONG, torch.ones(3, 603)),
    "a row without a token": (NEW, OLD, REF, MASK * torch.tensor([[1.0], [1.0], [0.0]])),
}


def draw_policies(r):
    N, T = r.randint(1, 4), r.randint(1, 5)
    tables = [numbers(r, N, T, low=-4, high=-0.05) for _ in range(3)]
    return *tables, mask(r, N, T, holes=True)


corrected_kl.draw = draw_policies
GARBAGE = (
    "Under a 0 of the mask there may be NaN, and 0 * NaN is NaN, in the backward pass too. "
    "torch.where leaves it alone, if it comes before the exp."
)
UNDERFLOW = (
    "At a log-prob of -900 a probability is 0 in float32, and 0/0 is NaN. The exp of the "
    "difference of two log-probs is safe."
)
HIDDEN = [table.where(MASK > 0, torch.nan) for table in (NEW, OLD, REF)]
LOW = [table - 900 for table in (NEW, OLD, REF)]
corrected_kl.corners = {
    "NaN under the mask": ((*HIDDEN, MASK), GARBAGE),
    "log-probs whose exp is 0": ((*LOW, MASK), UNDERFLOW),
}
corrected_kl.hints = [
    "The tokens were drawn from the policy. If the policy changes, what changes besides k3 itself?",
    "Multiply k3 by exp(log_probs - old_log_probs). Its value may be 1, but its gradient isn't 0.",
    "Mask x = ref - new and new - old, then (new - old).exp() * (x.exp() - x - 1).",
]


@exercise(
    "entropy bonus",
    package=lambda logits, mask: logprobs.masked_mean(logprobs.token_entropy(logits), mask),
    gradient="logits",
)
def entropy_bonus(logits, mask):
    """logits (N, T, V), mask (N, T) -> scalar (), in nats"""
    log_p = logits.log_softmax(dim=-1)  # (N, T, V)
    finite = torch.where(log_p.isneginf(), 0.0, log_p)  # 0 * -inf would be NaN
    entropy = -(log_p.exp() * finite).sum(dim=-1)  # (N, T)
    real = mask.bool()
    return torch.where(real, entropy, 0.0).sum() / real.sum()


entropy_bonus.why = """
Entropy is a sum over the whole vocabulary, and a forbidden token adds nothing to it, so you replace
its infinite logarithm before you multiply. If you repair the NaN of 0 times -inf after the product,
the value is right, but the gradient still runs through that product and comes out as NaN."""
entropy_bonus.right = {
    "entropy = torch.distributions.Categorical(logits=logits).entropy()": "torch's Categorical.",
}
entropy_bonus.wrong = {
    "log_p = logits.detach().log_softmax(dim=-1)": "The entropy has no gradient (a detach, or "
    "no_grad?). That's fine for a metric, but as a bonus it has no effect.",
    "finite = log_p": "The formula is correct, but a forbidden token has p = 0 and log p = -inf, "
    "and 0 * -inf is NaN. Put a finite number in place of that logarithm before you multiply.",
    "entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1)": "The value is correct, but "
    "the gradient still runs through the logarithm of 0, and is NaN. Replace that logarithm first.",
    "log_p = logits.softmax(dim=-1).clamp(min=1e-6).log()": "You raise every tiny probability to "
    "1e-6, and over a vocabulary that adds up. Start from log_softmax.",
    "return entropy.mean()": "You don't use the mask, so the policy would be rewarded for "
    "hesitating after the end of a row.",
    "return torch.where(real, entropy, 0.0).mean()": "You divide by all positions, padding "
    "included, so one long row makes the bonus smaller. Divide by the number of real positions.",
}
PLAIN = torch.tensor([[[2.0, 0, 0], [0, 1, -1], [3, -3, 0]], [[0, 4, 1], [-2, 0, 2], [1, 1, 0]]])
TEXT = torch.tensor([[[0.5, 0.25, 0.25], [0, 1, 0], [0.1, 0.2, 0.7]]]).log()
WIDE = torch.cat([PLAIN[:1], torch.full((1, 3, 30_000), -torch.inf)], dim=-1)
entropy_bonus.cases = {
    "two rows": (PLAIN, torch.tensor([[1, 1, 0], [1, 0, 0]])),
    "the text's three positions, one of them certain": (TEXT, torch.tensor([[1.0, 1, 0]])),
    "a hundred forbidden tokens": (WIDE[..., :103], torch.tensor([[True, False, True]])),
    "a long row": (numbers(Random(5), 1, 603, 4), torch.ones(1, 603)),
}
entropy_bonus.draw = lambda r: (
    numbers(r, N := r.randint(1, 3), T := r.randint(1, 4), r.randint(1, 6), low=-6, high=6),
    mask(r, N, T, holes=True),
)
entropy_bonus.corners = {
    "30,000 forbidden tokens": (
        (WIDE, torch.ones(1, 3)),
        "Whatever you add to a tiny probability, however little, adds up over a real vocabulary. "
        "log_softmax needs no such help.",
    ),
    "logits of 1000": (
        (PLAIN + 1000, torch.ones(2, 3)),
        "The exp of a logit above 88 is infinite. log_softmax subtracts the largest one first.",
    ),
}
entropy_bonus.hints = [
    "Take one position. With which weight does the surprise -log p of each token enter?",
    "log_p = logits.log_softmax(dim=-1). What's log_p.exp() * log_p where a logit is -inf?",
    "torch.where(log_p.isneginf(), 0.0, log_p) before the product. Then one mean over all real "
    "positions, the token_mean of exercise 4.2.",
]


def loss_of_the_package(new, old, ref, entropy, A, mask, clip, kl_weight, entropy_weight):
    settings = {"kl_weight": kl_weight, "entropy_weight": entropy_weight, "clip": (clip, clip)}
    return course.grpo_loss(new, old, A, mask, ref_log_probs=ref, entropy=entropy, **settings)[0]


@exercise("the whole loss", package=loss_of_the_package, gradient="log_probs entropy")
def grpo_loss(
    log_probs,
    old_log_probs,
    ref_log_probs,
    entropy,
    advantages,
    mask,
    clip,
    kl_weight,
    entropy_weight,
):
    """log-probs, entropy, mask (N, T), advantages (N,), clip and weights numbers -> scalar ()"""
    real = mask.bool()
    new = torch.where(real, log_probs, 0.0)
    old = torch.where(real, old_log_probs, 0.0)
    ref = torch.where(real, ref_log_probs, 0.0)
    A = advantages[:, None]  # (N, 1)
    ratio = (new - old).exp()  # (N, T), new over old
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    x = ref - new  # reference over new
    kl = x.exp() - x - 1
    per_token = torch.where(real, kl_weight * kl - objective, 0.0)
    loss = (per_token.sum(dim=-1) / real.sum(dim=-1)).mean()  # rows alike
    mean_entropy = torch.where(real, entropy, 0.0).sum() / real.sum()  # tokens alike
    return loss - entropy_weight * mean_entropy


grpo_loss.why = """
You want a high objective and a high entropy but a small KL, so in a loss the first two get a minus
and the KL a plus, and only the entropy is averaged over all real tokens at once. If you subtract
the KL too, the loss rewards distance from the reference, and the first step won't tell you, because
there the KL and its gradient are both 0."""
grpo_loss.right = {"mean_entropy = entropy[real].mean()": "pick the tokens with entropy[real]."}
RAW = "new = log_probs", "old = old_log_probs", "ref = ref_log_probs"
grpo_loss.wrong = {
    "return loss + entropy_weight * mean_entropy": "You add the entropy to the loss, so the policy "
    "is punished for staying undecided. Subtract it.",
    "per_token = torch.where(real, -kl_weight * kl - objective, 0.0)": "You subtract the KL, so "
    "the policy is rewarded for leaving the reference. In a loss the KL is added.",
    "mean_entropy = torch.where(real, entropy, 0.0).sum().detach() / real.sum()": "The entropy has "
    "no gradient here. That's fine for a metric, but as a bonus it has no effect.",
    (*RAW, "per_token = kl_weight * kl - objective"): "You divide by the real tokens, but you sum "
    "over the padding too. Mask what you sum.",
    "loss = per_token.sum() / real.sum()": "You average the loss over all tokens at once, so long "
    "rows weigh more. Here each row is averaged first, then the rows.",
    "mean_entropy = (torch.where(real, entropy, 0.0).sum(dim=-1) / real.sum(dim=-1)).mean()": "You "
    "average the entropy row by row. It's one mean over all real tokens of the batch.",
}
ENTROPY = torch.tensor([[0.5, 2.0, 1.0], [3.0, 1.5, 0.0], [1.0, 0.25, 2.5]])
A = torch.tensor([1.0, -1.0, 0.0])
grpo_loss.cases = {
    "three rows": (NEW, OLD, REF, ENTROPY, A, MASK, 0.2, 0.1, 0.5),
    "no KL, a wide clip": (NEW, OLD, REF, ENTROPY, -A, MASK.bool(), 1.5, 0.0, 0.5),
}
grpo_loss.cases["long rows"] = (*LONG[:1] * 3, -LONG[0], A + 1, torch.ones(3, 603), 0.2, 1, 0.5)
grpo_loss.draw = lambda r: (
    *(tables := draw_policies(r))[:3],
    numbers(r, *tables[0].shape, low=0, high=4),
    numbers(r, len(tables[0])),
    tables[3],
    r.choice((0, 0.2, 0.28, 1.5)),
    r.choice((0.0, 0.04, 1, 2.5)),
    r.choice((0.0, 0.01, 1, 3.0)),
)
grpo_loss.corners = {
    "NaN under the mask": ((*HIDDEN, HIDDEN[0], A, MASK, 0.2, 0.1, 0.5), GARBAGE),
    "log-probs whose exp is 0": ((*LOW, ENTROPY, A, MASK, 0.2, 0.1, 0.5), UNDERFLOW),
}
grpo_loss.hints = [
    "With which sign do clipped objective, k3 and entropy enter a loss? How is each averaged?",
    "The ratio is new over old, the KL has ref - new. Per token: kl_weight * kl - objective.",
    "Mask that, sum each row, divide by its number of real tokens, and take the mean of the rows. "
    "Then subtract entropy_weight times torch.where(real, entropy, 0.0).sum() / real.sum().",
]
