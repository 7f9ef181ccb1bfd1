"""Answers to the exercises of notebook 05."""

from __future__ import annotations

import functools
import itertools
import math
import re
import string
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch.nn.utils.rnn import pad_sequence

from minigrpo import arithmetic
from minigrpo.arithmetic import TAGS

ROWS = [torch.tensor([5, 6, 7]), torch.tensor([8])], 29
PAD_FIRST = [torch.tensor([29, 6, 7]), torch.tensor([8])], 29
PAD_INSIDE = [torch.tensor([5, 29, 7]), torch.tensor([8])], 29
ZERO = [torch.tensor([5, 0, 7]), torch.tensor([8])], 29
EMPTY = [torch.tensor([5, 6]), torch.tensor([], dtype=torch.long), torch.tensor([8])], 29
MINUS = [torch.tensor([5, 6, 7]), torch.tensor([8])], -100
MILLIONS = [torch.tensor([3_000_001, 6, 7]), torch.tensor([8])], 29
SQUARE = [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 4])], 29
SAME = [torch.tensor([5, 6]), torch.tensor([8]), torch.tensor([9, 4])], 29


@wrong("5.1", *PAD_INSIDE)
def mask_from_ids(rows, pad_id):
    width = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    return torch.stack([ids, (ids != pad_id).long()])


@wrong("5.1", *ROWS)
def on_the_right(rows, pad_id):
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return torch.stack([ids, pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)])


@wrong("5.1", *EMPTY)
def minus_zero_slice(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row.tolist() for row in rows])
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        mask[i, -len(row) :] = 1
    return torch.stack([ids, mask])


@wrong("5.1", *PAD_FIRST)
def leading_pads_off(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row.tolist() for row in rows])
    return torch.stack([ids, ((ids != pad_id).cumsum(dim=1) > 0).long()])


@wrong("5.1", *ZERO)
def zeros_become_pads(rows, pad_id):
    ids = pad_sequence([row.flip(0) for row in rows], batch_first=True).flip(1)
    mask = pad_sequence([torch.ones_like(r) for r in rows], batch_first=True).flip(1)
    return torch.stack([ids.masked_fill(ids == 0, pad_id), mask])


@wrong("5.1", *ZERO)
def mask_is_truth_of_id(rows, pad_id):
    width = max(map(len, rows))
    mask = [F.pad((row > 0).long(), (width - len(row), 0)) for row in rows]
    ids = [F.pad(row, (width - len(row), 0), value=pad_id) for row in rows]
    return torch.stack([torch.stack(ids), torch.stack(mask)])


@wrong("5.1", *ROWS)
def mask_padded_with_pad_id(rows, pad_id):
    def pad(parts):
        return pad_sequence([p.flip(0) for p in parts], True, pad_id).flip(1)

    return torch.stack([pad(rows), pad([torch.ones_like(row) for row in rows])])


@wrong("5.1", *SAME)
def longest_first(rows, pad_id):
    rows = sorted(rows, key=len)
    width = len(rows[-1])
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return torch.stack([ids, (torch.arange(width) >= width - lengths[:, None]).long()])


@wrong("5.1", *EMPTY)
def drops_empty_rows(rows, pad_id):
    rows = [row for row in rows if row.numel()]
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    mask = [F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows]
    return torch.stack([ids, torch.stack(mask)])


@wrong("5.1", *SQUARE)
def lengths_not_a_column(rows, pad_id):
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    return torch.stack([ids, (torch.arange(width) >= width - lengths).long().expand_as(ids)])


@wrong("5.1", *MILLIONS)
def short_integers(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int16)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return torch.stack([ids, mask]).long()


@wrong("5.1", *ROWS)
def list_changed(rows, pad_id):
    width = max(map(len, rows))
    mask = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    for i, row in enumerate(rows):
        rows[i] = F.pad(row, (width - len(row), 0), value=pad_id)
    return torch.stack([torch.stack(rows), mask])


@wrong("5.1", *MINUS)
def negative_pad_by_absolute(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=-1) for row in rows])
    mask = (ids >= 0).long()
    return torch.stack([ids.abs() * mask + abs(pad_id) * (1 - mask), mask])


