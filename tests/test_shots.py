"""The task of the real run: a finite set of problems, its held-out side, epochs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from minigrpo.files import data_folder
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import answer_reward, format_reward, stop_tokens
from minigrpo.text.shots import SHOTS, Epochs, asked, line_ends, rows, tags_reward


@pytest.fixture(scope="module")
def small():
    return load_pretrained(data_folder() / "text_llama", device="cpu", dtype=torch.float32)


def draw(task: Epochs, n: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for ids in task.prompts(n, generator)]


def test_no_pair_of_numbers_is_on_both_sides_and_kinds_are_equally_frequent():
    sides = []
    for held_out in (False, True):
        some = rows(held_out=held_out)
        assert len({row["prompt"] for row in some}) == len(some)
        assert len({*Counter(row["kind"] for row in some).values()}) == 1
        sides.append({(row["kind"], *sorted(re.findall(r"\d+", row["question"]))) for row in some})
    assert len(sides[0]) > 2 * len(sides[1]) > 20 and not sides[0] & sides[1]


@pytest.mark.parametrize("held_out", (False, True))
def test_every_answer_is_right_and_its_solved_form_earns_everything(held_out):
    for row in rows(held_out=held_out)[:200]:
        have, n = map(int, re.findall(r"\d+", row["question"]))
        assert int(row["answer"]) == (have + n if row["kind"] == "gets" else have - n) > 0
        text = f"<think>{row['thought']}</think><answer>{row['answer']}</answer>"
        for reward in (tags_reward, format_reward, answer_reward):
            assert reward([row["prompt"]], [text], answer=[row["answer"]]) == [1.0]


def test_the_solved_problems_are_solved_correctly():
    for shots in SHOTS:
        lines = asked("?", shots).splitlines()
        assert len(lines) == 8 and lines[-2:] == ["Q: ?", "A:"]
        for question, answer in zip(lines[:6:2], lines[1:6:2]):
            have, n = map(int, re.findall(r"\d+", question))
            now = have + n if "gets" in question else have - n
            assert answer.endswith(f" = {now}</think><answer>{now}</answer>")
        assert ("loses" in asked("?", shots)) == (shots == "one loss")


@pytest.mark.parametrize(
    "text, earns",
    [
        ("<think>1</think><answer>1</answer>", 1.0),
        ("<think>1</think>", 0.5),
        ("<think><think><think>1</think>", 0.25),
        ("</answer>", 0.25),
        ("<answer>1</answer><answer>2</answer>", 0.0),
        ("nothing", 0.0),
    ],
)
def test_a_tag_earns_a_quarter_if_it_occurs_once(text, earns):
    assert tags_reward([""], [text]) == [earns]


def test_every_line_break_ends_an_answer_and_no_other_token(small):
    policy, tokenizer = small
    ends = line_ends(policy, tokenizer)
    assert tokenizer.eos_token_id in ends and len(ends) == len({*ends})
    breaks = {i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])}
    assert breaks and {*ends} == breaks | {*stop_tokens(tokenizer, policy)}


def test_an_epoch_has_every_row_once_and_the_next_another_order(small):
    task = Epochs(small[1], draw_rows(24, torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(0)
    epochs = [[key for _ in range(3) for key in draw(task, 8, generator)] for _ in range(2)]
    assert len({*epochs[0]}) == 24 and {*epochs[0]} == {*epochs[1]}
    assert epochs[0] != epochs[1]


def test_a_last_batch_that_is_not_full_is_left_out(small):
    task = Epochs(small[1], draw_rows(21, torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(0)
    first = [key for _ in range(2) for key in draw(task, 8, generator)]
    assert len({*first}) == 16
    assert len({*draw(task, 8, generator), *draw(task, 8, generator)}) == 16  # of the next epoch
    assert [len(draw(task, n, generator)) for n in (8, 4, 4, 8)] == [8, 4, 4, 8]  # begins anew
    with pytest.raises(ValueError, match="expected 22 different ones or more, got 21"):
        task.prompts(22, generator)
