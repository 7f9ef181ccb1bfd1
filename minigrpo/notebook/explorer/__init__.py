"""What one gradient step does to each token, as one HTML page to hold and to turn around.

    steps = []
    for m in train_grpo(policy, task, config):
        steps.append(explorer.snapshot(m, policy, reference, config, names))
    explorer.show(steps)

The page (`page.html`, plain JavaScript) computes advantages, ratios, KL and gradients itself, from
the log-probs that are stored in it. The tests compare them with the gradient of `grpo_loss`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from minigrpo.grpo import GRPOConfig, StepMetrics
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.notebook import interactive, plots
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
        ends = [int(real.nonzero()[-1:].sum()) + 1 if real.any() else 0 for real in r.own]
        return Step(
            step=m.step,
            prompts=[as_text(ids[real]) for ids, real in questions],
            tokens=[[token(i) for i in ids[:end].tolist()] for ids, end in zip(r.completions, ends)],
            mask=r.own,
            rewards=rewards,
            old=r.log_probs.float(),
            new=scored(policy),
            ref=scored(reference),
            config=config,
            fixed=fixed,
        )

    fixed = kept(asked[0].to("cpu"), asked[1]) if asked else None
    return kept(m.rollouts[rows], m.rewards[rows], fixed)


def page(steps: Sequence[Step], about: str = "") -> str:
    """The page as HTML, which loads nothing; `about` is a sentence on the task."""
    config = steps[0].config
    words = sorted({word for s in steps for row in s.tokens for word in row})
    number = {word: i for i, word in enumerate(words)}

    def stored(s: Step) -> dict:
        def floats(values: Tensor) -> str:  # the bytes of float32, row by row
            real = torch.cat([v[: len(row)] for v, row in zip(values, s.tokens)])
            return real.numpy().astype("<f4").tobytes().hex()

        masks = ("".join("01"[x] for x in m[: len(r)].int()) for m, r in zip(s.mask, s.tokens))
        ids = [[number[word] for word in row] for row in s.tokens]
        whole = dict(step=s.step, prompts=s.prompts, ids=ids, mask=[*masks])
        whole["rewards"] = s.rewards.tolist()
        return whole | {name: floats(getattr(s, name)) for name in ("old", "new", "ref")}

    data = {
        "about": about,
        "group_size": config.group_size,
        "run": {n: getattr(config, n) for n in ADVANTAGE_SETTINGS} | config.loss_settings,
        "variants": {ALGORITHMS[name]: settings for name, settings in VARIANTS.items()},
        "words": words,
        "steps": [stored(s) for s in steps],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("@DATA@", text.replace("<", "\\u003c"))


def show(steps: Sequence[Step], about: str = "") -> None:
    """Show the page in a notebook, with a picture of a group for where no script runs."""
    picture(steps[0])
    plt.show()
    interactive.show("explorer", page(steps, about), height=900)


def picture(s: Step, group: int = 0, columns: int = 7) -> Figure:
    """One group: the probability of each token as it was sampled, and its ratio after the step.

    The first `columns` tokens of each row, and an ellipsis where it goes on.
    """
    G = s.config.group_size
    rows = slice(group * G, (group + 1) * G)
    words = [row[:columns] for row in s.tokens[rows]]
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), sharey=True)
    labels = [f"reward {reward:g}" for reward in s.rewards[rows]]
    before, ratio = s.old.exp()[rows], (s.new - s.old).exp()[rows]
    gray = dict(middle=0.5, reach=0.5, colors=("#FFFFFF", "#C4C4C4"))  # a probability, no push
    plots.token_strips(axes[0], words, before, labels, **gray, size=5.4)
    plots.token_strips(axes[1], words, ratio, labels, middle=1, reach=0.3, size=5.4)
    for ax, title in zip(axes, ("probability before", "times as probable after")):
        ax.set_title(title, fontsize=9)
        for row in (i for i, row_words in enumerate(s.tokens[rows]) if len(row_words) > columns):
            ax.text(columns + 0.02, row + 0.34, "…", va="center", fontsize=8)
    figure.suptitle(f"Step {s.step} on {s.prompts[group]}", x=0.01, ha="left", fontsize=10)
    return figure
