"""Next-token training of any policy: the char GPT here, the warm-up of the tiny Llama later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigrpo.files import atomic_path
from minigrpo.gpt import next_token_pairs

Batch = Tensor | tuple[Tensor, Tensor]
"""Token ids (N, S), or a pair (ids, loss mask) where the mask (N, S) is 1 on tokens to learn."""


@dataclass(frozen=True)
class PretrainConfig:
    """How to train.

    Attributes:
        steps: optimizer steps.
        lr: learning rate of AdamW (embeddings, norms, head).
        matrix_lr: learning rate of Muon for the weight matrices inside the blocks; None trains
            everything with AdamW.
        weight_decay: of Muon's matrices, or of all matrices when AdamW trains everything.
        warmup: steps over which the learning rates rise from 0; then they fall in a straight
            line to 0 at the end.
        grad_clip: the gradient's norm is cut down to this.
        seed: of the batches.
        eval_every: steps between evaluations (there is always one after the last step).
        save_every: steps between resumable checkpoints.
    """

    steps: int = 400
    lr: float = 4e-3
    matrix_lr: float | None = 0.04
    weight_decay: float = 0.1
    warmup: int = 20
    grad_clip: float = 1.0
    seed: int = 0
    eval_every: int = 50
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "save_every"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}: expected a whole number of 1 or more, got {value!r}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup: expected 0 or more and fewer than steps = {self.steps}, got {self.warmup}"
            )
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class PretrainMetrics:
    """One training step, seen from outside.

    Attributes:
        step: steps done so far.
        loss: mean cross-entropy of this batch before the step, nats per token.
        grad_norm: norm of the whole gradient before it was clipped.
        lr_scale: what both learning rates were multiplied by (warm-up and decay).
        val_loss: result of `evaluate`, nats per token, or None between evaluations.
        seconds: time spent training in this process, evaluations left out.
    """

    step: int
    loss: float
    grad_norm: float
    lr_scale: float
    val_loss: float | None
    seconds: float


def documents_batch(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int
) -> tuple[Tensor, Tensor]:
    """Stack documents, each a pair (ids that are given, ids to learn), for `pretrain`.

    Returns:
        ids (N, S), padded on the right, and the loss mask (N, S) bool, True on what is to learn.
    """
    width = max(len(given) + len(learned) for given, learned in documents)
    ids = torch.full((len(documents), width), pad_id)
    mask = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, (given, learned) in enumerate(documents):
        end = len(given) + len(learned)
        ids[row, :end] = torch.tensor([*given, *learned])
        mask[row, len(given) : end] = True
    return ids, mask


def next_token_loss(logits: Tensor, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each token given the ones before it, in nats per token.

    logits (N, S, V), input_ids (N, S); mask (N, S), 1 = token to learn (None = all of them).
    The first token of a row is never learned: nothing predicts it. Returns a scalar.

    Raises:
        ValueError: shapes that do not fit, or a mask that leaves nothing to learn.
    """
    if logits.shape[:2] != input_ids.shape:
        raise ValueError(
            f"input_ids: expected shape {tuple(logits.shape[:2])}, got {tuple(input_ids.shape)}"
        )
    predictions, targets = next_token_pairs(logits, input_ids)
    if mask is None:
        return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())
    if mask.shape != input_ids.shape:
        raise ValueError(f"mask: expected shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}")
    learn = mask.bool()[:, 1:]
    if not learn.any():
        raise ValueError("mask: expected at least one token to learn, got none")
    return F.cross_entropy(predictions[learn], targets[learn])


def lr_scale(step: int, config: PretrainConfig) -> float:
    """Warm-up, then linear decay: the factor on the learning rates at `step` (0, 1, ...)."""
    rising = (step + 1) / config.warmup if config.warmup else 1.0
    falling = (config.steps - step) / (config.steps - config.warmup)
    return min(rising, falling, 1.0)


