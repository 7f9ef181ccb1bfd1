"""Measurements: what a free dashboard doesn't show, taken from a patient and from its healthy twin.

Each is a function of a `Subject` that returns readings by name, or a sentence where there is
nothing to measure. It works for every patient, and asks the loop's functions by name, so that it
sees the bug that is in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import arithmetic, grpo
from minigrpo.arithmetic import Arithmetic, completion_ids, evaluate, running_totals
from minigrpo.clinic.bugs import nudged, score
from minigrpo.clinic.charts import Chart, Readings, dashboard
from minigrpo.clinic.patients import Patient, Setting, run, trained
from minigrpo.corpus import CharTokenizer
from minigrpo.grpo import GRPOConfig
from minigrpo.llama import load_policy
from minigrpo.objective import kl_estimate
from minigrpo.sampling import Rollouts, completion_mask

TWIN_SEED = 13
"""No patient has it: a digit that differs from the twin's is no sign yet."""


class Nothing(str):
    """Why there is nothing to measure."""


STOPPED = Nothing("The run stopped before its first step was done.")


@dataclass(frozen=True)
class Subject:
    """Who is measured: a patient, or the healthy twin of one, on batches of its own seed."""

    patient: Patient
    seed: int

    @property
    def twin(self) -> Subject:
        """Healthy code, the same settings, another seed; patients of a setting have one twin."""
        return Subject(_healthy(self.patient.setting), TWIN_SEED)

    @property
    def chart(self) -> Chart:
        return _chart(self.patient, self.seed)

    @property
    def arithmetic(self) -> bool:
        return isinstance(self.patient.setting.task(), Arithmetic)

    def config(self, **changes: Any) -> GRPOConfig:
        return self.patient.config(sick=True, seed=self.seed, **changes)

    def bare(self, **changes: Any) -> GRPOConfig:
        """The settings of a single update without KL and entropy terms."""
        plain = {"inner_epochs": 1, "kl_weight": 0.0, "entropy_weight": 0.0}
        return self.config(**{**plain, **changes})

    def batch(self, policy: nn.Module, config: GRPOConfig) -> tuple[Rollouts, Tensor, list[Tensor]]:
        """Completions of a policy, their rewards, and their prompts, by the code in place."""
        task, order = self.patient.setting.task(), torch.Generator().manual_seed(self.seed)
        prompts = list(task.prompts(config.prompts_per_step, order))
        draw = torch.Generator().manual_seed(self.seed)
        return *grpo.rollout(policy, task, prompts, config, draw), prompts


@cache
def _healthy(setting: Setting) -> Patient:
    return Patient("healthy", setting=setting, key="healthy twin")


@cache
def _chart(patient: Patient, seed: int) -> Chart:
    return run(patient, seed)


Measurement = Callable[[Subject], Readings | str]
MEASUREMENTS: dict[str, tuple[str, Measurement]] = {}
"""By name: what it tells in a line, and the function, whose answers are kept."""


def measurement(name: str, line: str) -> Callable[[Measurement], Measurement]:
    """Enter a function into `MEASUREMENTS`."""

    def enter(function: Measurement) -> Measurement:
        MEASUREMENTS[name] = (line, cache(function))
        return function

    return enter


def reading(subject: Subject, measurement: str, name: str, index: int = -1) -> float:
    """One number; NaN where there is nothing to measure."""
    if measurement == "dashboard":
        readings = dashboard(subject.chart)
    else:
        readings = MEASUREMENTS[measurement][1](subject)
    value = readings.get(name, float("nan")) if isinstance(readings, dict) else float("nan")
    return value[index] if isinstance(value, tuple) else value


@contextmanager
def watched(name: str) -> Iterator[list[Any]]:
    """What a function of the loop returns during a block."""
    results: list[Any] = []
    function = getattr(grpo, name)

    def keep(*args: Any, **options: Any) -> Any:
        results.append(function(*args, **options))
        return results[-1]

    with patch.object(grpo, name, keep):
        yield results


