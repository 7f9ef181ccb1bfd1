"""From tokens to loss through both full stacks: TRL's own GRPOTrainer, and ours."""

from __future__ import annotations

import copy

import pytest
import torch

from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.problems import draw_rows
from minigrpo.runtime import data_folder
from minigrpo.text import TextProblems, answer_reward, format_reward, load_policy, write

trl = pytest.importorskip("trl", reason="the extra `scale` is not installed")

# TRL's loss_type, and what it is called here.
KINDS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "constant"}


@pytest.fixture(scope="module")
def text_policy():
    policy, tokenizer = load_policy(data_folder() / "text_llama", device="cpu")
    return policy.double(), tokenizer


def trainer(policy, tokenizer, folder, **settings):
    """A GRPOTrainer as a user makes one."""
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=12,
        num_generations=4,
        max_completion_length=40,
        reward_weights=[1.0, 2.0],
        **settings,
    )
    rows = Dataset.from_list(draw_rows(12, torch.Generator().manual_seed(0)))
    return trl.GRPOTrainer(
        model=policy,
        reward_funcs=[format_reward, answer_reward],
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
    )


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("beta", "correction"), [(0.0, False), (0.1, False), (0.1, True)])
def test_the_same_tokens_give_the_same_loss_and_gradient(
    text_policy, batch, kind, beta, correction, tmp_path
):
    (policy, tokenizer), (rollouts, advantages) = text_policy, batch
    ours, theirs = moved(policy), moved(policy)
    r = rollouts
    with torch.no_grad():
        ref, _ = completion_log_probs_and_entropy(
            policy, r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask
        )
    log_probs, _ = completion_log_probs_and_entropy(
        ours, r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask
    )
    settings = {"kl_weight": beta, "how": KINDS[kind], "max_length": 40}
    settings["kl_correction"] = correction
    loss, _ = grpo_loss(
        log_probs, r.log_probs, advantages, r.completion_mask, ref_log_probs=ref, **settings
    )
    loss.backward()

    # With a beta it would load a reference of its own.
    args = {"loss_type": kind, "beta": 0.0, "use_bias_correction_kl": correction}
    teacher = trainer(theirs, tokenizer, tmp_path, **args)
    teacher.beta = beta
    teacher.current_gradient_accumulation_steps = 1
    teacher.model.train()
    inputs = {
        "prompt_ids": r.prompt_ids,
        "prompt_mask": r.prompt_mask.long(),
        "completion_ids": r.completions,
        "completion_mask": r.completion_mask.long(),
        "advantages": advantages,
        "old_per_token_logps": r.log_probs,
        "ref_per_token_logps": ref,
        "num_items_in_batch": r.completion_mask.sum(),
    }
    their_loss = teacher._compute_loss(teacher.model, inputs)
    their_loss.backward()

    assert abs(loss.item() - their_loss.item()) < 1e-6
    assert abs(loss.item()) > 1e-3
    pairs = zip(ours.parameters(), teacher.model.parameters(), strict=True)
    assert max((p.grad - q.grad).abs().max().item() for p, q in pairs) < 1e-6
    assert max(p.grad.abs().max().item() for p in ours.parameters()) > 1e-3


def test_one_reward_function_serves_both(text_policy, tmp_path):
    """TRL calls it with more columns than we do, and gets the same numbers."""
    policy, tokenizer = text_policy
    rows = draw_rows(3, torch.Generator().manual_seed(4))
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    _, texts = write(policy, tokenizer, prompts, seed=2)
    task = TextProblems(tokenizer, rows, weights=(1.0, 2.0))
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    mine = task.reward([torch.tensor(tokenizer(p)["input_ids"]) for p in prompts], ids)

    teacher = trainer(copy.deepcopy(policy), tokenizer, tmp_path)
    inputs = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers)]
    each = teacher._calculate_rewards(inputs, prompts, texts, [i.tolist() for i in ids])
    theirs = (each * torch.tensor([1.0, 2.0])).sum(1)
    assert mine == theirs.tolist()
