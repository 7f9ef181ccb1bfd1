"""Next-token training of any policy: the char GPT here, the warm-up of the tiny Llama later."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

from minigrpo.checks import check_counts, check_shape
from minigrpo.logprobs import next_token_pairs

Batch = Tensor | tuple[Tensor, Tensor]  # ids (N, S), or (ids, mask); mask (N, S), 1 = learn


@dataclass(frozen=True)
class PretrainConfig:
    steps: int = 400  # optimizer steps
    lr: float = 4e-3  # of AdamW: embeddings, norms, head
    matrix_lr: float | None = 0.04  # of Muon: the matrices in the blocks; None = AdamW for all
    weight_decay: float = 0.1  # of Muon's matrices, or of all matrices if AdamW trains everything
    warmup: int = 20  # steps in which the learning rates rise from 0; then they fall to 0 again
    seed: int = 0  # of the batches

    def __post_init__(self) -> None:
        check_counts(steps=self.steps)
        if not 0 <= self.warmup < self.steps:  # or the learning rates would be negative
            raise ValueError(f"warmup: expected 0 to {self.steps - 1} steps, got {self.warmup}")


@dataclass(frozen=True)
class PretrainMetrics:
    step: int  # steps done so far
    loss: float  # mean cross-entropy of this batch before the step, nats per token
    seconds: float  # spent training so far


def documents_batch(documents: Sequence[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """Stack pairs (ids given, ids to learn), padded on the right, to ids and loss mask (N, S)."""
    rows = [torch.tensor([*prompt, *learned]) for prompt, learned in documents]
    masks = [torch.arange(len(row)) >= len(prompt) for row, (prompt, _) in zip(rows, documents)]
    return pad_sequence(rows, True, pad_id), pad_sequence(masks, True, False)


def next_token_loss(logits: Tensor, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each token given the ones before it, in nats per token: a scalar.

    logits (N, S, V), input_ids (N, S); mask (N, S), 1 = token to learn. Nothing predicts the first.
    """
    check_shape("input_ids", input_ids, logits.shape[:2])
    predictions, targets = next_token_pairs(logits, input_ids)
    if mask is None:
        return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())
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
    """AdamW, and Muon (Jordan et al. 2024) for the matrices in the blocks."""
    named = () if config.matrix_lr is None else model.named_modules()
    matrices = [m.weight for name, m in named if isinstance(m, nn.Linear) and "lm_head" not in name]
    taken, decay = {id(p) for p in matrices}, config.weight_decay
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.0 if matrices else decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, config.lr, (0.9, 0.99), fused=True)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, config.matrix_lr, weight_decay=decay))
    return optimizers


def pretrain(
    model: nn.Module,  # any policy, trained in place
    next_batch: Callable[[torch.Generator], Batch],  # random by this generator alone
    config: PretrainConfig,
) -> Iterator[PretrainMetrics]:
    """Train the model, yielding metrics at each step; RuntimeError before a step that is NaN."""
    optimizers = make_optimizers(model, config)
    device, batches = next(model.parameters()).device, torch.Generator().manual_seed(config.seed)
    schedules, seconds = [LambdaLR(o, partial(lr_scale, config=config)) for o in optimizers], 0.0
    for step in range(1, config.steps + 1):
        began = time.perf_counter()
        batch = next_batch(batches)
        ids, *mask = (x.to(device) for x in (batch if isinstance(batch, tuple) else (batch,)))
        loss = next_token_loss(model(ids).logits, ids, *mask)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        seconds += time.perf_counter() - began
        yield PretrainMetrics(step, loss.item(), seconds)


@torch.no_grad()
def validation_loss(
    model: nn.Module, ids: Tensor, length: int, *, max_windows: int | None = None
) -> float:
    """Mean cross-entropy, nats per token, of ids (L,) in windows that overlap by a token."""
    starts = torch.arange(0, len(ids) - length + 1, length - 1)
    if max_windows is not None and len(starts) > max_windows:
        starts = starts[torch.linspace(0, len(starts) - 1, max_windows).long()]
    device, total = next(model.parameters()).device, 0.0
    for chunk in starts.split(64):
        windows = ids[chunk[:, None] + torch.arange(length)].to(device)
        total += next_token_loss(model(windows).logits, windows).item() * len(chunk)
    return total / len(starts)
