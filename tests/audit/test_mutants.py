"""Of the answers that are one small step away from a solution, few pass."""

from __future__ import annotations

import pytest
from mutants import mutants, survivors

from minigrpo.exercises.reader import all_exercises, find

EXERCISES = [exercise for exercise in all_exercises() if not exercise.code]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)
def test_few_mutants_pass(exercise):
    number, passed = survivors(exercise)
    assert number >= 5
    assert len(passed) <= max(5, number / 8), passed


def test_the_mutants_of_a_function():
    exercise = find("2.2")
    lines = {*mutants(exercise, exercise.reference)}
    assert {
        "real = torch.where(mask.bool(), log_probs, 1.0)",
        "real = torch.where(log_probs, mask.bool(), 0.0)",
        "real = torch.where(mask, log_probs, 0.0)",
        "real = torch.where(mask.bool(), log_probs.detach(), 0.0)",
        "return real.sum(dim=0)",
        "return real.mean(dim=-1)",
        "return real.sum()",
    } <= lines