def update(
    policy: nn.Module, rollouts: Rollouts, advantages: Tensor, config: GRPOConfig, ref: Any = None
) -> tuple[dict[str, float], Tensor]:
    """One update by the code in place: its metrics, and d loss / d log-prob (N, T).

    The learning rate is 0, so that the policy stays.
    """
    inputs: list[Tensor] = []
    loss = grpo.grpo_loss

    def with_gradient(log_probs: Tensor, *args: Any, **options: Any) -> Any:
        if log_probs.requires_grad:
            log_probs.retain_grad()
        inputs.append(log_probs)
        return loss(log_probs, *args, **options)

    policy = copy.deepcopy(policy)
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    with patch.object(grpo, "grpo_loss", with_gradient):
        metrics = grpo.learn(policy, ref, still, rollouts, advantages, config)[0]
    gradient = inputs[0].grad
    return metrics, torch.zeros_like(inputs[0]) if gradient is None else gradient


@measurement("transcripts", "what was written in the last step, the right answer, the reward")
def transcripts(subject: Subject) -> str:
    m = subject.chart.steps[-1] if subject.chart.steps else None
    if m is None:
        return STOPPED
    r, size, lines = m.rollouts, subject.config().group_size, [""]
    for row in (0, 1, size, size + 1):  # two rows of two groups
        prompt, text = r.prompt_ids[row][r.prompt_mask[row]], r.completions[row]
        text = text[r.completion_mask[row]]
        if subject.arithmetic:
            question = arithmetic.read_question(prompt[prompt != subject.config().pad_id])
            asked = f"{' '.join(map(str, question))} -> {running_totals(question)[-1]}"
            written = arithmetic.to_text(text)
        else:
            asked = CharTokenizer().decode(prompt)
            written = repr(CharTokenizer().decode(text))
        lines.append(f"  reward {m.rewards[row]:.2f}  {asked}   {written}")
    return "\n".join(lines)


@measurement("groups", "how many groups have equal rewards, and their advantages")
def equal_groups(subject: Subject) -> Readings | str:
    if not subject.chart.steps:
        return STOPPED
    steps, size = subject.chart.steps, subject.config().group_size
    pairs = [(m.rewards.view(-1, size), m.advantages.cpu().view(-1, size)) for m in steps]
    equal = torch.cat([a[r.amax(1) == r.amin(1)] for r, a in pairs])
    shown = equal if len(equal) else torch.full((1, size), float("nan"))
    return {
        "equal groups, first step (frac_reward_zero_std)": steps[0].frac_reward_zero_std,
        "equal groups, last steps": subject.chart.last("frac_reward_zero_std"),
        "standard deviation of rewards (reward_std)": pairs[-1][0].std(1).mean().item(),
        "groups of equal rewards in the run": len(equal),
        "largest |advantage| where all rewards are equal": shown.abs().max().item(),
        "widest range of advantages in such a group": (shown.amax(1) - shown.amin(1)).max().item(),
    }


@measurement("weight change", "how far the weights have moved")
def weight_change(subject: Subject) -> Readings:
    base = subject.patient.setting.base()
    pairs = zip(base.parameters(), subject.chart.policy.parameters(), strict=True)
    same = torch.cat([(p == q).flatten() for p, q in pairs])
    return {
        "relative weight change": subject.chart.moved,
        "fraction of the weights that changed at all": 1 - same.double().mean().item(),
    }


_untrained = cache(lambda: evaluate(load_policy(), n=128)["accuracy"])


@measurement("held-out accuracy", "fresh questions, graded by a grader that is known to be good")
def held_out(subject: Subject) -> Readings | str:
    if not subject.arithmetic:
        return Nothing("Nothing to measure here: continuing a text has no right answers.")
    return {
        "held-out accuracy, before the run": _untrained(),
        "held-out accuracy, after the run": evaluate(subject.chart.policy, n=128)["accuracy"],
        "mean training reward, last steps": subject.chart.last("reward"),
    }


