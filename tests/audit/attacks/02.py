"""Answers to the exercises of notebook 02."""

import torch
import torch.nn.functional as F
from attack import right, wrong

INF = float("inf")


def rows(*given):
    return torch.tensor(given)


LOGITS = torch.linspace(-1, 1, 24).sin().mul(3).reshape(2, 4, 3) ** 3
IDS = torch.tensor([[0, 2, 1, 0], [1, 0, 2, 2]])
LEVELS = LOGITS + rows([0.0, -900.0, 800.0, 0.3], [500.0, 0.0, -900.0, 7.0])[..., None]


@wrong("2.1", LEVELS, IDS)
def maximum_of_the_whole_row(logits, input_ids):
    z = logits[:, :-1] - logits[:, :-1].amax(dim=(1, 2), keepdim=True)
    return z.gather(-1, input_ids[:, 1:, None])[..., 0] - z.exp().sum(dim=-1).log()


@wrong("2.1", LOGITS, IDS)
def unsqueezed_in_place(logits, input_ids):
    log_p = logits.log_softmax(dim=-1)[:, :-1]
    return log_p.gather(-1, input_ids.unsqueeze_(-1)[:, 1:]).squeeze(-1)


HOLES = rows([-1.0, -2.0, -4.0, -0.5], [-3.0, 0.0, -INF, -7.0])
HOLES_MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
DEEP = rows([-500.0, -400.0, -3.0], [-1.0, -2.0, -3.0]), torch.tensor([[1, 1, 0], [0, 1, 1]])


@wrong("2.2", HOLES, HOLES_MASK)
def zeros_taken_for_padding(log_probs, mask):
    real = torch.where(mask.bool(), log_probs, 0.0)
    return torch.stack([row[row != 0].sum() for row in real])


@wrong("2.2", *DEEP)
def product_of_the_probabilities(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0).exp().prod(dim=-1).log()


@wrong("2.2", HOLES, HOLES_MASK)
def zeroed_in_the_argument(log_probs, mask):
    log_probs.detach()[mask == 0] = 0.0
    return (log_probs * mask).sum(dim=-1)


@right("2.2")
def selected_row_by_row(log_probs, mask):
    return torch.stack([row[real != 0].sum() for row, real in zip(log_probs, mask)])


@right("2.4")
def cooled_after_a_softmax(model, prompt_ids, prompt_mask, completions, mask, temperature):
    """Only the last T + 1 logits, and log-probs divided before they're normalized again."""
    T = completions.shape[1]
    ids, real = torch.cat([prompt_ids, completions], 1), torch.cat([prompt_mask, mask], 1)
    log_p = model(ids, real).logits[:, -T - 1 : -1].log_softmax(-1)
    return (log_p / temperature).log_softmax(-1).gather(-1, completions[..., None])[..., 0]


@right("2.5")
def drawn_and_stored(
    model, prompt_ids, prompt_mask, max_new_tokens, eos_id, temperature, generator
):
    """In tables made beforehand, with a flag for the rows that have ended."""
    N, P = prompt_ids.shape
    ids = F.pad(prompt_ids, (0, max_new_tokens))
    mask = F.pad(prompt_mask.long(), (0, max_new_tokens), value=1)
    log_probs, ended = torch.zeros(N, max_new_tokens), torch.zeros(N, dtype=torch.bool)
    for t in range(P, P + max_new_tokens):
        scores = model(ids[:, :t], mask[:, :t]).logits[:, -1] / temperature
        token = torch.multinomial(F.softmax(scores, dim=1), 1, generator=generator)[:, 0]
        ids[:, t] = token
        log_probs[:, t - P] = -F.cross_entropy(scores, token, reduction="none").detach()
        ended |= token == eos_id
        if ended.all():
            break
    return ids[:, P : t + 1], log_probs[:, : t + 1 - P]


@right("2.5")
def padded_after_the_end(
    model, prompt_ids, prompt_mask, max_new_tokens, eos_id, temperature, generator
):
    """A row that has ended gets EOS and 0, as libraries do it."""
    completions, log_probs = drawn_and_stored(
        model, prompt_ids, prompt_mask, max_new_tokens, eos_id, temperature, generator
    )
    is_eos = completions == eos_id
    after = is_eos.cumsum(dim=1) - is_eos.long() > 0
    return completions.masked_fill(after, eos_id), log_probs.masked_fill(after, 0.0)
