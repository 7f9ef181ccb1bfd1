"""The rewards of GSM8K in the signature that OpenRLHF 0.11.2 calls.

It hands over prompt and completion in one text, special tokens included, so both ends are cut off
first: an example in the prompt is never rewarded, and the end of the turn is no part of the form.
OpenRLHF catches whatever is raised in here and goes on without a reward, so nothing is raised.
"""

import json
import re
import sys
from pathlib import Path

import torch

# OpenRLHF loads this file by its path, in processes where the course may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from minigrpo.text.prompts import answer_reward
from minigrpo.text.shots import tags_reward

ENDS = re.compile(r"(?:\s*(?:<\|[^|<>]*\|>|</s>|<eos>|<end_of_turn>))+\s*$")


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **others) -> dict:
    """The weighted sum for each query. `right`, `form` and `lost` (a prompt that isn't the
    beginning of its query, so that nothing is rewarded) are logged."""
    rows = {"rewards": [], "right": [], "form": [], "lost": []}
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        known, lost = json.loads(label), not query.startswith(prompt)
        text = "" if lost else ENDS.sub("", query[len(prompt) :])
        form = float(tags_reward([""], [text])[0])
        right = answer_reward([""], [text], answer=[known["answer"]])[0]
        rows["rewards"].append(known["form"] * form + known["right"] * right)
        rows["right"].append(right)
        rows["form"].append(form)
        rows["lost"].append(float(lost))
    logs = {name: torch.tensor(values) for name, values in rows.items()}
    # `scores` is what --algo.dynamic_filtering_range is about: from 0 to 1.
    return {"rewards": logs.pop("rewards"), "scores": logs["right"], "extra_logs": logs}
