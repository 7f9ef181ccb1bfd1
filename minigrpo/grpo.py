"""The loop of GRPO: sample, reward, compare within groups, take a few steps, and again.

Algorithm 1 of DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), with the reference policy fixed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Number
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minigrpo import parallel
from minigrpo.files import atomic_path
from minigrpo.logprobs import (
    check_sampling_settings,
    completion_log_probs_and_entropy,
    is_whole_number,
)
from minigrpo.objective import (
    ADVANTAGE_SETTINGS,
    equal_groups,
    group_advantages,
    grpo_loss,
)
from minigrpo.sampling import Rollouts, is_stop, left_pad, sample, stop_ids


class Task(Protocol):
    """What is to be learned. Everything random comes from the generator."""

    def prompts(self, n: int, generator: torch.Generator) -> Sequence[Tensor]:
        """n prompts, each a row of token ids."""

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> Sequence[float]:
        """One number per completion; both are lists of N rows of ids, without padding."""


@dataclass(frozen=True)
class GRPOConfig:
    """How to train; `GRPOConfig(**VARIANTS["dapo"], steps=50)` is a published algorithm.

    Attributes:
        steps: batches of rollouts.
        prompts_per_step: P, different questions per batch.
        group_size: G, completions per prompt.
        max_new_tokens: tokens that a completion may have.
        temperature: of sampling and of scoring, which must not differ.
        eos_id: the token that ends a completion, or several; None = all run to `max_new_tokens`.
        pad_id: fills the shorter rows of a batch.
        scale, baseline, eps: see `group_advantages`.
        level, clip, surrogate, how, kl_weight, estimator, kl_correction, entropy_weight: see
            `grpo_loss` (its max_length is `max_new_tokens`).
        lr: learning rate of AdamW.
        betas: its two averages.
        warmup_steps: steps over which the learning rate rises from 0; it is constant then.
        max_grad_norm: the gradient is cut down to this norm.
        inner_epochs: K, passes over the same rollouts. From the second update on, the policy is
            not the one that sampled, and the ratio has something to correct.
        minibatch_size: rows per update; None = all rows of the batch.
        skip_equal_groups: leave out groups whose rewards are all equal (with a KL weight of 0
            they have nothing to say, but they count in the averages).
        seed: of prompts, sampling and the order of rows.
        evaluate_every: steps between calls of the evaluation hook (always one after the last).
        save_every: steps between checkpoints (always one after the last).
        split_invariant: draw the random numbers of all rows beforehand, so that a run is the same
            on any number of processes (up to rounding); otherwise each process has its own.
        check: stop the run when the ratio is not 1 at the first update of a batch, the KL not 0
            at the first update of all, or no completion of the first batch ends.
    """

    steps: int = 100
    prompts_per_step: int = 4
    group_size: int = 16
    max_new_tokens: int = 24
    temperature: float = 1.0
    eos_id: int | Sequence[int] | None = None
    pad_id: int = 0
    scale: str = "group"
    baseline: str = "mean"
    eps: float = 1e-4
    level: str = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    surrogate: str = "clip"
    how: str = "sequence_mean"
    kl_weight: float = 0.0
    estimator: str = "k3"
    kl_correction: bool = False
    entropy_weight: float = 0.0
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    inner_epochs: int = 1
    minibatch_size: int | None = None
    skip_equal_groups: bool = False
    seed: int = 0
    evaluate_every: int = 10
    save_every: int = 10
    split_invariant: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        counts = (
            "steps prompts_per_step group_size max_new_tokens inner_epochs minibatch_size "
            "evaluate_every save_every"
        )
        for name in counts.split():
            value = getattr(self, name)
            if name == "minibatch_size" and value is None:
                continue
            least = (
                2 if name == "group_size" else 1
            )  # a group of one has nobody to be compared with
            if not is_whole_number(value) or value < least:
                raise ValueError(
                    f"{name}: expected a whole number of {least} or more, got {value!r}"
                )
        if not is_whole_number(self.warmup_steps) or self.warmup_steps < 0:
            raise ValueError(
                f"warmup_steps: expected a whole number of 0 or more, got {self.warmup_steps!r}"
            )
        for name in ("lr", "max_grad_norm"):
            value = getattr(self, name)
            if not (value > 0 and (math.isfinite(value) or name == "max_grad_norm")):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        check_sampling_settings(self.temperature)
        stop_ids(self.eos_id)
        # What the two functions refuse, they refuse here, and not after a batch was sampled.
        zeros = torch.zeros(2, 1)
        group_advantages(torch.zeros(2 * self.group_size), self.group_size, **self.advantages)
        grpo_loss(zeros, None, zeros[:, 0], zeros, ref_log_probs=zeros, entropy=zeros, **self.loss)

    @property
    def advantages(self) -> dict[str, Any]:
        """The settings of `group_advantages`."""
        return {name: getattr(self, name) for name in ADVANTAGE_SETTINGS}

    @property
    def loss(self) -> dict[str, Any]:
        """The settings of `grpo_loss`."""
        names = "level clip surrogate how kl_weight estimator kl_correction entropy_weight".split()
        return {"max_length": self.max_new_tokens, **{name: getattr(self, name) for name in names}}


def _plain(value: Any) -> Any:
    """Python's number for one of numpy, with which torch.load would refuse a checkpoint."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


