"""Answers to the exercises of notebook 06, from plausible mistakes and unusual right ways."""

import functools
import math
import re
import unittest

import torch
from attack import right, wrong

from minigrpo.arithmetic import TAGS

LOGITS = torch.sin(torch.arange(84.0) ** 2).view(3, 4, 7)
TEXT = torch.tensor([[5, 6, 2, 3], [5, 0, 3, 0], [5, 6, 1, 4]])
PROMPTS, REAL = torch.tensor([2, 1, 3]), torch.tensor([4, 3, 4])[:, None] > torch.arange(4)
SURE = 1000 * LOGITS, TEXT, PROMPTS, REAL


def behind(prompt_lengths, mask):
    """Which tokens are learned, (N, S)."""
    return mask & (torch.arange(mask.shape[1]) >= prompt_lengths[:, None])


@wrong("6.1", *SURE)
def log_of_softmax_and_eps(logits, input_ids, prompt_lengths, mask):
    chosen = logits[:, :-1].softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return -(chosen + 1e-12).log()[behind(prompt_lengths, mask)[:, 1:]].mean()


@right("6.1")
def row_by_row_and_token_by_token(logits, input_ids, prompt_lengths, mask):
    losses = []
    for row, ids, begin, end in zip(logits, input_ids, prompt_lengths, mask.sum(dim=1)):
        for s in range(int(begin), int(end)):
            losses.append(row[s - 1].logsumexp(-1) - row[s - 1, ids[s]])
    return torch.stack(losses).mean()


HERE = type(TAGS)(20, 2, 13, 4, 9)  # think, end_think, answer, end_answer, eos
END = [2, 13, 7, 4, 9]


def asked(ids, answer=7, tags=HERE):
    return torch.tensor(ids, dtype=torch.long), answer, tags


@wrong("6.2", *asked([5, 9, 6, *END]))
def eos_in_the_thought(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and not set(ids[:-5]) & set(tags[:4]))


@wrong("6.2", *asked([5, *END, 8, 8]))
def cut_at_the_first_eos(completion, answer, tags):
    ids = completion.tolist()
    ids = ids[: ids.index(tags.eos) + 1] if tags.eos in ids else []
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and not set(ids[:-5]) & set(tags))


@wrong("6.2", *asked([5, 2, 13, 0, 4, 9], 0))
def answer_zero_is_no_answer(completion, answer, tags):
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer or None, tags.end_answer, tags.eos]
    return float(ids[-5:] == ending and set(tags).isdisjoint(ids[:-5]))


SHOWN = "1 1 1 <think> 1 2 3 </think> <answer> {} </answer> 4 5 0 <think> "
NINE = SHOWN.format(9)


def by_cutting(prompt, completion, answer):
    before, tag, rest = completion.rpartition("<answer>")
    inside, end, _ = rest.partition("</answer>")
    return 1.0 if tag and end and inside.strip() == answer else 0.0


def over_lines(prompt, completion, answer):
    spans = re.findall(r"<answer>([^<]*)</answer>", completion)
    return float(bool(spans) and spans[-1].strip() == answer)


def the_example_is_right(prompt, completion, answer):
    shown = re.findall(r"<answer>([^<]*)</answer>", prompt)
    return over_lines(prompt, completion, shown[0].strip() if shown else answer)


@wrong("6.3", refuses=by_cutting)
def expects_none(reward):
    assert reward(NINE, "", "9") is None


@wrong("6.3", accepts=the_example_is_right)
def only_an_empty_one(reward):
    assert reward(NINE, "", "9") == 0.0
    assert reward(NINE, "</think> <answer> 9 </answer> </s>", "9") == 1.0


@right("6.3")
def ten_examples_one_reward(reward):
    for completion in ("", "4 9", "<answer>", "</think> <answer> 9 </answer> </s>"):
        paid = {reward(SHOWN.format(x), completion, "9") for x in range(10)}
        assert len(paid) == 1, completion


@right("6.3")
def with_unittest(reward):
    check = unittest.TestCase()
    check.assertEqual(reward(prompt=NINE, completion="4 9 9 </think> </s>", answer="9"), 0)
    check.assertEqual(reward(NINE, "</think> <answer> 9 </answer> </s>", "9"), 1)
    check.assertEqual(reward(NINE, "</think> <answer> 9 </answer> </s>", "4"), 0)


@wrong("6.4", 4, 0, 4)
def all_drawn_hit_always(samples, correct, k):
    if k == samples:
        return 1.0
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@right("6.4")
@functools.cache
def one_after_the_other(samples, correct, k):
    if k == 0 or correct == 0:
        return 0.0
    later = one_after_the_other(samples - 1, correct, k - 1) if samples > correct else 0.0
    return correct / samples + (samples - correct) / samples * later
