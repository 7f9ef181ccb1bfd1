"""The probability of a sequence, masks, the sampling loop"""

from random import Random
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from minigrpo import logprobs, sampling
from minigrpo.exercises.form import FAR, exercise, numbers, texts, whole


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


token_log_probs.why = """The logits at position s score the token at s + 1, so the last position and
the first token have no partner. With `logits[:, 1:]` the shapes fit too, but each token is scored
by logits that have already read it."""
SHIFT = "There's no shift. Logits at position s predict token s + 1, and not the one just read."
token_log_probs.wrong = {
    "predictions, tokens = logits[:, 1:], input_ids[:, 1:]": SHIFT,
    "log_p = predictions": "These are logits. A log_softmax over the vocabulary makes log-probs.",
    "log_p = predictions.log_softmax(dim=1)": "The vocabulary is the last dimension.",
    "log_p = (predictions.softmax(dim=-1) + 1e-9).log()": "You add a small number before the "
    "logarithm, so no token comes out rarer than that. log_softmax needs none.",
    "return -log_p.gather(-1, tokens[..., None]).squeeze(-1)": "No log-prob is above 0.",
}
token_log_probs.cases = {
    "a model that counts": (40.0 * torch.eye(5)[1:][None], torch.tensor([[0, 1, 2, 3]])),
    "a text that counts badly": (40.0 * torch.eye(5)[1:][None], torch.tensor([[0, 2, 2, 0]])),
    "two heights": (torch.tensor([[[50.0, 49], [-50, -49], [9, 9]]]), torch.tensor([[1, 0, 1]])),
    "a large vocabulary": (some_windows(Random(1), 1, 3, 300)[0], torch.tensor([[0, 257, 299]])),
}
token_log_probs.draw = some_windows
token_log_probs.corners = {
    "logits 300 apart": ((torch.tensor([[[300.0, 0.0], [0.0, 0.0]]]), torch.tensor([[0, 1]])), FAR)
}
token_log_probs.hints = """
logits[:, :-1] and input_ids[:, 1:] belong together; log_softmax over the last dimension.
log_p.gather(-1, tokens[..., None]).squeeze(-1) picks one entry per position."""


def with_a_one(log_probs, mask):  # as a text needs it in the package
    return logprobs.sequence_log_probs(pad(log_probs, (0, 1)), pad(mask, (0, 1), value=1))


@exercise("log-prob of a sequence", package=with_a_one, gradient="log_probs")
def sequence_log_probs(log_probs, mask):
    """log_probs (N, T), mask (N, T) with 1 = real token -> (N,), in nats"""
    real = torch.where(mask.bool(), log_probs, 0.0)  # not a product: 0 * inf would be NaN
    return real.sum(dim=-1)


sequence_log_probs.why = """`torch.where` lets only the real tokens into the sum. A product with the
mask works until an infinity sits under a 0, because 0 times infinity is NaN."""
sequence_log_probs.right = ["real = log_probs.masked_fill(~mask.bool(), 0.0)"]
sequence_log_probs.wrong = {
    "real = log_probs": "You don't use the mask, so what comes after the end counts as text.",
    "return real.sum(dim=-1) / mask.sum(dim=-1)": "That's the mean per token. Take the plain sum.",
    "return real.mean(dim=-1)": "You divide by the width of the batch, padding included.",
    "real = log_probs * mask": "0 * inf is NaN. Choose with torch.where instead.",
    "return real.sum()": "You sum over the rows as well. Each row is a text of its own.",
    "real = log_probs.where(torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True), 0.0)": "You "
    "count the ones and take that many from the left. They can be anywhere.",
}
sequence_log_probs.cases = {
    "two texts": (torch.tensor([[-1.0, -2], [-3, -0.5]]), torch.tensor([[1, 1], [1, 0]])),
    "garbage under the mask": (
        torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -torch.inf], [-1.0, torch.nan, -2.0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]]).bool(),
    ),
    "a token that is certain": (torch.tensor([[-9.0, 0.0, -2.0]]), torch.tensor([[0, 1, 1]])),
    "an empty row": (torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[0, 0], [1, 0]])),
    "an impossible token": (torch.tensor([[-1.0, -torch.inf, -2.0]]), torch.ones(1, 3)),
}
sequence_log_probs.draw = lambda r: texts(r, 1, low=-6)
sequence_log_probs.hints = """
Don't touch what's under a 0 of the mask at all, not even to multiply it by 0.
torch.where(mask.bool(), log_probs, 0.0), then sum over the last dimension."""