@dataclass(frozen=True)
class StepMetrics:
    """One step, seen from outside. Of several updates: the mean, and the extremes of the ratio.

    Attributes:
        step: steps done so far.
        reward, reward_std: mean and std over the batch.
        frac_reward_zero_std: share of groups whose rewards are all equal.
        loss: says little: without a KL and with all rows weighing the same ("sequence_mean"), it is
            0 at the first update of a batch whatever is learned, because the advantages sum to 0.
        kl: mean estimate per token, nats, to the reference policy; None if it is not computed.
        entropy: mean per token, nats.
        clip_low, clip_high: share of ratios whose gradient the clip stopped.
        ratio_min, ratio_max: over all updates.
        grad_norm: before it was clipped; mean of the updates.
        lr: learning rate.
        mean_length: tokens per completion.
        truncated: share of completions without EOS (all, if there is no EOS).
        updates: optimizer steps taken; 0 if every group was skipped.
        seconds: time spent on this step, evaluation left out.
        rollouts: prompts and completions, on the CPU.
        rewards: (N,) float64.
        advantages: (N,).
        evaluation: what the evaluation hook returned; empty between evaluations.
    """

    step: int
    reward: float
    reward_std: float
    frac_reward_zero_std: float
    loss: float
    kl: float | None
    entropy: float
    clip_low: float
    clip_high: float
    ratio_min: float
    ratio_max: float
    grad_norm: float
    lr: float
    mean_length: float
    truncated: float
    updates: int
    seconds: float
    rollouts: Rollouts
    rewards: Tensor
    advantages: Tensor
    evaluation: Mapping[str, float]

    def table(self, decode: Callable[[Tensor], str], rows: Sequence[int] | None = None) -> str:
        """Reward, advantage and text of the completions, one line each; rows None = all."""
        lines = [" reward  advantage  completion"]
        for row in range(len(self.rewards)) if rows is None else rows:
            text = decode(self.rollouts.completions[row][self.rollouts.completion_mask[row]])
            lines.append(f"{self.rewards[row]:7.3f} {self.advantages[row]:+10.2f}  {text!r}")
        return "\n".join(lines)


def train_grpo(
    policy: nn.Module,
    task: Task,
    config: GRPOConfig,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    checkpoint: str | Path | None = None,
) -> Iterator[StepMetrics]:
    """Train the policy in place by reward alone, yielding one StepMetrics per step.

    The reference policy is a copy of the policy as it is handed over; it is made, and scored, only
    if the KL weight is not 0. The policy runs in eval mode throughout: dropout would make the
    policy that samples another one than the policy that is scored.

    Args:
        policy: any causal language model with the Hugging Face call; with several processes (see
            `parallel`) in DistributedDataParallel, and then each step's metrics are those of this
            process's share.
        task: prompts and rewards.
        config: how to train.
        evaluate: measures the policy (which it gets without DistributedDataParallel), called
            every `config.evaluate_every` steps. It has to use generators of its own.
        checkpoint: a file. If it exists, training goes on from it as if it had never stopped (to
            the bit); every `config.save_every` steps it is written anew, in one piece.

    Raises:
        ValueError: a task that returns something else than it should (too few prompts or rewards,
            NaN); a checkpoint that is a folder, or belongs to another policy or config, or to
            several processes without `split_invariant`.
        RuntimeError: a reward function that raises; a check that fails (see `GRPOConfig.check`).
        FloatingPointError: loss or gradient are not finite; the policy is left as it was before
            that update.
    """
    state = _State(policy, config)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        if path.is_dir():
            raise ValueError(f"checkpoint: expected the name of a file, got the folder {path}")
        if parallel.world_size() > 1 and not config.split_invariant:
            raise ValueError(
                "checkpoint: expected split_invariant=True with several processes, because one "
                "file does not hold the random state of each, got False"
            )
        if path.is_file():
            state.load(path)
    return _steps(state, task, evaluate, path)


