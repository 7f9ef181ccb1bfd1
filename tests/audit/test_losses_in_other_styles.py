"""The judge of losses: each mistake is found by name in code of another style, too."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
import pytest
from test_clinic_losses import AVERAGES, BUILT_IN, LOOPS, judged  # noqa: F401

from minigrpo.clinic.judge.verdict import CAUTIONS

ROW_MEAN = "value = sum(r / max(c, 1) for r, c in zip(rows, counts)) / len(rows)"
CLIP = "low, high = clip"
PLANTED = [  # where such a style behaves otherwise than ours
    ("ratio_against_itself_though_there_are_old_log_probs", CLIP, f"{CLIP}; old_logps = None"),
    ("negative_advantages_clipped_on_the_wrong_side",
     "gain = torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)",
     "gain = torch.clamp(ratio, max=1 + high) * a"),
    ("cispo_weight_not_detached", "torch.clamp(ratio.detach(), max", "torch.clamp(ratio, max"),
    ("k3_with_the_opposite_sign", "kl = torch.exp(-d) - 1 + d", "kl = torch.exp(d) - 1 - d"),
    ("k1_as_the_loss", "kl = torch.exp(-d) - 1 + d", "kl = d"),
    ("entropy_detached", "append(entropy[i, t])", "append(entropy[i, t].detach())"),
    ("mask_in_the_denominator_only", "continue\n", "count -= 1\n"),
    ("mean_over_the_padding", ROW_MEAN, "value = sum(rows) / mask.numel()"),
    ("masked_rows_leave_the_denominator", ROW_MEAN,
     ROW_MEAN.replace("len(rows)", "max(1, sum(c > 0 for c in counts))")),
    ("advantages_not_detached", "a = adv[i].item()", "a = adv[i]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "instead"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_mistake_is_found_by_name_in_another_style(judged, name, line, instead):
    assert LOOPS.count(line) == 1
    report = judged(LOOPS.replace(line, instead))
    assert [*report.mistakes, *report.notes, *report.cautions] == [name], report.text


NUMPYISH = """
def advantages(r, G, eps=1e-4):
    out = r.clone()
    for k in range(0, len(r), G):
        group = r[k:k + G]
        m = group.mean()
        s = (((group - m) ** 2).sum() / (G - 1)) ** 0.5
        out[k:k + G] = (group - m) / (s + eps)
    return out
"""


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("std_clamped_instead_of_plus_eps", "(s + eps)", "max(s, eps)"),
        ("mean_over_the_batch", "m = group.mean()", "m = r.mean()"),
        ("groups_mix_prompts", "[k:k + G]", "[k // G::len(r) // G]"),
    ],
)
def test_a_mistake_about_advantages_is_found_in_another_style(judged, name, line, instead):
    report = judged(NUMPYISH, "advantages")
    assert report.passed and set(report.cautions) <= set(CAUTIONS), report.text
    report = judged(NUMPYISH.replace(line, instead), "advantages")
    assert report.mistakes == [name], report.text


@pytest.mark.parametrize(("how", "high"), [*zip(AVERAGES, ["0.2", "0.28", "0.2"])])
def test_what_is_built_in_is_found_out_and_said(judged, how, high):
    source = BUILT_IN.replace("AVERAGE", AVERAGES[how]).replace("HIGH", high)
    report = judged(source)
    assert report.passed, report.text
    assert f"how={how!r}" in report.text and f"clip=(0.2, {high})" in report.text
    assert ("max_length=32" in report.text) == (how == "constant")
    assert "old_log_probs=None" in report.details["not_covered"]  # it can't take it
    wrong = judged(source.replace("-(", "(").replace("-gain", "gain"))
    assert wrong.mistakes == ["loss_minimises_the_objective"], wrong.text


STYLES = """
import torch
from minigrpo.objective import grpo_loss

def in_float32(logps, old, adv, mask, clip=(0.2, 0.2), how="sequence_mean", max_length=None):
    old = None if old is None else old.float()
    return grpo_loss(logps.float(), old, adv.float(), mask, clip=clip, how=how,
                     max_length=max_length)

def clipped(logps, old, a, low=0.2, high=0.2):
    r = (logps - old).exp()
    return torch.min(r * a, r.clamp(1 - low, 1 + high) * a)

def rows(t, mask):
    return -((t * mask).sum(1) / (mask.sum(1) + 1e-8)).mean()

