"""Exercises that check themselves: `check` an answer, ask for a `hint`, read the `solution`."""

from minigrpo.exercises.engine import Answer, Case, Checked, Exercise, check, hint, solution

__all__ = ["Answer", "Case", "Checked", "Exercise", "check", "hint", "solution"]
