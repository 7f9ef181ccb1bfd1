"""The KL, the entropy, and the family"""

from random import Random

import torch

from minigrpo import logprobs
from minigrpo import objective as course
from minigrpo.clinic.catalogue import NAMED
from minigrpo.exercises.form import FAR, UNDERFLOW, exercise, mask, numbers, texts


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


corrected_kl.why = """The policy also decides which tokens get drawn, and the ratio brings that part
of the gradient back. If you detach it, your gradient is that of k3: on average the forward KL's."""
corrected_kl.right = ["return (x + log_ratio).exp() - ratio * (x + 1)"]
corrected_kl.wrong = {
    "return k3": "Its gradient is that of the other direction: you left out the ratio.",
    "ratio = log_ratio.exp().detach()": "Your ratio is a constant. Leave it attached.",
    "log_ratio = torch.where(real, log_probs - log_probs.detach(), 0.0)": "You divide the policy "
    "by itself, which is right at the first update only. Later the tokens are the old policy's.",
    "x = torch.where(real, log_probs - ref_log_probs, 0.0)": "Inside k3 the log-ratio is upside "
    "down. The reference goes on top: exp(ref - new) - (ref - new) - 1.",
    ("log_ratio = log_probs - old_log_probs", "x = ref_log_probs - log_probs"): "You don't use "
    "the mask, so what comes after the end of a row gets into the penalty.",
    "ratio = (-log_ratio).exp()": NAMED["old_over_new"].sentence,
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
}
corrected_kl.garbage = True
corrected_kl.draw = lambda r: texts(r, 3)
LOW = [table - 900 for table in (NEW, OLD, REF)]
corrected_kl.corners = {"log-probs whose exp is 0": ((*LOW, MASK), UNDERFLOW)}
corrected_kl.hints = """
Multiply k3 by exp(log_probs - old_log_probs). Its value may be 1, but its gradient isn't 0.
Mask x = ref - new and new - old, then (new - old).exp() * (x.exp() - x - 1)."""


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


entropy_bonus.why = """A forbidden token adds nothing to the entropy, so replace its infinite
logarithm before you multiply. If you repair the NaN after the product, the gradient still runs
through it."""
entropy_bonus.right = ["entropy = torch.distributions.Categorical(logits=logits).entropy()"]
entropy_bonus.wrong = {
    "log_p = logits.detach().log_softmax(dim=-1)": NAMED["entropy_detached"].sentence,
    "finite = log_p": "For a forbidden token you multiply 0 by -inf, which is NaN. Put a finite "
    "number in place of that logarithm first.",
    "entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1)": "The value is correct, but "
    "the gradient still runs through the logarithm of 0, and is NaN.",
    "return (torch.where(real, entropy, 0.0).sum(1) / real.sum(1).clamp(min=1)).mean()": "You "
    "average row by row. It's one mean over all real tokens.",
    "return entropy.mean()": "Use the mask, or what comes after the end counts too.",
    "return torch.where(real, entropy, 0.0).mean()": "You divide by the padding too.",
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
    mask(r, N, T),
)
entropy_bonus.corners = {"logits of 1000": ((PLAIN + 1000, torch.ones(2, 3)), FAR)}
entropy_bonus.hints = """
log_p = logits.log_softmax(dim=-1). What's log_p.exp() * log_p where a logit is -inf?
torch.where(log_p.isneginf(), 0.0, log_p) before the product. Then the mean of all real ones."""


def loss_of_the_package(new, old, ref, entropy, A, mask, clip, kl_weight, entropy_weight):
    settings = {"kl_weight": kl_weight, "entropy_weight": entropy_weight, "clip": (clip, clip)}
    settings |= {"ref_log_probs": ref, "kl_correction": True, "entropy": entropy.expand_as(new)}
    return course.grpo_loss(new, old, A, mask, **settings)[0]


@exercise("the whole loss", package=loss_of_the_package, gradient="new entropy")
def grpo_loss(new, old, ref, entropy, advantages, mask, clip, kl_weight, entropy_weight):
    """log-probs new, old, ref and mask (N, T), advantages (N,), the rest numbers -> scalar ()"""
    real = mask.bool()
    new = torch.where(real, new, 0.0)
    old = torch.where(real, old, 0.0)
    ref = torch.where(real, ref, 0.0)
    A = advantages[:, None]  # (N, 1)
    ratio = (new - old).exp()  # (N, T), new over old
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    x = ref - new  # reference over new
    kl = ratio * (x.exp() - x - 1)
    per_token = torch.where(real, kl_weight * kl - objective, 0.0)
    loss = (per_token.sum(dim=-1) / real.sum(dim=-1)).mean()  # rows alike
    return loss - entropy_weight * entropy


grpo_loss.why = """In a loss the objective and the entropy get a minus and the KL a plus. If you
subtract the KL, the first step won't tell you: there it's 0."""
grpo_loss.right = ["kl = ratio * (torch.expm1(x) - x)"]
RAW = "new = 1 * new", "old = 1 * old", "ref = 1 * ref"
grpo_loss.wrong = {
    "return loss + entropy_weight * entropy": NAMED["entropy_penalty_instead_of_a_bonus"].sentence,
    "per_token = torch.where(real, -kl_weight * kl - objective, 0.0)": NAMED[
        "kl_subtracted_from_the_loss"
    ].sentence,
    (*RAW, "per_token = kl_weight * kl - objective"): NAMED[
        "mask_in_the_denominator_only"
    ].sentence,
    "loss = per_token.mean()": "You divide by the width of the batch, padding included.",
    "loss = per_token.sum() / real.sum()": "You average the loss over all tokens at once, so long "
    "rows weigh more. Average each row first.",
    "kl = x.exp() - x - 1": "Your KL is plain k3, with the gradient of the other direction. "
    "Multiply it by the ratio, as in exercise 5.1.",
}
H, A = torch.tensor(1.5), torch.tensor([1.0, -1.0, 0.0])
grpo_loss.cases = {
    "three rows": (NEW, OLD, REF, H, A, MASK, 0.2, 0.1, 0.5),
    "no KL, a wide clip": (NEW, OLD, REF, H, -A, MASK.bool(), 1.5, 0.0, 0.5),
}
grpo_loss.cases["long rows"] = (*LONG, H, A + 1, torch.ones(3, 603), 0.2, 1, 0.5)
grpo_loss.garbage = True
grpo_loss.draw = lambda r: (
    *(given := texts(r, 3))[:3],
    numbers(r, 1, low=0, high=4)[0],
    numbers(r, len(given[3])),
    given[3],
    r.choice((0, 0.2, 0.28, 1.5)),
    *r.choices((0.0, 0.04, 1, 2.5), k=2),
)
grpo_loss.corners = {"log-probs whose exp is 0": ((*LOW, H, A, MASK, 0.2, 0.1, 0.5), UNDERFLOW)}
grpo_loss.hints = """
The ratio is new over old, the KL has ref - new. Per token: kl_weight * kl - objective.
Mask that, average each row, then the rows. The KL is k3 times the ratio, as in 5.1."""
