"""The probability of a sequence, masks, ratios, perplexity"""

from random import Random
from types import SimpleNamespace

import torch

from minigrpo import logprobs, objective, sampling
from minigrpo.exercises.form import exercise, mask, numbers, whole
from minigrpo.logprobs import masked_mean


@exercise(
    "log of a product",
    package=lambda probs: logprobs.sequence_log_probs(probs.log(), torch.ones_like(probs)),
    gradient="probs",
)
def log_product(probs):
    """probs (..., L) -> (...), the logarithm of the product over the last dimension"""
    return probs.log().sum(dim=-1)


log_product.why = """
The logarithm of a product is the sum of the logarithms, and that sum stays an ordinary number
however long the text gets. If you multiply first, a hundred probabilities of 0.1 have already
underflowed to 0 in float32 by the time you take the logarithm."""
log_product.right = {
    "return probs.log().cumsum(-1)[..., -1]": "the last entry of a running sum of the logarithms.",
}
log_product.wrong = {
    "return probs.prod(-1).log()": "You multiply first, and then you take the logarithm. By that "
    "time the product of many probabilities is 0. Take the logarithms first, and add them.",
    "return probs.double().prod(-1).log()": "You multiply in float64, which only moves the wall. "
    "A few hundred factors more, and the product is 0 again. Add the logarithms instead.",
    "return probs.log().mean(-1)": "That's the mean of the logarithms, so the length is lost.",
    "return probs.log2().sum(-1)": "That's in bits (log2). The course counts in nats: .log().",
    "return (probs + 1e-10).log().sum(-1)": "You add a small number before the logarithm. No "
    "probability is 0 here, and those near your small number come out wrong. Leave it out.",
    "return probs.log().sum()": "You sum over all dimensions. Sum over the last one only, so that "
    "each row keeps a number of its own.",
}
log_product.cases = {
    "worked by hand": (torch.tensor([0.5, 0.25, 0.5]),),
    "two rows, certain and rare tokens": (torch.tensor([[1.0, 0.1, 1.0], [1e-10, 0.5, 1e-20]]),),
    "100 factors of 0.1": (torch.full((1, 100), 0.1),),
    "600 factors of 0.1": (torch.full((1, 600), 0.1),),
}
log_product.draw = lambda r: (
    numbers(r, *r.choice(((4,), (1, 3), (3, 2), (2, 3, 4))), low=0.02, high=1.0),
)
log_product.hints = [
    "What is the logarithm of a * b?",
    "Take the logarithm of every factor first, then sum over the last dimension.",
]


def of_the_package(logits, input_ids):  # which takes a model
    return logprobs.token_log_probs(lambda *_, **__: SimpleNamespace(logits=logits), input_ids)


@exercise("log-prob of every token", package=of_the_package, gradient="logits")
def token_log_probs(logits, input_ids):
    """logits (N, S, V), input_ids (N, S) -> (N, S - 1), in nats"""
    predictions, tokens = logits[:, :-1], input_ids[:, 1:]  # position s predicts token s + 1
    log_p = predictions.log_softmax(dim=-1)  # (N, S - 1, V)
    return log_p.gather(-1, tokens[..., None]).squeeze(-1)


def some_windows(r, *sizes):
    N, S, V = sizes or (r.randint(1, 3), r.randint(2, 5), r.randint(2, 6))
    return numbers(r, N, S, V, low=-5, high=5), whole(r, N, S, high=r.randint(2, V))


