"""From tokens to loss through both full stacks: TRL's own GRPOTrainer, and ours."""

from __future__ import annotations

import copy

import pytest
import torch

from minigrpo.files import data_folder
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.scaling.trl import problem_config, problem_rows, trl_loss, trl_trainer
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import TextProblems, answer_reward, format_reward, write

pytest.importorskip("trl", reason="the extra `scale` is not installed")

CHANGES = {
    "sequence mean": {"how": "sequence_mean"},
    "token mean": {"how": "token_mean"},
    "constant": {"how": "constant"},
    "other clip": {"how": "token_mean", "clip": (0.05, 0.1)},
    "geometric": {"how": "sequence_mean", "level": "geometric"},
    "cispo": {"how": "token_mean", "surrogate": "cispo", "clip": (0.2, 0.1)},
}


@pytest.fixture(scope="module")
def text_policy():
    policy, tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu")
    return policy.double(), tokenizer


def trainer(policy, tokenizer, how="token_mean", **changes):
    """A GRPOTrainer as a user makes one, from our settings."""
    config = problem_config(policy, tokenizer, how=how, **{**changes, "kl_weight": 0.0})
    peer = trl_trainer(policy, tokenizer, problem_rows()[:16], config)
    # With a beta it would load a reference of its own.
    peer.beta = changes.get("kl_weight", 0.0)
    return peer


@pytest.fixture(scope="module")
def batch(text_policy):
    """Rollouts of three prompts of different lengths, four each, with their advantages."""
    policy, tokenizer = text_policy
    rows = draw_rows(3, torch.Generator().manual_seed(4))
    prompts = [row["prompt"] for row in rows for _ in range(4)]
    rollouts, texts = write(policy, tokenizer, prompts, seed=2)
    assert len(set(rollouts.prompt_mask.sum(1).tolist())) > 1  # some prompts are padded
    assert len(set(rollouts.completion_mask.sum(1).tolist())) > 2
    answers = [row["answer"] for row in rows for _ in range(4)]
    form = format_reward(prompts, texts)
    right = answer_reward(prompts, texts, answer=answers)
    rewards = torch.tensor(form, dtype=torch.float64) + 2 * torch.tensor(right)
    advantages = group_advantages(rewards, 4).double()
    assert advantages.abs().max() > 0.5
    return rollouts, advantages


def moved(policy):
    """The policy after a step, so that no ratio is 1 and no KL is 0."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return other


@pytest.mark.parametrize(
    ("name", "beta", "correction"),
    [
        (name, beta, correction)
        for name in CHANGES
        for beta, correction in ((0.0, False), (0.1, False), (0.1, True))
        if not (beta and name == "geometric")  # TRL's KL is then weighted by sequences
    ],
)
def test_the_same_tokens_give_the_same_loss_and_gradient(
    text_policy, batch, name, beta, correction
):
    (policy, tokenizer), (r, advantages) = text_policy, batch
    changes = {**CHANGES[name], "kl_weight": beta, "kl_correction": correction}
    ours, theirs = moved(policy), moved(policy)
    with torch.no_grad():
        ref, _ = completion_log_probs_and_entropy(
            policy, r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask
        )
    log_probs, _ = completion_log_probs_and_entropy(
        ours, r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask
    )
    loss, _ = grpo_loss(
        log_probs,
        r.log_probs,
        advantages,
        r.completion_mask,
        ref_log_probs=ref,
        max_length=40,
        **changes,
    )
    loss.backward()
    peer = trainer(theirs, tokenizer, **changes)
    their_loss = trl_loss(peer, r, advantages, ref)
    their_loss.backward()

    assert abs(loss.item() - their_loss.item()) < 1e-6
    assert abs(loss.item()) > 1e-3
    pairs = zip(ours.parameters(), peer.model.parameters(), strict=True)
    assert max((p.grad - q.grad).abs().max().item() for p, q in pairs) < 1e-6
    assert max(p.grad.abs().max().item() for p in ours.parameters()) > 1e-3


def test_one_reward_function_serves_both(text_policy):
    """TRL calls it with more columns than we do, and gets the same numbers."""
    policy, tokenizer = text_policy
    rows = draw_rows(3, torch.Generator().manual_seed(4))
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    _, texts = write(policy, tokenizer, prompts, seed=2)
    task = TextProblems(tokenizer, rows, weights=(1.0, 2.0))
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    mine = task.reward([torch.tensor(tokenizer(p)["input_ids"]) for p in prompts], ids)

    peer = trainer(copy.deepcopy(policy), tokenizer)
    inputs = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers)]
    each = peer._calculate_rewards(inputs, prompts, texts, [i.tolist() for i in ids])
    theirs = (each * torch.tensor([1.0, 2.0])).sum(1)
    assert mine == theirs.tolist() and len({*mine}) > 1
