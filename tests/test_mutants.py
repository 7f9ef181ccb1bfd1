"""No answer that is one small step away from a right one passes, unless its record says why."""

from __future__ import annotations

import pytest
from mutants import mutants, survivors

from minigrpo.exercises.judge import Answer, Exercise
from minigrpo.exercises.reader import all_exercises, find

EXERCISES = [exercise for exercise in all_exercises() if isinstance(exercise, Exercise)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)
def test_every_mutant_is_refused_or_named_as_no_mistake(exercise):
    number, passed = survivors(exercise)
    assert number >= 15
    assert passed.keys() == {line for line, _ in exercise.same}


def test_the_mutants_of_a_function():
    exercise = find("2.3")
    lines = {*mutants(exercise, Answer("", exercise.reference, ""))}
    assert {
        "real = torch.where(mask.bool(), log_probs, 1.0)",
        "real = torch.where(log_probs, mask.bool(), 0.0)",
        "real = torch.where(mask, log_probs, 0.0)",
        "real = torch.where(mask.bool(), log_probs.detach(), 0.0)",
        "return real.sum(dim=0)",
        "return real.mean(dim=-1)",
        "return real.sum()",
    } <= lines
