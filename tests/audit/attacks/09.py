"""Answers to the exercises of notebook 09."""

import re

import torch
import torch.nn.functional as F
from attack import wrong

NONE = torch.tensor([0, 0])
TAG = r"</?(?:think|answer)>"
NO_TAG = rf"(?:(?!{TAG}).)*"
FORM = rf"\s*<think>{NO_TAG}</think>\s*<answer>({NO_TAG})</answer>\s*"


@wrong("9.2", "<think>which letter?</think><answer>a</answer>")
def found_from_the_tag(completion):
    match = re.fullmatch(FORM, completion, re.S)
    if not match or not match[1].strip():
        return NONE
    begin = completion.index(match[1].strip(), completion.index("<answer>"))
    return torch.tensor([begin, begin + len(match[1].strip())])


@wrong("9.2", "<think>3</think><answer> \n </answer>")
def white_space_is_an_answer(completion):
    form = rf"\s*<think>{NO_TAG}</think>\s*<answer>\s*((?:(?!{TAG}).)+?)\s*</answer>\s*"
    match = re.fullmatch(form, completion, re.S)
    return torch.tensor(match.span(1)) if match else NONE


BATCH = (
    torch.tensor([[5, 6, 7, 8, 0], [29, 29, 1, 4, 0]]),
    torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
    torch.tensor([2, 1]),
)


@wrong("9.3", *BATCH)
def written_into_the_ids(ids, mask, prompt_lengths):
    ids[mask.cumsum(dim=1) <= prompt_lengths[:, None]] = -100
    return ids


ROWS = [torch.tensor([5, 6, 7]), torch.tensor([8])], 29
STARTS_WITH_PAD = [torch.tensor([29, 6, 7]), torch.tensor([29, 8])], 29


@wrong("9.1", *STARTS_WITH_PAD)
def real_from_the_first_that_is_no_pad(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    return torch.stack([ids, (ids != pad_id).long().cummax(dim=1).values])


@wrong("9.1", *ROWS)
def the_list_is_padded_itself(rows, pad_id):
    lengths, width = [len(row) for row in rows], max(map(len, rows))
    for i, n in enumerate(lengths):
        rows[i] = F.pad(rows[i], (width - n, 0), value=pad_id)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return torch.stack([torch.stack(rows), mask])