def make_optimizers(model: nn.Module, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for everything else.

    Muon (Jordan et al. 2024; `torch.optim.Muon`) takes the momentum of a weight matrix and makes
    all its singular values equal before it steps, so that no direction of the matrix is left
    behind. At this size it needs far fewer steps than AdamW.
    """
    matrices = []
    if config.matrix_lr is not None:
        layers = (m for name, m in model.named_modules() if not name.endswith("lm_head"))
        matrices = [m.weight for m in layers if isinstance(m, nn.Linear)]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    decay = 0.0 if matrices else config.weight_decay
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), fused=True)
    ]
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay)
        )
    return optimizers


def pretrain(
    model: nn.Module,
    next_batch: Callable[[torch.Generator], Batch],
    config: PretrainConfig,
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    checkpoint: str | Path | None = None,
) -> Iterator[PretrainMetrics]:
    """Train the model in place, yielding one PretrainMetrics per step.

    Args:
        model: any policy.
        next_batch: draws a batch, using only the generator it is given for randomness.
        config: how to train.
        evaluate: validation loss of the model, called every `config.eval_every` steps.
        checkpoint: a file. If it exists, training goes on from it as if it had never stopped (to
            the bit); every `config.save_every` steps it is written anew, in one piece.

    Raises:
        ValueError: the checkpoint belongs to another model or another config.
        FloatingPointError: the loss or its gradient is not finite; the model is left as it was
            before that step.
    """
    optimizers = make_optimizers(model, config)
    base_lrs = [[group["lr"] for group in opt.param_groups] for opt in optimizers]
    generator = torch.Generator().manual_seed(config.seed)
    start = 0
    if checkpoint is not None and Path(checkpoint).is_file():
        start = _load_state(Path(checkpoint), model, optimizers, generator, config)

    seconds = 0.0
    for step in range(start, config.steps):
        began = time.perf_counter()
        scale = lr_scale(step, config)
        for opt, lrs in zip(optimizers, base_lrs, strict=True):
            for group, lr in zip(opt.param_groups, lrs, strict=True):
                group["lr"] = lr * scale
        loss, grad_norm = _step(model, next_batch(generator), optimizers, config.grad_clip, step)
        seconds += time.perf_counter() - began

        done = step + 1
        if checkpoint is not None and (done % config.save_every == 0 or done == config.steps):
            _save_state(Path(checkpoint), done, model, optimizers, generator, config)
        due = done % config.eval_every == 0 or done == config.steps
        val_loss = evaluate(model) if evaluate is not None and due else None
        yield PretrainMetrics(done, loss, grad_norm, scale, val_loss, seconds)


def _step(
    model: nn.Module,
    batch: Batch,
    optimizers: list[torch.optim.Optimizer],
    grad_clip: float,
    step: int,
) -> tuple[float, float]:
    """Forward, backward, update. Returns the loss and the gradient's norm before clipping."""
    device = next(model.parameters()).device
    ids, mask = batch if isinstance(batch, tuple) else (batch, None)
    ids, mask = ids.to(device), None if mask is None else mask.to(device)
    loss = next_token_loss(model(ids).logits, ids, mask)
    if not torch.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss.item()} at step {step}: expected a finite number"
        )
    for opt in optimizers:
        opt.zero_grad(set_to_none=True)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    if not torch.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm.item()} at step {step}: expected a finite number"
        )
    for opt in optimizers:
        opt.step()
    return loss.item(), grad_norm.item()


def _save_state(
    path: Path,
    done: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
    config: PretrainConfig,
) -> None:
    state = {
        "step": done,
        "config": repr(config),
        "model": model.state_dict(),
        "optimizers": [opt.state_dict() for opt in optimizers],
        "batches": generator.get_state(),
        "torch": torch.get_rng_state(),  # dropout, if a model has any
    }
    with atomic_path(path) as unfinished:
        torch.save(state, unfinished)


def _load_state(
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
    config: PretrainConfig,
) -> int:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        done, saved_config, weights, moments, batches, noise = (
            state[part] for part in ("step", "config", "model", "optimizers", "batches", "torch")
        )
    except Exception as error:  # torch.load raises whatever the broken bytes lead it to
        raise ValueError(
            f"checkpoint: expected one written by pretrain, but {path} cannot be read ({error})"
        ) from error
    if saved_config != repr(config):
        raise ValueError(
            f"checkpoint: {path} was written with {saved_config}, but this run has {config!r}; "
            "use the same config, or another file"
        )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"checkpoint: {path} belongs to another model ({error})") from error
    for opt, saved in zip(optimizers, moments, strict=True):
        opt.load_state_dict(saved)
    generator.set_state(batches)
    torch.set_rng_state(noise)
    return done


@torch.no_grad()
def validation_loss(
    model: nn.Module, ids: Tensor, length: int, *, max_windows: int | None = None
) -> float:
    """Mean cross-entropy over the text cut into consecutive windows, in nats per token.

    Neighbouring windows share one token, so that every token but the first is predicted once. No
    randomness. A rest at the end that is shorter than a window is left out. ids (L,); length:
    tokens per window; max_windows: use only that many, evenly spaced.

    Raises:
        ValueError: the text is shorter than one window, windows of fewer than 2 tokens, or none.
    """
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows: expected 1 or more, or None, got {max_windows}")
    if not 2 <= length <= len(ids):
        raise ValueError(f"length: expected 2 to {len(ids)}, the length of the text, got {length}")
    starts = torch.arange(0, len(ids) - length + 1, length - 1)
    if max_windows is not None and len(starts) > max_windows:
        starts = starts[torch.linspace(0, len(starts) - 1, max_windows).long()]
    device = next(model.parameters()).device
    total = 0.0
    for chunk in starts.split(64):
        windows = ids[chunk[:, None] + torch.arange(length)].to(device)
        total += next_token_loss(model(windows).logits, windows).item() * len(chunk)
    return total / len(starts)