token_log_probs.why = """
The logits at position s score the token at s + 1, so the last position and the first token have no
partner. If you slice `logits[:, 1:]` instead, the shapes still fit, but you score each token with
logits that have already read it."""
token_log_probs.right = {
    "return -torch.nn.functional.cross_entropy(predictions.mT, tokens, reduction='none')": "minus "
    "F.cross_entropy with reduction='none', the vocabulary in dimension 1.",
}
token_log_probs.wrong = {
    "predictions, tokens = logits[:, 1:], input_ids[:, 1:]": "There's no shift. You score each "
    "token with the logits computed after reading it. Those at position s predict token s + 1.",
    "predictions, tokens = logits[:, 1:], input_ids[:, :-1]": "The shift goes the wrong way. You "
    "ask each position for the token before it.",
    "log_p = predictions": "These are logits. A log_softmax over the vocabulary makes log-probs.",
    "log_p = predictions.log_softmax(dim=1)": "The softmax runs over the positions. Each position "
    "has a distribution over the vocabulary, the last dimension.",
    "log_p = (predictions.softmax(dim=-1) + 1e-9).log()": "You add a small number before the "
    "logarithm, so no token comes out rarer than that. log_softmax needs none.",
    "return -log_p.gather(-1, tokens[..., None]).squeeze(-1)": "The sign is wrong. These are the "
    "losses of the tokens, and a log-prob is never above 0.",
}
token_log_probs.cases = {
    "a model that counts": (40.0 * torch.eye(5)[1:][None], torch.tensor([[0, 1, 2, 3]])),
    "it meets a text that doesn't": (40.0 * torch.eye(5)[1:][None], torch.tensor([[0, 2, 2, 0]])),
    "two heights": (torch.tensor([[[50.0, 49], [-50, -49], [9, 9]]]), torch.tensor([[1, 0, 1]])),
    "a large vocabulary": (some_windows(Random(1), 1, 3, 300)[0], torch.tensor([[0, 257, 299]])),
    "a long text": some_windows(Random(2), 1, 600, 3),
}
token_log_probs.draw = some_windows
token_log_probs.corners = {
    "a token that is out of reach": (
        (torch.tensor([[[300.0, 0.0], [0.0, 0.0]]]), torch.tensor([[0, 1]])),
        "With logits 300 apart the probability of a token is 0 in float32, so a softmax with a "
        "logarithm after it gives minus infinity. log_softmax gives -300.",
    ),
}
token_log_probs.hints = [
    "Write down for S = 4 which logits predict which token. Which are left over?",
    "logits[:, :-1] and input_ids[:, 1:] belong together; log_softmax over the last dimension.",
    "log_p.gather(-1, targets[..., None]) picks one entry per position; .squeeze(-1) removes the "
    "last dimension, of size 1 (with the -1, or N = 1 vanishes as well).",
]


@exercise("log-prob of a sequence", package=logprobs.sequence_log_probs, gradient="log_probs")
def sequence_log_probs(log_probs, mask):
    """log_probs (N, T), mask (N, T) with 1 = real token -> (N,), in nats"""
    real = torch.where(mask.bool(), log_probs, 0.0)  # not a product: 0 * inf would be NaN
    return real.sum(dim=-1)


def some_rows(r):
    N, T = r.randint(1, 4), r.randint(1, 6)
    return numbers(r, N, T, low=-6, high=0), mask(r, N, T, holes=True)


sequence_log_probs.why = """
The log-prob of a text is a sum over its tokens, and `torch.where` lets only the real ones into it.
If you multiply by the mask instead, it works until an infinity sits under a 0, because 0 times
infinity is NaN."""
sequence_log_probs.right = {
    "real = log_probs.masked_fill(~mask.bool(), 0.0)": "masked_fill with 0, then the sum.",
}
sequence_log_probs.wrong = {
    "real = log_probs": "You don't use the mask, so what comes after the end counts as text.",
    "return real.sum(dim=-1) / mask.sum(dim=-1)": "That's the mean per token. Take the plain sum.",
    "return real.mean(dim=-1)": "You divide by the width of the batch, padding included.",
    "real = log_probs * mask": "You multiply by the mask. That works until there's an infinity "
    "under a 0, because 0 * inf is NaN. Choose with torch.where instead.",
    "return real.sum()": "You sum over the rows as well. Each row is a text of its own.",
    "real = log_probs.where(torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True), 0.0)": "You "
    "count the ones and take that many from the left. The ones can be anywhere.",
}
sequence_log_probs.cases = {
    "two texts": (torch.tensor([[-1.0, -2], [-3, -0.5]]), torch.tensor([[1, 1], [1, 0]])),
    "holes, and a token that is certain": (
        torch.tensor([[-0.5, -3.0, 0.0, -2.0], [-9.0, 0.0, -1.0, -6.0]]),
        torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]]),
    ),
    "garbage under the mask": (
        torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -torch.inf], [-1.0, torch.nan, -2.0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]]).bool(),
    ),
    "an impossible token": (torch.tensor([[-1.0, -torch.inf, -2.0]]), torch.ones(1, 3)),
    "a long text": (torch.full((1, 600), -0.5), torch.ones(1, 600)),
}
sequence_log_probs.draw = some_rows
sequence_log_probs.hints = [
    "In log space the product over the tokens is a sum. Over which of them?",
    "Don't touch what's under a 0 of the mask at all, not even to multiply it by 0.",
    "torch.where(mask.bool(), log_probs, 0.0), then sum over the last dimension.",
]


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


GARBAGE = torch.tensor([[-1.0, torch.nan], [-torch.inf, -1.0]])


