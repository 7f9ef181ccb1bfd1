"""The exercises of notebook 06: the training loop, from scoring a batch to choosing its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from minigrpo import logprobs, objective
from minigrpo.exercises.engine import Answer, Case, Exercise
from minigrpo.exercises.notebook_01 import _own, wave
from minigrpo.exercises.records import records
from minigrpo.objective import grpo_loss

NAN, INF = math.nan, math.inf

token_loss = records(4)["4.3"].reference


def _real(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _grouped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """From a function (P, G) -> (P, G) to one of rewards and group_size."""
    return lambda rewards, size: function(rewards.view(-1, size)).flatten()


# 6.1 ----------------------------------------------------------------------------------------


def completion_log_probs(policy, input_ids, attention_mask, width):
    """input_ids, attention_mask (N, S), width T -> (N, T), the last T tokens; 0 where masked"""
    logits = policy(input_ids, attention_mask=attention_mask).logits  # (N, S, V)
    log_p = logits[:, :-1].log_softmax(dim=-1)  # position s predicts token s + 1
    chosen = log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1)  # (N, S - 1)
    real = attention_mask[:, -width:].bool()
    return torch.where(real, chosen[:, -width:], 0.0)


class _Policy(Tensor):
    """A table of logits that is called like a model; a tensor, so that gradients are compared.

    What it says depends on the last token and on the mean of all that it may read.
    """

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> SimpleNamespace:
        read = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        last = self.as_subclass(Tensor)[input_ids]  # (N, S, V)
        mean = (last * read[..., None]).cumsum(1) / read.cumsum(1).clamp(min=1)[..., None]
        return SimpleNamespace(logits=last + mean, past_key_values=None)


def _log_p(policy: _Policy, ids: Tensor, mask: Tensor) -> Tensor:
    return policy(ids, attention_mask=mask).logits.log_softmax(-1)


def _chosen(policy: _Policy, ids: Tensor, mask: Tensor) -> Tensor:
    """(N, S - 1), nothing masked."""
    return _own(_log_p(policy, ids, mask)[:, :-1], ids[:, 1:])


def _end(columns: Tensor, mask: Tensor, width: int) -> Tensor:
    return _real(columns[:, -width:], mask[:, -width:])


def _from_logits(
    function: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[_Policy, Tensor, Tensor, int], Tensor]:
    """Shift, completion and mask are right; this function of logits and targets is not."""
    return lambda policy, ids, mask, width: _end(
        function(policy(ids, attention_mask=mask).logits[:, :-1], ids[:, 1:]), mask, width
    )


def _cut_first(policy: _Policy, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    logits = policy(ids, attention_mask=mask).logits[:, -width - 1 : -1]  # one to the left
    return _end(_own(logits.log_softmax(-1), ids[:, -width:]), mask, width)


COMPLETION_LOG_PROBS = Exercise(
    key="6.1",
    title="log-probs of a completion",
    reference=completion_log_probs,
    imports=("import torch",),
    package=lambda policy, ids, mask, width: logprobs.completion_log_probs_and_entropy(
        policy, ids[:, :-width], mask[:, :-width], ids[:, -width:], mask[:, -width:]
    )[0],
    others=(
        Answer(
            "cut first",
            _cut_first,
            "keep logits[:, -width - 1 : -1], which predict input_ids[:, -width:], before the "
            "log_softmax. That saves memory when the prompt is long.",
        ),
        Answer(
            "cross-entropy",
            _from_logits(
                lambda z, targets: -F.cross_entropy(z.transpose(1, 2), targets, reduction="none")
            ),
            "minus F.cross_entropy with reduction='none', the vocabulary in dimension 1.",
        ),
    ),
    wrong=(
        Answer(
            "no shift",
            lambda policy, ids, mask, width: _end(
                _own(_log_p(policy, ids, mask), ids), mask, width
            ),
            "There is no shift: each token is scored with the logits computed after reading it, so "
            "the policy would learn to repeat what it has just read. The logits at position s "
            "predict token s + 1.",
        ),
        Answer(
            "shifted the wrong way",
            lambda policy, ids, mask, width: _end(
                _own(_log_p(policy, ids, mask)[:, 1:], ids[:, :-1]), mask, width
            ),
            "The shift goes the wrong way: each position is asked for the token before it. Pair "
            "logits[:, :-1] with input_ids[:, 1:].",
        ),
        Answer(
            "attention mask not passed",
            lambda policy, ids, mask, width: _end(
                _chosen(policy, ids, torch.ones_like(mask)), mask, width
            ),
            "The policy does not get the attention mask, so it reads the padding before a short "
            "prompt as text. When it sampled it did not: pass attention_mask=attention_mask.",
        ),
        Answer(
            "the first token is missing",
            lambda policy, ids, mask, width: _real(
                _own(_log_p(policy, ids, mask)[:, -width:-1], ids[:, 1 - width :]),
                mask[:, 1 - width :],
            ),
            "The first token of the completion has no column. You cut out the completion first and "
            "shift then, but that token is predicted by the last position of the prompt. Shift "
            "first, and keep the last width columns.",
        ),
        Answer(
            "one column too far left",
            lambda policy, ids, mask, width: _end(_chosen(policy, ids, mask)[:, :-1], mask, width),
            "Your columns begin one token too early: the first is the last token of the prompt, "
            "and the last token of the completion is missing. After the shift the completion is "
            "simply the last width columns, [:, -width:].",
        ),
        Answer(
            "one column too many",
            lambda policy, ids, mask, width: _end(_chosen(policy, ids, mask), mask, width + 1),
            "You keep one column too many: the last token of the prompt, which the policy has not "
            "written. After the shift the completion is the last width columns.",
        ),
        Answer(
            "prompt kept",
            lambda policy, ids, mask, width: _end(
                _chosen(policy, ids, mask), mask, ids.shape[1] - 1
            ),
            "You keep the columns of the prompt. The policy has not written it, so it must not "
            "be trained on it: keep the last width columns.",
        ),
        Answer(
            "first columns",
            lambda policy, ids, mask, width: _real(
                _chosen(policy, ids, mask)[:, :width], mask[:, -width:]
            ),
            "You keep the first columns, which are the prompt. The completion stands at the end: "
            "[:, -width:].",
        ),
        Answer(
            "prompt left out",
            lambda policy, ids, mask, width: _end(
                _chosen(policy, ids[:, -width - 1 :], mask[:, -width - 1 :]), mask, width
            ),
            "The policy does not read the prompt, or only its last token. The completion was "
            "written as an answer to all of it: give the policy the whole rows, and cut "
            "afterwards.",
        ),
        Answer(
            "logits",
            _from_logits(_own),
            "These are logits. They become log-probs by a log_softmax over the vocabulary.",
        ),
        Answer(
            "probabilities",
            _from_logits(lambda z, targets: _own(z.softmax(-1), targets)),
            "These are probabilities. Their logarithms are asked for: log_softmax.",
        ),
        Answer(
            "logarithm of the softmax",
            _from_logits(lambda z, targets: _own(z.softmax(-1), targets).log()),
            "You take the softmax and then its logarithm. A small probability underflows to 0, and "
            "its logarithm is minus infinity: log_softmax does both in one safe step.",
        ),
        Answer(
            "softmax over the positions",
            lambda policy, ids, mask, width: _end(
                _own(policy(ids, attention_mask=mask).logits.log_softmax(1)[:, :-1], ids[:, 1:]),
                mask,
                width,
            ),
            "The softmax runs over the positions. Each position has a distribution over the "
            "vocabulary, the last dimension.",
        ),
        Answer(
            "softmax after gathering",
            _from_logits(
                lambda z, targets: z.gather(-1, targets[..., None]).log_softmax(-1).squeeze(-1)
            ),
            "The softmax comes after gather, over a single number, and that is always log 1 = 0. "
            "Normalise over the vocabulary first, then gather.",
        ),
        Answer(
            "the likeliest token",
            _from_logits(lambda z, targets: z.log_softmax(-1).amax(-1)),
            "You score the likeliest token at each position. The one that was drawn is asked for, "
            "likely or not: gather it with input_ids.",
        ),
        Answer(
            "cross-entropy without the minus",
            _from_logits(lambda z, targets: -_own(z.log_softmax(-1), targets)),
            "The sign is wrong: this is the cross-entropy, minus the log-prob. A log-prob is "
            "never above 0.",
        ),
        Answer(
            "summed",
            lambda policy, ids, mask, width: _end(_chosen(policy, ids, mask), mask, width).sum(-1),
            "You add up the log-probs of each completion. Every token gets its own ratio and its "
            "own clip later: return them one by one, (N, width).",
        ),
        Answer(
            "padding not 0",
            lambda policy, ids, mask, width: _chosen(policy, ids, mask)[:, -width:],
            "What stands after the end of a completion is scored like text. Put 0 there: "
            "torch.where with attention_mask[:, -width:].",
        ),
        Answer(
            "mask of the token before",
            lambda policy, ids, mask, width: _real(
                _chosen(policy, ids, mask)[:, -width:], mask[:, -width - 1 : -1]
            ),
            "Your zeros come one token too late: a column is kept if the token before it is real. "
            "A column belongs to the token that it scores: attention_mask[:, -width:].",
        ),
        Answer(
            "mask upside down",
            lambda policy, ids, mask, width: _end(
                _chosen(policy, ids, mask), 1 - mask.long(), width
            ),
            "You put 0 on the real tokens and keep the padding. The mask is 1 for a real token.",
        ),
        Answer(
            "detached",
            lambda policy, ids, mask, width: completion_log_probs(
                policy.detach(), ids, mask, width
            ),
            "The numbers are right, but the gradient is cut off (detach or no_grad). That is right "
            "for the old policy and the reference; the policy that learns needs it.",
        ),
    ),
    cases=(
        Case(
            "prompts of 3, 1 and 2 tokens, completions of 2, 3 and 1",
            (
                wave(5, 5).as_subclass(_Policy),
                torch.tensor([[3, 1, 2, 4, 0, 0], [0, 0, 2, 1, 3, 4], [0, 4, 4, 3, 0, 0]]),
                torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]),
                3,
            ),
        ),
        Case(
            "a single row, and a very sure policy",
            (
                torch.tensor([[600.0, 0, -200], [0, 500, 0], [0, 0, 900]]).as_subclass(_Policy),
                torch.tensor([[1, 0, 2, 0]]),
                torch.ones(1, 4, dtype=torch.bool),
                2,
            ),
        ),
    ),
    hints=(
        "Take one row: prompt a b, completion c d. At which positions do the logits stand that "
        "predict c and d?",
        "As in exercise 2.2: log_softmax of logits[:, :-1], then gather input_ids[:, 1:, None]. "
        "Column s of the result scores token s + 1.",
        "The completion is the last width columns, chosen[:, -width:], and its mask is "
        "attention_mask[:, -width:]: torch.where puts 0 where it is 0.",
    ),
    gradient=(0,),
    lapses=(
        lambda policy, ids, mask, width: completion_log_probs(policy, ids, mask, width).squeeze(),
    ),
)


# 6.2 ----------------------------------------------------------------------------------------


def inner_epochs(start, old_log_probs, advantages, mask, epochs):
    """start() -> (score, optimizer); old_log_probs, mask (N, T), advantages (N,) -> (N, T)"""
    score, optimizer = start()  # score() -> (N, T), what the policy of this moment says
    for _ in range(epochs):
        log_probs = score()  # anew: the last update has changed the policy
        loss, _ = grpo_loss(log_probs, old_log_probs, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return score().detach()


Score = Callable[[], Tensor]
Start = Callable[[], tuple[Score, Optimizer]]


def _written(policy: Tensor, mask: Tensor) -> Tensor:
    """(N, T), log-probs of ROWS under a table of logits; 0 where masked, as in the package."""
    return _real(_own(policy[ROWS[:, :-1]].log_softmax(-1), ROWS[:, 1:]), mask)


def _start(mask: Tensor, make: Callable[..., Optimizer]) -> Start:
    """A policy with the logits of TABLE, and its optimizer; new ones at every call."""

    def start() -> tuple[Score, Optimizer]:
        policy = nn.Parameter(TABLE.double().clone())
        return lambda: _written(policy, mask), make([policy])

    return start


def _loop(epoch: Callable[..., object]) -> Callable[..., Tensor]:
    """This function of score, optimizer, old_log_probs, advantages and mask, in every epoch."""

    def answer(start: Start, old: Tensor, adv: Tensor, mask: Tensor, epochs: int) -> Tensor:
        score, optimizer = start()
        for _ in range(epochs):
            epoch(score, optimizer, old, adv, mask)
        return score().detach()

    return answer


def _epochs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loop with this loss of log_probs, old_log_probs, advantages and mask."""

    def epoch(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
        optimizer.zero_grad()
        function(score(), *batch).backward()
        optimizer.step()

    return _loop(epoch)


def _without_backward(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    (parameter.grad,) = torch.autograd.grad(grpo_loss(score(), *batch)[0], parameter)
    optimizer.step()


def _by_hand(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
    """Plain gradient descent, whatever the optimizer is."""
    (parameter,) = optimizer.param_groups[0]["params"]
    (gradient,) = torch.autograd.grad(grpo_loss(score(), *batch)[0], parameter)
    parameter.data -= optimizer.param_groups[0]["lr"] * gradient


def _gradients_add_up(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
    grpo_loss(score(), *batch)[0].backward()
    optimizer.step()


def _no_gradient_left(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
    grpo_loss(score(), *batch)[0].backward()
    optimizer.zero_grad()
    optimizer.step()


def _step_first(score: Score, optimizer: Optimizer, *batch: Tensor) -> None:
    loss, _ = grpo_loss(score(), *batch)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def _scored_once(retain: bool) -> Callable[..., Tensor]:
    def answer(
        start: Start,
        old: Tensor,
        adv: Tensor,
        mask: Tensor,
        epochs: int,
        retain: bool = retain,
    ) -> Tensor:
        score, optimizer = start()
        log_probs = score()
        for _ in range(epochs):
            optimizer.zero_grad()
            grpo_loss(log_probs, old, adv, mask)[0].backward(retain_graph=retain)
            optimizer.step()
        return score().detach()

    return answer


def _one_step_at_the_end(
    start: Start, old: Tensor, adv: Tensor, mask: Tensor, epochs: int
) -> Tensor:
    score, optimizer = start()
    for _ in range(epochs):
        grpo_loss(score(), old, adv, mask)[0].backward()
    optimizer.step()
    return score().detach()


def _before_the_last_update(
    start: Start, old: Tensor, adv: Tensor, mask: Tensor, epochs: int
) -> Tensor:
    return inner_epochs(start, old, adv, mask, epochs - 1)


def _one_epoch_behind(start: Start, old: Tensor, adv: Tensor, mask: Tensor, epochs: int) -> Tensor:
    score, optimizer = start()
    for _ in range(epochs):
        log_probs = score()
        optimizer.zero_grad()
        grpo_loss(log_probs, old, adv, mask)[0].backward()
        optimizer.step()
        old = log_probs.detach()
    return score().detach()


def _losses(start: Start, old: Tensor, adv: Tensor, mask: Tensor, epochs: int) -> Tensor:
    score, optimizer = start()
    losses = []
    for _ in range(epochs):
        loss, _ = grpo_loss(score(), old, adv, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# Each row is the last token of a prompt, and a completion.
ROWS = torch.tensor([[0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 3, 2], [0, 1, 1, 0]])
FULL = torch.ones(4, 3, dtype=torch.long)
ENDED = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
TABLE = wave(4, 4) / 4
# The policy that wrote the batch of the second case, which is a few updates old.
OLDER = wave(4, 4).T / 4 + wave(4, 4) / 5


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=2.0)


def _adam(parameters: list[nn.Parameter]) -> Optimizer:
    # With weight decay, a gradient of 0 and no gradient are not the same.
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


INNER_EPOCHS = Exercise(
    key="6.2",
    title="several updates from one batch",
    reference=inner_epochs,
    imports=("from minigrpo.objective import grpo_loss",),
    package=_loop(_without_backward),
    others=(
        Answer(
            "loss written out",
            _epochs(lambda new, old, adv, mask: token_loss(new, old, adv, mask, 0.2, 0.2)),
            "the same loop with the loss of exercise 4.3, token_loss(..., 0.2, 0.2).",
        ),
    ),
    wrong=(
        Answer(
            "old log-probs taken anew",
            _epochs(lambda new, old, adv, mask: grpo_loss(new, new.detach(), adv, mask)[0]),
            "Your updates are those of a ratio that is always 1: nothing is clipped, and nothing "
            "corrects for the policy that wrote the batch. Either there is no ratio, or you take "
            "the old log-probs anew in every epoch. They are frozen when the batch is sampled: use "
            "old_log_probs.",
        ),
        Answer(
            "old log-probs not detached",
            _epochs(lambda new, old, adv, mask: token_loss(new, new, adv, mask, 0.2, 0.2)),
            "You divide the policy by itself, with a gradient on both sides of the ratio, and the "
            "two cancel: the gradient is 0. The old log-probs are plain numbers from the time of "
            "sampling: use old_log_probs.",
        ),
        Answer(
            "old log-probs one epoch behind",
            _one_epoch_behind,
            "After each update you replace the old log-probs by those of the last epoch. The ratio "
            "then measures one update only, and the policy may drift away from the batch in small "
            "steps that nothing clips. Leave old_log_probs as they are.",
        ),
        Answer(
            "gradients add up",
            _loop(_gradients_add_up),
            "The gradients add up: backward adds to what is still there from the epochs before. "
            "Call optimizer.zero_grad() in every epoch, before backward.",
        ),
        Answer(
            "policy does not move",
            _loop(_no_gradient_left),
            "The policy has not moved: there is no gradient when the optimizer steps, or it never "
            "steps. In every epoch the order is zero_grad, backward, step.",
        ),
        Answer(
            "step before backward",
            _loop(_step_first),
            "You step before backward, so each step uses the gradient of the epoch before, and the "
            "last one is never used. The order is zero_grad, backward, step.",
        ),
        Answer(
            "scored once",
            _scored_once(False),
            "You compute the log-probs once, before the loop. Their graph is used up by the first "
            "backward, and after an update they belong to a policy that is gone. Call score() in "
            "every epoch.",
        ),
        Answer(
            "scored once, graph kept",
            _scored_once(True),
            "You compute the log-probs once and keep their graph (retain_graph), so every epoch "
            "repeats the gradient of the first, as if the policy had not moved. Call score() in "
            "every epoch, without retain_graph.",
        ),
        Answer(
            "loss made larger",
            _epochs(lambda new, old, adv, mask: -grpo_loss(new, old, adv, mask)[0]),
            "The sign is wrong: your updates make the loss larger and the bad tokens likelier. An "
            "optimizer minimises. The objective needs a minus before it; grpo_loss has it already.",
        ),
        Answer(
            "one update only",
            lambda start, old, adv, mask, epochs: inner_epochs(start, old, adv, mask, 1),
            "The policy has had one update only. Is the step after the loop, or the return inside "
            "it? Or do you call start() in every epoch? That takes all updates back.",
        ),
        Answer(
            "one step at the end",
            _one_step_at_the_end,
            "You add up the gradients of all epochs and step once, after the loop. Until then the "
            "policy does not move, so that is one epoch with a larger gradient. Step in every "
            "epoch.",
        ),
        Answer(
            "one update too many",
            lambda start, old, adv, mask, epochs: inner_epochs(start, old, adv, mask, epochs + 1),
            "You do one update too many: range(epochs) counts from 0 to epochs - 1, and that is "
            "enough.",
        ),
        Answer(
            "scored before the last update",
            _before_the_last_update,
            "You return the log-probs of the last epoch, from before its update (or one update is "
            "missing). Call score() once more, after the loop.",
        ),
        Answer(
            "no clip",
            _epochs(lambda new, old, adv, mask: grpo_loss(new, old, adv, mask, clip=(INF, INF))[0]),
            "Nothing is clipped: a token that has risen enough is pushed further in every epoch. "
            "With several updates from one batch it is the clip that says when to stop: 0.2 on "
            "both sides.",
        ),
        Answer(
            "old over new",
            _epochs(lambda new, old, adv, mask: token_loss(-new, -old, adv, mask, 0.2, 0.2)),
            "Your ratio is old over new, so good tokens are made rarer. It is "
            "exp(log_probs - old_log_probs), new over old.",
        ),
        Answer(
            "one ratio per row",
            _epochs(
                lambda new, old, adv, mask: grpo_loss(new, old, adv, mask, level="sequence")[0]
            ),
            "You take one ratio per completion. Every token has its own here, with its own clip.",
        ),
        Answer(
            "mask not used",
            _epochs(lambda new, old, adv, mask: grpo_loss(new, old, adv, torch.ones_like(mask))[0]),
            "The mask is not used: padding counts as tokens when the rows are averaged.",
        ),
        Answer(
            "token mean",
            _epochs(
                lambda new, old, adv, mask: grpo_loss(new, old, adv, mask, how="token_mean")[0]
            ),
            "You average over all tokens at once, so long rows weigh more. Here each row is "
            "averaged first, then the rows, which is the default of grpo_loss.",
        ),
        Answer(
            "normalised again",
            _epochs(
                lambda new, old, adv, mask: grpo_loss(
                    new, old, (adv - adv.mean()) / (adv.std() + 1e-4), mask
                )[0]
            ),
            "You normalise the advantages once more, over the whole batch. They are finished: the "
            "group has already been the measure. Use them as they are.",
        ),
        Answer(
            "losses returned",
            _losses,
            "You return the losses. The log-probs after all the updates are asked for, (N, T): "
            "score() once more, after the loop.",
        ),
    ),
    cases=(
        Case(
            "four epochs",
            (
                _start(FULL, _sgd),
                _written(TABLE.double(), FULL),
                torch.tensor([1.5, -1.0, -0.75, 0.25]),
                FULL,
                4,
            ),
        ),
        Case(
            "AdamW, ragged rows, and a batch that is a few updates old",
            (
                _start(ENDED, _adam),
                _written(OLDER.double(), ENDED),
                torch.tensor([1.2, -1.2, 0.6, -0.6]),
                ENDED,
                3,
            ),
        ),
        Case(
            "one epoch, ragged rows",
            (
                _start(ENDED, _sgd),
                _written(TABLE.double(), ENDED),
                torch.tensor([0.75, 0.75, -0.75, -0.75]),
                ENDED,
                1,
            ),
        ),
    ),
    hints=(
        "What changes from one epoch to the next, and what stays as it was when the batch was "
        "sampled?",
        "Call start() once, before the loop. Inside: score() anew, the loss from it and from "
        "old_log_probs, then three calls on the optimizer and the loss. In which order?",
        "loss, _ = grpo_loss(score(), old_log_probs, advantages, mask); optimizer.zero_grad(); "
        "loss.backward(); optimizer.step(). After the loop: score().detach().",
    ),
    lapses=(
        _loop(_by_hand),
        _epochs(lambda new, old, adv, mask: grpo_loss(new.detach(), old, adv, mask)[0]),
        lambda start, old, adv, mask, epochs: inner_epochs(start, old, adv, mask, max(epochs, 2)),
        lambda start, old, adv, mask, epochs: inner_epochs(start, old, adv, mask, min(epochs, 3)),
    ),
)


# 6.3 ----------------------------------------------------------------------------------------


def gradient_weights(ratio, advantages, mask, clip):
    """ratio, mask (N, T), advantages (N,), clip (low, high) -> (N, T), 0 where masked"""
    low, high = clip
    A = advantages[:, None]  # (N, 1): the same for every token of a row
    enough = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    real = mask.bool()
    return torch.where(real & ~enough, ratio * A, 0.0) / real.sum()


def _by_autograd(ratio: Tensor, adv: Tensor, mask: Tensor, clip: tuple[float, float]) -> Tensor:
    """The gradient of the loss, turned round; the old log-probs are 0."""
    log_probs = torch.where(mask.bool(), ratio, 1.0).log().requires_grad_()
    old = torch.zeros_like(log_probs)
    loss, _ = grpo_loss(log_probs, old, adv, mask, clip=clip, how="token_mean")
    return -torch.autograd.grad(loss, log_probs)[0]


def _autograd_of_the_minimum(
    ratio: Tensor, adv: Tensor, mask: Tensor, clip: tuple[float, float]
) -> Tensor:
    low, high = clip
    log_ratio = torch.where(mask.bool(), ratio, 1.0).log().requires_grad_()
    rho, A = log_ratio.exp(), adv[:, None]
    per_token = torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)
    objective = _real(per_token, mask).sum() / mask.sum()
    return torch.autograd.grad(objective, log_ratio)[0]


def _enough(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    return ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))


def _pushes(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    """(N, T), not divided, and garbage where the ratio is garbage."""
    return torch.where(_enough(ratio, A, low, high), 0.0, ratio * A)


Weights = Callable[[Tensor, Tensor, Tensor, tuple[float, float]], Tensor]


def _pushed(function: Callable[[Tensor, Tensor, float, float], Tensor]) -> Weights:
    """Mask and divisor are right; this function of ratio, A (N, 1), low and high is not."""
    return lambda ratio, adv, mask, clip: (
        _real(function(ratio, adv[:, None], *clip), mask) / mask.sum()
    )


def _stopped(function: Callable[[Tensor, Tensor, float, float], Tensor]) -> Weights:
    """The clip stops where this function says so."""
    return _pushed(
        lambda ratio, A, low, high: torch.where(function(ratio, A, low, high), 0.0, ratio * A)
    )


def _divided(function: Callable[[Tensor, Tensor], Tensor | int]) -> Weights:
    """The pushes are right, but divided by this function of pushes and mask."""

    def answer(ratio: Tensor, adv: Tensor, mask: Tensor, clip: tuple[float, float]) -> Tensor:
        pushes = _real(_pushes(ratio, adv[:, None], *clip), mask)
        return pushes / function(pushes, mask)

    return answer


def _bounds(function: Callable[[float, float], tuple[float, float]]) -> Weights:
    return lambda ratio, adv, mask, clip: gradient_weights(ratio, adv, mask, function(*clip))


GRADIENT_WEIGHTS = Exercise(
    key="6.3",
    title="how hard each token is pushed",
    reference=gradient_weights,
    imports=("import torch",),
    package=_by_autograd,
    others=(
        Answer(
            "autograd",
            _autograd_of_the_minimum,
            "let torch.autograd.grad find the derivative of the clipped objective.",
        ),
        Answer(
            "where the minimum is the first",
            _pushed(
                lambda ratio, A, low, high: torch.where(
                    ratio * A <= ratio.clamp(1 - low, 1 + high) * A, ratio * A, 0.0
                )
            ),
            "a token is pushed where ratio * A is the smaller of the two products, or equal.",
        ),
    ),
    wrong=(
        Answer(
            "clip on both sides",
            _stopped(lambda ratio, A, low, high: (ratio > 1 + high) | (ratio < 1 - low)),
            "You stop every token outside the bounds, whatever the sign of its advantage. A token "
            "that has moved the wrong way (ratio 0.5 and a positive advantage) has to be brought "
            "back. Only moves in the direction of the advantage are stopped.",
        ),
        Answer(
            "clip on the wrong sides",
            _stopped(
                lambda ratio, A, low, high: (
                    ((A > 0) & (ratio < 1 - low)) | ((A < 0) & (ratio > 1 + high))
                )
            ),
            "The clip acts on the wrong sides: you stop the tokens that have moved the wrong way, "
            "and go on pushing those that have moved enough. A positive advantage is stopped "
            "above, a negative one below.",
        ),
        Answer(
            "negative advantages not clipped",
            _stopped(lambda ratio, A, low, high: (A > 0) & (ratio > 1 + high)),
            "Tokens with a negative advantage are never stopped. They have moved enough when the "
            "ratio is below 1 - low.",
        ),
        Answer(
            "positive advantages not clipped",
            _stopped(lambda ratio, A, low, high: (A < 0) & (ratio < 1 - low)),
            "Tokens with a positive advantage are never stopped. They have moved enough when the "
            "ratio is above 1 + high.",
        ),
        Answer(
            "same bound for both signs",
            _stopped(lambda ratio, A, low, high: ratio > 1 + high),
            "You stop every token above 1 + high, and none below 1 - low. Which bound acts depends "
            "on the sign of the advantage.",
        ),
        Answer(
            "no clip",
            _pushed(lambda ratio, A, low, high: ratio * A),
            "Nothing is clipped: the further a token has moved, the harder you push it on.",
        ),
        Answer(
            "clamped ratio",
            _pushed(lambda ratio, A, low, high: ratio.clamp(1 - low, 1 + high) * A),
            "You weight with the clamped ratio. Where the clip acts, the objective is flat: its "
            "value is the bound times A, but its derivative is 0.",
        ),
        Answer(
            "objective instead of its derivative",
            _pushed(
                lambda ratio, A, low, high: torch.minimum(
                    ratio * A, ratio.clamp(1 - low, 1 + high) * A
                )
            ),
            "That is the clipped objective itself. How hard a token is pushed is its derivative, "
            "which is 0 where the clip acts.",
        ),
        Answer(
            "ratio left out",
            _pushed(
                lambda ratio, A, low, high: torch.where(
                    _enough(ratio, A, low, high), 0.0, A.expand_as(ratio)
                )
            ),
            "The ratio is left out: you take the derivative with respect to the ratio. With "
            "respect to the log-prob it is A * ratio, because the derivative of exp is exp.",
        ),
        Answer(
            "log-ratio instead of ratio",
            _pushed(
                lambda ratio, A, low, high: torch.where(
                    _enough(ratio, A, low, high), 0.0, ratio.log() * A
                )
            ),
            "You weight with the log of the ratio, which is 0 when nothing has changed. The "
            "weight is the ratio itself.",
        ),
        Answer(
            "advantage left out",
            _pushed(
                lambda ratio, A, low, high: torch.where(_enough(ratio, A, low, high), 0.0, ratio)
            ),
            "The advantage is left out of the product: bad tokens are pushed up like good ones. "
            "The weight is ratio * A.",
        ),
        Answer(
            "sign of the advantage",
            _pushed(
                lambda ratio, A, low, high: torch.where(
                    _enough(ratio, A, low, high), 0.0, ratio * A.sign()
                )
            ),
            "You use only the sign of the advantage. A row that is much better than its group is "
            "pushed harder than one that is a little better: multiply by the advantage.",
        ),
        Answer(
            "advantages along the wrong axis",
            lambda ratio, adv, mask, clip: _real(_pushes(ratio, adv, *clip), mask) / mask.sum(),
            "You multiply (N, T) by (N,): torch lays the advantages along the tokens, which fails, "
            "or where N happens to equal T goes wrong without a word. Each row has one advantage: "
            "advantages[:, None].",
        ),
        Answer(
            "gradient of the loss",
            _divided(lambda pushes, mask: -mask.sum()),
            "The sign is wrong: this is the gradient of the loss. A good token is pushed up: its "
            "weight is positive.",
        ),
        Answer(
            "divided per row",
            _divided(lambda pushes, mask: len(mask) * mask.sum(-1, keepdim=True).clamp(min=1)),
            "You divide by the length of each row and by the number of rows: that is the sequence "
            "mean. In the token mean all tokens have the same divisor, the number of real tokens "
            "of the batch.",
        ),
        Answer(
            "divided by the length of the row",
            _divided(lambda pushes, mask: mask.sum(-1, keepdim=True).clamp(min=1)),
            "You divide each row by its own length. In the token mean all tokens have the same "
            "divisor, the number of real tokens of the whole batch.",
        ),
        Answer(
            "divided by all positions",
            _divided(lambda pushes, mask: mask.numel()),
            "You divide by all positions, padding included. Count the real tokens only: "
            "mask.sum().",
        ),
        Answer(
            "divided by the rows",
            _divided(lambda pushes, mask: len(mask)),
            "You divide by the number of rows. The token mean divides by the number of real tokens "
            "of the batch.",
        ),
        Answer(
            "divided by the tokens that are pushed",
            _divided(lambda pushes, mask: (pushes != 0).sum()),
            "You divide by the number of tokens that still have a weight. A stopped token counts "
            "in the mean as well: divide by all real tokens.",
        ),
        Answer(
            "not divided",
            _divided(lambda pushes, mask: 1),
            "Nothing is divided. The objective is a mean over the tokens: divide by the number of "
            "real tokens of the batch.",
        ),
        Answer(
            "mask not used",
            lambda ratio, adv, mask, clip: gradient_weights(
                ratio, adv, torch.ones_like(mask), clip
            ),
            "The mask is not used: what stands after the end of a row is pushed like text.",
        ),
        Answer(
            "mask in the divisor only",
            lambda ratio, adv, mask, clip: _pushes(ratio, adv[:, None], *clip) / mask.sum(),
            "You count only the real tokens, but the padding keeps its weights. Put 0 where the "
            "mask is 0, with torch.where.",
        ),
        Answer(
            "times the mask",
            lambda ratio, adv, mask, clip: _pushes(ratio, adv[:, None], *clip) * mask / mask.sum(),
            "You multiply by the mask, and 0 * NaN is NaN. Choose with torch.where instead.",
        ),
        Answer(
            "low on both sides",
            _bounds(lambda low, high: (low, low)),
            "You use low on both sides. Above, the bound is 1 + high.",
        ),
        Answer(
            "high on both sides",
            _bounds(lambda low, high: (high, high)),
            "You use high on both sides. Below, the bound is 1 - low.",
        ),
        Answer(
            "low and high exchanged",
            _bounds(lambda low, high: (high, low)),
            "low and high have changed places: clip is (low, high), and the bounds are 1 - low and "
            "1 + high.",
        ),
        Answer(
            "bounds without the one",
            _bounds(lambda low, high: (1 - low, high - 1)),
            "Your bounds are low and high themselves. A ratio is 1 when nothing has changed, so "
            "the bounds lie around 1: 1 - low and 1 + high.",
        ),
        Answer(
            "bounds of DAPO",
            _bounds(lambda low, high: (0.2, 0.28)),
            "The bounds are written into your function: 0.2 and 0.28. Use the argument clip.",
        ),
        Answer(
            "bounds of 0.2",
            _bounds(lambda low, high: (0.2, 0.2)),
            "The bounds are written into your function: 0.2 on both sides. Use the argument clip.",
        ),
    ),
    cases=(
        # As many rows as tokens, so that an advantage laid along the wrong axis is not refused.
        Case(
            "both signs, below and above the bounds",
            (
                torch.tensor(
                    [
                        [0.5, 1.5, 1.0, 1.3],
                        [0.5, 1.5, 1.0, 0.7],
                        [1.25, 1.3, 0.7, 2.5],
                        [0.5, 1.5, 1.0, 1.1],
                    ]
                ),
                torch.tensor([1.0, -1.0, 2.0, 0.0]),
                torch.ones(4, 4),
                (0.2, 0.4),
            ),
        ),
        Case(
            "ragged rows, garbage after the end, other bounds",
            (
                torch.tensor(
                    [
                        [1.5, 0.85, NAN, INF, 0.5],
                        [0.5, 0.65, 1.15, 1.5, 0.9],
                        [1.25, 1.5, 0.75, -INF, NAN],
                        [NAN, 1.5, 0.5, INF, 1.0],
                    ]
                ),
                torch.tensor([0.5, -1.5, 1.0, -0.5]),
                torch.tensor(
                    [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
                ).bool(),
                (0.3, 0.1),
            ),
        ),
    ),
    hints=(
        "Without the clip the objective of a token is ratio * A, and ratio is "
        "exp(log_probs - old_log_probs). What is its derivative with respect to log_probs?",
        "The clip makes the objective flat, and its derivative 0, for tokens that have already "
        "moved enough in the direction of their advantage. With A = advantages[:, None]: where "
        "is that for A > 0, and where for A < 0?",
        "enough = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low)). Take "
        "torch.where(mask.bool() & ~enough, ratio * A, 0.0) and divide by the number of real "
        "tokens.",
    ),
)


# 6.4 ----------------------------------------------------------------------------------------


def learnable(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,) bool"""
    groups = rewards.view(-1, group_size)  # (P, G)
    differ = groups.amax(dim=1) != groups.amin(dim=1)  # (P,)
    return differ.repeat_interleave(group_size)


def _groups_with(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """The rows of the groups for which this function of groups (P, G) is True, (P,)."""
    return lambda rewards, size: function(rewards.view(-1, size)).repeat_interleave(size)


def _differ(groups: Tensor) -> Tensor:
    return groups.amax(1) != groups.amin(1)


LEARNABLE = Exercise(
    key="6.4",
    title="rows that can teach something",
    reference=learnable,
    imports=(),
    package=lambda rewards, size: ~objective.equal_groups(rewards, size).repeat_interleave(size),
    others=(
        Answer(
            "compare with the first",
            _grouped(lambda g: (g != g[:, :1]).any(1, keepdim=True).expand_as(g)),
            "compare every reward with the first of its group: .any(dim=1, keepdim=True), spread "
            "over the group with expand_as.",
        ),
        Answer(
            "one group after the other",
            lambda rewards, size: torch.tensor(
                [len(set(g.tolist())) > 1 for g in rewards.split(size) for _ in g]
            ),
            "go through the groups with rewards.split(group_size), and count different rewards.",
        ),
        Answer(
            "advantages",
            _groups_with(
                lambda g: objective.group_advantages(g.flatten(), g.shape[1]).view_as(g).any(1)
            ),
            "a group can teach something if any of its advantages is not 0. (group_advantages "
            "returns exactly 0 for equal rewards; with a rounded mean that would not be safe.)",
        ),
    ),
    wrong=(
        Answer(
            "one per group",
            lambda rewards, size: _differ(rewards.view(-1, size)),
            "You return one value per group. The batch is filtered row by row: repeat each value "
            "group_size times with repeat_interleave.",
        ),
        Answer(
            "equal groups",
            objective.equal_groups,
            "You return one value per group, and it is True for the groups whose rewards are all "
            "equal. Turn it round with ~, and repeat each value group_size times.",
        ),
        Answer(
            "still a table",
            lambda rewards, size: learnable(rewards, size).view(-1, size),
            "The values are right, but they still stand in a table (P, G). One for each row of "
            "the batch is asked for, (N,): flatten it.",
        ),
        Answer(
            "upside down",
            lambda rewards, size: ~learnable(rewards, size),
            "Your result is upside down. True is for the rows that are kept: those of groups "
            "whose rewards are not all equal.",
        ),
        Answer(
            "repeated as a whole",
            lambda rewards, size: _differ(rewards.view(-1, size)).repeat(size),
            "You repeat the whole list of groups. The rows come prompt by prompt, so each value "
            "has to be repeated on its own: repeat_interleave instead of repeat.",
        ),
        Answer(
            "groups interleaved",
            lambda rewards, size: _differ(rewards.view(size, -1).T).repeat(size),
            "You take every P-th reward for a group. The rows come prompt by prompt: the first "
            "group_size belong together, so .view(-1, group_size) has one group per row.",
        ),
        Answer(
            "all-zero groups only",
            _groups_with(lambda g: (g != 0).any(1)),
            "You leave out the groups in which all rewards are 0. A group of equal rewards of any "
            "other size teaches nothing either: its advantages are 0 too.",
        ),
        Answer(
            "all-one groups only",
            _groups_with(lambda g: (g != 1).any(1)),
            "You leave out the groups in which all rewards are 1. Where all are 0, or all are "
            "equal in any other way, there is nothing to compare either.",
        ),
        Answer(
            "between 0 and 1",
            _groups_with(lambda g: (g.mean(1) > 0) & (g.mean(1) < 1)),
            "You ask whether the mean of the group lies between 0 and 1. That is right for rewards "
            "of 0 and 1 only. Ask whether the rewards of the group differ.",
        ),
        Answer(
            "not all 0, not all 1",
            _groups_with(lambda g: (g != 0).any(1) & (g != 1).any(1)),
            "You leave out the groups in which all rewards are 0 or all are 1. Rewards may be "
            "other numbers: leave out every group in which all are equal.",
        ),
        Answer(
            "some success",
            _groups_with(lambda g: (g > 0).any(1)),
            "You keep the groups in which some reward is above 0. Where all are right there is "
            "nothing to compare, and -1 against 0 is a difference too.",
        ),
        Answer(
            "reward above 0",
            lambda rewards, size: rewards > 0,
            "You keep the rows with a reward above 0. That throws away what has to be pushed down, "
            "and keeps groups without any difference. Whole groups are kept or left out.",
        ),
        Answer(
            "advantage of the row",
            _grouped(lambda g: (g - g.mean(1, keepdim=True)).abs() > 1e-4),
            "You ask each row for its own advantage. In a group with differences, a row with "
            "exactly the mean reward has advantage 0 and still counts in the averages: keep "
            "whole groups.",
        ),
        Answer(
            "better than the group",
            _grouped(lambda g: g - g.mean(1, keepdim=True) > 1e-4),
            "You keep only the rows that are better than their group. The worse ones teach as "
            "much, what not to do. Keep whole groups.",
        ),
        Answer(
            "mean of the batch",
            lambda rewards, size: rewards != rewards.mean(),
            "You compare with the mean of the whole batch. A reward is compared with those of its "
            "own group: does that group have a difference?",
        ),
        Answer(
            "any difference in the batch",
            lambda rewards, size: (rewards != rewards[0]).any().expand(len(rewards)),
            "You ask whether the rewards of the whole batch differ. Each group is asked on its "
            "own.",
        ),
        Answer(
            "rounded mean",
            _groups_with(lambda g: (g != g.mean(1, keepdim=True)).any(1)),
            "You compare the rewards with their mean, and that is rounded: the mean of three times "
            "5.7 is not exactly 5.7. Compare the rewards with each other, for instance amax with "
            "amin.",
        ),
        Answer(
            "threshold",
            _groups_with(lambda g: g.std(1) > 1e-2),
            "You leave out groups whose rewards differ by little. The std in the advantage makes "
            "small differences large: any difference counts.",
        ),
        Answer(
            "first and last",
            _groups_with(lambda g: g[:, 0] != g[:, -1]),
            "You compare the first reward of each group with the last. Those between may differ "
            "as well: compare the largest with the smallest.",
        ),
        Answer(
            "rewards that are left",
            lambda rewards, size: rewards[learnable(rewards, size)],
            "You return the rewards that are left. A value for each row is asked for, (N,), True "
            "or False: completions and log-probs have to be filtered with it too.",
        ),
    ),
    cases=(
        Case(
            "eight groups of four",
            (
                torch.tensor(
                    [
                        [1.0, 1.0, 1.0, 1.0],
                        [1.0, 0.0, 0.0, 0.0],
                        [3.0, 3.0, 4.0, 3.0],  # beyond 1, and equal at both ends
                        [0.0, 0.0, 0.0, 0.0],
                        [0.5, 0.5, 0.5, 0.5],
                        [1.0, 0.5, 0.0, 0.5],  # two rows have the mean, of group and batch
                        [-1.0, -1.0, -1.0, -1.0],
                        [-1.0, -1.0, 0.0, 0.0],  # nothing above 0
                    ]
                ).flatten(),
                4,
            ),
        ),
        Case(
            "groups of three in float32",
            (torch.tensor([5.7, 5.7, 5.7, 1.0, 1.0, 1.001, 0.9, 0.9, 0.9]), 3),
            as_given=True,
        ),
    ),
    hints=(
        "A completion is compared with its group. Which groups have nothing to compare?",
        "groups = rewards.view(-1, group_size). All rewards of a group are equal exactly if the "
        "largest is the smallest: groups.amax(dim=1) and groups.amin(dim=1).",
        "differ = groups.amax(dim=1) != groups.amin(dim=1) has one value per group; "
        "differ.repeat_interleave(group_size) has one per row.",
    ),
    lapses=(lambda rewards, size: learnable(rewards, 3),),
)

EXERCISES = (
    COMPLETION_LOG_PROBS,
    INNER_EPOCHS,
    GRADIENT_WEIGHTS,
    LEARNABLE,
)
