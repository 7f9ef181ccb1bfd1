"""PPO beside GRPO"""

import torch

from minigrpo.exercises.form import exercise, texts, whole
from minigrpo.study import ppo


def of_the_package(rewards, values, mask, lam, gamma=1.0):
    """It has no discount, so each token's rewards and values bring their own."""
    faded = gamma ** torch.arange(mask.shape[1])
    return ppo.gae(faded * rewards, faded * values, mask, lam)[0] / faded


@exercise("generalized advantage estimation", package=of_the_package)
def gae(rewards, values, mask, lam, gamma=1.0):
    """rewards, values, mask (N, T), padded on the right -> advantages (N, T), 0 in the padding"""
    real = mask.bool()
    r, V = torch.where(real, rewards, 0.0), torch.where(real, values, 0.0)
    A = torch.zeros_like(V)
    V_next = A_next = torch.zeros_like(V[:, 0])  # (N,): 0 after the end
    for t in reversed(range(V.shape[1])):
        delta = r[:, t] + gamma * V_next - V[:, t]
        A[:, t] = delta + gamma * lam * A_next
        V_next, A_next = V[:, t], A[:, t]
    return A


gae.why = """A completion is over after its last token, so nothing is left to expect there. If you
skip the mask, what the critic says in the padding gets into the last real token's surprise, and
from there into all before it."""


def by_a_matrix(rewards, values, mask, lam, gamma=1.0):
    real, T = mask.bool(), mask.shape[1]
    r, V = (torch.where(real, table, 0.0) for table in (rewards, values))
    delta = r - V + gamma * torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], dim=1)
    later = torch.arange(T)[:, None] - torch.arange(T)  # (T, T): how much later, if it is
    return delta @ ((gamma * lam) ** later.clamp(min=0) * (later >= 0)).to(delta)


gae.right = [by_a_matrix, "r, V = rewards.masked_fill(~real, 0.0), values.masked_fill(~real, 0.0)"]
UNMASKED = "r, V = rewards, values"
gae.wrong = {
    "for t in range(V.shape[1]):": "You go forward. An advantage is made of the surprises that "
    "come after it, so begin at the end.",
    "A[:, t] = delta + gamma * A_next": "You left out lambda. The later surprises fade by "
    "gamma * lam from token to token.",
    "A[:, t] = delta + gamma * gamma * lam * A_next": "You discount twice. From one token to the "
    "next it's gamma * lam, once.",
    UNMASKED: "You don't use the mask, so what stands in the padding gets into the real tokens.",
    (
        "r, V = torch.where(real, rewards, 0.0), values",
        "A[:, t] = torch.where(real[:, t], delta + gamma * lam * A_next, 0.0)",
    ): "After its last token a completion is over. V is 0 there, whatever the critic says in the "
    "padding.",
    "return torch.where(real, (A - A[real].mean()) / A[real].std(), 0.0)": "You normalize. That "
    "comes after gae, in the loop. Return the advantages as they are.",
}
V = torch.tensor([[0.5, 0.6, 0.2, 0.3], [0.25, 0.75, 0.5, 2.0]])
R = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, -1.0, 3.0, -2.0]])
REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
gae.cases = {
    "four tokens, gamma left out": (R[:1], V[:1], REAL[:1], 0.95),
    "two rows": (R, V, REAL, 0.5, 0.8),
    "lambda 0": (R, V, REAL.bool(), 0.0, 1.0),
    "lambda 1": (R, V, REAL.float(), 1.0, 0.9),
}
gae.garbage = True


def ragged(random):
    rewards, values, mask = texts(random, 2, low=-2.0, high=2.0)
    N, T = mask.shape
    real = torch.arange(T) <= whole(random, N, high=T)[:, None]
    lam, gamma = random.choice((0.0, 0.5, 0.95, 1.0)), random.choice((0.5, 0.9, 1.0))
    return rewards, values, real.to(mask), lam, gamma


gae.draw = ragged
gae.hints = """
Put zeros in the padding first. Which token's advantage can you tell without any other?
The last one's. From there backward, A_t is r_t + gamma * V_next - V_t + gamma * lam * A_next."""