def two_policies(r):
    new, real = some_rows(r)
    return new, new - numbers(r, *new.shape), real


sequence_ratio.why = """
The product of the token ratios is, in log space, a subtraction and a sum, with a single exp at the
end. If you take exp of both log-probs first and then divide, a long text gives you 0/0, even when
its ratio is close to 1."""
sequence_ratio.right = {
    "return (new.sum(dim=-1) - old.sum(dim=-1)).exp()": "the difference of two sums.",
}
sequence_ratio.wrong = {
    "return (old - new).sum(dim=-1).exp()": "This is old over new. The ratio says how many times "
    "as likely the text has become, with log_probs - old_log_probs in the exponent.",
    "real = torch.ones_like(mask).bool()": "You don't use the mask, so what comes after the end "
    "of a row gets into the ratio.",
    "return masked_mean((new - old).exp(), mask, dim=-1)": "You average the ratios of the tokens. "
    "The probability of a text is a product, so its ratio is the product of theirs.",
    "return masked_mean(new - old, mask, dim=-1).exp()": "You divide by the length, which gives "
    "the geometric mean of the token ratios (GSPO, notebook 05). Here we want the whole product.",
    "return new.sum(dim=-1).exp() / old.sum(dim=-1).exp()": "You take exp first, and then you "
    "divide. The probability of a long text underflows to 0, and 0/0 is NaN. Subtract first.",
    "return (new - old).sum(dim=-1).clamp(-20, 20).exp()": "You clamp the log-ratio. We want the "
    "exact ratio, however far the policies are apart, and no gradient flows where you clamp.",
}
sequence_ratio.cases = {
    "as likely, twice, half": (
        torch.tensor([[0.5, 0.4], [0.5, 0.5], [0.25, 0.1]]).log(),
        torch.tensor([[0.5, 0.4], [0.25, 0.5], [0.5, 0.9]]).log(),
        torch.tensor([[1, 1], [1, 1], [1, 0]]),
    ),
    "far apart": (
        torch.tensor([[-1.0, -7.0, -1.0], [-30.0, -2.0, -40.0]]),
        torch.tensor([[-26.0, -1.0, -2.0], [-55.0, 0.0, -1.0]]),
        torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]),
    ),
    "a long text": (torch.full((1, 600), -0.5), torch.full((1, 600), -0.501), torch.ones(1, 600)),
}
sequence_ratio.draw = two_policies
sequence_ratio.corners = {
    "garbage under the mask": (
        (GARBAGE, torch.tensor([[-2.0, -1.0], [-torch.inf, -2.0]]), torch.eye(2)),
        "Under a 0 of the mask there may be infinity or NaN, and 0 * NaN is NaN, in the gradient "
        "too. Choose with torch.where before you subtract.",
    ),
    "a token that has become impossible": (
        (torch.tensor([[-torch.inf, -1.0]]), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)),
        "A real token can be impossible now, with log-prob -inf. The ratio of its text is 0.",
    ),
    "ratios beyond float32": (
        (torch.tensor([[-100.0, -1.0]]), torch.tensor([[-1.0, -100.0]]), torch.ones(1, 2)),
        "If one token's ratio is e^99 and another's e^-99, their product is infinity times 0. Add "
        "the log-ratios, and take exp once, at the end.",
    ),
}
sequence_ratio.hints = [
    "In log space a quotient is a difference. Of which two numbers for each row?",
    "Mask both before you subtract, because inf - inf is NaN, and so is 0 * NaN.",
    "Sum the masked differences over dim=-1, then exp, once, at the very end.",
]


@exercise("completion mask", package=sampling.completion_mask, keywords="eos_id")
def completion_mask(completions, eos_id):
    """completions (N, T) -> (N, T) bool, True up to and including the first EOS of each row"""
    is_eos = completions == eos_id
    eos_before = is_eos.cumsum(dim=1) - is_eos.long()  # the position's own EOS does not count
    return eos_before == 0


