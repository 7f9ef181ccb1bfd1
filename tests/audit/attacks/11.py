"""Answers to the exercises of notebook 11."""

from __future__ import annotations

import re

import torch
from attack import right, wrong
from torch.nn import functional as F

from minigrpo.exercises.reader import find

RAGGED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])


@wrong("11.2", RAGGED, 8)
def single_part_without_dimension(mask, rows):
    tokens = torch.stack([part.sum() for part in mask.split(rows)]).double()
    return (tokens / tokens.sum()).squeeze()


@right("11.2")
def padded_to_whole_parts(mask, rows):
    lengths = mask.double().sum(dim=1)
    lengths = F.pad(lengths, (0, -len(mask) % rows))
    return lengths.view(-1, rows).sum(dim=1) / lengths.sum()


LOGITS = torch.tensor([[[1.0, 0.5, -1.0], [2.0, 0.0, 3.0]], [[0.0, -2.0, 1.0], [1.0, 1.0, 4.0]]])
LOGITS = torch.cat([LOGITS, -LOGITS[:1]])
TOKENS = torch.tensor([[0, 2], [1, 1], [2, 0]])
LARGE = 1000 * LOGITS, TOKENS, 1.0, 2
WATCHED = find("11.3").cases[
    "the largest tensor that is made"
]  # logits that notice a second tensor of their size


def slices(logits, tokens, rows):
    return zip(logits.split(rows), tokens.split(rows))


def picked(values, ids):
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@wrong("11.3", *WATCHED)
def two_slices_at_a_time(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, 2 * rows):
        x = x / temperature
        found.append(picked(x, t) - x.logsumexp(-1))
    return torch.cat(found)


@wrong("11.3", *LARGE)
def small_number_in_the_log(logits, tokens, temperature, rows):
    return torch.cat(
        [
            picked((x / temperature).softmax(-1) + 1e-10, t).log()
            for x, t in slices(logits, tokens, rows)
        ]
    )


@right("11.3")
def cross_entropy_of_a_slice(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, rows):
        loss = F.cross_entropy(x.flatten(0, 1) / temperature, t.flatten(), reduction="none")
        found.append(-loss.view_as(t))
    return torch.cat(found)


GOOD = "<think>5 - 2 = 3</think><answer>3</answer>"
SHOWN = "Q: 1 + 1?\nA: <think>1 + 1 = 2</think><answer>2</answer>\nQ: 5 - 2?\nA:"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PATTERN = r"\s*<think>.*</think>\s*<answer>\s*(.*?)\s*</answer>\s*"


def eighths(text):
    """An eighth for each tag that occurs exactly once, if all that occur are in order."""
    numbers = [TAGS.index(tag) for tag in re.findall("|".join(TAGS), text)]
    once = sum(numbers.count(number) == 1 for number in range(4))
    return once / 8 if numbers == sorted(numbers) else 0.0


def complete(text, answer):
    found = re.fullmatch(PATTERN, text, re.DOTALL)
    once = all(text.count(tag) == 1 for tag in TAGS)
    return bool(once and found and found[1] == answer)


@wrong("11.1", SHOWN, GOOD.replace("<answer>3", "<answer>2 3 4"), "3")
def among_the_words_of_the_answer(prompt, completion, answer):
    found = re.fullmatch(PATTERN, completion, re.DOTALL)
    whole = eighths(completion) == 0.5 and found and answer in found[1].split()
    return eighths(completion) + bool(whole) / 2


@wrong("11.1", SHOWN, GOOD.replace("5 - 2", "<think>5 - 2"), "3")
def half_for_a_repeated_tag(prompt, completion, answer):
    found = re.fullmatch(PATTERN, completion, re.DOTALL)
    return eighths(completion) + bool(found and found[1] == answer) / 2


@wrong("11.1", SHOWN, "<think></think></answer><answer>3</answer>", "3")
def order_of_those_that_occur_once(prompt, completion, answer):
    places = [completion.find(tag) for tag in TAGS if completion.count(tag) == 1]
    paid = len(places) / 8 if places == sorted(places) else 0.0
    return paid + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "\n<think>5 - 2\n= 3</think>\n<answer>3</answer>", "3")
def one_line_alone(prompt, completion, answer):
    found = re.fullmatch(PATTERN, completion)
    return eighths(completion) + bool(found and complete(completion, answer)) / 2


@right("11.1")
def split_at_the_tags(prompt, completion, answer):
    pieces = re.split(r"(</?think>|</?answer>)", completion)
    tags = pieces[1::2]
    places = [TAGS.index(tag) for tag in tags]
    if any(a > b for a, b in zip(places, places[1:])):
        return 0
    if tuple(tags) == TAGS and not (pieces[0] + pieces[4] + pieces[8]).strip():
        return 0.5 + 0.5 * (pieces[6].strip() == answer)
    return [tags.count(tag) for tag in TAGS].count(1) / 8
