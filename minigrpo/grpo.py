"""The loop of GRPO, Algorithm 1 of DeepSeekMath (arXiv 2402.03300), with a fixed reference policy.

Notebook 07 has the same loop: `rollout`, `group_advantages`, and `learn`, which calls `score`.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Generator, Tensor, nn
from torch.optim import AdamW, Optimizer

from minigrpo import checks
from minigrpo.config import GRPOConfig, Task
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.objective import equal_groups, group_advantages, grpo_loss
from minigrpo.sampling import Rollouts, ended, left_pad, sample

Evaluation = Callable[[nn.Module], Mapping[str, float]]  # leaves the run's generators alone
AllReduce = Callable[..., tuple[Tensor, ...]]  # tensors -> their sums over processes, in place
MicroBatch = tuple[Rollouts, Tensor, Tensor | None]  # some rows, their advantages, ref_log_probs


@dataclass(frozen=True)
class StepMetrics:
    """Of one step, averaged over its K updates; of the ratio, the extremes."""

    step: int
    reward: float  # mean over the batch
    frac_reward_zero_std: float  # fraction of groups whose rewards are all equal
    loss: float  # says little: with "sequence_mean" 0 at a first update, whatever is learned
    kl: float | None  # nats per token, to the reference; None if it is not computed
    entropy: float  # nats per token, over the rows that were scored; so are the ratios
    clip_low: float  # fraction of all ratios whose gradient the clip stopped
    clip_high: float
    ratio_min: float
    ratio_max: float
    grad_norm: float  # before it was clipped
    mean_length: float  # tokens per completion, a tool's included
    truncated: float  # fraction of completions without EOS (all, if there is no EOS)
    rollouts: Rollouts  # on the CPU
    rewards: Tensor  # (N,) float64
    advantages: Tensor  # (N,)
    seconds: float  # evaluation left out
    evaluation: Mapping[str, float] = field(default_factory=dict)  # empty between evaluations

    def table(self, decode: Callable[[Tensor], str], rows: Sequence[int] | None = None) -> str:
        """Reward, advantage and text of the completions, one line each; rows None = all."""
        texts = [decode(ids) for ids in self.rollouts.unpadded(self.rollouts.completions)]
        lines = [" reward  advantage  completion"]
        for row in range(len(texts)) if rows is None else rows:
            lines.append(f"{self.rewards[row]:7.3f} {self.advantages[row]:+10.2f}  {texts[row]!r}")
        return "\n".join(lines)


def train_grpo(
    policy: nn.Module, task: Task, config: GRPOConfig, *, evaluate: Evaluation | None = None
) -> Iterator[StepMetrics]:
    """Train the policy in place, in eval mode, and yield the metrics of each step as it is done."""
    checks.check_weights(policy)
    reference = frozen_copy(policy) if config.kl_weight else None
    optimizer = AdamW(policy.parameters(), config.lr, config.betas, weight_decay=0.0)
    order = Generator().manual_seed(config.seed)  # of the prompts
    sampling = Generator(next(policy.parameters()).device).manual_seed(config.seed)
    was_training = policy.training
    try:
        policy.eval()  # with dropout, the policy that samples would differ from the one scored
        for step in range(1, config.steps + 1):
            began = time.perf_counter()
            prompts = task.prompts(config.prompts_per_step, order)  # P questions
            checks.check_number("task.prompts", prompts, config.prompts_per_step)
            rollouts, rewards = rollout(policy, task, prompts, config, sampling)  # P * G rows
            advantages = group_advantages(rewards, **config.advantage_settings)
            checks.check_ends(step, ended(rollouts, config.eos_id), config)
            updates = learn(policy, reference, optimizer, rollouts, advantages, config)  # K
            metrics = measure(step, began, rollouts, rewards, advantages, updates, config)
            if evaluate and (step == config.steps or step % config.evaluate_every == 0):
                metrics = replace(metrics, evaluation=dict(evaluate(policy)))
            yield metrics
    finally:  # when the run is left early, too
        policy.train(was_training)


def rollout(
    policy: nn.Module, task: Task, prompts: list[Tensor], config: GRPOConfig, generator: Generator
) -> tuple[Rollouts, Tensor]:
    """N = P * G completions, prompt by prompt, and their rewards (N,) in float64."""
    questions = [prompt for prompt in prompts for _ in range(config.group_size)]
    rollouts = sample(
        policy,
        *left_pad(prompts, config.pad_id),
        completions_per_prompt=config.group_size,
        generator=generator,
        reply=lambda row, completion: task.reply(questions[row], completion),
        **config.sampling_settings,
    )
    own = () if config.call_id is None else (rollouts.unpadded(rollouts.own),)
    rewards = task.reward(questions, rollouts.unpadded(rollouts.completions), *own)
    rewards = torch.as_tensor(rewards, dtype=torch.float64).detach().cpu()
    checks.check_shape("task.reward", rewards, (len(questions),))
    return rollouts, rewards


def score(policy: nn.Module, rollouts: Rollouts, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of what the policy wrote itself, with gradient."""
    options = {"temperature": config.temperature, "entropy_gradient": bool(config.entropy_weight)}
    scored = completion_log_probs_and_entropy(policy, *rollouts.text, **options)
    return tuple(values.where(rollouts.own, 0.0) for values in scored)


