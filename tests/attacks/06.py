"""Answers to the exercises of notebook 06, from plausible mistakes and unusual right ways."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import string
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch.nn.utils.rnn import pad_sequence

from minigrpo.arithmetic import TAGS

ROWS = [torch.tensor([5, 6, 7]), torch.tensor([8])], 29
UPWARD = [torch.tensor([8]), torch.tensor([5, 6, 7])], 29
EMPTY = [torch.tensor([5, 6]), torch.tensor([], dtype=torch.long)], 29
STARTS_WITH_PAD = [torch.tensor([29, 6, 7]), torch.tensor([29, 8])], 29
STARTS_WITH_ZERO = [torch.tensor([0, 6, 7]), torch.tensor([0, 8])], 29
MINUS = [torch.tensor([5, 6, 7]), torch.tensor([8])], -100
MILLIONS = [torch.tensor([16_777_217, 2]), torch.tensor([8])], 29
SAME_LENGTH = [torch.tensor([5, 6]), torch.tensor([7, 8]), torch.tensor([9])], 29


@wrong("6.1", *ROWS)
def pads_on_the_right(rows, pad_id):
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return torch.stack([ids, mask.long()])


@wrong("6.1", *EMPTY)
def minus_zero_in_the_mask(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        mask[i, -len(row) :] = 1
    return torch.stack([ids, mask])


@wrong("6.1", *STARTS_WITH_PAD)
def real_from_the_first_that_is_no_pad(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    return torch.stack([ids, (ids != pad_id).long().cummax(dim=1).values])


@wrong("6.1", *STARTS_WITH_ZERO)
def zeros_for_holes_first(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])
    mask = (ids > 0).long().cummax(dim=1).values
    return torch.stack([ids.masked_fill(mask == 0, pad_id), mask])


@wrong("6.1", *UPWARD)
def cropped_to_the_first_row(rows, pad_id):
    gaps = [len(rows[0]) - len(row) for row in rows]
    ids = [F.pad(row, (gap, 0), value=pad_id) for row, gap in zip(rows, gaps)]
    mask = [F.pad(torch.ones_like(row), (gap, 0)) for row, gap in zip(rows, gaps)]
    return torch.stack([torch.stack(ids), torch.stack(mask)])


@wrong("6.1", *EMPTY)
def empty_rows_left_out(rows, pad_id):
    width = max(map(len, rows))
    pairs = [(F.pad(r, (width - len(r), 0), value=pad_id), len(r)) for r in rows if len(r)]
    mask = [[0] * (width - n) + [1] * n for _, n in pairs]
    return torch.stack([torch.stack([ids for ids, _ in pairs]), torch.tensor(mask)])


@wrong("6.1", *MILLIONS)
def float32_on_the_way(rows, pad_id):
    ids = torch.zeros(2, len(rows), max(map(len, rows)))
    ids[0] = pad_id
    for i, row in enumerate(rows):
        start = ids.shape[2] - len(row)
        ids[0, i, start:], ids[1, i, start:] = row, 1
    return ids.long()


@wrong("6.1", *ROWS)
def the_list_is_padded_itself(rows, pad_id):
    lengths, width = [len(row) for row in rows], max(map(len, rows))
    for i, n in enumerate(lengths):
        rows[i] = F.pad(rows[i], (width - n, 0), value=pad_id)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return torch.stack([torch.stack(rows), mask])


@wrong("6.1", *MINUS)
def no_negative_ids(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.stack([ids.clamp(min=0), torch.tensor(mask)])


@wrong("6.1", *SAME_LENGTH)
def row_found_by_its_length(rows, pad_id):
    lengths = [len(row) for row in rows]
    ids = torch.full((len(rows), max(lengths)), pad_id)
    mask = torch.zeros_like(ids)
    for row in rows:
        i, start = lengths.index(len(row)), max(lengths) - len(row)
        ids[i, start:], mask[i, start:] = row, 1
    return torch.stack([ids, mask])


def turned(rows, value):
    return pad_sequence([r.flip(0) for r in rows], batch_first=True, padding_value=value).flip(1)


@right("6.1")
def turned_around_twice(rows, pad_id):
    return torch.stack([turned(rows, pad_id), turned([torch.ones_like(r) for r in rows], 0)])


@right("6.1")
def of_plain_lists(rows, pad_id):
    lists = [row.tolist() for row in rows]
    width = max(len(row) for row in lists)
    ids = [[pad_id] * (width - len(row)) + row for row in lists]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in lists]
    return torch.stack([torch.tensor(part, dtype=torch.long) for part in (ids, mask)])


@right("6.1")
def through_a_boolean_mask(rows, pad_id):
    lengths = torch.tensor([row.numel() for row in rows])
    real = torch.arange(int(lengths.max())).flip(0) < lengths.unsqueeze(1)
    ids = torch.full(real.shape, pad_id, dtype=torch.long)
    ids[real] = torch.cat(rows)
    return torch.stack([ids, real.long()])


ENDS = torch.tensor([[4, 31, 29, 29], [4, 5, 6, 7]]), 31
FIRST = torch.tensor([[31, 4, 29, 29], [4, 5, 31, 7]]), 31
TWICE = torch.tensor([[4, 31, 5, 31, 6]]), 31
ZERO = torch.tensor([[4, 0, 5, 6]]), 0
ALL_EOS = torch.full((1, 300), 31), 31
LONG = torch.full((2, 1100), 4), 31
LATE = torch.full((1, 2100), 4).index_fill(1, torch.tensor([2048]), 31), 31


@wrong("6.2", *ENDS)
def without_the_eos(completions, eos_id):
    return (completions == eos_id).cumsum(dim=1) == 0


@wrong("6.2", *TWICE)
def later_eos_too(completions, eos_id):
    is_eos = completions == eos_id
    return (is_eos.cumsum(dim=1) == 0) | is_eos


@wrong("6.2", *ENDS)
def none_found_in_the_whole_batch(completions, eos_id):
    is_eos = completions == eos_id
    if not is_eos.any():
        return torch.ones_like(is_eos)
    return torch.arange(completions.shape[1]) <= is_eos.int().argmax(dim=1, keepdim=True)


@wrong("6.2", *FIRST)
def eos_at_zero_means_none(completions, eos_id):
    first = (completions == eos_id).int().argmax(dim=1, keepdim=True)
    first = torch.where(first > 0, first, completions.shape[1])
    return torch.arange(completions.shape[1]) <= first


@wrong("6.2", *ALL_EOS)
def counted_in_a_byte(completions, eos_id):
    is_eos = (completions == eos_id).to(torch.uint8)
    return is_eos.cumsum(dim=1, dtype=torch.uint8) - is_eos == 0


@wrong("6.2", *TWICE)
def last_eos_of_each_row(completions, eos_id):
    mask = torch.ones_like(completions, dtype=torch.bool)
    for row, end in dict((completions == eos_id).nonzero().tolist()).items():
        mask[row, end + 1 :] = False
    return mask


@wrong("6.2", *ZERO)
def eos_zero_taken_for_none(completions, eos_id):
    if not eos_id:  # None: nothing ends
        return torch.ones_like(completions, dtype=torch.bool)
    is_eos = completions == eos_id
    return is_eos.cumsum(dim=1) - is_eos.long() == 0


@wrong("6.2", *LONG)
def a_thousand_is_far_enough(completions, eos_id):
    is_eos = completions == eos_id
    first = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), 1000)
    return torch.arange(completions.shape[1]) <= first[:, None]


@wrong("6.2", *LATE)
def positions_in_half(completions, eos_id):
    width = completions.shape[1]
    at = torch.arange(width).half()
    first = torch.where(completions == eos_id, at, width).amin(dim=1, keepdim=True)
    return at <= first.half()


@wrong("6.2", *ENDS)
def compared_in_place(completions, eos_id):
    is_eos = completions.eq_(eos_id)
    return is_eos.cumsum(dim=1) - is_eos == 0


@right("6.2")
def row_by_row(completions, eos_id):
    mask = []
    for row in completions.tolist():
        n = row.index(eos_id) + 1 if eos_id in row else len(row)
        mask.append([True] * n + [False] * (len(row) - n))
    return torch.tensor(mask)


@right("6.2")
def alive_so_far(completions, eos_id):
    alive = (completions != eos_id).long().cumprod(dim=-1)
    return F.pad(alive[:, :-1], (1, 0), value=1).bool()


@right("6.2")
def smallest_position(completions, eos_id):
    at = torch.arange(completions.size(1), device=completions.device).expand_as(completions)
    first = at.masked_fill(completions.ne(eos_id), completions.size(1)).amin(dim=1, keepdim=True)
    return at.le(first)


HERE = type(TAGS)(20, 2, 13, 4, 9)  # think, end_think, answer, end_answer, eos
FAR = type(TAGS)(3000, 2000, 1000, 4000, 5000)
END = [2, 13, 7, 4, 9]


def asked(ids, answer=7, tags=HERE):
    return torch.tensor(ids, dtype=torch.long), answer, tags


@wrong("6.3", *asked([5, 9, 6, *END]))
def eos_in_the_thought(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and not set(ids[:-5]) & set(tags[:4]))


@wrong("6.3", *asked([5, *END, 8, 8]))
def cut_at_the_first_eos(completion, answer, tags):
    ids = completion.tolist()
    ids = ids[: ids.index(tags.eos) + 1] if tags.eos in ids else []
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and not set(ids[:-5]) & set(tags))


@wrong("6.3", *asked(END))
def wants_a_thought(completion, answer, tags):
    *thought, a, b, x, c, d = completion.tolist() if len(completion) > 4 else [0] * 5
    ok = (a, b, x, c, d) == (tags.end_think, tags.answer, answer, tags.end_answer, tags.eos)
    return 1.0 if ok and thought and not set(thought) & set(tags) else 0.0


@wrong("6.3", *asked([5, 20, *END]))
def each_once_but_think_unseen(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and all(ids.count(tag) == 1 for tag in tags[1:]))


@wrong("6.3", *asked([]))
def zip_stops_early(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.eos, tags.end_answer, answer, tags.answer, tags.end_think]
    fits = all(a == b for a, b in zip(reversed(ids), ending))
    return float(fits and not set(ids[:-5]) & set(tags))


@wrong("6.3", *asked([5, 12, 13, 7, 4, 9]))
def digits_of_a_longer_id(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    ends = " ".join(map(str, ids)).endswith(" ".join(map(str, ending)))
    return float(ends and not set(ids[:-5]) & set(tags))


@wrong("6.3", *asked([5, 2000, 1000, 7, 4000, 5000], tags=FAR))
def as_bytes(completion, answer, tags):
    ids = completion.to(torch.uint8).tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(bytes(ids).endswith(bytes(ending)) and not set(ids[:-5]) & set(tags))


@wrong("6.3", *asked([30, *END]))
def tags_are_the_last_ids(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and all(word < min(tags) for word in ids[:-5]))


@wrong("6.3", *asked([5, 2, 13, 0, 4, 9], 0))
def answer_zero_is_no_answer(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer or None, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and set(tags).isdisjoint(ids[:-5]))


@wrong("6.3", *asked([5, 2, 13, 4, 7, 9]))
def five_in_any_order(completion, answer, tags):
    ids = completion.tolist()
    ending = {tags.end_think, tags.answer, answer, tags.end_answer, tags.eos}
    return float(set(ids[-5:]) == ending and not set(ids[:-5]) & set(tags))


@right("6.3")
def a_small_machine(completion, answer, tags):
    path = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    state = 0
    for word in map(int, completion):
        if state == 0 and word not in tags:
            continue
        if state == 5 or word != path[state]:
            return 0.0
        state += 1
    return 1.0 if state == 5 else 0.0


@right("6.3")
def with_torch_equal(completion, answer, tags):
    end = completion.new_tensor([tags.end_think, tags.answer, answer, tags.end_answer, tags.eos])
    known = torch.isin(completion[:-5], completion.new_tensor(list(tags)))
    return float(torch.equal(completion[-5:], end) and not known.any())


@right("6.3")
def by_a_regular_expression(completion, answer, tags):
    text = "".join(f"{word};" for word in completion.tolist())
    none = "|".join(f"{tag};" for tag in tags)
    end = f"{tags.end_think};{tags.answer};{answer};{tags.end_answer};{tags.eos};"
    return float(re.fullmatch(rf"(?:(?!{none})\d+;)*{end}", text) is not None)


NO_TAG = r"(?:(?!</?think>|</?answer>).)"
FORM = rf"{NO_TAG}*</think>\s*<answer>(?!\s*</answer>){NO_TAG}+</answer>\s*"


@wrong("6.4", "7 + 4\nso 1</think><answer>1</answer>")
def point_stops_at_new_lines(text):
    return float(re.fullmatch(FORM, text) is not None)


@wrong("6.4", "so 1</think><answer> \n</answer>")
def blank_answer(text):
    form = rf"{NO_TAG}*</think>\s*<answer>{NO_TAG}+</answer>\s*"
    return float(bool(re.fullmatch(form, text, re.DOTALL)))


@wrong("6.4", "so 1</think><answer>a < b</answer>")
def no_bracket_in_the_answer(text):
    form = rf"{NO_TAG}*</think>\s*<answer>\s*[^<\s][^<]*</answer>\s*"
    return float(bool(re.fullmatch(form, text, re.DOTALL)))


@wrong("6.4", "so 1</think><answer>1 <think> 2</answer>")
def opening_think_only_before(text):
    thought, _, rest = text.strip().partition("</think>")
    span = re.fullmatch(r"\s*<answer>(.*\S.*)</answer>", rest, re.DOTALL)
    counts = [text.count(tag) for tag in ("</think>", "<answer>", "</answer>")]
    return float(span is not None and counts == [1, 1, 1] and "<think>" not in thought)


@wrong("6.4", "so 1</think>< answer>1</answer>")
def white_space_thrown_out(text):
    return float(bool(re.fullmatch(FORM, "".join(text.split()))))


@wrong("6.4", "so 1</think><answer>swan</answer>")
def strip_takes_letters(text):
    pieces = re.split(r"</?think>|<answer>", text)
    fits = re.fullmatch(FORM, text, re.DOTALL) and len(pieces) == 3
    return float(bool(fits) and pieces[-1].strip().strip("</answer>").strip() != "")


@wrong("6.4", "so 1</think><answer>1</answer>\nor 2")
def anchors_of_a_line(text):
    return float(re.search(f"^{FORM}$", text, re.DOTALL | re.MULTILINE) is not None)


@wrong("6.4", "so 1</think>\u00a0<answer>1</answer>")
def ascii_blanks_only(text):
    pieces = re.split(r"(</?think>|</?answer>)", text)
    pieces = [piece.strip(string.whitespace) for piece in pieces]
    if pieces[1::2] != ["</think>", "<answer>", "</answer>"]:
        return 0.0
    return float(pieces[2] == pieces[6] == "" and pieces[4] != "")


@wrong("6.4", "I think> 1</think><answer>1</answer>")
def ends_of_tags_counted(text):
    once = text.count("think>") == 1 and text.count("answer>") == 2
    return float(once and re.fullmatch(FORM, text, re.DOTALL) is not None)


@wrong("6.4", "so <b>1</b></think><answer>1</answer>")
def every_bracket_is_a_tag(text):
    tags = re.findall(r"<[^<>]+>", text) == ["</think>", "<answer>", "</answer>"]
    return float(tags and re.fullmatch(FORM, text, re.DOTALL) is not None)


WHOLE = re.compile(FORM, flags=re.DOTALL)


@right("6.4")
def compiled_form(text):
    return 1.0 if WHOLE.fullmatch(text) else 0.0


@right("6.4")
def by_partition(text):
    tags = "<think>", "</think>", "<answer>", "</answer>"
    if [text.count(tag) for tag in tags] != [0, 1, 1, 1]:
        return 0
    rest = text.partition("</think>")[2].strip()
    inside = rest.removeprefix("<answer>").removesuffix("</answer>")
    return int(len(rest) == len(inside) + 17 and len(inside.strip()) > 0)


def spans(text, tags=("<think>", "</think>", "<answer>", "</answer>")):
    """The words of the text: tags, and whatever stands between them, without blank ones."""
    at, tag = min(((text.find(t), t) for t in tags if t in text), default=(len(text), ""))
    rest = spans(text[at + len(tag) :]) if tag else []
    return [word for word in ("text" * bool(text[:at].strip()), tag) if word] + rest


@right("6.4")
def word_kinds_by_recursion(text):
    words = spans(text)
    return float(words[words[:1] == ["text"] :] == ["</think>", "<answer>", "text", "</answer>"])


@wrong("6.5", 4, 1, 2)
def puts_them_back(samples, correct, k):
    return 1 - (1 - correct / samples) ** k


@wrong("6.5", 5, 2, 3)
def exactly_one_is_right(samples, correct, k):
    return correct * math.comb(samples - correct, k - 1) / math.comb(samples, k)


@wrong("6.5", 7, 2, 3)
def simulated(samples, correct, k):
    draw = random.Random(0).sample
    return sum(min(draw(range(samples), k)) < correct for _ in range(5000)) / 5000


@wrong("6.5", 5, 2, 3)
def as_many_wrong_as_drawn(samples, correct, k):
    if samples - correct <= k:
        return 1.0
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@wrong("6.5", 4, 0, 4)
def all_drawn_hit_always(samples, correct, k):
    if k == samples:
        return 1.0
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@wrong("6.5", 5, 2, 2)
def a_set_of_draws(samples, correct, k):
    draws = set(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    return sum(map(any, draws)) / len(draws)


@wrong("6.5", 4, 1, 2)
def number_zero_is_falsy(samples, correct, k):
    draws = list(itertools.combinations(range(samples), k))
    return sum(any(i for i in draw if i < correct) for draw in draws) / len(draws)


@wrong("6.5", 6, 2, 2)
def product_one_too_short(samples, correct, k):
    if samples - correct < k:
        return 1.0
    return 1 - float(np.prod(1 - k / np.arange(samples - correct + 1, samples)))


@wrong("6.5", 7, 2, 3)
def rounded_to_two_places(samples, correct, k):
    return round(1 - math.comb(samples - correct, k) / math.comb(samples, k), 2)


@wrong("6.5", 5, 3, 2)
def enough_right_ones(samples, correct, k):
    if correct >= k:
        return 1.0
    return 1 - math.perm(samples - correct, k) / math.perm(samples, k)


@right("6.5")
@functools.cache
def one_after_the_other(samples, correct, k):
    if k == 0 or correct == 0:
        return 0.0
    later = one_after_the_other(samples - 1, correct, k - 1) if samples > correct else 0.0
    return correct / samples + (samples - correct) / samples * later


@right("6.5")
def with_fractions(samples, correct, k):
    wrong_ones = range(samples - correct, samples - correct - k, -1)
    miss = math.prod(Fraction(max(w, 0), samples - i) for i, w in enumerate(wrong_ones))
    return float(1 - miss)


@right("6.5")
def product_of_numpy(samples, correct, k):
    if samples - correct < k:
        return 1.0
    return 1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1))