@measurement("scorer against sampler", "the trainer's log-probs against those it was sampled with")
def scorer(subject: Subject) -> Readings:
    policy = subject.patient.setting.base()
    with watched("sample") as drawn, subject.patient.switch():  # beneath the bug
        config = subject.config()
        subject.batch(policy, config)
        scored = score(policy, drawn[0], config.temperature)
    apart = (scored - drawn[0].log_probs)[drawn[0].own]
    with subject.patient.switch(), watched("learn") as updates:
        trained(subject.patient, subject.config(inner_epochs=1, steps=4))
    off = [max(1 - m["ratio/min"], m["ratio/max"] - 1) for (m,) in updates] or [float("nan")]
    return {
        "largest difference (nats)": apart.abs().max().item(),
        "standard deviation of the difference": apart.std().item(),
        "smallest of scorer's / sampler's probability": apart.min().exp().item(),
        "mean of scorer's / sampler's probability": apart.exp().mean().item(),
        "largest of scorer's / sampler's probability": apart.max().exp().item(),
        "the loop's own ratio, farthest from 1 in batch 1": round(off[0], 4),  # less is rounding
        "the same in batches 2 to 4": round(max(off[1:], default=float("nan")), 4),
    }


@measurement("gradient at zero advantage", "the pull of KL and entropy bonus, each alone")
def zero_advantage(subject: Subject) -> Readings:
    base = subject.patient.setting.base()
    moved, readings = nudged(base), {}
    terms = {"neither term": {}, "the KL term alone, weight 1": {"kl_weight": 1.0}}
    terms |= {"the entropy bonus alone, weight 1": {"entropy_weight": 1.0}}
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    new, ref = logits.log_softmax(0), torch.full((4,), 0.25, dtype=torch.float64).log()
    with subject.patient.switch():
        rollouts, rewards, _ = subject.batch(moved, subject.bare())
        for name, weights in terms.items():
            config, zeros = subject.bare(**weights), torch.zeros(len(rewards))
            metrics, _ = update(moved, rollouts, zeros, config, grpo.frozen_copy(base))
            readings[name] = metrics["grad_norm"]
        readings["the loss that this bonus adds"] = metrics["loss"]
        kl = kl_estimate(new[None], ref[None], estimator=config.estimator)
        (kl * new.detach().exp()).sum().backward()
    readings["the KL term, its mean over all of four tokens"] = logits.grad.norm().item()
    return readings


@measurement("gradient per token", "size of d loss / d log-prob, token by token, in two texts")
def per_token(subject: Subject) -> Readings:
    policy, ratios = subject.patient.setting.base(), torch.ones(2, 8)
    ratios[0, 1], ratios[1, 0], ratios[1, 1] = 1.5, 0.5, 1.5
    config = subject.bare(how="token_mean")
    if subject.arithmetic:
        texts = [completion_ids([], 7), completion_ids([7, 1, 0], 0)]
        prompt = arithmetic.prompt_ids((7, 4, 9))
        config = replace(config, eos_id=arithmetic.EOS)
    else:
        *texts, prompt = map(CharTokenizer().encode, (" the sea", "no, sir!", "ROMEO:"))
    ids = torch.full((2, 8), config.pad_id)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.as_tensor(text)
    mask, prompts = completion_mask(ids, config.eos_id), torch.stack([prompt] * 2)
    plain = Rollouts(prompts, torch.ones_like(prompts).bool(), ids, mask, torch.zeros(2, 8))
    with subject.patient.switch():
        rollouts = replace(plain, log_probs=score(policy, plain) - ratios.log())
        gradient = update(policy, rollouts, torch.tensor([1.0, -1.0]), config)[1].abs()
    end = int(mask[0].sum())
    return {
        "A = +1, ratio 1.0, first token": gradient[0, 0].item(),
        "A = +1, ratio 1.5": gradient[0, 1].item(),
        "A = +1, ratio 1.0, third token": gradient[0, 2].item(),
        "A = -1, ratio 0.5": gradient[1, 0].item(),
        "A = -1, ratio 1.5": gradient[1, 1].item(),
        "A = -1, ratio 1.0": gradient[1, 2].item(),
        "A = +1, ratio 1.0, </s>": gradient[0, end - 1].item() if end < 8 else float("nan"),
        "padding": gradient[0, end:].max().item() if end < 8 else float("nan"),
    }


