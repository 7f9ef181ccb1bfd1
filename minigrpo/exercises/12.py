"""Two authors in one text: whose token it is, what is learned from, and how good it can get"""

import torch

from minigrpo.exercises.form import exercise, texts, whole
from minigrpo.objective import grpo_loss
from minigrpo.turns import commits


@exercise("whose token is it?")
def own_mask(lengths, replies):
    """lengths: N ints; replies: N lists of (start, length) -> (N, T) bool, T the longest"""
    T = max(lengths)
    own = torch.arange(T) < torch.tensor(lengths)[:, None]  # (N, T): the real tokens
    for row, spans in enumerate(replies):
        for start, length in spans:
            own[row, start : start + length] = False
    return own


own_mask.why = """A row's real tokens are the policy's, except where a tool wrote. A slice that goes
past the end of the row changes nothing there, so a reply that didn't fit needs no case of its
own."""
SLICE = "own[row, start : start + length] = False"
own_mask.wrong = {
    "own = torch.ones(len(lengths), T, dtype=torch.bool)": "You count the padding as the policy's. "
    "Nobody wrote it, so it's False.",
    (
        (SLICE, "own[row, start : start + length + 1] = False"),
    ): "You take the token after the reply, too. That one is the policy's again.",
    (
        (SLICE, "own[row, start - 1 : start + length] = False"),
    ): "You take the closing tag of the call from the "
    "policy. It decided to call, so it has to learn from it.",
    (
        (SLICE, "own[row, start:] = False"),
    ): "After a reply the policy writes on. Only the reply is the tool's.",
    (
        (SLICE, "own[row, start:length] = False"),
    ): "(start, length), not (start, end). The slice ends at start + length.",
    (
        (SLICE, "own[:, start : start + length] = False"),
    ): "Other rows have their replies elsewhere. Change this row only.",
}
own_mask.cases = {
    "a call, a result, an answer": ([10], [[(3, 3)]]),
    "two rows": ([16, 4], [[(3, 3), (9, 3)], []]),
    "the reply didn't fit": ([6, 5], [[(2, 1)], [(4, 3)]]),
}
own_mask.draw = lambda r: (
    lengths := [r.randint(4, 12) for _ in range(r.randint(1, 4))],
    [[(t, r.randint(1, 3)) for t in range(2, T, 5) if r.random() < 0.7] for T in lengths],
)
own_mask.hints = """
Which tokens of a row are real at all? torch.arange(T) < torch.tensor(lengths)[:, None].
Then, for each (start, length) of a row: own[row, start : start + length] = False."""


def of_the_package(log_probs, old_log_probs, advantages, own, clip):
    loss, _ = grpo_loss(log_probs, old_log_probs, advantages, own, clip=clip, how="token_mean")
    return loss


@exercise("the loss of several turns", package=of_the_package, gradient="log_probs")
def turn_loss(log_probs, old_log_probs, advantages, own, clip):
    """log_probs, old_log_probs, own (N, T), advantages (N,), clip (low, high) -> scalar ()"""
    low, high = clip
    A = advantages[:, None]  # (N, 1): the same for every turn of a row
    ratio = torch.where(own.bool(), log_probs - old_log_probs, 0.0).exp()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    return -(objective * own).sum() / own.sum()


turn_loss.why = """The sampler has no log-prob for what it didn't draw and keeps a 0 there, so a
ratio at the tool's tokens means nothing. They're neither in the sum nor in the divisor."""
turn_loss.wrong = {
    "return -objective.sum() / own.sum()": "The tool's tokens, with ratios of 1, are still in your "
    "sum. Leave them out.",
    "return -(objective * own).mean()": "You divide by all places, the tool's and the padding. "
    "Divide by own.sum().",
    "return -((objective * own).sum(dim=1) / own.sum(dim=1)).mean()": "You take the mean of each "
    "row first, so a token in a long episode weighs less. Take one mean over all own tokens.",
    "return (objective * own).sum() / own.sum()": "That's the objective, which goes up. A loss is "
    "its negative.",
    "ratio = torch.where(own.bool(), old_log_probs - log_probs, 0.0).exp()": "Your ratio is old "
    "over new. It's new over old.",
    "objective = ratio.clamp(1 - low, 1 + high) * A": "You always clamp. The clip takes the "
    "minimum of both, so a token that moved the wrong way keeps its gradient.",
}
ONE = torch.tensor([[-1.0, -0.1, -0.5, -2.0]]), torch.tensor([[-1.2, 0.0, 0.0, -1.9]])
turn_loss.cases = {
    "two of four": (*ONE, torch.tensor([1.0]), torch.tensor([[1, 0, 0, 1]]) > 0, (0.2, 0.2)),
    "a bad row": (*ONE, torch.tensor([-1.5]), torch.tensor([[1, 0, 0, 1]]) > 0, (0.1, 0.3)),
}


def two_authors(random):
    log_probs, old, own = texts(random, 2, low=-2.0)
    old, N = old.where(own.bool(), 0.0), len(own)
    return log_probs, old, whole(random, N, high=9) / 2 - 2, own.bool(), (0.203, 0.284)


turn_loss.draw = two_authors
turn_loss.hints = """
What's old_log_probs at a token that the tool wrote? Take the ratio where own is True only.
It's -(objective * own).sum() / own.sum(), with the ratio 1 wherever own is False."""


def by_bits(n, k):
    return min(2**k, n) / n


@exercise("the best possible with k calls", package=commits.best)
def best(n, k):
    """n open commits, k calls -> the best chance to name the first bad one"""
    if n == 1 or k == 0:
        return 1 / n  # nothing to test, or no way to
    chances = []
    for t in range(1, n):  # a test parts t commits from the n - t others
        chances.append(t / n * best(t, k - 1) + (n - t) / n * best(n - t, k - 1))
    return max(chances)


