"""Answers to the exercises of notebook 11."""

from __future__ import annotations

import re

import torch
from attack import right, wrong
from torch.nn import functional as F

from minigrpo.exercises.reader import find

RAGGED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
HOLLOW = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]])


@wrong("11.2", RAGGED, 2)
def one_over_the_parts(mask, rows):
    parts = -(-len(mask) // rows)
    return torch.full((parts,), 1 / parts, dtype=torch.double)


@wrong("11.2", RAGGED, 2)
def rows_over_all_rows(mask, rows):
    return torch.tensor([len(part) for part in mask.split(rows)]).double() / len(mask)


@wrong("11.2", RAGGED, 2)
def single_precision(mask, rows):
    weights = [part.sum() / mask.sum() for part in mask.split(rows)]
    return torch.stack(weights)


@wrong("11.2", RAGGED, 2)
def whole_parts_alone(mask, rows):
    parts = len(mask) // rows
    tokens = mask[: parts * rows].reshape(parts, -1).sum(dim=1).double()
    return tokens / tokens.sum()


@wrong("11.2", RAGGED, 2)
def summing_to_the_number_of_parts(mask, rows):
    tokens = torch.stack([part.sum() for part in mask.split(rows)]).double()
    return tokens / tokens.mean()


@wrong("11.2", RAGGED, 2)
def short_part_as_a_whole_one(mask, rows):
    density = torch.stack([part.double().mean() for part in mask.split(rows)])
    return density / density.sum()


@wrong("11.2", HOLLOW, 1)
def empty_part_left_out(mask, rows):
    tokens = torch.stack([part.sum() for part in mask.split(rows)]).double()
    return tokens[tokens > 0] / tokens.sum()


@wrong("11.2", RAGGED, 2)
def rounded_weights(mask, rows):
    return [round(part.sum().item() / mask.sum().item(), 6) for part in mask.split(rows)]


@wrong("11.2", RAGGED, 8)
def single_part_without_dimension(mask, rows):
    tokens = torch.stack([part.sum() for part in mask.split(rows)]).double()
    return (tokens / tokens.sum()).squeeze()


@wrong("11.2", RAGGED, 2)
def share_of_the_rest(mask, rows):
    tokens = torch.stack([part.sum() for part in mask.split(rows)]).double()
    return tokens / tokens.flip(0).cumsum(0).flip(0)


@wrong("11.2", RAGGED, 2)
def inverse_of_its_tokens(mask, rows):
    inverse = 1 / torch.stack([part.sum() for part in mask.split(rows)]).double()
    return inverse / inverse.sum()


@right("11.2")
def padded_to_whole_parts(mask, rows):
    lengths = mask.double().sum(dim=1)
    lengths = F.pad(lengths, (0, -len(mask) % rows))
    return lengths.view(-1, rows).sum(dim=1) / lengths.sum()


@right("11.2")
def differences_of_a_running_sum(mask, rows):
    ends = [min(i + rows, len(mask)) - 1 for i in range(0, len(mask), rows)]
    running = mask.double().sum(dim=1).cumsum(dim=0)[ends]
    return running.diff(prepend=running.new_zeros(1)) / running[-1]


@right("11.2")
def one_after_the_other(mask, rows):
    found = []
    for i in range(0, len(mask), rows):
        found.append(mask[i : i + rows].count_nonzero().item() / mask.count_nonzero().item())
    return torch.tensor(found, dtype=torch.float64)


LOGITS = torch.tensor([[[1.0, 0.5, -1.0], [2.0, 0.0, 3.0]], [[0.0, -2.0, 1.0], [1.0, 1.0, 4.0]]])
LOGITS = torch.cat([LOGITS, -LOGITS[:1]])
TOKENS = torch.tensor([[0, 2], [1, 1], [2, 0]])
PLAIN = LOGITS, TOKENS, 0.7, 2
LARGE = 1000 * LOGITS, TOKENS, 1.0, 2
WATCHED = find("11.3").cases[
    "the largest tensor that is made"
]  # logits that notice a second tensor of their size


def slices(logits, tokens, rows):
    return zip(logits.split(rows), tokens.split(rows))


def picked(values, ids):
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@wrong("11.3", *LARGE)
def log_of_softmax(logits, tokens, temperature, rows):
    return torch.cat(
        [picked((x / temperature).softmax(-1), t).log() for x, t in slices(logits, tokens, rows)]
    )


@wrong("11.3", *LARGE)
def nothing_taken_away(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, rows):
        x = x / temperature
        found.append(picked(x, t) - x.exp().sum(-1).log())
    return torch.cat(found)


@wrong("11.3", *PLAIN)
def temperature_forgotten(logits, tokens, temperature, rows):
    return torch.cat([picked(x, t) - x.logsumexp(-1) for x, t in slices(logits, tokens, rows)])


@wrong("11.3", *PLAIN)
def temperature_at_the_end(logits, tokens, temperature, rows):
    found = [picked(x, t) - x.logsumexp(-1) for x, t in slices(logits, tokens, rows)]
    return torch.cat(found) / temperature


@wrong("11.3", *WATCHED)
def log_softmax_of_all(logits, tokens, temperature, rows):
    return picked(F.log_softmax(logits / temperature, dim=-1), tokens)


@wrong("11.3", *WATCHED)
def logsumexp_of_all(logits, tokens, temperature, rows):
    if temperature != 1:
        chunks = [x / temperature for x in logits.split(rows)]
        logits = torch.cat(chunks)
    return picked(logits, tokens) - torch.logsumexp(logits, dim=-1)


@wrong("11.3", *WATCHED)
def cross_entropy_of_all(logits, tokens, temperature, rows):
    flat = logits.flatten(0, 1)
    return -F.cross_entropy(flat / temperature, tokens.flatten(), reduction="none").view_as(tokens)


@wrong("11.3", *WATCHED)
def two_slices_at_a_time(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, 2 * rows):
        x = x / temperature
        found.append(picked(x, t) - x.logsumexp(-1))
    return torch.cat(found)


@wrong("11.3", *WATCHED)
def filled_in_place(logits, tokens, temperature, rows):
    scaled = logits.clone().div_(temperature)
    return torch.cat([picked(x.log_softmax(-1), t) for x, t in slices(scaled, tokens, rows)])


@wrong("11.3", *PLAIN)
def normalizer_without_gradient(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, rows):
        x = x / temperature
        with torch.no_grad():
            whole = x.logsumexp(-1)
        found.append(picked(x, t) - whole)
    return torch.cat(found)


@wrong("11.3", *PLAIN)
def shifted(logits, tokens, temperature, rows):
    scored = torch.cat(
        [
            picked((x / temperature).log_softmax(-1), t)
            for x, t in slices(logits[:, :-1], tokens[:, 1:], rows)
        ]
    )
    return F.pad(scored, (1, 0))


@wrong("11.3", *LARGE)
def small_number_in_the_log(logits, tokens, temperature, rows):
    return torch.cat(
        [
            picked((x / temperature).softmax(-1) + 1e-10, t).log()
            for x, t in slices(logits, tokens, rows)
        ]
    )


@right("11.3")
def row_by_row(logits, tokens, temperature, rows):
    found = []
    for x, t in zip(logits, tokens):
        x = x / temperature
        found.append(x[torch.arange(len(t)), t] - x.logsumexp(-1))
    return torch.stack(found)


@right("11.3")
def cross_entropy_of_a_slice(logits, tokens, temperature, rows):
    found = []
    for x, t in slices(logits, tokens, rows):
        loss = F.cross_entropy(x.flatten(0, 1) / temperature, t.flatten(), reduction="none")
        found.append(-loss.view_as(t))
    return torch.cat(found)


@right("11.3")
def distribution_object(logits, tokens, temperature, rows):
    return torch.cat(
        [
            torch.distributions.Categorical(logits=x / temperature).log_prob(t)
            for x, t in slices(logits, tokens, rows)
        ]
    )


@right("11.3")
def gather_first(logits, tokens, temperature, rows):
    normalizers = [(x / temperature).logsumexp(-1) for x in logits.split(rows)]
    return picked(logits, tokens) / temperature - torch.cat(normalizers)


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


@wrong("11.1", SHOWN, 3 * "</answer>", "3")
def tags_that_occur(prompt, completion, answer):
    paid = sum(tag in completion for tag in TAGS) / 8
    return min(paid, eighths(completion) or paid) + complete(completion, answer) / 2


@wrong("11.1", SHOWN, 20 * "<think>", "3")
def every_tag_paid(prompt, completion, answer):
    return sum(map(completion.count, TAGS)) / 8 + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "</answer><answer>", "3")
