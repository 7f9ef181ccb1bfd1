"""The judge of losses: is this GRPO loss right?"""

from minigrpo.clinic import lazily

__all__ = ["Report", "assert_grpo_loss", "judge_loss"]
_WHERE = {"report": ("Report",), "verdict": ("assert_grpo_loss", "judge_loss")}
__getattr__ = lazily(__name__, _WHERE)
