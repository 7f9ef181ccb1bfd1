"""Answers to the exercises of notebook 03."""

import torch
from attack import right, wrong


def floats(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


IDS = torch.tensor([[4, 1, 4, 2], [0, 4, 3, 4], [1, 2, 4, 4]])
HOLES = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]])


@wrong("3.1", IDS, HOLES, 4)
def share_of_the_first_tokens(completions, mask, letter_id):
    lengths = mask.sum(dim=-1).long().tolist()
    shares = [(row[:n] == letter_id).float().mean() for row, n in zip(completions, lengths)]
    return torch.stack(shares)


@right("3.2")
def by_numpy(rewards, group_size):
    r = rewards.numpy().reshape(-1, group_size)
    a = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-4)
    a[r.max(1) == r.min(1)] = 0
    return torch.from_numpy(a.reshape(-1))


LOG_PROBS = floats([-1.0, -2.0, 0.0], [-0.5, -3.0, -4.0])
REAL = torch.tensor([[1, 0, 1], [1, 1, 0]])


@wrong("3.3", LOG_PROBS, REAL, floats(1.0, 0.0))
def idle_completions_left_out(log_probs, mask, advantages):
    log_p = torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)
    return -(advantages * log_p).sum() / (advantages != 0).sum().clamp(min=1)


@right("3.3")
def one_completion_after_another(log_probs, mask, advantages):
    losses = [-A * row[real].sum() for A, row, real in zip(advantages, log_probs, mask.bool())]
    return torch.stack(losses).mean()


@right("3.3")
def token_by_token(log_probs, mask, advantages):
    weighted = torch.where(mask.bool(), advantages[:, None] * log_probs, 0.0)
    return -weighted.sum() / len(advantages)


@right("3.4")
def a_tensor_and_cleared_afterwards(policy, sample_batch, grade, compare, loss_of, *, passes, lr):
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    optimizer.zero_grad()
    means = torch.zeros(len(passes))
    for step, updates in enumerate(passes):
        batch = sample_batch(policy)
        rewards = grade(batch)
        means[step] = rewards.mean()
        advantages = compare(rewards)
        while updates:
            loss_of(policy, batch, advantages).backward()
            optimizer.step()
            policy.zero_grad()
            updates -= 1
    return means


@right("3.4")
def adamw_without_decay(policy, sample_batch, grade, compare, loss_of, *, passes, lr):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    means = []
    for updates in passes:
        batch = sample_batch(policy)
        with torch.no_grad():
            rewards = grade(batch)
            advantages = compare(rewards)
        for _ in range(updates):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(policy, batch, advantages)
            loss.backward()
            optimizer.step()
        means.append(rewards.mean())
    return torch.stack(means)


@wrong("3.7", floats(0.0, 1.0), floats(1.0, 1.0), 0.2)
def ratio_kept_above_zero(ratio, advantages, clip):
    ratio = ratio.clamp(min=1e-8)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


@right("3.7")
def the_four_cases(ratio, advantages, clip):
    J = ratio * advantages
    J = torch.where((advantages > 0) & (ratio > 1 + clip), (1 + clip) * advantages, J)
    return torch.where((advantages < 0) & (ratio < 1 - clip), (1 - clip) * advantages, J)
