"""Micro-batches: whether two unequal parts of a batch add up, and how they have to be weighted."""

import pytest
import torch

from minigrpo.clinic.judge import judge_loss
from minigrpo.clinic.judge.micro_batches import NAME
from minigrpo.objective import grpo_loss


def per_token(log_probs, old_log_probs, advantages):
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio, A = (log_probs - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)


def row_means(values, mask):
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def by_rows(log_probs, old_log_probs, advantages, mask):
    return row_means(per_token(log_probs, old_log_probs, advantages), mask).mean()


def by_tokens(log_probs, old_log_probs, advantages, mask):
    values = per_token(log_probs, old_log_probs, advantages)
    return (values * mask).sum() / mask.sum().clamp(min=1)


def summed(log_probs, old_log_probs, advantages, mask):
    return (per_token(log_probs, old_log_probs, advantages) * mask).sum()


def of_the_batch(log_probs, old_log_probs, advantages, mask):
    return by_tokens(log_probs, old_log_probs, advantages / (1 + advantages.abs().max()), mask)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (by_rows, "is the mean of its parts, weighted by their rows"),
        (by_tokens, "the mean of two parts isn't the loss of the whole batch. Weight them by"),
        (summed, "the losses of two parts add up"),
        (grpo_loss, "the losses of two parts add up"),  # it is given `whole`
        (of_the_batch, "is no mean of its parts"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_how_parts_have_to_be_weighted_is_told(loss, words):
    report = judge_loss(loss)
    assert NAME not in report.mistakes
    assert words in report.details["micro_batches"]
    assert report.details["micro_batches"] in " ".join(report.text.split())


def test_a_count_of_the_whole_batch_is_passed_whatever_it_is_called():
    def tokens(log_probs, old_log_probs, advantages, mask, num_items_in_batch=None):
        return summed(log_probs, old_log_probs, advantages, mask) / num_items_in_batch.clamp(min=1)

    def rows(log_probs, old_log_probs, advantages, mask, global_valid_seqs):
        values = per_token(log_probs, old_log_probs, advantages)
        return row_means(values, mask).sum() / global_valid_seqs

    def either(
        log_probs, old_log_probs, advantages, mask, how="token_mean", dp_size=1,
        batch_num_tokens=None, global_batch_size=None,
    ):  # fmt: skip
        if how == "token_mean":
            total, count = summed(log_probs, old_log_probs, advantages, mask), batch_num_tokens
        elif how == "sequence_mean":
            values = per_token(log_probs, old_log_probs, advantages)
            total, count = row_means(values, mask).sum(), global_batch_size
        else:
            raise NotImplementedError(how)
        return total / count * dp_size

    for loss in (tokens, rows, either):
        report = judge_loss(loss)
        assert (report.verdict, report.mistakes) == ("right", []), report.text
        assert "the losses of two parts add up" in report.text


def rescaled(log_probs, old_log_probs, advantages, mask, num_items_in_batch):
    return by_rows(log_probs, old_log_probs, advantages, mask) * mask.sum() / num_items_in_batch


def other_average_of_the_kl(
    log_probs, old_log_probs, advantages, mask, num_items_in_batch, ref_log_probs=None, beta=0.0
):
    d = ref_log_probs - log_probs
    kl = ((d.exp() - d - 1) * mask).sum() / mask.sum().clamp(min=1)
    return summed(log_probs, old_log_probs, advantages, mask) / num_items_in_batch + beta * kl


def only_in_one_mode(
    log_probs, old_log_probs, advantages, mask, global_batch_size, n_tokens, how="sequence_mean"
):
    values = per_token(log_probs, old_log_probs, advantages)
    if how == "sequence_mean":
        return row_means(values, mask).sum() / global_batch_size
    if how == "constant":
        raise NotImplementedError(how)
    return by_tokens(log_probs, old_log_probs, advantages, mask) * len(mask) / global_batch_size


@pytest.mark.parametrize("loss", [rescaled, other_average_of_the_kl, only_in_one_mode])
def test_parts_that_do_not_add_up_with_the_count_are_a_mistake(loss):
    report = judge_loss(loss)
    assert (report.verdict, report.mistakes) == ("mistake", [NAME])
    case = report.details["mistakes"][NAME]
    assert "in parts of 1 row and 2 rows" in case["case"] and case["got"] != case["expected"]


def test_a_count_that_is_not_read_is_said_and_no_mistake():
    def loss(log_probs, old_log_probs, advantages, mask, num_items_in_batch=None):
        return by_tokens(log_probs, old_log_probs, advantages, mask)

    report = judge_loss(loss)
    assert report.verdict == "notes" and report.notes == ["whole_batch_not_counted"]
    assert "by their tokens" in report.details["micro_batches"]
    assert "Not used, so not judged: num_items_in_batch." in report.text


def test_another_mistake_is_not_told_twice():
    def loss(log_probs, old_log_probs, advantages, mask, num_items_in_batch):
        ratio, A = (log_probs - old_log_probs).exp(), advantages[:, None]
        values = -ratio.clamp(0.8, 1.2) * A * mask
        return values.sum() / num_items_in_batch

    report = judge_loss(loss)
    assert report.mistakes == ["clamp_without_min"] and "Micro-batches" not in report.text
