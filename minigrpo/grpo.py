"""The loop of GRPO, Algorithm 1 of DeepSeekMath (arXiv 2402.03300), with a fixed reference policy.

`train_grpo` is the algorithm; `rollout`, `score` and `learn` are its lines, as in notebook 07.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minigrpo import parallel
from minigrpo.checks import check_choice, check_counts, check_sampling, check_shape
from minigrpo.files import load_run, save_run
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.objective import equal_groups, group_advantages, grpo_loss
from minigrpo.parts import Part, parts_of, precision, recomputing, together
from minigrpo.sampling import Rollouts, StopIds, is_stop, left_pad, sample, stop_ids


class Task(Protocol):
    """What is to be learned. Everything random comes from the generator.

    A task that remembers something between calls has `state_dict` and `load_state_dict`, too.
    """

    def prompts(self, n: int, generator: torch.Generator) -> Sequence[Tensor]: ...  # rows of ids

    # One number for each of the N completions; both are lists of N rows of ids, without padding.
    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> Sequence[float]: ...


# Settings by where they go: to a count, to `group_advantages`, `grpo_loss` and `sample`.
COUNTS = (
    "steps prompts_per_step max_new_tokens inner_epochs rows_per_pass evaluate_every save_every"
)
ADVANTAGE = "scale baseline"
LOSS = "level clip surrogate how kl_weight estimator kl_correction entropy_weight"
SAMPLING = "max_new_tokens temperature eos_id pad_id"
FREE = "steps evaluate_every save_every rows_per_pass"  # may change when a run goes on


@dataclass(frozen=True)
class GRPOConfig:
    """How to train; `GRPOConfig(**VARIANTS["dapo"], steps=50)` is a published algorithm."""

    steps: int = 100  # batches of rollouts
    prompts_per_step: int = 4  # P, different questions per batch
    group_size: int = 16  # G, completions per prompt
    max_new_tokens: int = 24  # tokens that a completion may have
    temperature: float = 1.0  # of sampling and of scoring, which must not differ
    eos_id: StopIds = None  # what ends a completion; None = all run to max_new_tokens
    pad_id: int = 0  # fills the shorter rows of a batch
    scale: str = "group"  # this and the next: see `group_advantages`
    baseline: str = "mean"
    level: str = "token"  # this and the next seven: see `grpo_loss`; max_length is max_new_tokens
    clip: tuple[float, float] = (0.2, 0.2)
    surrogate: str = "clip"
    how: str = "sequence_mean"
    kl_weight: float = 0.0
    estimator: str = "k3"
    kl_correction: bool = False
    entropy_weight: float = 0.0
    lr: float = 1e-4  # learning rate of AdamW, constant
    betas: tuple[float, float] = (0.9, 0.99)  # its two averages
    max_grad_norm: float = 1.0  # the gradient is cut down to this norm
    inner_epochs: int = 1  # K, updates on the same rollouts; from the second on the ratio moves
    rows_per_pass: int = 2**30  # rows scored at a time; the gradients of the passes add up
    dtype: str = "float32"  # or "bfloat16": autocast, matrix products in it, weights as they are
    seed: int = 0  # of prompts and sampling
    evaluate_every: int = 10  # steps between evaluations (always one after the last)
    save_every: int = 10  # steps between checkpoints (always one after the last)
    split_invariant: bool = False  # the same run on any number of processes, each sampling all rows
    check: bool = True  # stop if the ratio is not 1 at a first update, or if no completion ends

    def __post_init__(self) -> None:
        check_counts(**self.only(COUNTS))
        check_counts(2, group_size=self.group_size)
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        check_sampling(self.temperature, None, None)
        stop_ids(self.eos_id)
        for name, value in self.only("lr max_grad_norm").items():
            if not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        # What the two functions refuse, they refuse here, and not after a batch was sampled.
        zeros = torch.zeros(2, 1)
        group_advantages(torch.zeros(2 * self.group_size), self.group_size, **self.only(ADVANTAGE))
        settings = {"ref_log_probs": zeros, "entropy": zeros, "max_length": 1, **self.only(LOSS)}
        grpo_loss(zeros, None, zeros[:, 0], zeros, **settings)

    def only(self, names: str) -> dict[str, Any]:  # as keyword arguments
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True)
class StepMetrics:
    """One step, seen from outside. Of several updates: the mean, and the extremes of the ratio.

    Entropy and ratios are those of the rows that were scored: without KL and entropy weights the
    rows of groups that differ, and if no group does, the first row alone (see `parts_of`).
    """

    step: int
    reward: float  # mean over the batch
    frac_reward_zero_std: float  # fraction of groups whose rewards are all equal
    loss: float  # says little: with "sequence_mean" 0 at a first update, whatever is learned
    kl: float | None  # nats per token, to the reference; None if it is not computed
    entropy: float  # nats per token
    clip_low: float  # fraction of all ratios whose gradient the clip stopped
    clip_high: float
    ratio_min: float
    ratio_max: float
    grad_norm: float  # before it was clipped
    mean_length: float  # tokens per completion
    truncated: float  # fraction of completions without EOS (all, if there is no EOS)
    rollouts: Rollouts  # on the CPU
    rewards: Tensor  # (N,) float64
    advantages: Tensor  # (N,)
    seconds: float  # evaluation left out
    evaluation: Mapping[str, float] = field(default_factory=dict)  # empty between evaluations

    def table(self, decode: Callable[[Tensor], str], rows: Sequence[int] | None = None) -> str:
        """Reward, advantage and text of the completions, one line each; rows None = all."""
        lines = [" reward  advantage  completion"]
        for row in range(len(self.rewards)) if rows is None else rows:
            text = decode(self.rollouts.completions[row][self.rollouts.completion_mask[row]])
            lines.append(f"{self.rewards[row]:7.3f} {self.advantages[row]:+10.2f}  {text!r}")
        return "\n".join(lines)


def train_grpo(
    policy: nn.Module,  # trained in place; with several processes in DistributedDataParallel
    task: Task,
    config: GRPOConfig,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,  # with its own generators
    checkpoint: str | Path | None = None,  # a file to save to, and to go on from, to the bit
) -> Iterator[StepMetrics]:
    """Train the policy by reward alone, in eval mode, yielding one StepMetrics per step."""
    parallel.check_run(policy, config, checkpoint)
    was_training, model = policy.training, parallel.unwrapped(policy)
    reference = frozen_copy(model) if config.kl_weight else None
    trained = [p for p in policy.parameters() if p.requires_grad]
    check_weights(trained)
    lr, betas = float(config.lr), tuple(map(float, config.betas))
    optimizer = torch.optim.AdamW(trained, lr, betas, weight_decay=0.0)
    order = torch.Generator().manual_seed(config.seed)
    own = 0 if config.split_invariant else 7919 * parallel.rank()
    sampling = torch.Generator(trained[0].device).manual_seed(config.seed + own)
    run = {  # all that a run needs to go on as if it had never stopped
        "settings": {name: v for name, v in vars(config).items() if name not in FREE.split()},
        "modules": {"policy": model, "reference": reference, "optimizer": optimizer},
        "generators": {"order": order, "sampling": sampling},
    }
    run["modules"] |= {"task": task} if hasattr(task, "state_dict") else {}
    done = load_run(checkpoint, **run) if checkpoint else 0

    try:
        policy.eval()  # with dropout, the policy that samples would differ from the one scored
        for step in range(done + 1, config.steps + 1):
            began = time.perf_counter()
            prompts = list(task.prompts(config.prompts_per_step, order))  # P questions
            rollouts, rewards = rollout(policy, task, prompts, config, sampling)  # P * G rows
            check_ends(rollouts, config, step)
            advantages = group_advantages(rewards, config.group_size, **config.only(ADVANTAGE))
            updates = learn(policy, reference, optimizer, rollouts, advantages, config, step)  # K
            metrics = measure(step, began, rollouts, rewards, advantages, updates, config)

            last = step == config.steps
            if checkpoint and (last or step % config.save_every == 0) and parallel.rank() == 0:
                save_run(checkpoint, step=step, **run)
            if evaluate and (last or step % config.evaluate_every == 0):
                metrics = replace(metrics, evaluation=dict(evaluate(model)))
            yield metrics
    finally:  # when the run is left early, too
        policy.train(was_training)


def rollout(policy, task, prompts, config, generator) -> tuple[Rollouts, Tensor]:
    """N = P * G completions, prompt by prompt, and their rewards (N,) in float64."""
    if len(prompts) != config.prompts_per_step:
        raise ValueError(f"task.prompts: expected {config.prompts_per_step}, got {len(prompts)}")
    mine = parallel.share(prompts)  # all of them, unless there are several processes
    with precision(policy, config.dtype):
        rollouts = sample(
            parallel.unwrapped(policy),
            *left_pad(prompts if config.split_invariant else mine, config.pad_id),
            completions_per_prompt=config.group_size,
            generator=generator,
            **config.only(SAMPLING),
        )
    if config.split_invariant:
        rollouts = rollouts[parallel.share(torch.arange(len(rollouts.completions)))]
    questions = [prompt for prompt in mine for _ in range(config.group_size)]
    rows = zip(rollouts.completions.cpu(), rollouts.completion_mask.cpu())
    rewards = task.reward(questions, [ids[written] for ids, written in rows])
    rewards = torch.as_tensor(rewards, dtype=torch.float64).detach().cpu()
    check_shape("task.reward", rewards, (len(questions),))
    return rollouts, rewards


def score(policy: nn.Module, rollouts: Rollouts, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of the completions, with gradient where the loss needs it."""
    r = rollouts
    text = (r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask)
    given = {"temperature": config.temperature, "entropy_gradient": bool(config.entropy_weight)}
    with precision(policy, config.dtype), recomputing(policy):
        return completion_log_probs_and_entropy(policy, *text, **given)


