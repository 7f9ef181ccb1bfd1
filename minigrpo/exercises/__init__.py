"""Exercises that check themselves: `check` an answer, ask for a `hint`, read the `solution`."""

from minigrpo.exercises.reader import all_exercises, answer, check, hint, judge, show, solution
from minigrpo.notebook.progress import outcome, predict, progress

__all__ = ["all_exercises", "answer", "check", "hint", "judge", "outcome", "predict", "progress"]
__all__ += ["show", "solution"]
