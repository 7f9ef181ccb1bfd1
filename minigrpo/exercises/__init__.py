"""Exercises that check themselves: `check` an answer, ask for a `hint`, read the `solution`.

In a review, `show` the code first.
"""

from minigrpo.exercises.engine import Answer, Case, Checked, Exercise, check, hint, show, solution

__all__ = ["Answer", "Case", "Checked", "Exercise", "check", "hint", "show", "solution"]
