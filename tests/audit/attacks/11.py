"""Answers to the exercises of notebook 11."""

import re
from fractions import Fraction

from attack import right, wrong

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


@wrong("11.1", SHOWN, "<think></think></answer><answer>3</answer>", "3")
def order_of_those_that_occur_once(prompt, completion, answer):
    places = [completion.find(tag) for tag in TAGS if completion.count(tag) == 1]
    paid = len(places) / 8 if places == sorted(places) else 0.0
    return paid + complete(completion, answer) / 2


@wrong("11.1", SHOWN, "\n<think>5 - 2\n= 3</think>\n<answer>3</answer>", "3")
def one_line_alone(prompt, completion, answer):
    found = re.fullmatch(PATTERN, completion)
    return eighths(completion) + bool(found and complete(completion, answer)) / 2


@wrong("11.2", [["8", "12", "12", "8"], ["9"]], ["12", "9"])
def equals_in_the_order_of_the_alphabet(groups, answers):
    winners = [max(sorted(filter(None, g)), key=g.count, default=None) for g in groups]
    return sum(w == a for w, a in zip(winners, answers)) / len(answers)


@wrong("11.2", [["5", "5"], [None, None]], ["5", "5"])
def groups_without_a_vote_left_out(groups, answers):
    pairs = [([t for t in g if t], a) for g, a in zip(groups, answers)]
    pairs = [(votes, answer) for votes, answer in pairs if votes]
    return sum(max(v, key=v.count) == a for v, a in pairs) / max(1, len(pairs))


@right("11.3")
def one_completion_after_the_other(asked, correct, group_size):
    all_right = all_wrong = Fraction(1)
    for i in range(group_size):
        all_right *= Fraction(max(correct - i, 0), asked - i)
        all_wrong *= Fraction(max(asked - correct - i, 0), asked - i)
    return float(1 - all_right - all_wrong)