completion_mask.why = """
A token is real as long as no EOS came before it, so the first EOS counts too. If you mask it out,
the choice to stop is never reinforced, and completions can grow until the limit truncates them."""
completion_mask.right = {
    "return torch.nn.functional.pad(~is_eos, (1, -1), value=True).cumprod(dim=1).bool()": "cumprod "
    "of 'not EOS', moved by one.",
}
completion_mask.wrong = {
    "eos_before = is_eos.cumsum(dim=1)": "The EOS itself is masked out. It's a token that the "
    "policy chose, and if you leave it out of training, the policy doesn't learn when to stop.",
    "return ~is_eos": "You look at token values, so the EOS is masked out, and whatever follows it "
    "counts as text. The mask is about positions, up to and including the first EOS.",
    "return completions != 0": "You look at token values, and 0 may be any token, even the EOS. "
    "Find the position of the first EOS instead.",
    "return (eos_before == 0) & is_eos.any(dim=1, keepdim=True)": "A row without an EOS was cut "
    "off at the limit. All of its tokens are real, but your mask has none of them.",
    "return torch.arange(completions.shape[1]) <= is_eos.long().argmax(dim=1, keepdim=True)": "In "
    "a row without an EOS argmax says 0, as if the first token were one. All of it is real.",
    "return is_eos.cumsum(dim=1) <= 1": "You keep what comes after the first EOS, up to the next. "
    "The count is 1 at the first EOS, and after it too. Count the EOS *before* a position.",
}
completion_mask.cases = {
    "EOS and padding are both 0": (torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 5]]), 0),
    "the EOS is 2": (torch.tensor([[5, 2, 0, 7, 1], [1, 0, 3, 12, 4], [2, 0, 0, 0, 0]]), 2),
    "large ids": (torch.tensor([[50256, 7, 50257, 3], [128009, 50250, 50258, 9]]), 50257),
    "thousands of tokens": (torch.tensor([[7, 3] + [3] * 2998, [5] * 3000]), 3),
}
completion_mask.draw = lambda r: (
    whole(r, r.randint(1, 4), r.randint(1, 6), high=5),
    r.randrange(5),
)
completion_mask.hints = [
    "For one row on paper: [5, EOS, pad, pad]. Which positions did the policy write?",
    "(completions == eos_id).cumsum(dim=1) counts the EOS so far. Where is it 0, and where 1?",
    "A position is real if there's no EOS *before* it. Subtract its own from the count: is it 0?",
]


@exercise("perplexity", package=lambda *given: (-masked_mean(*given)).exp(), gradient="log_probs")
def perplexity(log_probs, mask):
    """log_probs (N, T), mask (N, T) with 1 = real token -> scalar, at least 1"""
    real = torch.where(mask.bool(), log_probs, 0.0)
    mean = real.sum() / mask.sum()
    return (-mean).exp()


perplexity.why = """
Every real token of the batch has the same weight in the mean. If you average row by row, the tokens
of short rows count more, and if you divide by all positions, padding included, every model looks
better than it is."""
perplexity.right = {
    "mean = log_probs[mask.bool()].mean()": "the mean of one long list of real tokens.",
}
perplexity.wrong = {
    ("mean = real.sum(1) / mask.sum(1).clamp(min=1)", "return (-mean).exp().mean()"): "You average "
    "the perplexities of the rows. Average the log-probs of all real tokens first, then take exp.",
    "mean = (real.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)).mean()": "You average "
    "within each row, then over the rows. Every real token counts the same, in short rows too.",
    "mean = real.mean()": "You divide by the number of all positions, padding included, which "
    "makes every model look better. Divide by the number of real tokens.",
    "return 2 ** (-mean)": "You raise 2 to a number in nats. The base of nats is e, so use exp.",
    "return real.exp().prod() ** (-1 / mask.sum())": "You multiply the probabilities, then take "
    "the root. On a long text the product underflows to 0. Stay in log space until the very end.",
}
perplexity.cases = {
    "worked by hand": (torch.tensor([[0.5, 0.125, 0.5]]).log(), torch.tensor([[1, 1, 0]])),
    "three rows, one of them empty": (
        torch.tensor([[-1.5, 0.0, -1.0], [-3.0, -2.0, -1.0], [-0.5, -0.25, -4.0]]),
        torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 1]]).bool(),
    ),
    "always certain and right": (torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])),
    "a single surprise": (torch.tensor([[-1.0, -40.0]]), torch.tensor([[0.0, 1.0]])),
    "a long text": (torch.full((1, 601), -3.0), torch.ones(1, 601)),
}
perplexity.draw = some_rows
perplexity.corners = {
    "garbage under the mask": (
        (GARBAGE, torch.eye(2)),
        "Under a 0 of the mask there may be infinity or NaN, and 0 * NaN is NaN. Choose with "
        "torch.where, before the sum.",
    ),
}
perplexity.hints = [
    "Which tokens enter the mean, and with which weight?",
    "Sum the log-probs of all real tokens of the batch; divide by how many there are.",
    "Then minus, then exp.",
]