def learn(
    policy: nn.Module,
    reference: nn.Module | None,
    optimizer: Optimizer,
    rollouts: Rollouts,
    advantages: Tensor,  # (N,)
    config: GRPOConfig,
    all_reduce: AllReduce = lambda *tensors: tensors,  # one process: the sums are its own
) -> list[dict[str, float]]:
    """K updates on the same rollouts; returns the metrics of each."""
    batches, updates = micro_batches(reference, rollouts, advantages, config), []
    (whole,) = all_reduce(count(rollouts))  # rows and tokens that each micro-batch divides by
    for update in range(config.inner_epochs):
        optimizer.zero_grad()
        shares = []
        for batch in batches:
            loss, metrics = loss_of(policy, batch, whole, config, first=update == 0)
            loss.backward()
            shares.append(metrics)
        all_reduce(*[p.grad for p in policy.parameters() if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
        metrics = add_up(shares, batches, whole, config, all_reduce) | {"grad_norm": norm.item()}
        checks.check_finite(metrics)
        optimizer.step()
        updates.append(metrics)
    return updates


def measure(
    step: int,
    began: float,  # by time.perf_counter
    rollouts: Rollouts,
    rewards: Tensor,  # (N,)
    advantages: Tensor,  # (N,)
    updates: list[dict[str, float]],
    config: GRPOConfig,
) -> StepMetrics:
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


def micro_batches(
    reference: nn.Module | None, rollouts: Rollouts, advantages: Tensor, config: GRPOConfig
) -> list[MicroBatch]:
    """`rows_per_pass` rows at a time; those of advantage 0 only for a KL or an entropy bonus.

    If all have advantage 0, one row stays: its gradient is 0, and AdamW goes on by its averages.
    """
    advantages = advantages.to(rollouts.completions.device)
    rows = torch.arange(len(advantages), device=advantages.device)
    if not config.kl_weight and not config.entropy_weight:
        rows = advantages.nonzero()[:, 0] if advantages.any() else rows[:1]
    batches = []
    for some in rows.split(config.rows_per_pass):
        written = rollouts[some].trimmed()
        with torch.no_grad():
            ref_log_probs = score(reference, written, config)[0] if reference else None
        batches.append((written, advantages[some], ref_log_probs))
    return batches


def loss_of(
    policy: nn.Module, batch: MicroBatch, whole: Tensor, config: GRPOConfig, *, first: bool
) -> tuple[Tensor, dict[str, float]]:
    """A micro-batch's share of loss and metrics; at a first update, the ratio has to be 1."""
    rollouts, advantages, ref_log_probs = batch
    log_probs, entropy = score(policy, rollouts, config)  # (n, T)
    old_log_probs = rollouts.log_probs  # of the sampler: held fixed over all K updates
    if config.check and first:
        checks.check_first_ratio(log_probs, old_log_probs, rollouts.own)
    terms = {"ref_log_probs": ref_log_probs, "entropy": entropy, "whole": tuple(whole.tolist())}
    settings = {**terms, **config.loss_settings}
    loss, metrics = grpo_loss(log_probs, old_log_probs, advantages, rollouts.own, **settings)
    return loss, {**metrics, "loss": loss.item()}


def count(*written: Rollouts) -> Tensor:
    """(2,): rows, and tokens that the policy wrote itself."""
    return torch.tensor([(len(r.own), int(r.own.sum())) for r in written]).sum(dim=0)


def add_up(
    shares: list[dict[str, float]],
    batches: list[MicroBatch],
    whole: Tensor,
    config: GRPOConfig,
    all_reduce: AllReduce,
) -> dict[str, float]:
    """The metrics of a whole batch; entropy and mean ratio over the rows that were scored."""
    extremes = {"ratio/min": min, "ratio/max": max}  # these alone are of this process's rows
    metrics = {name: extremes.get(name, sum)(share[name] for share in shares) for name in shares[0]}
    sums = torch.tensor([*metrics.values()], dtype=torch.float64)
    scored = count(*(rollouts for rollouts, *_ in batches)) / whole.double()  # fractions
    all_reduce(sums, scored)
    metrics |= {n: x for n, x in zip(metrics, sums.tolist()) if n not in extremes}
    metrics["entropy"] /= scored[1].item()
    metrics["ratio/mean"] /= scored[int(config.level == "token")].item()
    return metrics


def frozen_copy(policy: nn.Module) -> nn.Module:
    """The reference policy: the policy as it is before its first update."""
    return copy.deepcopy(policy).eval().requires_grad_(False)
