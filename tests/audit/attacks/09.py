"""Answers to the exercises of notebook 09."""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from attack import right, wrong
from torch.nn.utils.rnn import pad_sequence

NONE = torch.tensor([0, 0])
TAG = r"</?(?:think|answer)>"
NO_TAG = rf"(?:(?!{TAG}).)*"
FORM = rf"\s*<think>{NO_TAG}</think>\s*<answer>({NO_TAG})</answer>\s*"
TIGHT = rf"\s*<think>{NO_TAG}</think>\s*<answer>\s*((?!\s|{TAG}){NO_TAG}?)\s*</answer>\s*"
NUMBER = r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?"
WORLD = 1000, 4, 2, 8, 300, 6, 17, 3, 2


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


@wrong("9.2", "Sure!\n<think>3</think>\n<answer>5</answer>")
def line_ends_for_text_ends(completion):
    match = re.search(f"^{TIGHT}$", completion, re.S | re.M)
    if match is None or len(re.findall(TAG, completion)) != 4:
        return NONE
    return torch.tensor(match.span(1))


@right("9.2")
def with_one_pattern(completion):
    match = re.fullmatch(TIGHT, completion, flags=re.DOTALL)
    return torch.tensor(match.span(1) if match else (0, 0))


def value(text):
    """The number, or None."""
    text = text.strip()
    return float(text.replace(",", "")) if re.fullmatch(NUMBER, text) else None


@wrong("9.3", "1,234.0", "1234")
def no_point_after_commas(given, right):
    pattern = r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+(\.[0-9]*)?)"
    good = all(re.fullmatch(pattern, text.strip()) for text in (given, right))
    return float(good and value(given) == value(right))


@wrong("9.3", ",123", "123")
def first_group_empty(given, right):
    pattern = r"[+-]?([0-9]{0,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?"
    if not all(re.fullmatch(pattern, text.strip()) for text in (given, right)):
        return 0.0
    return float(float(given.replace(",", "")) == float(right.replace(",", "")))


@wrong("9.3", "-0.0", "0")
def minus_zero_by_letters(given, right):
    def letters(text):
        whole, _, rest = text.strip().replace(",", "").partition(".")
        return whole.startswith("-"), whole.lstrip("+-0"), rest.rstrip("0")

    return float(None not in (value(given), value(right)) and letters(given) == letters(right))


@wrong("9.3", "\u22127", "-7")
def typographic_minus(given, right):
    a, b = (value(text.replace("\u2212", "-")) for text in (given, right))
    return float(a is not None and a == b)


@wrong("9.3", "123,456,789,012,345", "123456789012345")
def characters_for_digits(given, right):
    if max(len(given.strip()), len(right.strip())) > 16:
        return 0.0
    return float(value(given) is not None and value(given) == value(right))


@right("9.3")
def with_floats(given, right):
    a, b = value(given), value(right)
    return 0.0 if a is None or b is None else float(a == b)


def said(completion):
    """The text that counts."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


@wrong("9.4", ["p", "q"], ["7", "7"], ["8", "7"])
def row_of_the_completion(prompts, completions, answer, **columns):
    return [float(said(c).strip() == answer[completions.index(c)]) for c in completions]


@wrong("9.4", ["q"], [[{"content": "7", "role": "assistant"}]], ["7"])
def content_is_the_second_value(prompts, completions, answer, **columns):
    texts = [c if isinstance(c, str) else list(c[-1].values())[1] for c in completions]
    return torch.tensor([float(t.strip() == a) for t, a in zip(texts, answer)])


@wrong("9.4", ["q"], ["a  b"], ["a b"])
def white_space_inside_forgiven(prompts, completions, answer, **columns):
    texts = [" ".join(said(c).split()) for c in completions]
    return [float(t == " ".join(a.split())) for t, a in zip(texts, answer)]


@right("9.4")
def a_list_of_floats(prompts, completions, answer, **columns):
    return list(map(lambda c, a: float(said(c).strip() == a), completions, answer))


def world(function):
    """Give it the six counts of bytes and the sizes; keep the exercise's names."""

    def answer(
        parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, slice_rows, read_bytes
    ):
        size = {"layers": layers, "width": kv_heads * head_dim, "vocab": vocab_size}
        size |= {"rows": rows, "tokens": tokens, "slice_rows": slice_rows, "p": parameters}
        cache = 2 * layers * kv_heads * head_dim * rows * tokens * read_bytes
        logits = 4 * slice_rows * tokens * vocab_size
        trained = [4 * parameters, 4 * parameters, 8 * parameters]
        return function([*trained, parameters * read_bytes, cache, logits], read_bytes, **size)

    answer.__name__ = function.__name__
    return answer


@wrong("9.5", 16_777_217, *WORLD[1:-1], 1)
@world
def capital_tensor(counts, b, **size):
    return torch.Tensor(counts).long()


@right("9.5")
def by_name_alone(**given):
    p, b = given["parameters"], given["read_bytes"]
    token = 2 * math.prod(given[name] for name in ("layers", "kv_heads", "head_dim")) * b
    cache = given["rows"] * given["tokens"] * token
    logits = given["slice_rows"] * given["tokens"] * given["vocab_size"] * 4
    return torch.tensor([p * 4, p * 4, p * 8, p * b, cache, logits])


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


def turned(rows, value):
    return pad_sequence([r.flip(0) for r in rows], batch_first=True, padding_value=value).flip(1)


@right("9.1")
def turned_around_twice(rows, pad_id):
    return torch.stack([turned(rows, pad_id), turned([torch.ones_like(r) for r in rows], 0)])