def _steps(
    state: _State,
    task: Task,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
    checkpoint: Path | None,
) -> Iterator[StepMetrics]:
    policy, config = state.policy, state.config
    was_training = policy.training
    policy.eval()
    try:
        for step in range(state.done + 1, config.steps + 1):
            began = time.perf_counter()
            metrics = _step(state, task, step)
            seconds = time.perf_counter() - began
            state.done = step
            last = step == config.steps
            save = checkpoint is not None and (last or step % config.save_every == 0)
            if save and parallel.rank() == 0:
                state.save(checkpoint)
            due = evaluate is not None and (last or step % config.evaluate_every == 0)
            evaluation = dict(evaluate(parallel.unwrapped(policy))) if due else {}
            yield replace(metrics, seconds=seconds, evaluation=evaluation)
    finally:
        policy.train(was_training)


def _step(state: _State, task: Task, step: int) -> StepMetrics:
    """Rollouts, rewards, advantages, updates."""
    policy, config = state.policy, state.config
    prompts = parallel.share(_prompts(task, config, state.order))
    group = [prompt for prompt in prompts for _ in range(config.group_size)]  # prompt-major
    ids, mask = left_pad(prompts, config.pad_id)
    rollouts = sample(
        parallel.unwrapped(policy),
        ids.to(state.device),
        mask.to(state.device),
        max_new_tokens=config.max_new_tokens,
        completions_per_prompt=config.group_size,
        temperature=config.temperature,
        eos_id=config.eos_id,
        pad_id=config.pad_id,
        generator=state.sampling,
        uniforms=state.uniforms(),
    )
    ended = _ended(rollouts, config.eos_id)
    if config.check and step == 1 and config.eos_id is not None and not ended.any():
        raise RuntimeError(
            f"policy: none of the {len(ended)} completions of the first step ended with eos_id = "
            f"{config.eos_id} within max_new_tokens = {config.max_new_tokens}; a policy that never "
            "emits EOS cannot learn to stop (is it the token that the policy was taught?)"
        )
    rewards = _rewards(task, group, rollouts)
    advantages = group_advantages(rewards, config.group_size, **config.advantages)
    equal = equal_groups(rewards, config.group_size)

    rows = torch.arange(len(group))
    if config.skip_equal_groups:
        rows = rows[~equal.repeat_interleave(config.group_size)]
    lr = config.lr * min(1.0, step / config.warmup_steps if config.warmup_steps else 1.0)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = lr
    updates = _learn(state, rollouts, advantages, rows, step)

    def mean(name: str) -> float:
        return fmean(update[name] for update in updates) if updates else 0.0

    return StepMetrics(
        step=step,
        reward=rewards.mean().item(),
        reward_std=rewards.std().item(),
        frac_reward_zero_std=equal.double().mean().item(),
        loss=mean("loss"),
        kl=mean("kl") if config.kl_weight else None,
        entropy=mean("entropy"),
        clip_low=mean("clip_ratio/low_mean"),
        clip_high=mean("clip_ratio/high_mean"),
        ratio_min=min((update["ratio/min"] for update in updates), default=1.0),
        ratio_max=max((update["ratio/max"] for update in updates), default=1.0),
        grad_norm=mean("grad_norm"),
        lr=lr,
        mean_length=rollouts.completion_mask.sum(dim=1).double().mean().item(),
        truncated=1 - ended.double().mean().item(),
        updates=len(updates),
        seconds=0.0,
        rollouts=rollouts.to(torch.device("cpu")),
        rewards=rewards,
        advantages=advantages,
        evaluation={},
    )


