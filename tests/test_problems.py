"""Word problems: solved rightly, split cleanly, demonstrated carelessly."""

from __future__ import annotations

import re

import pytest
import torch
from support import generator
from train_models import careless, train_tokenizer, warmup_batch

from minigrpo.text.problems import GAINS, MOST, draw_problem, draw_rows, is_held_out
from minigrpo.text.prompts import answer_reward, format_reward


def numbers(question: str) -> tuple[int, list[int]]:
    """What a reader of the question finds: how many there were, and the changes."""
    had = int(re.search(r"has (\d+)", question)[1])
    deeds = re.findall(r"(buys|finds|gets|loses|sells|drops) (\d+)", question)
    return had, [int(n) if deed in GAINS else -int(n) for deed, n in deeds]


def test_thought_and_answer_are_right():
    g = generator()
    kinds = set()
    for _ in range(300):
        problem = draw_problem(g)
        now, changes = numbers(problem.question)
        steps = problem.thought.split(", ")
        assert len(steps) == len(changes)
        for step, change in zip(steps, changes):
            sign = "+" if change > 0 else "-"
            assert step == f"{now} {sign} {abs(change)} = {now + change}"
            now += change
            assert 1 <= now <= MOST
        assert problem.answer == str(now)
        kinds.add(len(steps))
    assert kinds == {1, 2, 3}


def test_a_careful_completion_is_paid_in_full():
    problem = draw_problem(generator())
    paid = {"prompts": [problem.prompt], "completions": [problem.completion]}
    assert format_reward(**paid) == answer_reward(**paid, answer=[problem.answer]) == [1]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_split_goes_by_the_numbers(held_out):
    rows = draw_rows(200, generator(), held_out=held_out)
    assert all(is_held_out(*numbers(row["prompt"])) == held_out for row in rows)
    assert len({row["prompt"] for row in rows}) == 200


def test_one_in_five_is_held_out():
    changes = range(-8, 9)
    numbers = [(have, (a, b)) for have in range(1, 10) for a in changes for b in changes]
    assert 0.18 < sum(is_held_out(*n) for n in numbers) / len(numbers) < 0.22


def test_the_pupil_is_right_one_time_in_three_and_wrong_in_every_way():
    g = generator()
    problems = [draw_problem(g) for _ in range(1000)]
    texts = [careless(problem, g) for problem in problems]
    prompts = [problem.prompt for problem in problems]
    form = sum(format_reward(prompts, texts)) / 1000
    right = sum(answer_reward(prompts, texts, answer=[p.answer for p in problems])) / 1000
    assert 0.55 < form < 0.65 and 0.28 < right < 0.38
    for slip in (r"The answer is \d+\.", r"<answer>\d+</answer>", r"<think>[^/]*</think>\n\d+"):
        assert any(re.fullmatch(slip, text) for text in texts)


def test_a_warmup_batch_learns_completions_and_their_end():
    texts = [row["prompt"] for row in draw_rows(50, generator())]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    ids, mask = warmup_batch(16, generator(1), tokenizer)
    assert ids.shape == mask.shape and len(ids) == 16
    for row, learned in zip(ids, mask):
        assert row[learned][-1] == tokenizer.eos_token_id
        given = tokenizer.decode(row[: int(learned.nonzero()[0])])
        assert given.endswith("now?\n") and not is_held_out(*numbers(given))
        assert set(row[int(learned.nonzero()[-1]) + 1 :].tolist()) <= {tokenizer.pad_token_id}
    again, _ = warmup_batch(16, generator(1), tokenizer)
    assert torch.equal(ids, again)