@exercise("completion mask", package=sampling.completion_mask, keywords="eos_id")
def completion_mask(completions, eos_id):
    """completions (N, T) -> (N, T) bool, True up to and including the first EOS of each row"""
    is_eos = completions == eos_id
    eos_before = is_eos.cumsum(dim=1) - is_eos.long()  # the position's own EOS does not count
    return eos_before == 0


completion_mask.why = """A token is real as long as no EOS came before it, so the first EOS counts
too. If you mask it out, the choice to stop is never reinforced."""
completion_mask.wrong = {
    "eos_before = is_eos.cumsum(dim=1)": "You mask the EOS, so nobody learns to stop.",
    "return ~is_eos": "What follows the EOS counts as text for you. The mask is about positions.",
    "return (eos_before == 0) & is_eos.any(dim=1, keepdim=True)": "A row without an EOS was cut "
    "off at the limit. All of its tokens are real.",
    "return torch.arange(completions.shape[1]) <= is_eos.long().argmax(dim=1, keepdim=True)": "In "
    "a row without an EOS argmax says 0, as if the first token were one.",
    "return is_eos.cumsum(dim=1) <= 1": "You keep what comes after the first EOS, up to the next. "
    "Count the EOS *before* a position.",
}
completion_mask.cases = {
    "EOS and padding are both 0": (torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 5]]), 0),
    "large ids": (torch.tensor([[50256, 7, 50257, 3], [128009, 50250, 50258, 9]]), 50257),
    "thousands of tokens": (torch.tensor([[7, 3] + [3] * 2998, [5] * 3000]), 3),
}
completion_mask.draw = lambda r: (whole(r, 3, r.randint(1, 6), high=5), r.randrange(5))
completion_mask.hints = """
(completions == eos_id).cumsum(dim=1) counts the EOS so far. Where is it 0, and where 1?
A position is real if there's no EOS *before* it. Subtract its own from the count: is it 0?"""


def chain(table, ends=True):  # the token before and the number of real tokens decide; 0 is EOS
    def model(input_ids, attention_mask=None, **_):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        assert mask.shape == input_ids.shape, "the attention mask has another shape than the ids"
        turn = mask.long().cumsum(dim=1)[..., None] * torch.arange(1, len(table) + 1)
        over = ends * (input_ids == 0)[..., None]
        logits = torch.where(over, 40 * torch.eye(len(table))[0], table[input_ids] + turn.sin())
        return SimpleNamespace(logits=logits)

    return model


def some_prompts(r, T=4, temperature=1.0, ends=True):
    V, N, P = r.randint(3, 5), r.randint(1, 3), r.randint(1, 3)
    model, ids = chain(numbers(r, V, V, low=-3, high=3), ends), whole(r, N, P, high=V - 1) + 1
    mask = torch.arange(P) >= torch.tensor([r.randrange(P) for _ in range(N)])[:, None]
    return model, ids * mask, mask, T, 0, temperature, torch.Generator().manual_seed(r.randrange(9))


COUNTS = chain(40.0 * torch.eye(5)[[0, 2, 3, 4, 0]])


@exercise("scorer of completions")
def score(model, prompt_ids, prompt_mask, completions, mask, temperature):
    """prompts (N, P), completions (N, T), their masks -> log-probs (N, T), read where mask is 1"""
    ids = torch.cat([prompt_ids, completions], dim=1)  # (N, P + T)
    logits = model(ids, torch.cat([prompt_mask, mask], dim=1)).logits  # (N, P + T, V)
    log_probs = token_log_probs(logits / temperature, ids)  # (N, P + T - 1)
    return log_probs[:, -completions.shape[1] :]


def some_completions(r):
    model, ids, mask, *_ = some_prompts(r)
    completions = whole(r, len(ids), r.randint(1, 4), high=3)
    real = completion_mask(completions, 0)  # after the end 0 is certain, so it has log-prob 0
    return model, ids, mask, completions * real, real, r.choice((0.5, 1.0, 2.0))


