"""Training: the right loss, real learning, and a killed run that goes on to the bit."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from support import Bigram, must_fail_on, tiny_gpt, tiny_llama, uniform
from torch import Tensor, nn
from torch.testing import assert_close

from minigrpo import pretrain as pretraining
from minigrpo.gpt import GPT, GPTConfig, next_token_pairs
from minigrpo.pretrain import (
    PretrainConfig,
    PretrainMetrics,
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


# ---------------------------------------------------------------------------------------------
# the loss


@must_fail_on(
    (next_token_pairs, "return logits[:, :-1], input_ids[:, 1:]", "return logits, input_ids"),
    (next_token_loss, "learn = mask.bool()[:, 1:]", "learn = mask.bool()[:, :-1]"),
    (
        next_token_loss,
        "return F.cross_entropy(predictions[learn], targets[learn])",
        "return F.cross_entropy(predictions[learn], targets[learn], reduction='sum')",
    ),
)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens():
    logits, ids = (
        uniform(3, 4, 5).requires_grad_(),
        torch.tensor([[0, 1, 2, 3], [4] * 4, [2, 0] * 2]),
    )
    ragged = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]])
    for mask in (None, ragged):
        terms = []
        for row in range(3):
            for place in range(1, 4):
                if mask is None or mask[row, place]:
                    before = logits[row, place - 1]
                    terms.append(before.logsumexp(0) - before[ids[row, place]])
        expected = sum(terms) / len(terms)
        loss = next_token_loss(logits, ids, mask)
        assert_close(loss, expected)
        assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


def test_loss_refuses_shapes_that_do_not_fit():
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \(2, 3\), got \(2, 2\)"):
        next_token_loss(logits, ids[:, 1:])
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 3\), got \(2, 2\)"):
        next_token_loss(logits, ids, torch.ones(2, 2))


def test_loss_refuses_a_mask_that_leaves_nothing_to_learn():
    only_the_first = torch.tensor([[1, 0, 0]])
    with pytest.raises(ValueError, match="mask: expected at least one token to learn, got none"):
        next_token_loss(torch.zeros(1, 3, 5), torch.zeros(1, 3).long(), only_the_first)


@must_fail_on(
    (
        validation_loss,
        "starts = torch.arange(0, len(ids) - length + 1, length - 1)",
        "starts = torch.arange(0, len(ids) - length + 1, length)",
    ),
    (
        validation_loss,
        "starts = torch.arange(0, len(ids) - length + 1, length - 1)",
        "starts = torch.arange(0, len(ids) - length, length - 1)",
    ),
)
def test_validation_predicts_every_token_but_the_first_exactly_once():
    ids = torch.arange(1 + 5 * 70) % 97  # 70 windows of 6 tokens that share their ends
    model = Bigram(uniform(97, 97))
    loss = validation_loss(model, ids, length=6)
    targets = torch.cat([batch[:, 1:].flatten() for batch in model.read])
    assert torch.equal(targets, ids[1:])
    expected = -model.table.log_softmax(-1)[ids[:-1], ids[1:]].mean().item()
    assert abs(loss - expected) < 1e-12


def test_validation_equals_a_loop_over_windows_and_tokens():
    model, ids = tiny_gpt(), torch.arange(40) ** 2 % 11
    losses = []
    for start in range(0, 40 - 8 + 1, 7):
        for end in range(1, 8):
            logits = model(ids[None, start : start + end]).logits[0, -1]
            losses.append(-logits.log_softmax(-1)[ids[start + end]].item())
    assert abs(validation_loss(model, ids, length=8) - sum(losses) / len(losses)) < 1e-10


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


@pytest.mark.parametrize("length", [1, 0, 201])
def test_validation_refuses_windows_that_do_not_fit(length):
    with pytest.raises(ValueError, match=f"length: expected 2 to 200, .* got {length}"):
        validation_loss(tiny_gpt(), CYCLE, length)


# ---------------------------------------------------------------------------------------------
# settings


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
        ({"eval_every": 0}, "eval_every: expected a whole number of 1 or more, got 0"),
        ({"save_every": -1}, "save_every: expected a whole number of 1 or more, got -1"),
        ({"warmup": -1}, "warmup: expected 0 or more .*, got -1"),
        ({"steps": 20}, "warmup: expected .* fewer than steps = 20, got 20"),
        ({"lr": 0.0}, "lr: expected a number above 0, got 0.0"),
        ({"lr": math.nan}, "lr: expected a number above 0, got nan"),
        ({"grad_clip": -1}, "grad_clip: expected a number above 0, got -1"),
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


def test_without_a_rate_for_matrices_adamw_gets_everything():
    model = small_gpt()
    (adamw,) = make_optimizers(model, PretrainConfig(matrix_lr=None, weight_decay=0.3))
    matrices, vectors = adamw.param_groups
    assert sorted(_names(model, adamw)) == sorted(name for name, _ in model.named_parameters())
    assert {p.dim() for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.3
    assert {p.dim() for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0


# ---------------------------------------------------------------------------------------------
# learning


def _with_mask(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows whose first half is noise that is not to be learned."""
    ids = windows(generator)
    ids[:, :6] = torch.randint(7, (4, 6), generator=generator)
    mask = torch.zeros_like(ids)
    mask[:, 7:] = 1
    return ids, mask


