"""Rewards see the completion only; tasks draw from the generator only."""

from __future__ import annotations

import pytest
import torch

from minigrpo.corpus import CharTokenizer
from minigrpo.rewards import TextTask, letter_share


def ids(text: str) -> torch.Tensor:
    return CharTokenizer().encode(text)


@pytest.mark.parametrize(
    ("text", "share"), [("eeee", 1.0), ("see me", 0.5), ("oh", 0.0), ("", 0.0), ("E", 0.0)]
)
def test_letter_share(text, share):
    assert letter_share(text) == share


def test_a_share_is_not_raised_by_writing_more():
    assert letter_share("see" * 10) == letter_share("see")
    assert letter_share("banana", "a") == 0.5


def test_the_prompt_is_never_read():
    task = TextTask(["eeeeee", "oooooo"])
    completions = [ids("see"), ids("oh")]
    first = task.reward([ids("eeeeee")] * 2, completions)
    assert first == task.reward([ids("oooooo")] * 2, completions) == [2 / 3, 0.0]


def test_prompts_come_from_the_generator_and_repeat_as_late_as_possible():
    task = TextTask(["a", "bb", "ccc"])
    drawn = [task.prompts(7, torch.Generator().manual_seed(s)) for s in (0, 0, 1, 2)]
    texts = [[CharTokenizer().decode(p) for p in prompts] for prompts in drawn]
    assert texts[0] == texts[1]
    assert any(texts[0] != other for other in texts[2:])
    assert set(texts[0][:3]) == set(texts[0][3:6]) == {"a", "bb", "ccc"}
    assert len(texts[0]) == 7


def test_any_function_of_the_text_is_a_reward():
    task = TextTask(["O"], lambda text: float(text.count("!")))
    assert task.reward([ids("O!")] * 2, [ids("!!"), ids("no")]) == [2.0, 0.0]


@pytest.mark.parametrize("texts", [[], ["a", ""], "ROMEO:"])
def test_a_task_without_prompts_is_refused(texts):
    with pytest.raises(ValueError, match="texts: expected a list of one or more texts"):
        TextTask(texts)
