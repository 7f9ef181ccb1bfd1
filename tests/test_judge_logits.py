"""Losses that take logits: the judge makes the logits, and names a wrong shift or temperature."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minigrpo.clinic.judge import judge_loss
from minigrpo.clinic.judge.logits import OF_LOGITS
from minigrpo.objective import grpo_loss

FIRST, LAST, ALL = slice(1, None), slice(None, -1), slice(None)  # cut off the first, the last, none


def surrogate(new, old, advantages, mask, better=torch.minimum):
    old = new.detach() if old is None else old
    ratio, A = (new - old).exp(), advantages[:, None]
    values = -better(ratio * A, ratio.clamp(0.8, 1.2) * A) * mask
    return (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def gathered(logits, ids):
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)


def subtracted(logits, ids):
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(dim=-1)


def crossed(logits, ids):
    values = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none")
    return -values.view(ids.shape)


def loss_with(score=gathered, logits_at=LAST, ids_at=FIRST, mask_at=ALL, heat=torch.div, **better):
    """One that is given the ids that the model has read."""

    def loss(logits, input_ids, old_log_probs, advantages, completion_mask, temperature=1.0):
        new = score(heat(logits[:, logits_at], temperature), input_ids[:, ids_at])
        return surrogate(new, old_log_probs, advantages, completion_mask[:, mask_at], **better)

    return loss


@pytest.mark.parametrize("score", [gathered, subtracted, crossed])
@pytest.mark.parametrize("mask_at", [ALL, FIRST], ids=["mask (N, T)", "mask (N, T+1)"])
def test_one_that_shifts_is_right_in_any_style(score, mask_at):
    report = judge_loss(loss_with(score, mask_at=mask_at))
    assert (report.verdict, report.mistakes, report.notes) == ("right", [], [])
    assert "given as (N, T+1, V), with input_ids (N, T+1), at a temperature of 0.7" in report.text
    assert "40 of 40 of TRL's answers agree" in report.text
    assert "the shift by one" not in report.more and "the sampler" in report.more


@pytest.mark.parametrize("score", [gathered, subtracted, crossed])
def test_one_that_is_given_them_shifted_is_right(score):
    def loss(policy_logits, labels, old_logps, adv, mask):
        return surrogate(score(policy_logits, labels), old_logps, adv, mask)

    report = judge_loss(loss)
    assert (report.verdict, report.notes) == ("right", [])
    assert "given as (N, T, V), with labels (N, T)." in report.text


def test_under_the_name_of_what_the_model_reads_it_is_a_note():
    def loss(logits, input_ids, old_log_probs, advantages, mask):
        return surrogate(gathered(logits, input_ids), old_log_probs, advantages, mask)

    report = judge_loss(loss)
    assert report.passed and report.notes == ["logits_not_shifted"]
    assert "right where the logits were shifted" in report.text.replace("\n  ", " ")


def cut_everywhere(logits, labels, old_log_probs, advantages, mask):
    new, old = gathered(logits[:, :-1], labels[:, 1:]), old_log_probs
    return surrogate(new, old if old is None else old[:, 1:], advantages, mask[:, 1:])


def all_beside_the_logits(logits, input_ids, old_log_probs, advantages, mask):
    """Old log-probs and mask stand where the logits do."""
    new, old = gathered(logits[:, :-1], input_ids[:, 1:]), old_log_probs
    return surrogate(new, old if old is None else old[:, :-1], advantages, mask[:, :-1])


def old_beside_the_logits(logits, input_ids, old_log_probs, advantages, mask):
    new, old = gathered(logits[:, :-1], input_ids[:, 1:]), old_log_probs
    return surrogate(new, old if old is None else old[:, :-1], advantages, mask)


def padded(logits, tokens, old_log_probs, advantages, mask):
    new = F.pad(gathered(logits[:, :-1], tokens[:, 1:]), (1, 0))
    return surrogate(new, old_log_probs, advantages, mask)


def own_ids(logits, completion_ids, old_log_probs, advantages, mask, temperature):
    logits = logits[:, :-1]
    logits.div_(temperature)
    return surrogate(gathered(logits, completion_ids), old_log_probs, advantages, mask)


def old_logits_too(new_logits, old_logits, actions, advantages, action_mask, temp=1.0):
    old = old_logits if old_logits is None else gathered(old_logits[:, :-1] / temp, actions)
    new = gathered(new_logits[:, :-1] / temp, actions)
    return surrogate(new, old, advantages, action_mask)


def labels_alone(logits, labels, old_log_probs, advantages):
    logits, labels = logits[:, :-1].transpose(1, 2), labels[:, 1:]
    new = -F.cross_entropy(logits, labels, reduction="none")  # 0 where it's -100
    return surrogate(new, old_log_probs, advantages, labels != -100)


def with_a_bonus(logits, input_ids, old_log_probs, advantages, mask, entropy_coef=0.01):
    all_of = logits[:, :-1].log_softmax(dim=-1)
    new = all_of.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    entropy = -(all_of.exp() * all_of).sum(dim=-1)
    return surrogate(new, old_log_probs, advantages, mask) - entropy_coef * entropy.mean()


def at_one_temperature(logits, input_ids, old_log_probs, advantages, mask):
    new = gathered(logits[:, :-1] / 0.6, input_ids[:, 1:])
    return surrogate(new, old_log_probs, advantages, mask)


def from_rewards(logits, input_ids, old_log_probs, rewards, group_size, mask):
    groups = rewards.view(-1, group_size)
    std = groups.std(dim=1, keepdim=True)
    A = ((groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)).flatten()
    return surrogate(gathered(logits[:, :-1], input_ids[:, 1:]), old_log_probs, A, mask)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (cut_everywhere, "with labels (N, T+1)."),
        (all_beside_the_logits, "with input_ids (N, T+1)."),
        (old_beside_the_logits, "with input_ids (N, T+1)."),
        (padded, "with tokens (N, T+1)."),
        (own_ids, "(N, T+1, V), with completion_ids (N, T), at a temperature of 0.7."),
        (old_logits_too, "(N, T+1, V), with actions (N, T), at a temperature of 0.7."),
        (labels_alone, "with labels (N, T+1)."),
        (with_a_bonus, "so not judged: entropy_coef."),
        (at_one_temperature, "it divides them by 0.6."),
        (from_rewards, "(N, T+1, V)"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_forms_that_are_right(loss, words):
    report = judge_loss(loss)
    assert (report.verdict, report.mistakes, report.notes) == ("right", [], []), report.text
    assert words in report.text


class PerToken(nn.Module):
    def __init__(self, heat):
        super().__init__()
        self.heat = heat

    def forward(self, logits, target_ids, advantages, generator_logprobs, loss_mask, temperature):
        new = gathered(self.heat(logits, temperature), target_ids)
        old = new.detach() if generator_logprobs is None else generator_logprobs
        ratio = (new - old).exp()
        values = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * loss_mask
        return values.sum() / loss_mask.sum().clamp(min=1)


def test_a_module_that_is_given_an_advantage_per_token():
    report = judge_loss(PerToken(torch.div))
    assert (report.verdict, report.notes) == ("notes", ["advantages_per_token"])
    assert "given as (N, T, V), with target_ids (N, T)" in report.text
    assert judge_loss(PerToken(torch.mul)).mistakes == ["temperature_multiplied"]


WRONG = {
    "logits_not_shifted": dict(ids_at=LAST),
    "logits_not_shifted ": dict(logits_at=FIRST, ids_at=LAST),
    "logits_not_shifted  ": dict(logits_at=FIRST, ids_at=FIRST, mask_at=FIRST),
    "mask_off_by_one": dict(mask_at=LAST),
    "temperature_ignored": dict(heat=lambda logits, temperature: logits),
    "temperature_multiplied": dict(heat=torch.mul),
    "logits_without_a_softmax": dict(
        score=lambda logits, ids: logits.gather(-1, ids[..., None]).squeeze(-1)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    report = judge_loss(loss_with(**WRONG[name]))
    assert report.mistakes == [name.strip()] and not report.details["unknown"]
    assert OF_LOGITS[name.strip()] in " ".join(report.text.split())


def test_log_probs_that_are_divided_by_the_temperature():
    def loss(logits, input_ids, old_log_probs, advantages, mask, temperature=1.0):
        new = gathered(logits[:, :-1], input_ids[:, 1:]) / temperature
        return surrogate(new, old_log_probs, advantages, mask)

    report = judge_loss(loss)
    assert report.mistakes == ["temperature_after_the_softmax"] and not report.details["unknown"]


def test_own_ids_with_the_wrong_logits():
    def loss(logits, completion_ids, old_log_probs, advantages, mask):
        new = gathered(logits[:, 1:], completion_ids)
        return surrogate(new, old_log_probs, advantages, mask)

    assert judge_loss(loss).mistakes == ["logits_not_shifted"]


def test_other_mistakes_are_named_beside_them():
    clamped = dict(better=lambda unclipped, clipped: clipped)
    assert judge_loss(loss_with(**clamped)).mistakes == ["clamp_without_min"]
    report = judge_loss(loss_with(**clamped, heat=torch.mul, mask_at=LAST))
    assert report.mistakes == ["mask_off_by_one", "temperature_multiplied", "clamp_without_min"]


def with_a_reference(kl):
    def loss(logits, input_ids, old_log_probs, advantages, mask, ref_logits=None, beta=0.0):
        logits, ids = logits[:, :-1], input_ids[:, 1:]
        new, A = gathered(logits, ids), advantages[:, None]
        ratio = (new - (new.detach() if old_log_probs is None else old_log_probs)).exp()
        values = -torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)
        values = values + beta * kl(logits, ref_logits[:, :-1], ids)
        return ((values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()

    return loss


def k3_of(d):
    return d.exp() - d - 1


def test_a_reference_in_logits():
    right = with_a_reference(lambda new, ref, ids: k3_of(gathered(ref, ids) - gathered(new, ids)))
    report = judge_loss(right)
    assert (report.verdict, report.mistakes) == ("right", []) and "80 of 80" in report.text
    wrong = with_a_reference(lambda new, ref, ids: k3_of(gathered(new, ids) - gathered(ref, ids)))
    assert judge_loss(wrong).mistakes == ["k3_with_the_opposite_sign"]


def test_every_option_reaches_a_loss_that_takes_logits():
    def loss(logits, input_ids, old_log_probs, advantages, mask, temperature=1.0, **options):
        new = gathered(logits[:, :-1] / temperature, input_ids[:, 1:])
        return grpo_loss(new, old_log_probs, advantages, mask, **options)

    report = judge_loss(loss)
    assert report.verdict == "right" and "440 of 440 of TRL's answers agree" in report.text


def test_names_can_be_said():
    def loss(scores_of_all, written, old_log_probs, advantages, mask):
        new = gathered(scores_of_all[:, :-1], written[:, 1:])
        return surrogate(new, old_log_probs, advantages, mask)

    assert judge_loss(loss).verdict == "not judged"
    names = {"scores_of_all": "logits", "ids": "written"}  # whichever comes first
    report = judge_loss(loss, names)
    assert report.verdict == "right" and "written is ids." in report.more
    report = judge_loss(loss, {"written": "logit"})
    assert report.verdict == "not judged" and "ids, temperature, got 'logit'" in report.text


@pytest.mark.parametrize("error", [AttributeError, SystemExit])
def test_what_it_raises_is_told_with_the_line(error):
    def loss(logits, input_ids, old_log_probs, advantages, mask):
        raise error("no such thing")

    report = judge_loss(loss)
    assert report.verdict == "not judged" and "no such thing" in report.text
    assert "test_judge_logits.py:" in report.text


def test_while_it_is_read_and_asked_for_leaks_it_prints_and_ends_nothing(capsys):
    def loss(logits, labels, old_log_probs, advantages, mask):
        print("loud")
        if advantages.requires_grad:
            raise SystemExit(5)
        return surrogate(gathered(logits, labels), old_log_probs, advantages, mask)

    assert judge_loss(loss).verdict == "right" and not capsys.readouterr().out