@wrong("5.1", [torch.tensor([8]), torch.tensor([5, 6, 7])], 29)
def width_of_the_first(rows, pad_id):
    ids = torch.full((len(rows), len(rows[0])), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        start = max(0, len(rows[0]) - len(row))
        ids[i, start:], mask[i, start:] = row[-len(rows[0]) :], 1
    return torch.stack([ids, mask])


@right("5.1")
def flipped_twice(rows, pad_id):
    ids = pad_sequence([row.flip(0) for row in rows], batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return torch.stack([ids, mask]).flip(-1)


@right("5.1")
def sentinel_below_zero(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.tensor([[-1] * (width - len(row)) + row.tolist() for row in rows])
    real = ids >= 0
    return torch.stack([ids.masked_fill(~real, pad_id), real.long()])


@right("5.1")
def all_at_once(rows, pad_id):
    lengths = torch.tensor([row.numel() for row in rows])
    size = int(lengths.max())
    mask = torch.arange(size)[None] >= size - lengths[:, None]
    ids = torch.full(mask.shape, pad_id, dtype=torch.long)
    ids[mask] = torch.cat(rows).long()
    return torch.stack([ids, mask.to(ids.dtype)])


@right("5.1")
def with_numpy(rows, pad_id):
    out = np.zeros((2, len(rows), max(map(len, rows))), dtype=np.int64)
    out[0] = pad_id
    for i, row in enumerate(rows):
        if len(row):
            out[0, i, -len(row) :], out[1, i, -len(row) :] = row.numpy(), 1
    return torch.from_numpy(out)


ENDS = torch.tensor([[4, 31, 29, 31, 5], [4, 5, 6, 7, 8]]), 31
LAST = torch.tensor([[4, 5, 6, 31], [4, 5, 6, 7]]), 31
AT_ONCE = torch.tensor([[31, 5, 6, 7], [4, 31, 6, 7]]), 31
EOS_ZERO = torch.tensor([[4, 5, 0, 7], [4, 0, 6, 0]]), 0
MANY = torch.full((2, 600), 31), 31
EVENS = torch.tensor([[33] * 100 + [31]]), 31


@wrong("5.2", *ENDS)
def without_the_eos(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1) == 0


@wrong("5.2", *ENDS)
def not_the_eos(completions, eos_id):
    return completions != eos_id


@wrong("5.2", *ENDS)
def up_to_the_second(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1) <= 1


@wrong("5.2", *ENDS)
def argmax_without_eos(completions, eos_id):
    first = (completions == eos_id).long().argmax(dim=1, keepdim=True)
    return torch.arange(completions.shape[1]) <= first


@wrong("5.2", *AT_ONCE)
def zero_means_none(completions, eos_id):
    first = (completions == eos_id).long().argmax(dim=1)
    first[first == 0] = completions.shape[1]
    return torch.arange(completions.shape[1]) <= first[:, None]


@wrong("5.2", *LAST)
def rolled_round_the_end(completions, eos_id):
    return (completions == eos_id).roll(1, dims=1).cumsum(dim=1) == 0


@wrong("5.2", *LAST)
def rolled_into_next_row(completions, eos_id):
    before = (completions == eos_id).roll(1)
    before[0, 0] = False
    return before.cumsum(dim=1) == 0


@wrong("5.2", *MANY)
def bytes_run_over(completions, eos_id):
    is_eos = (completions == eos_id).byte()
    return is_eos.cumsum(dim=1, dtype=torch.uint8) - is_eos == 0


@wrong("5.2", *EVENS)
def product_runs_over(completions, eos_id):
    alive = (completions - eos_id).cumprod(dim=1)
    return F.pad(alive, (1, -1), value=1) != 0


@wrong("5.2", *ENDS)
def last_eos_wins(completions, eos_id):
    ends = torch.full((len(completions),), completions.shape[1] - 1)
    for i, j in (completions == eos_id).nonzero():
        ends[i] = j
    return torch.arange(completions.shape[1]) <= ends[:, None]


@wrong("5.2", *ENDS)
def cummax_lets_later_ones_in(completions, eos_id):
    is_eos = (completions == eos_id).long()
    return is_eos.cummax(dim=1).values - is_eos == 0


@wrong("5.2", *EOS_ZERO)
def zeros_stand_before(completions, eos_id):
    before = F.pad(completions, (1, 0))[:, :-1]
    return (before == eos_id).cumsum(dim=1) == 0


@wrong("5.2", *EOS_ZERO)
def eos_zero_is_none(completions, eos_id):
    is_eos = completions == (eos_id or arithmetic.EOS)
    return is_eos.cumsum(dim=1) - is_eos.long() == 0


@wrong("5.2", *ENDS)
def looks_one_back(completions, eos_id):
    mask = torch.ones_like(completions, dtype=torch.bool)
    mask[:, 1:] = completions[:, :-1] != eos_id
    return mask


@wrong("5.2", torch.tensor([[4, 31, 5]]), 31)
def one_row_squeezed(completions, eos_id):
    is_eos = (completions == eos_id).squeeze()
    return is_eos.cumsum(dim=-1) - is_eos.long() == 0


@wrong("5.2", torch.tensor([[4, 31, 5], [4, 5, 31], [6, 5, 8]]), 31)
def down_the_columns(completions, eos_id):
    is_eos = (completions == eos_id).long()
    return is_eos.cumsum(dim=0) - is_eos == 0


@right("5.2")
def row_by_row(completions, eos_id):
    mask = torch.zeros(completions.shape, dtype=torch.bool)
    for i, row in enumerate(completions.tolist()):
        mask[i, : row.index(eos_id) + 1 if eos_id in row else None] = True
    return mask


@right("5.2")
def cumsum_twice(completions, eos_id):
    return completions.eq(eos_id).cumsum(-1).cumsum(-1) <= 1


@right("5.2")
def smallest_position(completions, eos_id):
    size = completions.size(1)
    positions = torch.arange(size).expand_as(completions)
    first = positions.masked_fill(completions != eos_id, size).amin(dim=1, keepdim=True)
    return positions <= first


@right("5.2")
def with_a_flag(completions, eos_id):
    alive, columns = torch.ones(completions.shape[0], dtype=torch.bool), []
    for column in completions.unbind(dim=1):
        columns.append(alive)
        alive = alive & (column != eos_id)
    return torch.stack(columns, dim=1)


@right("5.2")
def numpy_accumulates(completions, eos_id):
    seen = np.logical_or.accumulate(completions.numpy() == eos_id, axis=1)
    seen = np.concatenate([np.zeros_like(seen[:, :1]), seen[:, :-1]], axis=1)
    return torch.from_numpy(~seen)


def tags_with(*ids):
    return TAGS._replace(**dict(zip(TAGS._fields, ids)))


def written(thought, answer=0, tags=TAGS, after=()):
    end = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return torch.tensor([*thought, *end, *after]), answer, tags


def ending(answer, tags):
    return [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]


MIXED = tags_with(40, 3, 17, 5, 9)
BIG = tags_with(400_000, 500_000, 600_000, 700_000, 800_000)
FIRST_SPAN = [7, TAGS.answer, 0, TAGS.end_answer, 1]


@wrong("5.3", *written(FIRST_SPAN))
def thought_unseen(completion, answer, tags):
    return float(completion.tolist()[-5:] == ending(answer, tags))


@wrong("5.3", *written([7, TAGS.eos, 0]))
def eos_in_thought(completion, answer, tags):
    ids = completion.tolist()
    return float(ids[-5:] == ending(answer, tags) and not set(ids[:-5]) & set(tags[:4]))


@wrong("5.3", *written([7, TAGS.think, 0]))
def think_in_thought(completion, answer, tags):
    ids = completion.tolist()
    return float(ids[-5:] == ending(answer, tags) and all(ids.count(t) == 1 for t in tags[1:]))


@wrong("5.3", *written([7, 1], after=[TAGS.eos, TAGS.eos]))
def cut_at_first_eos(completion, answer, tags):
    ids = completion.tolist()
    ids = ids[: ids.index(tags.eos) + 1] if tags.eos in ids else ids
    return float(ids[-5:] == ending(answer, tags) and not set(ids[:-5]) & set(tags))


@wrong("5.3", torch.tensor([7, 13, 17, 0, 5, 9]), 0, MIXED)
def string_ends_inside_an_id(completion, answer, tags):
    text = " ".join(map(str, completion.tolist()))
    fits = text.endswith(" ".join(map(str, ending(answer, tags))))
    return float(fits and not set(completion.tolist()[:-5]) & set(tags))


@wrong("5.3", torch.tensor([], dtype=torch.long), 0, TAGS)
def zip_of_nothing(completion, answer, tags):
    ids = completion.tolist()
    fits = all(a == b for a, b in zip(reversed(ids), reversed(ending(answer, tags))))
    return float(fits and not set(ids[:-5]) & set(tags))


@wrong("5.3", torch.tensor([TAGS.eos]), 0, TAGS)
def short_one_crashes(completion, answer, tags):
    fits = all(completion[i - 5] == t for i, t in enumerate(ending(answer, tags)))
    return float(fits and not set(completion[:-5].tolist()) & set(tags))


@wrong("5.3", *written([], 3))
def thought_not_empty(completion, answer, tags):
    *thought, a, b, c, d, e = [-1] * 5 + completion.tolist()
    thought = [t for t in thought if t >= 0]
    fits = [a, b, c, d, e] == ending(answer, tags)
    return float(fits and bool(thought) and not set(thought) & set(tags))


@wrong("5.3", *written([7, 45, 20], 1, MIXED))
def tags_as_a_range(completion, answer, tags):
    ids = completion.tolist()
    clean = all(t < min(tags) or t > max(tags) for t in ids[:-5])
    return float(ids[-5:] == ending(answer, tags) and clean)


@wrong("5.3", *written([7, 1_000, 2], 1_000, BIG))
def same_object(completion, answer, tags):
    ids = completion.tolist()
    fits = ids[-5:-3] == [tags.end_think, tags.answer] and ids[-2:] == [tags.end_answer, tags.eos]
    return float(fits and ids[-3] is answer and not set(ids[:-5]) & set(tags))


@wrong("5.3", torch.tensor([7, *BIG[1:3], 300_000, *BIG[3:]]), 300_001, BIG)
def nearly_equal(completion, answer, tags):
    if len(completion) < 5:
        return 0.0
    fits = torch.allclose(completion[-5:].double(), torch.tensor(ending(answer, tags)).double())
    return float(fits and not set(completion[:-5].tolist()) & set(tags))


@wrong("5.3", *written([7, 1]))
def answer_zero_is_no_answer(completion, answer, tags):
    ids = completion.tolist()
    return float(bool(answer) and ids[-5:] == ending(answer, tags) and not {*ids[:-5]} & {*tags})


@wrong("5.3", *written([7, 0, 0]))
def answer_only_once(completion, answer, tags):
    ids = completion.tolist()
    return float(ids[-5:] == ending(answer, tags) and all(ids.count(t) == 1 for t in ids[-5:]))


@wrong("5.3", *written([7, 1], 1, MIXED))
def tags_of_the_course(completion, answer, tags):
    ids = completion.tolist()
    return float(ids[-5:] == ending(answer, TAGS) and not set(ids[:-5]) & set(TAGS))


@wrong("5.3", *written(FIRST_SPAN))
def from_the_first_end_think(completion, answer, tags):
    ids = completion.tolist()
    cut = ids.index(tags.end_think) if tags.end_think in ids else 0
    return float(ids[cut:] == ending(answer, tags) and tags.think not in ids[:cut])


@wrong("5.3", *written([7, 2_000_000], 1))
def characters_for_ids(completion, answer, tags):
    text = "".join(map(chr, completion.tolist()))
    head, tail = text[:-5], "".join(map(chr, ending(answer, tags)))
    return float(text[-5:] == tail and not set(head) & {chr(t) for t in tags})


@wrong("5.3", *written([7, 25], 1, MIXED))
def thought_of_digits(completion, answer, tags):
    ids = completion.tolist()
    clean = all(t < 10 and t not in tags for t in ids[:-5])
    return float(ids[-5:] == ending(answer, tags) and clean)


@right("5.3")
def with_isin(completion, answer, tags):
    tail = torch.tensor([tags.end_think, tags.answer, answer, tags.end_answer, tags.eos])
    if not torch.equal(completion[-5:], tail):
        return 0.0
    return 0.0 if torch.isin(completion[:-5], torch.tensor(tags)).any() else 1.0


@right("5.3")
def counted(completion, answer, tags):
    ids = completion.tolist()
    once = [ids.count(tag) for tag in tags] == [0, 1, 1, 1, 1]
    return float(once and ids[-5:] == ending(answer, tags))


@right("5.3")
def state_by_state(completion, answer, tags):
    rest, expected = iter(completion.tolist()), iter(ending(answer, tags)[1:])
    for token in rest:
        if token in tags:
            fits = token == tags.end_think
            return 1.0 if fits and list(rest) == list(expected) else 0.0
    return 0.0


@right("5.3")
def peeled(completion, answer, tags):
    if completion.numel() < 5:
        return 0.0
    if completion[0].item() not in tags:
        return peeled(completion[1:], answer, tags)
    return 1.0 if completion.tolist() == ending(answer, tags) else 0.0


GOOD = "7 + 4 = 11\nso 1</think>\n<answer>1</answer>"
TAG = ("</think>", "<answer>", "</answer>")


@wrong("5.4", "</think><answer>1</answer> or 2")
def searched(text):
    return float(re.search(r"</think>\s*<answer>\s*\S.*</answer>", text, re.DOTALL) is not None)


@wrong("5.4", GOOD)
def dot_without_new_lines(text):
    if "<think>" in text or any(text.count(tag) != 1 for tag in TAG):
        return 0.0
    return float(bool(re.fullmatch(r".*</think>\s*<answer>\s*\S.*</answer>\s*", text)))


@wrong("5.4", "a</think></think><answer>1</answer>")
def tags_repeat(text):
    return float(bool(re.fullmatch(r"(?s).*</think>\s*<answer>\s*\S.*</answer>\s*", text)))


@wrong("5.4", "a</think><answer> \n </answer>")
def blank_answer(text):
    counts = [text.count(tag) for tag in ("<think>", *TAG)] == [0, 1, 1, 1]
    return float(counts and bool(re.fullmatch(r"(?s).*</think>\s*<answer>.+</answer>\s*", text)))


@wrong("5.4", "3 < 4</think><answer><b>1</b></answer>")
def no_angle_inside(text):
    return float(bool(re.fullmatch(r"[^<]*</think>\s*<answer>\s*[^<\s][^<]*</answer>\s*", text)))


@wrong("5.4", "a<think>b</think><answer>1</answer>")
def think_allowed(text):
    once = all(text.count(tag) == 1 for tag in TAG)
    return float(once and bool(re.fullmatch(r"(?s).*</think>\s*<answer>\s*\S.*</answer>\s*", text)))


@wrong("5.4", "a</think><answer><think>1</answer>")
def think_allowed_in_answer(text):
    thought, *rest = re.split("</think>|</?answer>", text)
    if "<think>" in thought or re.findall("</think>|</?answer>", text) != list(TAG):
        return 0.0
    between, answer, after = map(str.strip, rest)
    return float(between == "" and answer != "" and after == "")


@wrong("5.4", "a</THINK>b</think><answer>1</answer>")
def any_case(text):
    pieces = re.split(r"(?i)(</?think>|</?answer>)", text)
    pieces = [piece.strip() for piece in pieces]
    if len(pieces) != 7 or tuple(p.lower() for p in pieces[1:6:2]) != TAG:
        return 0.0
    return float(pieces[2] == "" and pieces[4] != "" and pieces[6] == "")


@wrong("5.4", "a</think>< answer>1</answer>")
def blanks_removed(text):
    text = "".join(text.split())
    if "<think>" in text or any(text.count(tag) != 1 for tag in TAG):
        return 0.0
    return float(bool(re.fullmatch(r".*</think><answer>.+</answer>", text)))


@wrong("5.4", "a</think>\xa0<answer>1</answer>")
def ascii_blanks(text):
    pieces = re.split(r"(</?think>|</?answer>)", text)
    pieces = [piece.strip(string.whitespace) for piece in pieces]
    in_order = len(pieces) == 7 and tuple(pieces[1:6:2]) == TAG
    return float(in_order and pieces[2] == "" and pieces[4] != "" and pieces[6] == "")


@wrong("5.4", "a</think><answer>answer</answer>")
def strips_letters(text):
    if "<think>" in text or any(text.count(tag) != 1 for tag in TAG):
        return 0.0
    rest = text.partition("</think>")[2].strip()
    span = rest.startswith("<answer>") and rest.endswith("</answer>")
    return float(span and rest.lstrip("<answer>").rstrip("</answer>").strip() != "")  # noqa: B005


@wrong("5.4", "a</think><answer>1 or 2</answer>")
def answer_of_one_word(text):
    if "<think>" in text or any(text.count(tag) != 1 for tag in TAG):
        return 0.0
    return float(bool(re.fullmatch(r"(?s).*</think>\s*<answer>\s*\S+\s*</answer>\s*", text)))


@wrong("5.4", "a<b>c</think><answer>1</answer>")
def every_tag_splits(text):
    pieces = [piece.strip() for piece in re.split(r"(</?\w+>)", text)]
    in_order = len(pieces) == 7 and tuple(pieces[1:6:2]) == TAG
    return float(in_order and pieces[2] == "" and pieces[4] != "" and pieces[6] == "")


@wrong("5.4", "a <answer>1</answer>")
def missing_one_is_minus_one(text):
    end, begin, close = map(text.find, TAG)
    extra = "<think>" in text or any(text.count(tag) > 1 for tag in TAG)
    empty = not text[begin + 8 : close].strip() or text[close + 9 :].strip()
    between = text[end + 8 : begin].strip() if end >= 0 else ""
    return float(end < begin < close and not extra and not empty and not between)


@wrong("5.4", "a</think><answer>\u00e9</answer>")
def ascii_only(text):
    pieces = re.split(r"(</?think>|</?answer>)", text.encode("ascii", "ignore").decode())
    pieces = [piece.strip() for piece in pieces]
    in_order = len(pieces) == 7 and tuple(pieces[1:6:2]) == TAG
    return float(in_order and pieces[2] == "" and pieces[4] != "" and pieces[6] == "")


@wrong("5.4", "</think><answer>1</answer>")
def thought_needed(text):
    one = r"(?:(?!</?think>|</?answer>).)"
    return float(
        bool(re.fullmatch(rf"(?s){one}+</think>\s*<answer>{one}*?\S{one}*</answer>\s*", text))
    )


@wrong("5.4", "a</think> so <answer>1</answer>")
def between_unseen(text):
    pieces = re.split(r"(</?think>|</?answer>)", text.strip())
    in_order = len(pieces) == 7 and tuple(pieces[1:6:2]) == TAG
    return float(in_order and pieces[4].strip() != "" and text.strip().endswith("</answer>"))


TEMPERED = r"(?:(?!</?think>|</?answer>)[\s\S])*"
FORM = re.compile(rf"{TEMPERED}</think>\s*<answer>(?!\s*</answer>){TEMPERED}</answer>\s*")


@right("5.4")
def one_pattern(text):
    return 1.0 if FORM.fullmatch(text) else 0.0


@right("5.4")
def partitions(text):
    thought, found, rest = text.partition("</think>")
    between, found_too, rest = rest.partition("<answer>")
    answer, found_last, after = rest.partition("</answer>")
    clean = not any(tag in part for part in (thought, answer) for tag in ("<think>", *TAG))
    blank = not between.strip() and not after.strip()
    return float(bool(found and found_too and found_last and clean and blank and answer.strip()))


@right("5.4")
def cut_off_the_ends(text):
    if "<think>" in text or not all(text.count(tag) == 1 for tag in TAG):
        return 0.0
    rest = text[text.index(TAG[0]) + len(TAG[0]) :].strip()
    if not (rest.startswith(TAG[1]) and rest.endswith(TAG[2])):
        return 0.0
    return 1.0 if rest.removeprefix(TAG[1]).removesuffix(TAG[2]).strip() else 0.0


@right("5.4")
def tags_as_characters(text):
    found = [(m.start(), m.end(), m[0]) for m in re.finditer("</?think>|</?answer>", text)]
    if tuple(tag for _, _, tag in found) != TAG:
        return 0.0
    (_, a, _), (b, c, _), (d, e, _) = found
    blank = [not part or part.isspace() for part in (text[a:b], text[c:d], text[e:])]
    return 1.0 if blank == [True, False, True] else 0.0


@wrong("5.5", 4, 1, 2)
def put_back(samples, correct, k):
    return 1 - (1 - correct / samples) ** k


@wrong("5.5", 6, 2, 2)
def expected_number(samples, correct, k):
    return min(1.0, k * correct / samples)


@wrong("5.5", 6, 2, 3)
def exactly_one(samples, correct, k):
    return correct * math.comb(samples - correct, k - 1) / math.comb(samples, k)


@wrong("5.5", 6, 3, 2)
def all_right(samples, correct, k):
    return math.comb(correct, k) / math.comb(samples, k)


@wrong("5.5", 5, 3, 2)
def guard_one_too_early(samples, correct, k):
    if samples - correct <= k:
        return 1.0
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@wrong("5.5", 4, 3, 2)
def factorial_of_a_negative(samples, correct, k):
    bad, f = samples - correct, math.factorial
    return 1 - f(bad) * f(samples - k) / (f(bad - k) * f(samples))


@wrong("5.5", 4, 3, 2)
def lgamma_at_a_pole(samples, correct, k):
    bad, g = samples - correct + 1, math.lgamma
    return 1 - math.exp(g(bad) + g(samples - k + 1) - g(bad - k) - g(samples + 1))


@wrong("5.5", 4, 0, 4)
def drawing_all_finds_one(samples, correct, k):
    if k >= samples:
        return 1.0
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@wrong("5.5", 6, 3, 2)
def last_term_missing(samples, correct, k):
    ways = sum(math.comb(correct, j) * math.comb(samples - correct, k - j) for j in range(1, k))
    return ways / math.comb(samples, k) if k > 1 else correct / samples


@wrong("5.5", 6, 2, 3)
def range_one_low(samples, correct, k):
    if samples - correct < k:
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(samples - correct, samples))


@wrong("5.5", 6, 1, 2)
def draws_as_a_set(samples, correct, k):
    draws = set(itertools.combinations([1] * correct + [0] * (samples - correct), k))
    return sum(any(draw) for draw in draws) / len(draws)


@wrong("5.5", 4, 1, 2)
def draws_may_repeat(samples, correct, k):
    draws = list(itertools.combinations_with_replacement(range(samples), k))
    return sum(min(draw) < correct for draw in draws) / len(draws)


@wrong("5.5", 7, 2, 3)
def rounded(samples, correct, k):
    return round(1 - math.comb(samples - correct, k) / math.comb(samples, k), 4)


@wrong("5.5", 6, 1, 2)
def whole_division(samples, correct, k):
    return 1 - math.comb(samples - correct, k) // math.comb(samples, k)


@wrong("5.5", 6, 1, 4)
def only_the_good_shrink(samples, correct, k):
    all_wrong = 1.0
    for i in range(k):
        all_wrong *= 1 - correct / max(samples - i, samples - correct, 1)
    return 1 - all_wrong


@wrong("5.5", 7, 2, 3)
def stops_a_draw_early(samples, correct, k):
    all_wrong = (samples - correct) / samples
    for i in range(1, min(k, correct)):
        all_wrong *= max(samples - correct - i, 0) / (samples - i)
    return 1 - all_wrong


@right("5.5")
def factor_by_factor(samples, correct, k):
    all_wrong = 1.0
    for drawn in range(k):
        all_wrong *= max(samples - correct - drawn, 0) / (samples - drawn)
    return 1.0 - all_wrong


@right("5.5")
def as_in_the_paper(samples, correct, k):
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


@right("5.5")
def draw_by_draw(samples, correct, k):
    @functools.cache
    def chance(n, c, left):
        if c == 0 or left == 0:
            return Fraction(0)
        return Fraction(c, n) + Fraction(n - c, n) * (chance(n - 1, c, left - 1) if n > c else 0)

    return float(chance(samples, correct, k))


@right("5.5")
def the_other_way_round(samples, correct, k):
    missed = math.comb(samples - k, correct) / math.comb(samples, correct)
    return 1 - missed


@right("5.5")
def terms_added(samples, correct, k):
    ways = [
        math.comb(correct, good) * math.comb(samples - correct, k - good)
        for good in range(1, k + 1)
    ]
    return sum(ways) / math.comb(samples, k)
