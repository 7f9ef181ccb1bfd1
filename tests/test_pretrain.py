"""Training: the right loss, the right steps, and real learning."""

import copy
import math
import time

import pytest
import torch
from support import Bigram, tiny_gpt, tiny_llama, uniform
from torch import Tensor, nn
from torch.testing import assert_close

from minigrpo import pretrain as pretraining
from minigrpo.gpt import GPT, GPTConfig
from minigrpo.pretrain import (
    PretrainConfig,
    lr_scale,
    make_optimizers,
    next_token_loss,
    pretrain,
    validation_loss,
)

CYCLE = torch.arange(200) % 7  # a text that is easy to learn


def windows(generator: torch.Generator) -> Tensor:
    """A batch of 4 windows of 12 tokens from the cycle."""
    starts = torch.randint(180, (4, 1), generator=generator)
    return CYCLE[starts + torch.arange(12)]


def small_gpt(seed: int = 0) -> GPT:
    """A GPT at its usual start, in float32."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(11, 12, 16, 2, 2))


def test_loss_refuses_what_does_not_fit():
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \(2, 3\), got \(2, 2\)"):
        next_token_loss(logits, ids[:, 1:])
    with pytest.raises(ValueError, match="mask: expected at least one token to learn, got none"):
        next_token_loss(logits, ids, torch.tensor([[1, 0, 0]] * 2))  # NaN, with a gradient of 0


def test_validation_predicts_every_token_but_the_first_exactly_once():
    ids = torch.arange(1 + 5 * 70) % 97  # 70 windows of 6 tokens that share their ends
    model = Bigram(uniform(97, 97))
    loss = validation_loss(model, ids, length=6)
    targets = torch.cat([batch[:, 1:].flatten() for batch in model.read])
    assert torch.equal(targets, ids[1:])
    expected = -model.table.log_softmax(-1)[ids[:-1], ids[1:]].mean().item()
    assert abs(loss - expected) < 1e-12


def test_validation_on_some_windows_spreads_them_evenly():
    model = Bigram(uniform(11, 11))
    validation_loss(model, torch.arange(101) % 11, length=11, max_windows=4)
    assert [row.tolist()[0] for row in model.read[0]] == [0, 30 % 11, 60 % 11, 90 % 11]


def test_validation_leaves_no_graph_and_no_randomness():
    model, before = tiny_gpt(), torch.get_rng_state()
    first = validation_loss(model, CYCLE, length=12)
    assert validation_loss(model, CYCLE, length=12) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_learning_rate_rises_to_one_and_falls_to_nearly_zero():
    config = PretrainConfig(steps=100, warmup=10)
    scale = [lr_scale(step, config) for step in range(100)]
    assert_close(scale[:10], [0.1 * (step + 1) for step in range(10)])
    assert max(scale) == 1.0
    assert all(later < earlier for earlier, later in zip(scale[10:], scale[11:]))
    assert_close(scale[-1], 1 / 90)
    assert lr_scale(0, PretrainConfig(warmup=0)) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"steps": 30.5}, "steps: expected a whole number of 1 or more, got 30.5"),
        ({"warmup": -1}, "warmup: expected 0 to 399 steps, got -1"),
        ({"steps": 20}, "warmup: expected 0 to 19 steps, got 20"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**settings)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("model", "blocks"),
    [(small_gpt(), "blocks."), (tiny_llama(), "model.layers.")],
    ids=["gpt", "llama"],
)
def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest(model, blocks):
    adamw, muon = (_names(model, opt) for opt in make_optimizers(model, PretrainConfig()))
    names = [name for name, _ in model.named_parameters()]
    assert sorted(adamw + muon) == sorted(names)  # each exactly once
    in_blocks = {n for n, p in model.named_parameters() if n.startswith(blocks) and p.dim() == 2}
    assert set(muon) == in_blocks
    assert "lm_head.weight" in adamw


def test_a_head_is_a_head_whatever_the_model_is_wrapped_in():
    wrapped = nn.ModuleDict({"model": small_gpt()})
    adamw, muon = (_names(wrapped, opt) for opt in make_optimizers(wrapped, PretrainConfig()))
    assert "model.lm_head.weight" in adamw and "model.blocks.0.mlp.up.weight" in muon


def test_what_the_optimizers_are_told():
    adamw, muon = make_optimizers(small_gpt(), PretrainConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.0, 0.0]
    assert muon.param_groups[0]["weight_decay"] == 0.3
    assert all(group["betas"] == (0.9, 0.99) for group in adamw.param_groups)


def test_a_step_takes_the_clipped_gradient_at_the_scheduled_rates():
    model, gradients, rates = small_gpt(), [], []

    def note(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    def noted(model, config):
        optimizers = make_optimizers(model, config)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(note)
        return optimizers

    model.lm_head.weight.data *= 50  # and so the gradient is long
    config, generator = PretrainConfig(steps=5, warmup=2), torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "make_optimizers", noted)
        training = pretrain(model, windows, config)
        for _ in range(config.steps):
            before, ids = copy.deepcopy(model), windows(generator)
            before.zero_grad()
            next_token_loss(before(ids).logits, ids).backward()
            gradient = torch.cat([p.grad.flatten() for p in before.parameters()])
            assert gradient.norm() > 1.5
            next(training)
            for taken in gradients[-2:]:
                assert_close(taken, gradient / gradient.norm())
    scales = [lr_scale(step, config) for step in range(config.steps)]
    assert_close(rates, [x * rate for x in scales for rate in (config.lr, config.matrix_lr)])


def test_without_a_rate_for_matrices_adamw_gets_everything():
    model = small_gpt()
    (adamw,) = make_optimizers(model, PretrainConfig(matrix_lr=None, weight_decay=0.3))
    matrices, vectors = adamw.param_groups
    assert sorted(_names(model, adamw)) == sorted(name for name, _ in model.named_parameters())
    assert {p.dim() for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.3
    assert {p.dim() for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0


def _with_mask(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows whose first half is noise that is not to be learned."""
    ids = windows(generator)
    ids[:, :6] = torch.randint(7, (4, 6), generator=generator)
    mask = torch.zeros_like(ids)
    mask[:, 7:] = 1
    return ids, mask


