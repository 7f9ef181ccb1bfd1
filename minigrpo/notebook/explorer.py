"""What one gradient step does to each token, as one HTML page to hold and to turn around.

    steps = []
    for m in train_grpo(policy, task, config):
        steps.append(explorer.snapshot(m, policy, reference, config, names))
    explorer.show(explorer.data(steps))

The page (`interactive/explorer.html`) computes advantages, ratios, KL and gradients itself, from
the log-probs that are stored in it. The tests compare them with the gradient of `grpo_loss`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.grpo import GRPOConfig, StepMetrics
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.notebook import interactive
from minigrpo.objective import ADVANTAGE_SETTINGS, VARIANTS
from minigrpo.sampling import Rollouts

ALGORITHMS = {name: name.upper().replace("DR_", "Dr. ") for name in VARIANTS}


@dataclass(frozen=True)
class Step:
    """Some groups of a batch, with all that the loss needs."""

    step: int
    prompts: list[str]  # one per group
    tokens: list[list[str]]  # N rows, each up to the last token that is trained on
    mask: Tensor  # (N, T) bool
    rewards: Tensor  # (N,) float64
    old: Tensor  # (N, T) log-probs of the sampler
    new: Tensor  # (N, T) after the updates of this step
    ref: Tensor  # (N, T) under the reference policy
    config: GRPOConfig
    fixed: Step | None = None  # the group of a question that is asked before every step


@torch.no_grad()
def snapshot(
    m: StepMetrics,  # of this step
    policy: nn.Module,  # as it is after the step
    reference: nn.Module,  # the policy before the run
    config: GRPOConfig,
    token: Callable[[int], str],  # the text of a token
    prompt: Callable[[Tensor], str] | None = None,  # of a prompt's ids; None = its tokens
    asked: tuple[Rollouts, Tensor] | None = None,  # a fixed question, by `rollout` before the step
    groups: int = 4,
) -> Step:
    """Keep some groups of a step's batch: those that differ most in reward, and the one that least.

    The completions are scored again, by the policy that has learned from them and by the reference.
    """
    order = m.rewards.view(-1, config.group_size).std(dim=1).argsort(descending=True, stable=True)
    chosen = torch.cat([order[: groups - 1], order[groups - 1 :][-1:]])
    rows = torch.arange(len(m.rewards)).view(-1, config.group_size)[chosen].flatten()
    as_text = prompt or (lambda ids: " ".join(map(token, ids.tolist())))

    def kept(r: Rollouts, rewards: Tensor, fixed: Step | None = None) -> Step:
        def scored(model: nn.Module) -> Tensor:
            text, tau = r.to(next(model.parameters()).device).text, config.temperature
            return completion_log_probs_and_entropy(model, *text, temperature=tau)[0].float().cpu()

        questions = zip(r.prompt_ids[:: config.group_size], r.prompt_mask[:: config.group_size])
        prompts = [as_text(ids[real]) for ids, real in questions]
        ahead = r.own.flip(1).cumsum(1).flip(1) > 0  # up to the last token that is trained on
        tokens = [[*map(token, ids[real].tolist())] for ids, real in zip(r.completions, ahead)]
        probs = dict(old=r.log_probs.float(), new=scored(policy), ref=scored(reference))
        return Step(m.step, prompts, tokens, r.own, rewards, **probs, config=config, fixed=fixed)

    fixed = kept(asked[0].to("cpu"), asked[1]) if asked else None
    return kept(m.rollouts[rows], m.rewards[rows], fixed)


def data(
    steps: Sequence[Step],
    about: str = "",  # a sentence on the task
    curve: tuple[str, Mapping[int, float]] | None = None,  # fractions by step, and of what
) -> dict[str, Any]:
    """All that the page shows, ready for JSON."""
    config = steps[0].config
    every = [*steps, *(s.fixed for s in steps if s.fixed)]
    words = sorted({word for s in every for row in s.tokens for word in row})
    number = {word: i for i, word in enumerate(words)}

    def stored(s: Step) -> dict[str, Any]:
        def floats(values: Tensor) -> str:  # the bytes of float32, row by row
            real = torch.cat([v[: len(row)] for v, row in zip(values, s.tokens)])
            return b64encode(real.numpy().astype("<f4").tobytes()).decode()

        masks = ("".join("01"[x] for x in m[: len(r)].int()) for m, r in zip(s.mask, s.tokens))
        ids = [[number[word] for word in row] for row in s.tokens]
        whole = dict(step=s.step, prompts=s.prompts, ids=ids, mask=[*masks])
        whole["rewards"] = s.rewards.tolist()
        whole |= {name: floats(getattr(s, name)) for name in ("old", "new", "ref")}
        return whole | {"fixed": s.fixed and stored(s.fixed)}

    return {
        "about": about,
        "curve": curve and {"name": curve[0], "points": [*curve[1].items()]},
        "group_size": config.group_size,
        "run": {n: getattr(config, n) for n in ADVANTAGE_SETTINGS} | config.loss_settings,
        "variants": {ALGORITHMS[name]: settings for name, settings in VARIANTS.items()},
        "words": words,
        "steps": [stored(s) for s in steps],
    }


def page(recorded: Mapping[str, Any]) -> str:
    """The page as HTML, which loads nothing, of what `data` gives."""
    return interactive.page("explorer", recorded)


def show(recorded: Mapping[str, Any]) -> None:
    """Show the page in a notebook."""
    interactive.show("explorer", recorded, height=900)
