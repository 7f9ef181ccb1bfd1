"""Small losses in a style of their own, such as an earlier judge was wrong about: what is said."""

import pytest
import torch
from torch import nn

from minigrpo.clinic.judge import judge_loss

WAYS = """
import torch
from torch.nn.functional import kl_div

def clipped(r, A, low=0.2, high=0.2):
    return torch.min(r * A, r.clamp(1 - low, 1 + high) * A)

def dual(r, A, c):
    return torch.where(A < 0, torch.max(clipped(r, A), c * A), clipped(r, A))

def rows(x, m):
    return ((x * m).sum(1) / m.sum(1).clamp(min=1)).mean()

def tokens(x, m):
    return (x * m).sum() / m.sum().clamp(min=1)

def sums(x, m):
    return (x * m).sum(1).mean()

def k3(d):
    return (-d).exp() - 1 + d

def groups(rewards, G, eps=1e-4, correction=1):
    g = rewards.view(-1, G)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, correction=correction) + eps))

def others(rewards, G):
    out = []
    for i in range(len(rewards)):
        k = i - i % G
        beside = torch.cat([rewards[k:i], rewards[i + 1 : k + G]])
        std = beside.std() if G > 2 else beside[0] - beside[0]
        a = rewards[i] - beside.mean()
        out.append(a / (std + 1e-6) if std > 0 else a)
    return torch.stack(out)

def loss(log_probs, old_log_probs, advantages, mask OPTIONS):
    r, A, m = (log_probs - old_log_probs).exp(), advantages[:, None], mask
    d, on = DIFFERENCE, (log_probs - log_probs.detach()).exp()
    return VALUE

def paid(log_probs, old_log_probs, rewards, group_size, mask):
    r, A, m = (log_probs - old_log_probs).exp(), groups(rewards, group_size, correction=0), mask
    A = A.reshape(-1, 1)
    return VALUE

def made(rewards, group_size):
    return (VALUE).flatten()
"""
FIXED, REF = ", ref_log_probs", ", ref_log_probs, kl_weight=0.1"
ON_POLICY = "ratio_against_itself_though_there_are_old_log_probs"
CASES = {  # what is called, its options, what it returns; mistakes, then notes, and words
    "one_epsilon": ("loss", ", clip=(0.2, 0.2)", "-rows(clipped(r, A, clip[0], clip[0]), m)", []),
    "reinforce": ("loss", "", "-sums(log_probs * A, m)", [ON_POLICY]),
    "ratio_without_clip": ("loss", "", "-sums(r * A, m)", ["no_clip"]),
    "clip_token_sum": ("loss", "", "-sums(clipped(r, A), m)", []),
    "starred": ("loss", ", **kwargs", "-rows(clipped(r, A), m)", []),
    "clip_0272": ("loss", "", "-tokens(clipped(r, A, 0.2, 0.272), m)", []),
    "numbers": ("loss", FIXED, "rows(0.03 * k3(d) - clipped(r, A, 0.2, 0.272), m)", [],
                "clip=(0.2, 0.272), kl_weight=0.03"),
    "cap_of_10": ("loss", "", "-rows(r.clamp(max=10).detach() * A * log_probs, m)", [],
                  "clip=(0.2, 9.0)"),
    "eps_1e_3": ("made", "", "groups(rewards, group_size, 1e-3)", []),
    "eps_1e_6": ("made", "", "groups(rewards, group_size, 1e-6)", []),
    "in_float32": ("made", "", "groups(rewards.float(), group_size)", []),
    "of_numpy": ("made", "", "groups(rewards, group_size).numpy()", []),
    "negated": ("loss", REF, "-rows(kl_weight * k3(d) - clipped(r, A), m)",
                ["the_whole_loss_negated"]),
    "kl_turned": ("loss", REF, "rows(-kl_weight * k3(d) - clipped(r, A), m)",
                  ["kl_subtracted_from_the_loss"]),
    "population": ("paid", "", "-tokens(clipped(r, A), m)", ["population_std"]),
    "population_and_clamp": ("paid", "", "-tokens(r.clamp(0.8, 1.2) * A, m)",
                             ["clamp_without_min", "population_std"]),
    "cispo_two_bounds": ("loss", ", clip=(0.2, 4.0)",
                         "-tokens(r.clamp(1 - clip[0], 1 + clip[1]).detach() * A * log_probs, m)",
                         ["cispo_two_bounds"]),
    "cut_off_at_8": ("loss", "", "-rows(r.clamp(max=8) * A, m)", ["ratio_cut_off"]),
    "dual_clip_5": ("loss", "", "-tokens(dual(r, A, 5), m)", ["dual_clip"]),
    "kl_up_to_10": ("loss", REF, "rows(kl_weight * k3(d).clamp(max=10) - clipped(r, A), m)",
                    ["k3_up_to"]),
    "kl_detached": ("loss", REF, "rows(kl_weight * k3(d).detach() - clipped(r, A), m)",
                    ["kl_without_a_gradient"]),
    "kl_of_the_old_policy": ("loss", REF, "rows(kl_weight * (old_log_probs - ref_log_probs) - "
                             "clipped(r, A), m)", ["kl_without_a_gradient"]),
    "rows_summed": ("loss", ", max_length", "-(clipped(r, A) * m).sum() / max_length",
                    ["sum_over_the_rows"]),
    "rows_summed_dual": ("loss", ", max_length", "-(dual(r, A, 3) * m).sum() / max_length",
                         ["sum_over_the_rows", "dual_clip"]),
    "reinforce_token_mean": ("loss", "", "-tokens(log_probs * A, m)", [ON_POLICY]),
    "reinforce_mask_missing": ("loss", "", "-(log_probs * A).sum() / m.sum()",
                               ["mask_in_the_denominator_only", ON_POLICY]),
    "one_ratio": ("loss", "", "-clipped((r.log() * m).sum().exp(), advantages).mean()",
                  ["one_ratio_for_the_batch", "masked_rows_leave_the_denominator"]),
    "never_empty": ("loss", "", "-((clipped(r, A) * m).sum(1) / m.sum(1)).mean()",
                    ["masked_row_divides_by_zero"]),
    "minus_k1": ("loss", REF, "rows(-kl_weight * d - clipped(r, A), m)",
                 ["k1_with_the_opposite_sign"]),
    "k1_times_the_ratio": ("loss", REF, "rows(kl_weight * r * d - clipped(r, A), m)",
                           ["k1_times_the_ratio"]),
    "k3_times_one": ("loss", REF, "rows(kl_weight * on * k3(d) - clipped(r, A), m)",
                     ["k3_times_one"]),
    "other_names": ("loss", ", epsilon_low=0.2, epsilon_high=0.2, beta=0.0, ref_logprobs=None",
                    "-rows(clipped(r, A, epsilon_low, epsilon_high) - beta * k3(-d), m)",
                    ["k3_with_the_opposite_sign"]),
    "shifted_left": ("loss", "", "-rows(clipped(r, A)[:, :-1], m[:, 1:])", ["mask_off_by_one"]),
    "shifted_right": ("loss", "", "-rows(clipped(r, A)[:, 1:], m[:, :-1])", ["mask_off_by_one"]),
    "kl_div": ("loss", FIXED, "rows(0.03 * kl_div(log_probs, ref_log_probs, log_target=True, "
               "reduction='none') - clipped(r, A), m)", ["kl_div_of_sampled_tokens"],
               "kl_weight=0.03"),
    "kl_div_turned": ("loss", FIXED, "rows(0.03 * kl_div(ref_log_probs, log_probs, "
                      "log_target=True, reduction='none') - clipped(r, A), m)",
                      ["kl_div_of_sampled_tokens"], "kl_weight=0.03"),
    "kl_div_nan": ("loss", ", ref_log_probs, beta=0.03", "rows(beta * kl_div(log_probs, "
                   "ref_log_probs, reduction='none') - clipped(r, A), m)",
                   ["kl_div_without_log_target"]),
    "kl_to_the_old": ("loss", FIXED, "rows(0.03 * k3(-r.log()) - clipped(r, A), m)",
                      ["kl_against_the_old_policy"], "kl_weight=0.03"),
    "to_the_old_alone": ("loss", "", "tokens(0.04 * k3(r.log()) - clipped(r, A), m)", ["unknown"]),
    "sequences": ("loss", "", "-((r.log() * m).sum(1).exp() * advantages).mean()", ["no_clip"],
                  "level='sequence'"),
    "no_lower_bound": ("loss", "", "-rows(clipped(r, A, low=1e9), m)", ["no_lower_bound"],
                       "clip=(1.0, 0.2)"),
    "no_upper_bound": ("loss", "", "-rows(clipped(r, A, high=1e9), m)", ["no_upper_bound"],
                       "clip=(0.2, inf)"),
    "eps": ("loss", ", eps=0.2", "-rows(clipped(r, A, eps), m)", ["unknown"]),  # in one bound alone
    "eps_of_a_division": ("loss", ", eps=1e-8", "-(clipped(r, A) * m).sum() / (m.sum() + eps)", [],
                          "Not used, so not judged: eps."),
    "never_read": ("loss", ", cliprange=0.2", "-rows(clipped(r, A), m)", [],
                   "Not used, so not judged: cliprange."),
    "max_for_min": ("loss", "", "rows(clipped(r, -A, 0.2, 0.272), m)", ["max_for_min"]),
    "no_eps": ("made", "", "groups(rewards, group_size, 0)", ["std_without_eps"], "nan, nan"),
    "of_the_others": ("made", "", "others(rewards, group_size)", ["std_of_the_others"]),
    "ranks": ("made", "", "rewards.view(-1, group_size).argsort(1).argsort(1).double() - 0.5",
              ["unknown"]),
    "no_mask_at_all": ("loss", "", "-clipped(r, A).sum()", ["unknown"]),  # nor in a denominator
    "a_dict": ("loss", "", "{'loss': -rows(clipped(r, A), m)}", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_small_loss_gets_its_verdict(case):
    function, options, value, names, *words = CASES[case]
    difference = "0.0"
    if "ref" in options:
        difference = "log_probs - ref_log_probs"
    if "ref_logprobs" in options:
        difference = "log_probs - (log_probs if ref_logprobs is None else ref_logprobs)"
    source = WAYS.replace("DIFFERENCE", difference).replace(" OPTIONS", options)
    module: dict = {}
    exec(source.replace("VALUE", value), module)
    report = judge_loss(module[function])
    unknown = ["unknown"] * (report.verdict == "unknown")
    assert [*report.mistakes, *report.notes, *unknown] == names, report.text
    assert all(word in " ".join(report.more.split()) for word in words)


class OldFirst(nn.Module):
    def forward(self, old_logprobs, logprobs, advantages, padding_masks):
        r, A = (logprobs - old_logprobs).exp(), advantages[:, None]
        s = torch.min(r * A, r.clamp(0.8, 1.2) * A) * padding_masks
        return (s.sum(1) / padding_masks.sum(1).clamp(min=1)).mean().neg()


def test_a_module_is_called_in_the_order_of_its_forward():
    assert judge_loss(OldFirst()).verdict == "right"


def verl_like(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2, agg="token-mean"):
    r = (log_prob - old_log_prob).exp()
    s = torch.min(r * advantages, r.clamp(1 - cliprange, 1 + cliprange) * advantages)
    return -(s * response_mask).sum() / response_mask.sum()


def test_advantages_per_token_are_judged_and_what_is_not_used_is_said():
    report = judge_loss(verl_like)
    assert report.verdict == "notes" and report.notes == ["advantages_per_token"]
    assert report.text.splitlines()[1] == "Not used, so not judged: agg."