def gspo(logps, old, adv, mask):
    mask = mask.float()
    mean = ((logps - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -clipped(mean, 0, adv, 3e-4, 4e-4).mean()

def with_kl(logps, old, adv, mask, ref_log_probs):
    d = ref_log_probs - logps
    return rows(clipped(logps, old, adv[:, None]) - 0.04 * (d.exp() - d - 1), mask), {}

def with_kl_subtracted(logps, old, adv, mask, ref_log_probs):
    d = ref_log_probs - logps
    return rows(clipped(logps, old, adv[:, None]) + 0.04 * (d.exp() - d - 1), mask), {}

def unclipped(logps, old, adv, mask):
    return rows((logps - old).exp() * adv[:, None], mask)

def no_mask(logps, old, adv, mask):
    return -clipped(logps, old, adv[:, None]).mean()

def twice(logps, old, adv, mask):
    return 2 * rows(clipped(logps, old, adv[:, None]), mask)

def anything(*given, **options):
    return grpo_loss(*given, **options)

def some(*given, **options):
    return with_kl(*given, given[0].detach(), **options)

def small_eps(rewards, group_size):
    g = rewards.view(-1, group_size)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-8)).view(-1)

def small_eps_population(rewards, group_size):
    g = rewards.view(-1, group_size)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, correction=0) + 1e-8)).view(-1)

def no_std(r, G):
    g = r.view(-1, G)
    return (g - g.mean(1, keepdim=True)).view(-1)

def leave_one_out(rewards, group_size):
    g = rewards.view(-1, group_size)
    return (g - (g.sum(1, keepdim=True) - g) / (group_size - 1)).view(-1)

def in_verls_order(old_log_prob, log_prob, advantages, response_mask):
    t = clipped(log_prob, old_log_prob, advantages) * response_mask
    return -t.sum() / response_mask.sum()

def dual_clip(logps, old, adv, mask):
    a = adv[:, None]
    t = clipped(logps, old, a)
    return rows(torch.where(a < 0, torch.max(t, 3 * a), t), mask)

def asks_for_float32(logps, old, adv, mask):
    assert logps.dtype == adv.dtype == torch.float32
    return dual_clip(logps, old, adv, mask)

def constant(logps, old, adv, mask, max_length):
    return -(clipped(logps, old, adv[:, None]) * mask).sum() / (len(adv) * max_length)

def k2(logps, old, adv, mask, ref_log_probs, kl_weight):
    kl = (ref_log_probs - logps) ** 2 / 2
    return rows((logps - old).exp() * adv[:, None] - kl_weight * kl, mask)

def cispo_through_the_weight(logps, old, adv, mask, clip=(0.2, 4.0)):
    w = (logps - old).exp().clamp(max=1 + clip[1])
    return -(w * adv[:, None] * logps * mask).sum() / mask.sum().clamp(min=1)

def empty_row(logps, old, adv, mask):
    return -((clipped(logps, old, adv[:, None]) * mask).sum(1) / mask.sum(1)).mean()
"""


@pytest.mark.parametrize(
    ("function", "names", "words"),
    [
        ("in_float32", [], "of TRL's answers agree"),
        ("gspo", [], "level='geometric', clip=(0.0003, 0.0004)"),
        ("with_kl", [], "kl_weight=0.04"),
        ("with_kl_subtracted", ["kl_subtracted_from_the_loss"], "kl_weight=0.04"),
        ("unclipped", ["no_clip"], "clip=(1.0, inf)"),
        ("no_mask", ["mean_over_the_padding"], "how='sequence_mean'"),
        ("twice", [], "9 of 24 answers are right"),
        ("anything", [], "440 of 440"),
        ("some", [], "clip=(0.2, 0.2)"),
        ("small_eps", [], "eps=1e-08"),
        ("small_eps_population", ["population_std"], "eps=1e-08"),
        ("no_std", [], "scale='none'"),
        ("leave_one_out", [], "baseline='leave_one_out'"),
        ("in_verls_order", ["advantages_per_token"], "they would run along the tokens"),
        ("dual_clip", ["dual_clip"], "no loss is above 3 times its size"),
        ("asks_for_float32", ["dual_clip"], "no loss is above 3 times its size"),
        ("constant", [], "how='constant'"),
        ("k2", ["no_clip"], "estimator='k2'"),
        ("cispo_through_the_weight", ["cispo_weight_not_detached"], "how='token_mean'"),
        ("empty_row", ["masked_row_divides_by_zero"], "is 0 divided by 0"),
    ],
)
def test_other_styles_are_judged_by_what_they_mean(judged, function, names, words):
    report = judged(STYLES, function)
    assert [*report.mistakes, *report.notes] == names, report.text
    assert words in " ".join(report.more.split())
