"""Answers to the exercises of notebook 02."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch.distributions import Categorical

NAN, INF = float("nan"), float("inf")
double = partial(torch.tensor, dtype=torch.float64)

# 2.1
TINY = double([[1e-300, 1e-300], [0.5, 1.0]])
ONE = double([[1.0, 0.5, 0.25], [0.125, 1.0, 0.5]])
LINE = double([0.5, 0.25, 0.5])
BLOCK = double([[[0.5, 0.25, 1.0], [0.1, 0.2, 0.3]], [[0.7, 0.9, 0.4], [0.6, 0.8, 0.3]]])


@wrong("2.1", TINY)
def log_of_the_product(probs):
    return probs.prod(dim=-1).log()


@wrong("2.1", LINE)
def second_dimension(probs):
    return probs.log().sum(dim=1)


@wrong("2.1", BLOCK)
def one_number_for_all(probs):
    return probs.log().flatten().sum()


@wrong("2.1", BLOCK)
def flat_from_the_second_dimension(probs):
    return probs.log().flatten(start_dim=1).sum(dim=-1) if probs.ndim > 1 else probs.log().sum()


@wrong("2.1", TINY)
def floor_of_float32(probs):
    return probs.clamp(min=1e-38).log().sum(dim=-1)


@wrong("2.1", TINY)
def floor_of_eps(probs):
    return probs.clamp(min=torch.finfo(probs.dtype).eps).log().sum(dim=-1)


@wrong("2.1", TINY)
def log1p_of_the_rest(probs):
    return torch.log1p(probs - 1).sum(dim=-1)


@wrong("2.1", TINY)
def logs_in_float32(probs):
    return probs.float().log().sum(dim=-1).to(probs.dtype)


@wrong("2.1", ONE)
def ones_skipped(probs):
    return torch.where(probs < 1, probs.log(), 0.0).sum(dim=-1)


@wrong("2.1", ONE)
def relu_of_the_surprise(probs):
    return -F.relu(-probs.log()).sum(dim=-1)


@wrong("2.1", TINY)
def binary_cross_entropy(probs):
    return -F.binary_cross_entropy(probs, torch.ones_like(probs), reduction="none").sum(dim=-1)


@wrong("2.1", TINY)
def products_of_sixteen(probs):
    return sum(part.prod(dim=-1).log() for part in probs.split(16, dim=-1))


@wrong("2.1", TINY)
def only_where_it_underflows(probs):
    product = probs.prod(dim=-1)
    return torch.where(product > 0, product.log(), probs.log().sum(dim=-1))


@wrong("2.1", double([[1e-300, 1e-300, 1.0]]))
def divided_by_the_largest(probs):
    largest = probs.amax(dim=-1)
    rest = (probs / largest[..., None]).prod(dim=-1).log()
    return rest + probs.shape[-1] * largest.log()


@right("2.1")
def last_of_cumsum(probs):
    return torch.cumsum(torch.log(probs), dim=-1)[..., -1]


@right("2.1")
def over_the_slices(probs):
    total = torch.zeros_like(probs[..., 0])
    for p in probs.unbind(dim=-1):
        total = total + p.log()
    return total


@right("2.1")
def bits_to_nats(probs):
    return math.log(2) * torch.einsum("...l->...", probs.log2())


@right("2.1")
def halves(probs):
    half = probs.shape[-1] // 2
    if half == 0:
        return probs.squeeze(-1).log()
    return halves(probs[..., :half]) + halves(probs[..., half:])


# 2.2
LOGITS = double([[[1, 2, 0], [0, 3, 1], [2, 0, 1], [1, 1, 4]], [[0, 1, 5], [2, 2, 1]] * 2])
PLAIN = LOGITS, torch.tensor([[2, 1, 0, 2], [0, 0, 2, 1]])
FAR = double([[[900, 0, 0, 10], [0, 900, 5, 10], [1, 2, 3, 4]]]), torch.tensor([[0, 2, 3]])
LEVELS = double([[[0, 1, 2], [900, 901, 903], [-900, -901, -899]]]), torch.tensor([[0, 1, 2]])
WIDE = double([[[900.3] + [0.1] * 9, [900.7, 901.1] * 5, [0] * 10]]), torch.tensor([[0, 0, 1]])
PAIR = LOGITS[:, :2], torch.tensor([[2, 1], [0, 0]])


@wrong("2.2", *PLAIN)
def own_token(logits, input_ids):
    log_p = logits.log_softmax(-1).gather(-1, input_ids[..., None]).squeeze(-1)
    return log_p[:, 1:]


@wrong("2.2", *PLAIN)
def shifted_the_other_way(logits, input_ids):
    log_p = logits[:, 1:].log_softmax(-1)
    return log_p.gather(-1, input_ids[:, :-1, None]).squeeze(-1)


@wrong("2.2", *FAR)
def log_of_softmax(logits, input_ids):
    probs = logits[:, :-1].softmax(dim=-1)
    return probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1).log()


@wrong("2.2", *FAR)
def log_of_softmax_and_tiny(logits, input_ids):
    probs = logits[:, :-1].softmax(dim=-1) + torch.finfo(logits.dtype).tiny
    return probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1).log()


@wrong("2.2", *FAR)
def categorical_of_probs(logits, input_ids):
    return Categorical(probs=logits[:, :-1].softmax(-1)).log_prob(input_ids[:, 1:])


@wrong("2.2", *LEVELS)
def largest_of_the_row(logits, input_ids):
    z = logits[:, :-1] - logits.amax(dim=(1, 2), keepdim=True)
    chosen = z.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return chosen - z.exp().sum(dim=-1).log()


@wrong("2.2", *WIDE)
def centred_on_the_mean(logits, input_ids):
    z = (logits - logits.mean(dim=-1, keepdim=True))[:, :-1]
    return z.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - z.exp().sum(dim=-1).log()


@wrong("2.2", *PLAIN)
def token_0_ignored(logits, input_ids):
    z = logits[:, :-1].transpose(1, 2)
    return -F.cross_entropy(z, input_ids[:, 1:], ignore_index=0, reduction="none")


@wrong("2.2", *PAIR)
def squeezed_everywhere(logits, input_ids):
    log_p = logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze()


@wrong("2.2", *PLAIN)
def normaliser_without_graph(logits, input_ids):
    z = logits[:, :-1]
    with torch.no_grad():
        log_z = z.logsumexp(dim=-1)
    return z.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - log_z


@wrong("2.2", *PLAIN)
def logits_of_row_0_for_all(logits, input_ids):
    log_p = logits[:, :-1].log_softmax(-1)
    return log_p[:, torch.arange(log_p.shape[1]), input_ids[:, 1:]][0]


@wrong("2.2", *PLAIN)
def classes_not_moved(logits, input_ids):
    N, S, V = logits.shape
    z = logits[:, :-1].reshape(N, V, S - 1)
    return -F.cross_entropy(z, input_ids[:, 1:], reduction="none")


@wrong("2.2", *WIDE)
def softmax_in_float32(logits, input_ids):
    log_p = logits[:, :-1].log_softmax(-1, dtype=torch.float32)
    return log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1).to(logits.dtype)


@wrong("2.2", *FAR)
def floor_of_minus_100(logits, input_ids):
    log_p = logits[:, :-1].log_softmax(-1).clamp(min=-100.0)
    return log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@right("2.2")
def categorical_of_logits(logits, input_ids):
    return Categorical(logits=logits[:, :-1]).log_prob(input_ids[:, 1:])


@right("2.2")
def flat_cross_entropy(logits, input_ids):
    z, y = logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
    return F.cross_entropy(z, y, reduction="none").neg().reshape(len(logits), -1)


@right("2.2")
def one_hot_einsum(logits, input_ids):
    hot = F.one_hot(input_ids[:, 1:], num_classes=logits.size(2)).to(logits.dtype)
    return torch.einsum("nsv,nsv->ns", hot, F.log_softmax(logits[:, :-1], dim=2))


@right("2.2")
def rows_and_positions(logits, input_ids):
    log_z = torch.logsumexp(logits, dim=-1)
    rows = [
        torch.stack([logits[n, s, a] - log_z[n, s] for s, a in enumerate(ids[1:].tolist())])
        for n, ids in enumerate(input_ids)
    ]
    return torch.stack(rows)


# 2.3
VALUES = double([[-1, -2, -4, -8], [-3, -5, -6, -7]])
HOLES = VALUES, torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]])
FLOATS = VALUES, double([[1, 0, 1, 0], [0, 1, 1, 1]])
BOOLS = VALUES, torch.tensor([[True, False, True, False], [False, True, True, True]])
IMPOSSIBLE = double([[-1, -INF, -2], [-3, NAN, -1]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
RUBBISH = double([[-1, NAN, -2], [INF, -5, -INF]]), torch.tensor([[1, 0, 1], [0, 1, 0]])
CERTAIN = double([[0, -1, -2], [-3, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
SINGLE = double([[-1, -2, -4]]), torch.tensor([[1, 0, 1]])


@wrong("2.3", *HOLES)
def mask_as_length(log_probs, mask):
    rows = zip(log_probs, mask.sum(dim=-1))
    return torch.stack([row[: int(n)].sum() for row, n in rows])


@wrong("2.3", *RUBBISH)
def times_the_mask(log_probs, mask):
    return (log_probs * mask).sum(dim=-1)


@wrong("2.3", *IMPOSSIBLE)
def nansum_of_the_product(log_probs, mask):
    return (log_probs.masked_fill(log_probs == -INF, 0) * mask).nansum(dim=-1)


@wrong("2.3", *IMPOSSIBLE)
def finite_numbers_first(log_probs, mask):
    return (log_probs.nan_to_num() * mask).sum(dim=-1)


@wrong("2.3", *IMPOSSIBLE)
def infinities_kept_by_nan_to_num(log_probs, mask):
    clean = log_probs.nan_to_num(neginf=-INF, posinf=INF)
    return torch.where(mask.bool(), clean, 0.0).sum(dim=-1)


@wrong("2.3", *IMPOSSIBLE)
def nansum_of_the_real(log_probs, mask):
    real = torch.where(mask.bool() & log_probs.isfinite(), log_probs, NAN)
    return real.nansum(dim=-1)


@wrong("2.3", *CERTAIN)
def only_below_zero(log_probs, mask):
    return log_probs.where((log_probs < 0) & mask.bool(), 0).sum(dim=-1)


@wrong("2.3", *HOLES)
def mask_as_index(log_probs, mask):
    return torch.stack([row[keep].sum() for row, keep in zip(log_probs, mask)])


@wrong("2.3", *FLOATS)
def split_by_counts(log_probs, mask):
    rows = log_probs[mask.bool()].split(mask.sum(dim=-1).tolist())
    return torch.stack([row.sum() for row in rows])


@wrong("2.3", *HOLES)
def real_ones_in_equal_rows(log_probs, mask):
    return log_probs[mask.bool()].view(len(mask), -1).sum(dim=-1)


@wrong("2.3", *BOOLS)
def one_minus_mask(log_probs, mask):
    return log_probs.masked_fill((1 - mask) == 1, 0.0).sum(dim=-1)


@wrong("2.3", *HOLES)
def first_to_last_one(log_probs, mask):
    spans = [m.nonzero().flatten() for m in mask]
    return torch.stack([row[s[0] : s[-1] + 1].sum() for row, s in zip(log_probs, spans)])


@wrong("2.3", *SINGLE)
def squeezed_sum(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0).sum(dim=-1).squeeze()


@wrong("2.3", *IMPOSSIBLE)
def log_of_the_probs(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0).exp().prod(dim=-1).log()


@right("2.3")
def row_by_row(log_probs, mask):
    return torch.stack([row[keep > 0].sum() for row, keep in zip(log_probs, mask)])


@right("2.3")
def added_by_row_number(log_probs, mask):
    row, column = mask.nonzero(as_tuple=True)
    return log_probs.new_zeros(len(mask)).index_add(0, row, log_probs[row, column])


@right("2.3")
def zeros_in_a_copy(log_probs, mask):
    copy = log_probs.clone()
    copy[mask == 0] = 0
    return copy @ torch.ones(copy.shape[1], dtype=copy.dtype)


@right("2.3")
def columns_in_a_loop(log_probs, mask):
    total = 0
    for column, real in zip(log_probs.T, mask.T):
        total = torch.where(real != 0, total + column, total)
    return total


# 2.4
NEW, OLD = VALUES, double([[-2, -1, -3, -8], [-1, -5, -6.5, -6]])
GAPS = NEW, OLD, HOLES[1]
DEEP = double([[-400, -500, -1]]), double([[-400, -501, -1]]), torch.tensor([[1, 1, 1]])
BOTH = double([[-1, -801]]), double([[-801, -1]]), torch.tensor([[1, 1]])
UP = double([[-1, -2], [-1, -90]]), double([[-200, -2], [-1, -89]]), torch.tensor([[1, 1]] * 2)
GONE = double([[-1, -INF, -1], [-2, -1, -1]]), OLD[:, :3], torch.tensor([[1, 1, 0], [1, 1, 1]])
DIRTY = RUBBISH[0], double([[-1, -1, -1], [-1, -2, -3]]), RUBBISH[1]
OLD_DIRTY = VALUES[:, :3], RUBBISH[0], RUBBISH[1]


@wrong("2.4", *GAPS)
def old_over_new(log_probs, old_log_probs, mask):
    return (old_log_probs - log_probs).masked_fill(mask == 0, 0.0).sum(dim=-1).exp()


@wrong("2.4", *GAPS)
def mean_of_the_real(log_probs, old_log_probs, mask):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)
    return (log_ratio.sum(dim=-1) / mask.sum(dim=-1)).exp()


@wrong("2.4", *DEEP)
def quotient_of_probabilities(log_probs, old_log_probs, mask):
    new, old = (x.masked_fill(mask == 0, 0).sum(-1) for x in (log_probs, old_log_probs))
    return new.exp() / old.exp()


@wrong("2.4", *BOTH)
def product_of_token_ratios(log_probs, old_log_probs, mask):
    log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0)
    return log_ratio.exp().prod(dim=-1)


@wrong("2.4", *DIRTY)
def masked_after_exp(log_probs, old_log_probs, mask):
    ratio = (log_probs - old_log_probs).exp()
    return torch.where(mask.bool(), ratio, 1.0).prod(dim=-1)


@wrong("2.4", *DIRTY)
def difference_times_mask(log_probs, old_log_probs, mask):
    return ((log_probs - old_log_probs) * mask).sum(dim=-1).exp()


@wrong("2.4", *UP)
def exponent_up_to_20(log_probs, old_log_probs, mask):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(dim=-1)
    return log_ratio.clamp(-20, 20).exp()


@wrong("2.4", *UP)
def exponent_up_to_88(log_probs, old_log_probs, mask):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(dim=-1)
    return log_ratio.clamp(max=88.0).exp()


@wrong("2.4", *UP)
def exp_in_float32(log_probs, old_log_probs, mask):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(dim=-1)
    return log_ratio.float().exp().to(log_probs.dtype)


@wrong("2.4", *GONE)
def impossible_taken_for_padding(log_probs, old_log_probs, mask):
    log_ratio = log_probs - old_log_probs
    return log_ratio.where(mask.bool() & log_ratio.isfinite(), 0).sum(dim=-1).exp()


@wrong("2.4", *OLD_DIRTY)
def old_put_at_masked_places(log_probs, old_log_probs, mask):
    new = torch.where(mask.bool(), log_probs, old_log_probs)
    return (new - old_log_probs).sum(dim=-1).exp()


@wrong("2.4", *GONE)
def value_times_gradient_carrier(log_probs, old_log_probs, mask):
    new, old = (x.masked_fill(mask == 0, 0).sum(-1) for x in (log_probs, old_log_probs))
    return (new - old).exp().detach() * (new - new.detach()).exp()


@wrong("2.4", *OLD_DIRTY)
def old_cleaned_in_place(log_probs, old_log_probs, mask):
    old_log_probs[mask == 0] = 0.0
    new = log_probs.masked_fill(mask == 0, 0.0)
    return (new - old_log_probs).sum(dim=-1).exp()


@wrong("2.4", *GAPS)
def from_the_first_real_token(log_probs, old_log_probs, mask):
    real = mask.long().cummax(dim=1).values * mask.long().flip(1).cummax(dim=1).values.flip(1)
    return torch.where(real == 1, log_probs - old_log_probs, 0).sum(dim=1).exp()


@right("2.4")
def difference_of_sums(log_probs, old_log_probs, mask):
    def of(x):
        return x.masked_fill(mask.logical_not(), 0.0).sum(1)

    return torch.exp(of(log_probs) - of(old_log_probs))


@right("2.4")
def where_after_difference(log_probs, old_log_probs, mask):
    return (log_probs - old_log_probs).where(mask == 1, 0).sum(axis=1).exp()


@right("2.4")
def nan_to_num_times_mask(log_probs, old_log_probs, mask):
    log_ratio = (log_probs - old_log_probs).nan_to_num()  # exp of -1.8e308 is 0 as well
    return (log_ratio * mask).sum(dim=-1).exp()


@right("2.4")
def zipped_rows(log_probs, old_log_probs, mask):
    ratios = []
    for new, old, real in zip(log_probs, old_log_probs, mask.bool()):
        ratios.append((new[real].sum() - old[real].sum()).exp())
    return torch.stack(ratios)


# 2.5
BY_HAND = torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 5]]), 0
MIDDLE = torch.tensor([[0, 3, 9, 4, 0, 9], [9, 9, 0, 4, 9, 5], [0, 0, 7, 4, 2, 3]]), 4
LARGE = torch.tensor([[50256, 7, 50257, 3], [50250, 50257, 50257, 9]]), 50257
LONG = torch.tensor([[4] * 3000 + [2] * 3000, [4] * 6000]), 2


@wrong("2.5", *BY_HAND)
def up_to_the_eos(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1) == 0


@wrong("2.5", *BY_HAND)
def up_to_the_second_eos(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1) <= 1


@wrong("2.5", *BY_HAND)
def argmax_without_eos(completions, eos_id):
    first = (completions == eos_id).int().argmax(dim=1, keepdim=True)
    return torch.arange(completions.shape[1]) <= first


@wrong("2.5", *BY_HAND)
def only_the_token_before(completions, eos_id):
    before = F.pad(completions[:, :-1], (1, 0), value=eos_id + 1)
    return before != eos_id


@wrong("2.5", *BY_HAND)
def count_rolled_by_one(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1).roll(1, dims=1) == 0


@wrong("2.5", *MIDDLE)
def eos_is_the_smallest(completions, eos_id):
    lowest = completions.cummin(dim=1).values[:, :-1]
    return F.pad(lowest > eos_id, (1, 0), value=True)


@wrong("2.5", *LONG)
def product_of_differences(completions, eos_id):
    product = (completions - eos_id).cumprod(dim=1)
    return F.pad(product[:, :-1], (1, 0), value=1) != 0


@wrong("2.5", *LONG)
def count_in_eight_bits(completions, eos_id):
    is_eos = completions == eos_id
    return is_eos.cumsum(dim=1, dtype=torch.uint8) - is_eos.byte() == 0


@wrong("2.5", *LONG)
def at_most_1024_tokens(completions, eos_id):
    t = torch.arange(completions.shape[1]).expand_as(completions)
    first = torch.where(completions == eos_id, t, 1024).amin(dim=1, keepdim=True)
    return t <= first


@wrong("2.5", *LONG)
def one_call_per_token(completions, eos_id):
    def real(row):
        return [True] + (real(row[1:]) if row[0] != eos_id else [False] * (len(row) - 1))

    return torch.tensor([real(row + [eos_id])[:-1] for row in completions.tolist()])


@wrong("2.5", *LONG)
def positions_in_bfloat16(completions, eos_id):
    T = completions.shape[1]
    t = torch.arange(T, dtype=torch.bfloat16).expand_as(completions)
    return t <= t.masked_fill(completions != eos_id, T).amin(dim=1, keepdim=True)


@wrong("2.5", *LARGE)
def the_same_object(completions, eos_id):
    mask = torch.ones_like(completions, dtype=torch.bool)
    for i, row in enumerate(completions.tolist()):
        mask[i, next((t for t, a in enumerate(row) if a is eos_id), len(row)) + 1 :] = False
    return mask


@wrong("2.5", *MIDDLE)
def padding_is_never_real(completions, eos_id):
    is_eos = completions == eos_id
    before = is_eos.cumsum(dim=1) - is_eos.long()
    return (before == 0) & ((completions != 0) | is_eos)


@wrong("2.5", *BY_HAND)
def searched_in_unsorted_flags(completions, eos_id):
    flags = (completions == eos_id).int()
    first = torch.searchsorted(flags, torch.ones_like(flags[:, :1]))
    return torch.arange(flags.shape[1]) <= first


@right("2.5")
def index_in_a_list(completions, eos_id):
    T = completions.shape[1]
    lengths = [([*row, eos_id]).index(eos_id) + 1 for row in completions.tolist()]
    return torch.arange(T)[None, :] < torch.tensor(lengths)[:, None]


@right("2.5")
def argmax_if_any(completions, eos_id):
    hit, T = completions.eq(eos_id), completions.size(1)
    last = torch.where(hit.any(dim=1), hit.float().argmax(dim=1), T)
    return torch.arange(T).unsqueeze(0).le(last.unsqueeze(1))


@right("2.5")
def accumulated_in_numpy(completions, eos_id):
    seen = np.logical_or.accumulate(completions.numpy() == eos_id, axis=1)
    return torch.from_numpy(np.hstack([np.ones_like(seen[:, :1]), ~seen[:, :-1]]))


@right("2.5")
def alive_through_the_columns(completions, eos_id):
    alive, columns = torch.ones(len(completions), dtype=torch.bool), []
    for column in completions.unbind(1):
        columns.append(alive)
        alive = alive & (column != eos_id)
    return torch.stack(columns, dim=1)


# 2.6
EMPTY = VALUES, torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
ZEROS = double([[0, -1, -2], [-3, -1, 0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
SURE = double([[0, 0, -2], [0, -1, 0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
RARE = double([[-800, -1, -1, -1], [-2, -1, -900, 0]]), torch.tensor([[1, 1, 1, 1]] * 2)
HARD = double([[-30.5, -2]]), torch.tensor([[1, 0]])


@wrong("2.6", *HOLES)
def mean_of_the_rows_perplexities(log_probs, mask):
    total = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
    return (-total / mask.sum(-1).clamp(min=1)).exp()[mask.sum(-1) > 0].mean()


@wrong("2.6", *HOLES)
def mean_of_the_rows_means(log_probs, mask):
    total = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
    return (total / mask.sum(-1)).nanmean().neg().exp()


@wrong("2.6", *HOLES)
def mean_with_the_padding(log_probs, mask):
    return (-log_probs.masked_fill(mask == 0, 0.0).mean()).exp()


@wrong("2.6", *EMPTY)
def at_least_one_token_a_row(log_probs, mask):
    total = torch.where(mask.bool(), log_probs, 0.0).sum()
    return (-total / mask.sum(dim=-1).clamp(min=1).sum()).exp()


@wrong("2.6", *ZEROS)
def mean_of_the_nonzero(log_probs, mask):
    real = torch.where(mask.bool(), log_probs, 0.0)
    return (-real.sum() / real.count_nonzero()).exp()


@wrong("2.6", *SURE)
def maximum_with_one(log_probs, mask):
    value = log_probs[mask.bool()].mean().neg().exp()
    return torch.maximum(value, torch.ones_like(value))


@wrong("2.6", *ZEROS)
def absolute_values(log_probs, mask):
    return log_probs[mask.bool()].abs().mean().exp()


@wrong("2.6", *RARE)
def root_of_the_product(log_probs, mask):
    probs = log_probs.exp().masked_fill(mask == 0, 1.0)
    return probs.prod() ** (-1 / mask.sum())


@wrong("2.6", *RARE)
def floor_of_minus_100_nats(log_probs, mask):
    return log_probs[mask.bool()].clamp(min=-100.0).mean().neg().exp()


@wrong("2.6", *HARD)
def infinite_above_20_nats(log_probs, mask):
    loss = -log_probs[mask.bool()].mean()
    return loss.exp() if loss < 20 else loss * INF


@wrong("2.6", *HARD)
def eps_in_the_count(log_probs, mask):
    total = torch.where(mask.bool(), log_probs, 0.0).sum()
    return (-total / (mask.sum() + 1e-6)).exp()


@wrong("2.6", *HOLES)
def first_tokens_of_each_row(log_probs, mask):
    real = torch.arange(mask.shape[1]) < mask.sum(dim=1, keepdim=True)
    return log_probs[real].mean().neg().exp()


@wrong("2.6", *RARE)
def mean_in_float32(log_probs, mask):
    real = log_probs[mask.bool()].float()
    return (-real.mean()).exp().double()


@wrong("2.6", *BOOLS)
def bits_of_nats(log_probs, mask):
    return 2 ** -(log_probs[mask.bool()].mean())


@right("2.6")
def mean_of_the_selected(log_probs, mask):
    return torch.exp(-log_probs.masked_select(mask > 0).mean())


@right("2.6")
def sum_and_count(log_probs, mask):
    total, count = 0.0, 0
    for row, real in zip(log_probs, mask.tolist()):
        for value, m in zip(row, real):
            total, count = (total + value, count + 1) if m else (total, count)
    return (total / count).neg().exp()


@right("2.6")
def exponential_of_the_rows_totals(log_probs, mask):
    totals = [row[m != 0].sum() for row, m in zip(log_probs, mask)]
    return (-sum(totals) / (mask != 0).sum()).exp()


@right("2.6")
def nanmean_of_the_real(log_probs, mask):
    return log_probs.masked_fill(~mask.bool(), NAN).nanmean().neg().exp()
