"""The rewards of GSM8K in the signature that verl 0.9.1 calls, one completion at a time."""

import sys
from pathlib import Path

# verl loads this file by its path, in processes of its own, where the course may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from minigrpo.text.prompts import answer_reward
from minigrpo.text.shots import tags_reward


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others) -> dict:
    """`score` is the reward. verl logs the rest, and takes `acc` for the held-out accuracy."""
    form = float(tags_reward([""], [solution_str])[0])
    right = answer_reward([""], [solution_str], answer=[ground_truth])[0]
    return {"score": 0.2 * form + right, "acc": right, "form": form}