def learn(policy, reference, optimizer, rollouts, advantages, config, step=1) -> list[dict]:
    """K updates on the same rollouts, scored part by part; returns the metrics of each."""
    parts = parts_of(rollouts, advantages.to(rollouts.completions.device), config)
    with torch.no_grad():
        ref_log_probs = [reference and score(reference, part.rollouts, config)[0] for part in parts]
    all_processes = parallel.loss_weight(rollouts.completion_mask, config.how)
    updates: list[dict[str, float]] = []
    for update in range(config.inner_epochs):
        optimizer.zero_grad()
        found = []
        for part, ref in zip(parts, ref_log_probs):
            with parallel.last_pass_syncs(policy, part is parts[-1]):
                loss, metrics = loss_of(part, ref, policy, config, step if update == 0 else None)
                (loss * part.share * all_processes).backward()
            found.append({**metrics, "loss": loss.item()})
        norm = nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
        whole = together(found, parts, config)
        check_finite(whole["loss"], norm, whole, step)
        optimizer.step()
        updates.append({**whole, "grad_norm": norm.item()})
    return updates


def loss_of(part: Part, ref_log_probs, policy, config, step) -> tuple[Tensor, dict[str, float]]:
    """`grpo_loss` of some rows; at a first update, of this step, the ratio has to be 1."""
    log_probs, entropy = score(policy, part.rollouts, config)  # (n, T)
    if config.check and step is not None:
        check_first_update(config, log_probs, part.rollouts, step)
    settings = config.only(LOSS)  # the entropy is a mean over tokens, whatever `how` says
    settings["entropy_weight"] *= part.tokens / part.share
    return grpo_loss(
        log_probs,
        part.rollouts.log_probs,  # those it was sampled with: held fixed over all K updates
        part.advantages,
        part.rollouts.completion_mask,
        ref_log_probs=ref_log_probs,
        entropy=entropy,
        max_length=config.max_new_tokens,
        **settings,
    )