best.why = """The first bad commit is among the t with probability t/n, so that's the weight of what
k - 1 calls can do there. And k calls can tell 2^k commits apart, so it comes to min(n, 2^k) / n."""
best.right = [by_bits]
best.wrong = {
    "chances.append((best(t, k - 1) + best(n - t, k - 1)) / 2)": "Bad and good aren't equally "
    "likely. The weights are t/n and (n - t)/n.",
    "return sum(chances) / len(chances)": "That's the chance of someone who tests anywhere. The "
    "best tester picks the largest.",
    "chances.append(t / n * best(t, k - 1) + (n - t) / n * (1 / (n - t)))": "You stop after a "
    "good result. Both parts have k - 1 calls left.",
    "if n == 1:": "Without calls left there's only the guess, 1/n.",
    "return 1.0": "Without a call it's a guess among n.",
    lambda n, k: 2**k / n: "That's more than 1 once there are more calls than needed.",
}
best.cases = {"a guess": (8, 0), "one call": (8, 1), "two calls": (8, 2), "five commits": (5, 2)}
best.cases |= {"more than enough": (3, 4)}
best.draw = lambda r: (r.randint(1, 9), r.randint(0, 3))
best.hints = """
After a test that parts t from n - t commits, what can k - 1 calls do with each part?
It's the largest over t of t/n * best(t, k - 1) + (n - t)/n * best(n - t, k - 1)."""


@exercise("an advantage for each turn")
def turn_advantages(earned, played):
    """earned (G, K), 0 where no turn was played; played (G, K) bool -> advantages (G, K)"""
    to_go = earned.flip(1).cumsum(1).flip(1)  # (G, K): from the turn on
    mean = (to_go * played).sum(0) / played.sum(0).clamp(min=1)  # (K,): of those who had the turn
    return torch.where(played, to_go - mean, 0.0)


turn_advantages.why = """What was earned before a turn isn't its merit. And a second call has less
ahead of it than a first, so each is compared with the group's same turn."""
turn_advantages.wrong = {
    "to_go = earned.cumsum(1)": "You add up what came before the turn. It's paid for what comes "
    "from it on.",
    "to_go = earned": "Each turn gets its own reward only. A call also earns what the later turns "
    "make of it, so add up from the turn on.",
    "mean = (to_go * played).sum(0) / len(played)": "An episode without that turn counts as a 0 in "
    "your mean. Divide by those who played it.",
    "mean = (to_go * played).sum() / played.sum()": "You compare with all turns at once. The last "
    "turn has less ahead of it than the first, so compare each with the group's same turn.",
    "return to_go - mean": "A turn that nobody played gets an advantage, too. It's 0 there.",
    "return torch.where(played, mean - to_go, 0.0)": "The other way around. Better than the group "
    "is positive.",
}
TURNS = torch.tensor([[0.25, 0.5, 1.0], [0.25, 0.0, 0.0], [1.0, 0.0, 0.0]])
turn_advantages.cases = {
    "three episodes": (TURNS, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]) > 0),
    "one turn each": (torch.tensor([[1.0], [0.0]]), torch.ones(2, 1) > 0),
    "a turn that nobody played": (
        TURNS * torch.tensor([1, 0, 0]),
        torch.tensor([[1, 0, 0]] * 3) > 0,
    ),
}


def some_turns(random):
    G, K = random.randint(2, 5), random.randint(2, 4)
    played = torch.arange(K) < 1 + whole(random, G, high=K)[:, None]
    return whole(random, G, K, high=9) / 8 * played, played


turn_advantages.draw = some_turns
turn_advantages.hints = """
What's still ahead of a turn? A cumulative sum from the back: earned.flip(1).cumsum(1).flip(1).
Subtract, column by column, the mean over the rows where played is True, and keep 0 elsewhere."""


@exercise("only what the tool said")
def honest(ids, own):
    """ids (T,), own (T,) bool -> (T,): a good or bad that the policy wrote itself is error"""
    result = (ids == commits.GOOD) | (ids == commits.BAD)
    return torch.where(result & own, commits.ERROR, ids)


honest.why = """A word proves something if the tool wrote it, and `own` knows who did. The grader
can stay as it is."""
honest.wrong = {
    "return torch.where(result, commits.ERROR, ids)": "The tool's results have to stay. Only what "
    "the policy wrote itself is changed.",
    "return torch.where(result & ~own, commits.ERROR, ids)": "The other way around. own is True "
    "where the policy wrote.",
    "result = ids == commits.GOOD": "A forged bad is forged, too.",
    "return torch.where(own, commits.ERROR, ids)": "Calls and answers stay. Only results change.",
    "return ids[~(result & own)]": "The result is as long as ids. Put error in their place.",
}
TOLD = torch.tensor([19, 1, 21, commits.BAD, 22, 19, 0, 20, 21, commits.GOOD, 22])
WROTE = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]) > 0
honest.cases = {
    "forged, then true": (TOLD, WROTE),
    "forged, good": (torch.tensor([commits.GOOD, 3]), torch.ones(2) > 0),
    "all by the tool": (TOLD, ~WROTE),
}
honest.draw = lambda r: (whole(r, T := r.randint(1, 9), high=23), whole(r, T, high=2) > 0)
honest.hints = """
Which tokens are good or bad, and which of those did the policy write?
torch.where(result & own, commits.ERROR, ids), with result = (ids == commits.GOOD) | (...)."""
