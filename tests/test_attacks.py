"""Answers that no record lists: the wrong ones are refused, the right ones pass."""

from __future__ import annotations

import pytest
from attack import Attack, load

from minigrpo.exercises.reader import all_exercises, find

ATTACKS = load()
by_name = pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)


@by_name
def test_the_judge_is_not_deceived(attack):
    assert attack.refused() is attack.wrong
    assert not attack.wrong or attack.proven()


def test_there_are_ten_wrong_and_three_right_ones_for_each_exercise():
    for exercise in all_exercises():
        own = [attack.wrong for attack in ATTACKS if attack.key == exercise.key]
        assert own.count(True) >= 10 and own.count(False) >= 3, exercise.key


def test_a_right_answer_is_no_attack():
    """Nor has it a witness."""
    record = find("2.3")
    arguments = record.cases[0].arguments
    assert not Attack("2.3", record.reference, True, arguments).refused()
    assert not Attack("2.3", record.reference, True, arguments).proven()
