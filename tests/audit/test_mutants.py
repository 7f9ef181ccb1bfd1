"""Of the answers that are one small step away from a solution, few pass."""

import pytest
from mutants import survivors

from minigrpo.exercises.reader import all_exercises

EXERCISES = [exercise for exercise in all_exercises() if not exercise.code]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)
def test_few_mutants_pass(exercise):
    number, passed = survivors(exercise)
    assert number >= 5
    assert len(passed) <= max(5, number / 8), passed