@measurement("loss by hand", "the logged loss of a first update against three sums done by hand")
def by_hand(subject: Subject) -> Readings | str:
    policy, config = subject.patient.setting.base(), subject.bare(how="token_mean")
    with subject.patient.switch():
        rollouts, rewards, _ = subject.batch(policy, config)
        advantages = grpo.group_advantages(rewards, config.group_size).float()
        lengths = rollouts.own.sum(1)
        if (lengths == lengths[0]).all():
            return Nothing("Nothing to measure here: completions are equally long, all sums agree.")
        try:
            logged = update(policy, rollouts, advantages, config)[0]["loss"]
        except FloatingPointError:
            logged = float("nan")

    def hand(rows: Tensor, less: int = 0) -> float:
        tokens = lengths[rows] - less
        return (-(advantages[rows] * tokens).sum() / tokens.sum().clamp(min=1)).item()

    everyone = torch.arange(len(lengths))
    scored = advantages.nonzero()[:, 0]  # the loop leaves the others out
    parts = [hand(rows) for rows in scored.split(8)]
    share = (lengths[scored].sum() / lengths.sum()).item()
    return {
        "logged loss": logged,
        "by hand, over all tokens": hand(everyone),
        "by hand, without each row's last token": hand(everyone, less=1),
        "by hand, mean over micro-batches of 8 rows": share * sum(parts) / max(1, len(parts)),
        "from the logged loss to the one over all tokens": abs(logged - hand(everyone)),
    }


@measurement("exchange tests", "what another worked example, padding or reference changes")
def exchanged(subject: Subject) -> Readings:
    base = subject.patient.setting.base()
    policy, config = nudged(base), subject.bare(how="token_mean")
    with subject.patient.switch():
        rollouts, rewards, prompts = subject.batch(policy, config)
        advantages = torch.linspace(-1, 1, len(rewards))
        loss = update(policy, rollouts, advantages, config)[0]["loss"]
        seeded = torch.Generator().manual_seed(0)
        garbage = torch.randint(0, 20, rollouts.completions.shape, generator=seeded)
        ids = torch.where(rollouts.completion_mask, rollouts.completions, garbage)
        dirty = update(policy, replace(rollouts, completions=ids), advantages, config)[0]["loss"]
        asked = [prompt for prompt in prompts for _ in range(config.group_size)]
        padded = [row for row, p in enumerate(asked) if len(p) < rollouts.prompt_ids.shape[1]]
        apart = [_alone(policy, asked[row], rollouts[row : row + 1], config) for row in padded]
        held = replace(config, kl_weight=1.0)
        references = [grpo.frozen_copy(base), nudged(base, seed=1)]
        kls = [update(policy, rollouts, advantages, held, one)[0]["kl"] for one in references]
        changed = float("nan")
        if subject.arithmetic:
            task, written = subject.patient.setting.task(), rollouts.unpadded(rollouts.completions)
            graded = [task.reward(ps, written) for ps in (asked, [*map(_another_example, asked)])]
            changed = sum(a != b for a, b in zip(*graded)) / len(asked)
    return {
        "rewards, another worked example (fraction)": changed,
        "log-probs, a row's padding left out (largest change)": max(apart, default=float("nan")),
        "loss, random ids under the mask (change)": abs(loss - dirty),
        "KL, with the reference": kls[0],
        "KL, with another reference": kls[1],
    }


def _another_example(prompt: Tensor) -> Tensor:
    """The same prompt, but its worked example is about 5 + 1."""
    if len(prompt) < 12:
        return prompt  # it has none
    question = (5, 1)
    example = [*question, int(prompt[-1]), *completion_ids(running_totals(question), 6)[:-1]]
    return torch.cat([prompt[:1], torch.tensor(example), prompt[-10:]])


def _alone(policy: nn.Module, prompt: Tensor, row: Rollouts, config: GRPOConfig) -> float:
    """The largest difference that leaving out a row's padding makes to its log-probs (nats)."""
    bare = replace(row, prompt_ids=prompt[None], prompt_mask=torch.ones_like(prompt)[None].bool())
    apart = score(policy, row, config.temperature) - score(policy, bare, config.temperature)
    return apart[row.completion_mask].abs().max().item()
