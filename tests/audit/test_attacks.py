"""Answers that no record lists: the wrong ones are refused, the right ones pass."""

import pytest
from attack import Attack, load

from minigrpo.exercises.reader import find

ATTACKS = load()
by_name = pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)


@by_name
def test_the_judge_is_not_deceived(attack):
    assert attack.refused() is attack.wrong
    assert not attack.wrong or attack.proven()


def test_a_right_answer_is_no_attack():
    """Nor has it a witness."""
    record = find("2.2")
    arguments = record.tried[0].arguments
    assert not Attack("2.2", record.reference, True, arguments).refused()
    assert not Attack("2.2", record.reference, True, arguments).proven()