@pytest.mark.parametrize("next_batch", [windows, _with_mask], ids=["ids", "ids and mask"])
@pytest.mark.parametrize("make", [small_gpt, lambda: tiny_llama().float()], ids=["gpt", "llama"])
@pytest.mark.parametrize("matrix_lr", [0.02, None], ids=["muon", "adamw"])
def test_a_repeating_text_is_learned(make, next_batch, matrix_lr):
    config = PretrainConfig(steps=80, lr=1e-2, matrix_lr=matrix_lr, warmup=10, eval_every=80)
    losses = [m.loss for m in pretrain(make(), next_batch, config)]
    assert losses[0] > 1.9
    assert losses[-1] < 0.1


def test_metrics_tell_what_happened():
    config = PretrainConfig(steps=5, warmup=2, eval_every=2)
    metrics = list(pretrain(small_gpt(), windows, config, evaluate=lambda model: 1.5))
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5]
    assert [m.val_loss for m in metrics] == [None, 1.5, None, 1.5, 1.5]
    assert [m.lr_scale for m in metrics] == [lr_scale(step, config) for step in range(5)]
    assert all(a.seconds < b.seconds for a, b in zip(metrics, metrics[1:]))
    model, generator = small_gpt(), torch.Generator().manual_seed(config.seed)
    ids = windows(generator)
    loss = next_token_loss(model(ids).logits, ids)
    loss.backward()
    norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
    assert metrics[0].loss == pytest.approx(loss.item())
    assert metrics[0].grad_norm == pytest.approx(norm, rel=1e-5)


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
    with pytest.raises(
        FloatingPointError, match=rf"the {broken}.* is \w+ at step 1: expected a fi"
    ):
        next(training)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


# ---------------------------------------------------------------------------------------------
# a killed run goes on as if nothing had happened

RUN = PretrainConfig(steps=12, warmup=2, save_every=3, eval_every=100)


def train(folder, name: str, steps: int = RUN.steps) -> list[PretrainMetrics]:
    """Train a new model with the checkpoint `name`, for at most so many steps."""
    training = pretrain(small_gpt(), windows, RUN, checkpoint=folder / name)
    return list(islice(training, steps))


def assert_same_end(folder, one: str, other: str) -> None:
    """The same weights, optimizer states, next batch and random numbers, to the bit."""
    states = [torch.load(folder / name, weights_only=True) for name in (one, other)]
    assert all(state.pop("config") == repr(RUN) for state in states)
    assert states[0]["step"] == RUN.steps
    assert {"model", "optimizers", "batches", "torch"} <= set(states[0])
    assert_close(*states, rtol=0, atol=0)


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path):
    whole = train(tmp_path, "whole.pt")
    train(tmp_path, "resumed.pt", steps=7)  # two steps beyond the last checkpoint are lost
    rest = train(tmp_path, "resumed.pt")
    assert [m.step for m in rest] == [7, 8, 9, 10, 11, 12]
    assert [m.loss for m in rest] == [m.loss for m in whole[6:]]
    assert [m.lr_scale for m in rest] == [m.lr_scale for m in whole[6:]]
    assert_same_end(tmp_path, "whole.pt", "resumed.pt")


@pytest.mark.parametrize("part", ["model", "optimizers", "batches"])
def test_every_part_of_a_checkpoint_is_needed_to_go_on(tmp_path, part):
    train(tmp_path, "whole.pt")
    train(tmp_path, "early.pt", steps=3)
    train(tmp_path, "resumed.pt", steps=6)
    early, state = (torch.load(tmp_path / f"{name}.pt") for name in ("early", "resumed"))
    torch.save({**state, part: early[part]}, tmp_path / "resumed.pt")
    train(tmp_path, "resumed.pt")
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path, "whole.pt", "resumed.pt")