def _learn(
    state: _State, rollouts: Rollouts, advantages: Tensor, rows: Tensor, step: int
) -> list[dict[str, float]]:
    """K passes over these rows; returns the metrics of every update."""
    config = state.config
    ref_log_probs = None
    if config.kl_weight:
        with torch.no_grad():
            ref_log_probs = _score(state.reference, rollouts, config.temperature)[0]
    updates: list[dict[str, float]] = []
    for _ in range(config.inner_epochs):
        size = config.minibatch_size or len(rows)
        if size < len(rows):  # one batch needs no order, and groups may be split
            rows = rows[torch.randperm(len(rows), generator=state.order)]
        for some in rows.split(size) if len(rows) else ():
            batch = _take(rollouts, some)
            log_probs, entropy = _score(
                state.policy, batch, config.temperature, entropy_weight=config.entropy_weight
            )
            loss, metrics = grpo_loss(
                log_probs,
                batch.log_probs,  # those it was sampled with: held fixed over all K passes
                advantages[some].to(log_probs.device),
                batch.completion_mask,
                ref_log_probs=None if ref_log_probs is None else ref_log_probs[some],
                entropy=entropy,
                **config.loss,
            )
            loss = loss * parallel.loss_weight(batch.completion_mask, config.how)
            metrics["loss"] = loss.item()
            if config.check and not updates:
                _check_first_update(state.policy, log_probs, batch, metrics, step)
            metrics["grad_norm"] = _update(state, loss, metrics, step)
            updates.append(metrics)
    return updates