def frozen_copy(policy: nn.Module) -> nn.Module:
    """The reference policy: the policy as it is before its first update."""
    return copy.deepcopy(policy).eval().requires_grad_(False)


def measure(step, began, rollouts, rewards, advantages, updates, config) -> StepMetrics:
    """What a dashboard shows of a step."""
    mean = {name: fmean(update[name] for update in updates) for name in updates[0]}
    return StepMetrics(
        step=step,
        reward=rewards.mean().item(),
        frac_reward_zero_std=equal_groups(rewards, config.group_size).double().mean().item(),
        loss=mean["loss"],
        kl=mean["kl"] if config.kl_weight else None,
        entropy=mean["entropy"],
        clip_low=mean["clip_ratio/low_mean"],
        clip_high=mean["clip_ratio/high_mean"],
        ratio_min=min(update["ratio/min"] for update in updates),
        ratio_max=max(update["ratio/max"] for update in updates),
        grad_norm=mean["grad_norm"],
        mean_length=rollouts.completion_mask.sum(dim=1).double().mean().item(),
        truncated=1 - ended(rollouts, config.eos_id).double().mean().item(),
        rollouts=rollouts.to("cpu"),
        rewards=rewards,
        advantages=advantages,
        seconds=time.perf_counter() - began,
    )