@pytest.mark.parametrize(
    ("make", "next_batch", "matrix_lr"),
    [
        (small_gpt, windows, 0.02),
        (small_gpt, _with_mask, None),
        (lambda: tiny_llama().float(), _with_mask, 0.02),
        (lambda: tiny_llama().float(), windows, None),
    ],
    ids=["gpt, muon", "gpt, adamw, mask", "llama, muon, mask", "llama, adamw"],
)
def test_a_repeating_text_is_learned(make, next_batch, matrix_lr):
    config = PretrainConfig(steps=80, lr=1e-2, matrix_lr=matrix_lr, warmup=10)
    losses = [m.loss for m in pretrain(make(), next_batch, config)]
    assert losses[0] > 1.9
    assert losses[-1] < 0.1


def test_metrics_tell_what_happened():
    began, config = time.perf_counter(), PretrainConfig(steps=5, warmup=2)
    metrics = list(pretrain(small_gpt(), windows, config))
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5]
    assert all(a.seconds < b.seconds for a, b in zip(metrics, metrics[1:]))
    assert 0 < metrics[-1].seconds <= time.perf_counter() - began
    model, generator = small_gpt(), torch.Generator().manual_seed(config.seed)
    ids = windows(generator)
    assert metrics[0].loss == pytest.approx(next_token_loss(model(ids).logits, ids).item())


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_taken(broken):
    model = small_gpt()
    training = pretrain(model, windows, PretrainConfig(steps=9, warmup=0))
    next(training)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    if broken == "loss":
        model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.nan)
    else:
        model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(RuntimeError, match="norm .* is non-finite"):
        next(training)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
