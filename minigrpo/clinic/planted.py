"""The named mistakes, and the course's objective with any of them planted in it.

`mistakes.md` holds them: a name, the sentence that a reader is told, the function of
`minigrpo.objective`, its line, and the line instead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minigrpo import objective
from minigrpo.clinic.mistakes import replaced


class Mistake(NamedTuple):
    name: str
    sentence: str  # what a reader is told
    function: str  # of minigrpo.objective
    line: str
    instead: str


Form = tuple[Mistake, ...]
"""The lines that make a mistake, mostly one."""

ENTRY = re.compile(r"## (\w+)\n\n(.+)\n\n    (\w+)\n    - (.+)\n    \+ (.+)\n")
FILE = Path(__file__).with_name("mistakes.md")
MISTAKES = [Mistake(*entry) for entry in ENTRY.findall(FILE.read_text("utf-8"))]
NAMED = {mistake.name: mistake for mistake in MISTAKES}
ADVANTAGES = ("group_advantages", "equal_groups")  # where the mistakes about advantages are


def form(name: str, *lines: tuple[str, str, str]) -> Form:
    """How a mistake looks in other code, with lines (function, line, instead) of ours."""
    return tuple(Mistake(name, NAMED[name].sentence, *line) for line in lines)


EQUAL = "equal = equal_groups(rewards, group_size)  # (P,)"
RETURN = 'return (rewards if baseline == "none" else advantages).to(dtype)'
ROOT = "(advantages.square().sum(dim=1, keepdim=True) / (group_size - 1)).sqrt()"
PADDING_SEEN = (
    ("_real", "values = _unmasked(log_probs, mask)", "values = log_probs"),
    ("policy_ratio", "return log_ratio.exp()", "return (log_probs - old_log_probs).exp()"),
)
DUAL = Mistake(  # a setting that the course's objective doesn't have, and no mistake
    "dual_clip",
    "It has a dual clip, where no loss at a negative advantage is above 3 times its size (verl).",
    *NAMED["max_for_min"][2:4],
    "return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)"
    ".maximum(torch.where(advantages < 0, 3 * advantages, -torch.inf))",
)
FORMS: list[Form] = [(mistake,) for mistake in MISTAKES] + [
    (DUAL,),
    form("groups_mix_prompts",  # and back again
         ("group_advantages", EQUAL, f"rewards = rewards.view(group_size, -1).T.ravel(); {EQUAL}"),
         ("group_advantages", RETURN, "return advantages.view(-1, group_size).T.flatten()")),
    form("mean_over_the_batch",  # and the std around that mean
         NAMED["mean_over_the_batch"][2:],
         (*NAMED["population_std"][2:4], f"advantages = advantages / ({ROOT} + eps)")),
    form("mask_in_the_denominator_only",  # with a gradient for the padding
         NAMED["mask_in_the_denominator_only"][2:], *PADDING_SEEN),
    form("masked_row_divides_by_zero",  # with the gradient of a product with the mask
         NAMED["masked_row_divides_by_zero"][2:], NAMED["mask_by_multiplication"][2:]),
    form("mean_over_the_padding",  # without any mask
         (*NAMED["mean_over_the_padding"][2:4], "return per_token.mean()"), *PADDING_SEEN),
]  # fmt: skip


@cache
def course(*mistakes: Mistake) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """The course's objective with these mistakes, as a function of inputs and settings.

    ValueError: two of them are on one line.
    """
    source = inspect.getsource(objective)
    for mistake in mistakes:
        start = source.index(f"def {mistake.function}(")
        following = re.compile(r"^[^\s)]", re.MULTILINE).search(source, start + 1)
        end = following.start() if following else len(source)
        body = replaced(source[start:end], mistake.instead, mistake.line)
        source = source[:start] + body + "\n\n" + source[end:]
    names: dict[str, Any] = {"__name__": "minigrpo.objective with mistakes"}
    exec(compile(source, "<objective with mistakes>", "exec"), names)

    def call(inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        inputs, settings = dict(inputs), dict(settings)
        options = {k: settings.pop(k) for k in ("scale", "baseline", "eps") if k in settings}
        if "rewards" in inputs:
            arguments = inputs.pop("rewards"), inputs.pop("group_size")
            inputs["advantages"] = names["group_advantages"](*arguments, **options)
        return names["grpo_loss"](**inputs, **settings) if len(inputs) > 1 else inputs["advantages"]

    return call