def any_order(prompt, completion, answer):
    once = sum(completion.count(tag) == 1 for tag in TAGS) / 8
    return once + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "<answer>3</answer><think>5 - 2</think>", "3")
def order_within_pairs(prompt, completion, answer):
    paid = 0.0
    for opening, closing in (TAGS[:2], TAGS[2:]):
        counts = completion.count(opening) == 1, completion.count(closing) == 1
        good = not all(counts) or completion.find(opening) < completion.find(closing)
        paid += sum(counts) / 8 if good else 0
    return paid + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "So " + GOOD, "3")
def text_outside(prompt, completion, answer):
    once = eighths(completion) == 0.5
    found = re.search(r"<answer>\s*(.*?)\s*</answer>", completion, re.DOTALL)
    return eighths(completion) + (once and found[1] == answer) / 2


@wrong("11.1", SHOWN, "<think>1 2 3 4</think><answer>5</answer>", "3")
def answer_anywhere(prompt, completion, answer):
    return eighths(completion) + (eighths(completion) == 0.5 and answer in completion) / 2


@wrong("11.1", SHOWN, GOOD.replace("<answer>3", "<answer>2 3 4"), "3")
def among_the_words_of_the_answer(prompt, completion, answer):
    found = re.fullmatch(PATTERN, completion, re.DOTALL)
    whole = eighths(completion) == 0.5 and found and answer in found[1].split()
    return eighths(completion) + bool(whole) / 2


@wrong("11.1", SHOWN, "", "3")
def read_with_its_prompt(prompt, completion, answer):
    return eighths(prompt + completion) + complete(completion, answer) / 2


@wrong("11.1", SHOWN, GOOD, "3")
def more_than_one(prompt, completion, answer):
    return 2 * eighths(completion) + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "<think>5 - 2", "3")
def all_or_nothing(prompt, completion, answer):
    return float(complete(completion, answer))


@wrong("11.1", SHOWN, "<think>" + GOOD, "3")
def nothing_if_one_is_repeated(prompt, completion, answer):
    if any(completion.count(tag) > 1 for tag in TAGS):
        return 0.0
    return eighths(completion) + complete(completion, answer) / 2


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
def eighths_and_a_half(prompt, completion, answer):
    return eighths(completion) + 0.5 * complete(completion, answer)


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


@right("11.1")
def as_a_tensor(prompt, completion, answer):
    paid = eighths(completion)
    return torch.tensor(1.0 if complete(completion, answer) else paid)