def _score(
    policy: nn.Module, rollouts: Rollouts, temperature: float, *, entropy_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(N, T) log-probs of the completions and entropies; the latter with gradient if weighted."""
    log_probs, entropy = completion_log_probs_and_entropy(
        policy,
        rollouts.prompt_ids,
        rollouts.prompt_mask,
        rollouts.completions,
        rollouts.completion_mask,
        temperature=temperature,
    )
    return log_probs, entropy if entropy_weight else entropy.detach()


def _update(state: _State, loss: Tensor, metrics: Mapping[str, float], step: int) -> float:
    """One optimizer step; returns the norm of the gradient before it was cut down."""
    if not loss.isfinite():
        raise FloatingPointError(
            f"the loss is {loss.item()} at step {step}: expected a finite number (the ratio is "
            f"between {metrics['ratio/min']:.3g} and {metrics['ratio/max']:.3g})"
        )
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(state.policy.parameters(), state.config.max_grad_norm)
    if not norm.isfinite():
        state.optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the gradient's norm is {norm.item()} at step {step}: expected a finite number"
        )
    state.optimizer.step()
    return norm.item()


# --------------------------------------------------------------------------------------------
# checks


def _check_first_update(
    policy: nn.Module, log_probs: Tensor, batch: Rollouts, metrics: Mapping[str, float], step: int
) -> None:
    """Before the first update the policy is still the one that sampled, and the reference."""
    # Of the weights: log-probs are float32 even where the logits are of half precision.
    half = next(policy.parameters()).dtype in (torch.float16, torch.bfloat16)
    tolerance = 0.2 if half else 1e-3  # cached and uncached sums round differently
    mask = batch.completion_mask
    off = torch.where(mask, log_probs.detach() - batch.log_probs, 0.0).abs().max().item()
    if not off <= tolerance:
        raise RuntimeError(
            f"policy: the ratio at the first update of step {step} is off 1 by up to "
            f"{math.expm1(off):.3g}, expected 1: sampling and scoring disagree about the same text "
            "(dropout, position ids, a cache that forgets?)"
        )
    if step == 1 and not abs(metrics.get("kl", 0.0)) <= tolerance:
        raise RuntimeError(
            f"policy: the KL to the reference before the first update is {metrics['kl']:.3g}, "
            "expected 0: the reference is not a copy of the policy"
        )


def _prompts(task: Task, config: GRPOConfig, generator: torch.Generator) -> list[Tensor]:
    prompts = [torch.as_tensor(p) for p in task.prompts(config.prompts_per_step, generator)]
    if len(prompts) != config.prompts_per_step:
        raise ValueError(
            f"task.prompts: expected {config.prompts_per_step} prompts, got {len(prompts)}"
        )
    if any(p.dim() != 1 or len(p) == 0 or p.is_floating_point() for p in prompts):
        raise ValueError("task.prompts: expected rows of token ids, none of them empty")
    return prompts


def _rewards(task: Task, prompts: list[Tensor], rollouts: Rollouts) -> Tensor:
    """(N,) float64, checked."""
    pairs = zip(rollouts.completions.cpu(), rollouts.completion_mask.cpu())
    completions = [ids[mask] for ids, mask in pairs]
    try:
        given = task.reward(prompts, completions)
    except Exception as error:
        raise RuntimeError(f"task.reward raised {type(error).__name__}: {error}") from error
    try:
        rewards = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"task.reward: expected one number per completion, got {type(given).__name__} ({error})"
        ) from error
    if rewards.shape != (len(completions),):
        raise ValueError(
            f"task.reward: expected {len(completions)} rewards, one per completion, got "
            f"{len(rewards) if rewards.dim() == 1 else f'shape {tuple(rewards.shape)}'}"
        )
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"task.reward: expected finite numbers, got {rewards[bad[0]].item()} for completion "
            f"{bad[0]} (token ids {completions[bad[0]].tolist()})"
        )
    return rewards


def _ended(rollouts: Rollouts, eos_id: int | Sequence[int] | None) -> Tensor:
    """(N,) bool: whether the last token of a completion is EOS."""
    last = rollouts.completion_mask.sum(dim=1, keepdim=True) - 1
    return is_stop(rollouts.completions.gather(1, last)[:, 0], eos_id).cpu()


# --------------------------------------------------------------------------------------------
# rows and state


def _take(rollouts: Rollouts, rows: Tensor) -> Rollouts:
    """These rows of every tensor; the same object if they are all, in order."""
    if torch.equal(rows, torch.arange(len(rollouts.completions))):
        return rollouts
    return Rollouts(*(getattr(rollouts, field.name)[rows] for field in fields(rollouts)))


class _State:
    """All that has to be kept for a run to go on as if it had never stopped."""

    def __init__(self, policy: nn.Module, config: GRPOConfig) -> None:
        self.policy, self.config = policy, config
        self.device = next(policy.parameters()).device
        self.reference = None
        if config.kl_weight:
            start = parallel.unwrapped(policy)
            self.reference = copy.deepcopy(start).eval().requires_grad_(False)
        if parallel.world_size() > 1:
            _check_parallel(policy, config)
        trained = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=config.lr, betas=config.betas, weight_decay=0.0
        )
        seed = config.seed if config.split_invariant else config.seed + 7919 * parallel.rank()
        self.sampling = torch.Generator(self.device).manual_seed(seed)
        self.order = torch.Generator().manual_seed(config.seed)  # prompts, order of rows
        self.done = 0

    def uniforms(self) -> Tensor | None:
        """The random numbers of this process's rows, if all are drawn beforehand."""
        config = self.config
        if not config.split_invariant:
            return None
        rows = config.prompts_per_step * config.group_size
        size, generator = (rows, config.max_new_tokens), self.sampling
        return parallel.share(torch.rand(size, generator=generator, device=self.device))

    def save(self, path: Path) -> None:
        state = {
            "step": self.done,
            "config": _comparable(self.config),
            "policy": parallel.unwrapped(self.policy).state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampling": self.sampling.get_state(),
            "order": self.order.get_state(),
        }
        with atomic_path(path) as unfinished:
            torch.save(state, unfinished)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True, map_location=self.device)
            names = ("step", "config", "policy", "reference", "optimizer", "sampling", "order")
            done, config, policy, reference, optimizer, sampling, order = (state[n] for n in names)
        except Exception as error:  # torch.load raises whatever the broken bytes lead it to
            raise ValueError(
                f"checkpoint: expected one written by train_grpo, but {path} cannot be read "
                f"({error})"
            ) from error
        mine = _comparable(self.config)
        for name in mine:
            if mine[name] != config.get(name):
                raise ValueError(
                    f"checkpoint: {path} was written with {name} = {config.get(name)!r}, but this "
                    f"run has {mine[name]!r}; use the same config, or another file"
                )
        try:
            parallel.unwrapped(self.policy).load_state_dict(policy)
            if self.reference is not None:
                self.reference.load_state_dict(reference)
        except RuntimeError as error:
            raise ValueError(f"checkpoint: {path} belongs to another policy ({error})") from error
        self.optimizer.load_state_dict(optimizer)
        self.sampling.set_state(sampling.cpu())
        self.order.set_state(order.cpu())
        self.done = done


def _check_parallel(policy: nn.Module, config: GRPOConfig) -> None:
    """What would make processes wait for each other for ever, or average what is no average."""
    if parallel.unwrapped(policy) is policy:
        raise ValueError(
            "policy: expected one in DistributedDataParallel, because there are "
            f"{parallel.world_size()} processes; without it each would train its own"
        )
    if config.skip_equal_groups:
        raise ValueError(
            "skip_equal_groups: expected False with several processes, which would take different "
            "numbers of updates, got True"
        )
    if config.entropy_weight and config.how != "token_mean":
        raise ValueError(
            "entropy_weight: expected 0 with several processes, unless how is 'token_mean' (the "
            f"bonus is a mean over tokens), got {config.entropy_weight}"
        )


def _comparable(config: GRPOConfig) -> dict[str, Any]:
    """The settings that must not change between the parts of a run: all but its length."""
    settings = asdict(config)
    for name in ("steps", "evaluate_every", "save_every"):
        del settings[name]
    return settings
