"""What a text is worth, attention, the loss, a training step"""

import math
from random import Random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from minigrpo import corpus, gpt, pretrain
from minigrpo.exercises.form import FAR, exercise, mask, numbers, whole


@exercise("bigram entropy", package=corpus.bigram_entropy)
def bigram_entropy(ids):
    """ids (L,) -> nats per character, given the character before it"""
    vocab_size = int(ids.max()) + 1
    numbers = ids[:-1] * vocab_size + ids[1:]  # one for every pair (a, b)
    pairs = torch.bincount(numbers, minlength=vocab_size**2).view(vocab_size, vocab_size)
    joint = pairs.double() / pairs.sum()  # p(a, b)
    first = joint.sum(dim=1, keepdim=True)  # how often a comes first in a pair
    surprise = -torch.where(pairs > 0, joint / first, 1.0).log()  # -ln p(b | a)
    return float((joint * surprise).sum())


bigram_entropy.why = """A pair costs -ln p(b | a), because you already know a when b comes. With -ln
p(a, b) you pay for the first character too, and even a model that knows nothing beats that
number."""
bigram_entropy.wrong = {
    "return float(torch.special.entr(joint).sum())": "That's H(a, b). Take the log of p(b|a).",
    "surprise = -torch.where(pairs > 0, joint / first, 1.0).log2()": "That's in bits, not in nats.",
    "surprise = -(joint / first).log()": "0 * ln 0 is NaN. Leave such pairs out of the sum.",
    "first = (ids.bincount().double() / pairs.sum()).unsqueeze(1)": "You count first characters "
    "over the whole text. The last one starts no pair, so p(a) comes from ids[:-1].",
    "first = joint.sum(dim=0, keepdim=True)": "You divide by how often b comes second. For p(b|a), "
    "divide by how often a comes first.",
}
bigram_entropy.cases = {
    "the text aabb": (torch.tensor([0, 0, 1, 1]),),
    "a last letter that's new": (torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0, 2]),),
    "ids above 255": (torch.tensor([263, 256, 1, 0, 0, 256, 7, 1, 0, 7, 0, 11, 1, 1, 11]),),
    "a long text": (torch.tensor([0] * 2100 + [1, 0, 2, 2, 1, 0]),),
}
bigram_entropy.draw = lambda r: (whole(r, r.randint(2, 12), high=r.choice((2, 3, 5, 13))),)
bigram_entropy.hints = """
torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V).view(V, V) counts the pairs.
H(b | a) = H(a, b) - H(a). torch.special.entr(p) is -p ln p, and 0 at 0."""


@exercise("causal mask", package=gpt.causal_mask)
def causal_mask(length):
    """-> bool (length, length), True where row i may read column j"""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril()


causal_mask.why = """Position i reads columns 0 to i: the lower triangle, with the diagonal. With
the upper one every position reads the token it has to predict, and the training loss falls toward
zero."""
causal_mask.right = ["return torch.arange(length)[:, None] >= torch.arange(length)"]
causal_mask.wrong = {
    "return ones.triu()": "That's the other triangle, so each position may read the future.",
    "return ones.tril(-1)": "A position may read itself too, so the diagonal is True.",
    "return ones": "You let every position read all of them, also the one it has to predict.",
    "return ones.triu(1)": "You mark what is hidden. Here it's the opposite: True = may read.",
    "return torch.full((length, length), -torch.inf).triu(1)": "That's the mask to add to the "
    "scores. Here it's a bool tensor, True = may read.",
    "ones = torch.ones(length, length)": "1.0 and 0.0 are numbers. Ask for dtype=torch.bool.",
}
causal_mask.cases = {"length 3": (3,), "length 1": (1,), "length 600": (600,)}
causal_mask.draw = lambda r: (r.randint(1, 40),)
causal_mask.hints = """
Write the rows for length 3 on paper. What shape do the True values have?
torch.tril keeps the lower triangle of a matrix, such as torch.ones(3, 3, dtype=torch.bool)."""


@exercise("attention", package=F.scaled_dot_product_attention, gradient="query key value")
def attention(query, key, value, mask):
    """query, key, value (N, heads, S, d), mask bool (S, S) -> (N, heads, S, d)"""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (N, heads, S, S)
    allowed = scores.masked_fill(~mask, -torch.inf)  # the rest is never chosen
    return allowed.softmax(dim=-1) @ value


def some_heads(r, *sizes):
    """Queries, keys and values as transposed views, as in the layer, and a mask."""
    N, heads, S, d = sizes or [r.randint(1, 4) for _ in range(4)]
    parts = [numbers(r, N, S, heads, d).transpose(1, 2) for _ in range(3)]
    return *parts, mask(r, S, S).bool()