def ended(rollouts: Rollouts, eos_id: StopIds) -> Tensor:
    """(N,) bool: whether the last token of a completion is EOS."""
    last = rollouts.completion_mask.sum(dim=1, keepdim=True) - 1
    return is_stop(rollouts.completions.gather(1, last)[:, 0], eos_id)


def check_ends(rollouts: Rollouts, config: GRPOConfig, step: int) -> None:
    """Raise RuntimeError if no completion of the first step ends: it cannot learn to stop."""
    wanted = config.check and step == 1 and config.eos_id is not None
    if wanted and not ended(rollouts, config.eos_id).any():
        raise RuntimeError(
            f"policy: none of the {len(rollouts.completions)} completions of the first step ended "
            f"with eos_id = {config.eos_id} (is it the token that the policy was taught?)"
        )


def check_first_update(
    config: GRPOConfig, log_probs: Tensor, rollouts: Rollouts, step: int
) -> None:
    """Raise RuntimeError if the ratio is not 1, though the policy is still the one that sampled."""
    apart = (log_probs.detach() - rollouts.log_probs)[rollouts.completion_mask].abs()
    off, most, how = apart.max().item(), 1e-3, "up to"  # sums with and without a cache differ
    if config.dtype == "bfloat16":  # single tokens may be off by more than a tenth
        off, most, how = apart.mean().item(), 0.1, "on average"
    if not off <= most:
        raise RuntimeError(
            f"policy: the ratio at the first update of step {step} is off 1 by {how} "
            f"{math.expm1(off):.3g}, expected 1: sampling and scoring disagree about the same text "
            "(dropout, position ids, a cache that forgets?)"
        )


def check_weights(weights: Sequence[Tensor]) -> None:
    """Raise ValueError for weights of half precision, which swallow small steps (notebook 09)."""
    half = {p.dtype for p in weights} & {torch.float16, torch.bfloat16}
    if half:
        raise ValueError(
            f"policy: expected weights in float32, got {half.pop()}, in which a small step of the "
            'optimizer rounds to none; load it with dtype=torch.float32, and set dtype="bfloat16"'
        )


def check_finite(loss: float, norm: Tensor, metrics: Mapping[str, float], step: int) -> None:
    """Raise FloatingPointError before an update that would make every weight NaN."""
    for name, value in (("loss", loss), ("gradient's norm", norm.item())):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} is {value} at step {step}: expected a finite number "
                f"(the ratio is between {metrics['ratio/min']:.3g} and {metrics['ratio/max']:.3g})"
            )