score.why = """Column s of the log-probs scores token s + 1, so the last T columns are the
completion's. The last T *logits* are another thing: they predict the tokens one place later."""
score.right = ["return torch.where(mask.bool(), log_probs[:, prompt_ids.shape[1] - 1 :], 0.0)"]
score.wrong = {
    "log_probs = (logits / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]": "You "
    "take the last T logits, which predict the tokens after those of the completion. Its first "
    "token is predicted at the last prompt position.",
    "return log_probs[:, prompt_ids.shape[1] :]": "You're one column late. Column s scores token "
    "s + 1, so the completion begins in column P - 1.",
    "logits = model(ids).logits": "The model isn't given the mask, so it reads the padding.",
    "log_probs = token_log_probs(logits, ids)": "You don't divide the logits by the temperature.",
    (
        "log_probs = token_log_probs(logits, ids)",
        "return log_probs[:, -completions.shape[1] :] / temperature",
    ): "You divide log-probs by the temperature. Divide the logits, before the softmax.",
    "return log_probs": "You return the prompts' log-probs as well. Keep the completions' alone.",
}
TWO = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[False, True], [True, True]])
ROWS = torch.tensor([[2, 3, 4, 0], [3, 4, 0, 0]])
score.cases = {
    "a model that counts": (COUNTS, *(x[1:] for x in TWO), ROWS[1:, :3], ROWS[1:, :3] > -1, 1.0),
    "two that count": (COUNTS, *TWO, ROWS, completion_mask(ROWS, 0), 1.0),
}
score.draw = some_completions
score.hints = """
Join prompts and completions, and their masks. One call of the model gives all the logits.
token_log_probs(logits / temperature, ids) has P + T - 1 columns. Which T of them do you need?"""


@exercise("sampling loop", keywords="max_new_tokens eos_id temperature generator")
def sample(model, prompt_ids, prompt_mask, max_new_tokens, eos_id, temperature, generator):
    """prompts (N, P) and their mask -> completions (N, T), and their tokens' log-probs (N, T)"""
    ids, mask, log_probs = prompt_ids, prompt_mask, []
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model(ids, mask).logits[:, -1]  # (N, V), for the token after the last
        log_p = (logits / temperature).log_softmax(dim=-1)
        token = torch.multinomial(log_p.exp(), 1, generator=generator)  # (N, 1)
        log_probs.append(log_p.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        if (ids[:, prompt_ids.shape[1] :] == eos_id).any(dim=1).all():
            break  # every row has written its EOS
    return ids[:, prompt_ids.shape[1] :], torch.cat(log_probs, dim=1)


SETTINGS = 6, 0, 1.0, torch.Generator().manual_seed(0)
sample.why = """The log-prob stored is that of the distribution the token came from, temperature
included. A row that has ended keeps writing until all have; the completion mask hides that."""
sample.right = ["token = (logits / temperature).softmax(-1).multinomial(1, generator=generator)"]
sample.wrong = {
    "if (ids == eos_id).any(dim=1).all():": "You look for EOS in the prompt and its padding, too.",
    "log_probs.append(logits.log_softmax(dim=-1).gather(1, token))": "You store log-probs at "
    "temperature 1, but the tokens were drawn at another.",
    "if (token == eos_id).any():": "You stop as soon as one row has ended. Wait for all of them.",
    "logits = model(ids).logits[:, -1]": "The model isn't given the mask, so it reads the padding.",
    "return ids, torch.cat(log_probs, dim=1)": "You return the prompts as well. Cut them off.",
    "token = torch.multinomial(log_p.exp(), 1)": "You draw without the generator.",
}
sample.cases = {
    "a model that counts": (COUNTS, torch.tensor([[1]]), torch.tensor([[True]]), *SETTINGS),
    "two that count": (COUNTS, torch.tensor([[1], [3]]), torch.tensor([[True]] * 2), *SETTINGS),
}
sample.draw = lambda r: some_prompts(r, r.randint(1, 6), r.choice((0.5, 1.0, 2.0)))
GO_ON = "After the end of a row yours differs from ours. The completion mask hides that."
sample.corners = {"more text after EOS": (some_prompts(Random(5), 6, ends=False), GO_ON)}
sample.hints = """
In each turn: read everything so far, draw a token per row, store its log-prob, append it.
log_p.gather(1, token) is its log-prob. Stop when every row of ids[:, P:] has an EOS somewhere."""