attention.why = """After the softmax each row of weights sums to 1, so a position gets a weighted
mean of the values it may read. If you mask after it, the hidden scores are still in the
denominator."""
attention.right = ["allowed = scores.masked_fill(~mask, -1e9)"]
attention.wrong = {
    "scores = query @ key.transpose(-2, -1)": "The scores aren't divided by the root of d. With "
    "many columns the softmax then picks a single position.",
    "return (scores.softmax(dim=-1) * mask) @ value": "You mask after the softmax. Mask the "
    "scores before it, with minus infinity.",
    "allowed = scores.masked_fill(~mask, 0.0)": "A score of 0 isn't 'never': e^0 = 1.",
    "allowed = scores.masked_fill(mask, -torch.inf)": "You hide what may be read. The minus "
    "infinity goes where the mask is False.",
    "allowed = scores.masked_fill(~torch.ones_like(mask).tril(), -torch.inf)": "You build a "
    "causal mask instead of using the one you're given.",
}
ODD = torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
FOUR = torch.tensor([[[[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]]])
attention.cases = {
    "equal scores": (*torch.zeros(2, 1, 1, 3, 1), ODD, gpt.causal_mask(3)),
    "d is 4, scores are 0 and 1": (torch.ones(1, 1, 2, 4), FOUR, FOUR * 5 - 5, gpt.causal_mask(2)),
    "a mask that isn't causal": some_heads(Random(11), 1, 1, 4, 2),
    "many positions": some_heads(Random(3), 1, 1, 300, 2),
}
attention.draw = some_heads
HIGH = FOUR * 0 + 1000, FOUR * 3000 - 3000, FOUR, gpt.causal_mask(2)
SAFE = "Scores of millions can lie below a finite number for 'hidden'. Minus infinity is safe."
attention.corners = {"what is hidden has far higher scores": (HIGH, SAFE)}
attention.hints = """
query @ key.transpose(-2, -1) gives all scores, (N, heads, S, S). Divide by the root of d.
scores.masked_fill(~mask, -torch.inf) before softmax(dim=-1); then @ value."""


@exercise("next-token loss", package=pretrain.next_token_loss, gradient="logits")
def next_token_loss(logits, input_ids):
    """logits (N, S, V), input_ids (N, S) -> scalar, nats per token"""
    predictions, targets = logits[:, :-1], input_ids[:, 1:]  # position s predicts token s + 1
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())


def some_windows(r, *sizes):
    N, S, V = sizes or (r.randint(1, 3), r.randint(2, 5), r.randint(2, 6))
    return numbers(r, N, S, V, low=-5, high=5), whole(r, N, S, high=r.randint(2, V))


next_token_loss.why = """Position s has read tokens 0 to s, so its logits are a guess at token
s + 1. Without the shift the model learns to copy its input, and the loss looks wonderful."""
next_token_loss.right = ["return F.cross_entropy(predictions.mT, targets)"]
next_token_loss.wrong = {
    "predictions, targets = logits, input_ids": "There's no shift. The logits at position s "
    "predict token s + 1, and not the token just read.",
    "predictions, targets = logits[:, 1:], input_ids[:, :-1]": "The shift goes the wrong way. You "
    "ask each position for the token before it.",
    "return F.cross_entropy(logits.flatten(0, 1)[:-1], input_ids.flatten()[1:])": "You join the "
    "windows first, so the end of one is asked for the start of the next. Shift within each.",
    "return F.cross_entropy(predictions.mT, targets, reduction='sum')": "That's the sum over all "
    "tokens, which grows with the batch. Take the mean.",
    "predictions, targets = logits[:, :-1].softmax(dim=-1), input_ids[:, 1:]": "You apply a "
    "softmax twice. cross_entropy wants the logits themselves.",
}
HAND = torch.tensor([[[0.0, math.log(2), 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
next_token_loss.cases = {
    "worked by hand": (HAND, torch.tensor([[0, 1, 2]])),
    "two windows": (torch.tensor([4.0, 0]).expand(2, 2, 2), torch.tensor([[1, 0], [0, 1]])),
    "a surprise": (torch.tensor([[[48.0, 8], [-48, -47], [0, 0]]]), torch.tensor([[0, 1, 0]])),
    "a large vocabulary": (some_windows(Random(1), 1, 3, 300)[0], torch.tensor([[0, 257, 299]])),
    "a long window": some_windows(Random(2), 1, 600, 3),
}
next_token_loss.draw = some_windows
APART = torch.tensor([[[1000.0, 0.0], [0.0, 0.0]]])
next_token_loss.corners = {"logits 1,000 apart": ((APART, torch.tensor([[0, 1]])), FAR)}
next_token_loss.hints = """
Which positions predict something you can check? logits[:, :-1] and input_ids[:, 1:].
F.cross_entropy wants (tokens, V) and (tokens,): flatten windows and positions together."""


@exercise("training step")
def training_step(model, input_ids, optimizer, loss_of):
    """one step on input_ids (N, S) -> the loss before the step, a number"""
    loss = loss_of(model(input_ids).logits, input_ids)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


class Pairs(nn.Embedding):
    """A row of logits for each character. A copy still has a gradient, of the batch before."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=super().forward(input_ids))

    def __repr__(self):
        return f"logits {self.weight.tolist()}"

    def __setstate__(self, state):
        super().__setstate__(state)
        self.weight.grad = torch.ones_like(self.weight)


def a_step(table, input_ids):
    model = Pairs.from_pretrained(table, freeze=False)
    return model, input_ids, torch.optim.SGD(model.parameters(), lr=0.5), next_token_loss


training_step.why = """PyTorch adds each gradient to the one before, so empty it before backward(),
and clip between backward() and step()."""
training_step.right = ["return loss.detach()", (("optimizer.zero_grad()", "model.zero_grad()"),)]
training_step.wrong = {
    (("optimizer.zero_grad()", "pass"),): "backward() adds to the gradient of the batch before. "
    "Empty it first.",
    "nn.utils.clip_grad_norm_(model.parameters(), 1e9)": "You don't clip before the step.",
    (("optimizer.step()", "pass"),): "The weights don't move: no step(), or a late zero_grad()?",
    "return loss_of(model(input_ids).logits, input_ids).item()": "That's the loss after "
    "the step. Return the one before it.",
}
training_step.cases = {
    "one window": a_step(torch.zeros(2, 2), torch.tensor([[0, 1, 1]])),
    "a surprise": a_step(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([[0, 1]])),
}
training_step.draw = lambda r: a_step(numbers(r, 3, 3, low=-5, high=5), whole(r, 2, 4, high=3))
training_step.hints = """
loss, optimizer.zero_grad(), loss.backward(), clip, optimizer.step(). Which order, and why?
nn.utils.clip_grad_norm_(model.parameters(), 1.0) goes between backward() and step()."""
