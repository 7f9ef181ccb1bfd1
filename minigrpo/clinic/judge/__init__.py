"""The judge of losses: is this GRPO loss right?"""

from minigrpo.clinic.judge.asking import Report
from minigrpo.clinic.judge.testing import assert_grpo_loss
from minigrpo.clinic.judge.verdict import judge_loss

__all__ = ["Report", "assert_grpo_loss", "judge_loss"]