KILLED = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from test_pretrain import RUN, pretrain, small_gpt, windows
for m in pretrain(small_gpt(), windows, RUN, checkpoint=Path(sys.argv[2])):
    print(m.step, flush=True)
    if m.step == 8:
        time.sleep(600)
"""


def test_a_run_killed_in_another_process_goes_on_here(tmp_path):
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(Path(__file__).parent),
        str(tmp_path / "killed.pt"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        steps = [next(process.stdout).strip() for _ in range(8)]
        process.kill()
    assert steps[-1] == "8"
    assert process.returncode == -signal.SIGKILL
    rest = train(tmp_path, "killed.pt")
    assert rest[0].step == 7
    train(tmp_path, "whole.pt")
    assert_same_end(tmp_path, "whole.pt", "killed.pt")


def test_a_checkpoint_that_fails_half_way_leaves_the_one_before(tmp_path, monkeypatch):
    whole = train(tmp_path, "whole.pt")
    train(tmp_path, "resumed.pt", steps=5)  # written after step 3

    def fail_half_way(_, unfinished):
        unfinished.write_bytes(b"PK\x03\x04 half a checkpoint")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pretraining.torch, "save", fail_half_way)
        with pytest.raises(OSError, match="No space left"):
            train(tmp_path, "resumed.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.pt", "whole.pt"]
    assert [m.loss for m in train(tmp_path, "resumed.pt")] == [m.loss for m in whole[3:]]
    assert_same_end(tmp_path, "whole.pt", "resumed.pt")


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    train(tmp_path, "whole.pt")
    assert train(tmp_path, "whole.pt") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: b"garbage",
        lambda raw: raw[: len(raw) // 2],
    ],
    ids=["empty", "garbage", "half"],
)
def test_bytes_that_are_no_checkpoint_are_refused(tmp_path, damage):
    train(tmp_path, "run.pt", steps=3)
    path = tmp_path / "run.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"checkpoint: expected one .*, but \S+run.pt cannot be"):
        train(tmp_path, "run.pt")


@pytest.mark.parametrize("state", [[1, 2], {"config": repr(RUN)}], ids=["list", "parts missing"])
def test_a_file_of_something_else_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"checkpoint: expected one .*, but \S+run.pt cannot be"):
        train(tmp_path, "run.pt")


def test_a_checkpoint_of_another_config_is_refused(tmp_path):
    train(tmp_path, "run.pt", steps=3)
    other = PretrainConfig(steps=13, warmup=2)
    with pytest.raises(ValueError, match=r"checkpoint: .*steps=12.* this run has .*steps=13"):
        next(pretrain(small_gpt(), windows, other, checkpoint=tmp_path / "run.pt"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(tmp_path, "run.pt", steps=3)
    other = GPT(GPTConfig(11, 12, 32, 2, 2))
    with pytest.raises(ValueError, match=r"checkpoint: \S+run.pt belongs to another model"):
        next(pretrain(other, windows, RUN, checkpoint=tmp_path / "run.pt"))


def test_validation_loss_refuses_to_average_over_nothing():
    with pytest.raises(ValueError, match="max_windows: expected 1 or more, or None, got 0"):
        validation_loss(None, torch.arange(20), 5, max_windows=0)


def test_a_checkpoint_of_a_gpu_goes_on_without_it(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    config = PretrainConfig(steps=4, warmup=1, save_every=2)
    with monkeypatch.context() as gpu:  # what is saved says that it was there
        gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        next(islice(pretrain(small_gpt(), windows, config, checkpoint=path), 2, None))
    assert [m.step for m in pretrain(small_gpt(), windows, config, checkpoint=path)] == [3, 4]


@pytest.mark.parametrize("name", ["steps", "eval_every", "save_every"])
def test_counts_are_whole_numbers(name):
    with pytest.raises(ValueError, match=f"{name}: expected a whole number of 1 or more, got 30.5"):
        PretrainConfig(**{name: 30.5})


def test_documents_are_stacked_with_their_loss_mask():
    ids, mask = pretraining.documents_batch([([5], [6, 7]), ([1, 2, 3], [4])], pad_id=9)
    assert ids.tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]
