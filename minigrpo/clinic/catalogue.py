"""The mistakes that people make, each once: how it looks in the core, and what is told of it.

The judge of losses names them, the clinic's patients and the tests have them `planted`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from minigrpo import grpo
from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic.mistakes import Line, exchanged
from minigrpo.logprobs import (
    completion_log_probs_and_entropy,
    completion_logits,
    next_token_pairs,
)
from minigrpo.objective import (
    _count,
    _ratio_metrics,
    _real,
    _unmasked,
    aggregate,
    clipped_surrogate,
    equal_groups,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_ratio,
)
from minigrpo.sampling import left_pad


class Mistake(NamedTuple):
    name: str
    sentence: str  # what is told to whoever made it
    lines: tuple[Line, ...]  # mostly one


def mistake(name: str, *lines: Line, says: str = "") -> Mistake:
    return Mistake(name, says, lines)


def planted(*mistakes: str | Line) -> AbstractContextManager[None]:
    """For the length of a block, put mistakes, by name or as lines, into the code."""
    lines = (NAMED[m].lines if isinstance(m, str) else (m,) for m in mistakes)
    return exchanged(*sum(lines, ()))


# fmt: off
ROW_MEANS = "(values.sum(dim=-1) / _count(mask, dim=-1)).sum() / rows"
STD = "groups.std(dim=1, keepdim=True)"
MASK = "mask = completion_mask.bool()"
RIGHT = "torch.nn.functional.pad({}[:, :-1].bool(), (1, 0))"  # one token to the right
K3 = "torch.expm1(-d) + d"
MISTAKES = [  # those that the judge of losses names
    mistake("old_over_new",
        (policy_ratio, "_unmasked(log_probs, mask) - _unmasked(old_log_probs, mask)",
         "_unmasked(old_log_probs, mask) - _unmasked(log_probs, mask)"),
        says="The ratio is upside down: it should be new over old, exp(log_probs - "
        "old_log_probs)."),
    mistake("one_ratio_for_the_batch",
        (policy_ratio, 'if level == "token":', "if True:"),
        (policy_ratio, "return log_ratio.exp()", "return log_ratio.sum().exp().expand_as(mask)"),
        says="The log-ratios of all rows are added up before exp, so there's one ratio for the "
        "whole batch. Every row needs its own."),
    mistake("geometric_ratio_divides_by_the_width",
        (policy_ratio, "_count(mask, dim=-1)[:, None]", "mask.shape[-1]"),
        says="The geometric ratio divides by the width of the batch. It should divide by the "
        "number of real tokens in the row."),
    mistake("ratio_against_itself_though_there_are_old_log_probs",
        (grpo_loss, "old_log_probs is None", "True"),
        says="The ratio compares the policy with itself although old log-probs were passed, so "
        "it's 1 in every update and the clip never acts. That's right only if no batch is used for "
        "a second update."),
    mistake("old_log_probs_not_detached", (grpo_loss, "(new if", "(new.detach() if"),
        (grpo_loss, "mask)).detach()", "mask))"),
        says="The old log-probs aren't detached. If they arrive with a graph, their gradient pulls "
        "the other way with the same force."),
    mistake("first_update_without_a_gradient",
        (grpo_loss, '_real("old_log_probs", old_log_probs, mask)).detach()',
         "old_log_probs.detach())"),
        says="Without old log-probs the ratio is new - new, which has no gradient. It has to be "
        "new - new.detach()."),
    mistake("max_for_min", (clipped_surrogate, "torch.minimum(", "torch.maximum("),
        says="The surrogate takes the maximum of the clipped and the unclipped term. It should "
        "take the minimum."),
    mistake("negative_advantages_clipped_on_the_wrong_side",
        (clipped_surrogate, "torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high)",
         "(ratio.clamp(max=1 + high)"),
        says="At negative advantages the clip acts on the wrong side: it should stop the gradient "
        "below 1 - low, and leave it alone above."),
    mistake("clamp_without_min", (clipped_surrogate, "torch.minimum(ratio * advantages, ", "("),
        says="The clamped ratio is used alone, without the minimum. A good token that has become "
        "less likely then loses its gradient."),
    mistake("clip_low_and_high_swapped",
        (clipped_surrogate, "low, high = clip", "high, low = clip"),
        says="The two bounds of the clip are swapped: the first belongs below 1, the second "
        "above."),
    mistake("cispo_weight_not_detached", (grpo_loss, "clip[1]).detach()", "clip[1])"),
        says="CISPO's capped ratio is a constant weight, and here the gradient runs through it."),
    mistake("cispo_caps_at_the_clip_instead_of_one_plus_the_clip",
        (grpo_loss, "max=1 + clip[1]", "max=clip[1]"),
        says="CISPO's ratio is capped at the clip itself. It should be capped at 1 plus the clip."),
    mistake("kl_against_the_old_policy",
        (grpo_loss, "kl_estimate(new, ref", "kl_estimate(new, old"),
        says="The KL term compares the policy with the old policy. It should compare it with the "
        "reference."),
    mistake("k3_with_the_opposite_sign", (kl_estimate, "torch.expm1(-d) + d", "torch.expm1(d) - d"),
        says="k3 is exp(-d) - 1 + d with d = log_probs - ref_log_probs. Here d has the opposite "
        "sign."),
    mistake("k1_as_the_loss",
        (grpo_loss, "kl_estimate(new, ref, estimator=estimator)", "new - ref"),
        says="The KL term is k1, log_probs - ref_log_probs. As a loss it pushes every token down "
        "alike, whatever the reference says."),
    mistake("kl_subtracted_from_the_loss", (grpo_loss, "loss + kl_weight", "loss - kl_weight"),
        says="The KL term is subtracted from the loss. It should be added, or the policy is "
        "rewarded for leaving its reference."),
    mistake("k1_with_the_opposite_sign",
        (grpo_loss, "kl_estimate(new, ref, estimator=estimator)", "ref - new"),
        says="The KL term is ref_log_probs - log_probs, k1 with the opposite sign, which as a loss "
        "pushes every token up alike."),
    mistake("kl_div_of_sampled_tokens",
        (kl_estimate, K3, "ref_log_probs.exp() * -d"),
        says="The KL term is p (log p - log q), as in F.kl_div, which is right if it's summed over "
        "the vocabulary. At sampled tokens it counts the probability twice: take k3."),
    mistake("kl_div_without_log_target",
        (kl_estimate, K3, "torch.xlogy(ref_log_probs, ref_log_probs) - ref_log_probs * log_probs"),
        says="The KL term is NaN: F.kl_div takes its target as probabilities unless "
        "log_target=True, and the logarithm of a log-prob isn't a number."),
    mistake("kl_without_a_gradient",
        (grpo_loss, "kl = kl_estimate(new, ref", "kl = kl_estimate(new.detach(), ref"),
        says="The KL term has a value and no gradient, so it keeps the policy from nothing."),
    mistake("kl_correction_without_the_gradient_of_the_ratio",
        (grpo_loss, "kl * ratio if", "kl * ratio.detach() if"),
        says="The ratio that multiplies the KL estimate is detached. Its gradient belongs to the "
        "gradient of the KL."),
    mistake("entropy_penalty_instead_of_a_bonus",
        (grpo_loss, "loss - entropy_weight", "loss + entropy_weight"),
        says="The entropy is added to the loss, which makes it a penalty. A bonus is subtracted."),
    mistake("entropy_detached",
        (grpo_loss, '* metrics["entropy"]', '* metrics["entropy"].detach()'),
        says="The entropy bonus is detached: the loss shows it, and no gradient follows from it."),
    mistake("mask_by_multiplication",
        (_unmasked, "torch.where(mask.bool(), values, 0.0)", "values * mask"),
        says="The padding is masked by multiplication, and 0 times NaN is NaN. torch.where(mask, "
        "x, 0) is safe."),
    mistake("mask_in_the_denominator_only", (aggregate, "_unmasked(per_token, mask)", "per_token"),
        says="The mask is missing in the numerator: the sum runs over the padding, the count "
        "doesn't."),
    mistake("mask_off_by_one",
        (grpo_loss, MASK, "mask = torch.nn.functional.pad(completion_mask[:, 1:].bool(), (0, 1))"),
        says="The mask is one token off, so that a row gains a token that isn't its own, or loses "
        "its first or last. Log-probs begin with the second token, and the mask has to, too."),
    mistake("mean_over_the_padding", (aggregate, ROW_MEANS, "values.mean()"),
        says="The mean is taken over all columns, padding included, so a short row weighs less "
        "than a long one."),
    mistake("row_mean_for_token_mean", (aggregate, "values.sum() / tokens", ROW_MEANS),
        says="The token mean is computed as a mean of row means. It should be one sum over one "
        "count."),
    mistake("token_mean_for_row_mean", (aggregate, ROW_MEANS, "values.sum() / tokens"),
        says="The mean of row means is computed as one token mean, in which long rows weigh more. "
        "Every row should have its own mean."),
    mistake("sum_over_the_rows", (aggregate, ".sum() / rows", ".sum()"),
        says="The rows are summed, so the step grows with the batch. They should be averaged."),
    mistake("dr_grpo_divides_by_the_width", (aggregate, "(rows * max_length)", "values.numel()"),
        says="Dr. GRPO's sum is divided by the width of this batch. It should be divided by the "
        "constant max_length."),
    mistake("dr_grpo_divides_by_the_lengths",
        (aggregate, "values.sum() / (rows * max_length)", ROW_MEANS),
        says="Dr. GRPO's sum is divided by the length of every row. It should be divided by the "
        "constant max_length."),
    mistake("masked_rows_leave_the_denominator",
        (aggregate, ".sum() / rows", ".sum() / mask.any(dim=-1).sum()"),
        says="A row without a token leaves the mean. It's a 0 that counts."),
    mistake("masked_row_divides_by_zero", (_count, ".clamp(min=1)", ""),
        says="A row without a token is 0 divided by 0, so the loss of the whole batch is NaN."),
    mistake("population_std",
        (group_advantages, STD, "groups.std(dim=1, keepdim=True, correction=0)"),
        says="The standard deviation divides by G. It should divide by G - 1, as torch's std does "
        "on its own."),
    mistake("std_clamped_instead_of_plus_eps",
        (group_advantages, f"({STD} + eps)", f"{STD}.clamp(min=eps)"),
        says="The standard deviation is clamped at eps. The formula adds eps to it."),
    mistake("variance_for_std", (group_advantages, STD, "groups.var(dim=1, keepdim=True)"),
        says="The advantages are divided by the variance. It should be its root, the standard "
        "deviation."),
    mistake("mean_over_the_batch",
        (group_advantages, "groups.mean(dim=1, keepdim=True)", "groups.mean()"),
        says="The mean is taken over the whole batch. Every group needs a mean of its own, or hard "
        "prompts are only punished."),
    mistake("std_over_the_batch", (group_advantages, STD, "groups.std()"),
        says="The standard deviation is taken over the whole batch, although every group was to be "
        "scaled by its own."),
    mistake("groups_mix_prompts",  # and back again
        (group_advantages, "equal = ",
         "rewards = rewards.view(group_size, -1).T.flatten(); equal = "),
        (group_advantages, "else advantages)", "else advantages.view(-1, group_size).T.flatten())"),
        says="The rewards are reshaped the wrong way around, so that a group holds answers to "
        "several prompts."),
    mistake("equal_rewards_not_exactly_zero",
        (group_advantages, "torch.where(equal[:, None], 0.0, advantages)", "advantages"),
        says="Equal rewards leave a trace of rounding, and eps magnifies it. Their advantages "
        "should be exactly 0."),
    mistake("group_of_one_accepted",
        (equal_groups, "check_counts(2, group_size=group_size)", "pass"),
        says="A group of one is accepted, though there's nothing to compare its answer with."),
    mistake("advantages_along_the_tokens",
        (grpo_loss, "new.dtype)[:, None]", "new.dtype)[None, :]"),
        says="The advantages run along the tokens. Every row has one advantage: advantages[:, "
        "None]. A loss that expects a row of them for every row has to be wrapped, as --help "
        "shows."),
    mistake("advantages_not_detached", (grpo_loss, "advantages.detach()", "advantages"),
        says="The advantages aren't detached. If the reward is differentiable, a gradient runs "
        "through it."),
    mistake("loss_minimises_the_objective", (grpo_loss, "average(-objective", "average(objective"),
        says="The sign is wrong: minimizing this loss makes good tokens less likely."),
    mistake("the_whole_loss_negated", (grpo_loss, "return loss, {", "return -loss, {"),
        says="The whole loss has the wrong sign, its KL and entropy terms included. One minus "
        "mends it."),
]
OTHERS = [  # for the clinic and the tests; the judge tells std_without_eps, in another form
    mistake("old_is_new_with_its_graph", (grpo_loss, "old_log_probs is None", "True"),
        (grpo_loss, "mask)).detach()", "mask))")),
    mistake("gradient_of_k1",  # with the value of k3, so that the KL of every patient has one ruler
        (kl_estimate, "torch.expm1(-d) + d", "torch.expm1(-d).detach() + d")),
    mistake("std_without_eps", (group_advantages, f"({STD} + eps)", STD),
        says="Nothing is added to the standard deviation, so equal rewards are 0 divided by 0, and "
        "their advantages are NaN."),
    mistake("rounding_above_the_eps", (group_advantages, "rewards.double()", "rewards.float()"),
        (group_advantages, "groups.mean(dim=1, keepdim=True)",
         "groups.sum(1, keepdim=True) / group_size"),
        (group_advantages, f"({STD} + eps)", f"({STD} + 1e-8)")),
    mistake("padding_read", (_real, "_unmasked(log_probs, mask)", "log_probs"),
        (policy_ratio, "return log_ratio.exp()", "return (log_probs - old_log_probs).exp()")),
    mistake("clipped_whatever_the_advantage", (_ratio_metrics, " & (A > 0)", "")),
    mistake("logits_not_shifted",
        (next_token_pairs, "return logits[:, :-1]", "return logits[:, 1:]"),
        (completion_logits, "[logits, read(completions[:, :-1], readable[:, :-1], cache=cache)",
         "[read(completions, readable, cache=cache)"),
        (completion_logits, "[prompt_ids, completions[:, :-1]]", "[prompt_ids, completions]"),
        (completion_logits, "past_padding(readable[:, :-1], ", "past_padding(readable, ")),
    mistake("padding_scored", (completion_log_probs_and_entropy, "completion_mask.bool()",
         "torch.ones_like(completion_mask).bool()")),
    mistake("others_tokens_scored",
        (grpo.score, "tuple(values.where(rollouts.own, 0.0) for values in scored)", "scored")),
    mistake("padded_on_the_right", (left_pad, "(longest - len(s), 0)", "(0, longest - len(s))"),
        (left_pad, "torch.arange(longest) >= longest - lengths[:, None]",
         "torch.ones(len(rows), longest).bool()")),
    mistake("eos_masked", (grpo.learn, "batches, updates = ",
         "rollouts = replace(rollouts, own=rollouts.own & (rollouts.completions != "
         "config.eos_id)); batches, updates = ")),
    mistake("graded_by_its_own_probability",
        (grpo.rollout, "task.reward(questions, rollouts.unpadded(rollouts.completions), *own)",
         "(rollouts.log_probs.sum(1) / rollouts.completion_mask.sum(1)).exp()")),
    mistake("answer_compared_as_text",
        (Arithmetic.reward, "self.grade(ids, answer, TAGS, given=tags_in_prompt)",
         'float(f"<answer> {answer:.1f} <" in to_text(ids))')),
]
NAMED = {mistake.name: mistake for mistake in MISTAKES + OTHERS}


def alike(name: str, *lines: Line) -> Mistake:
    """How a mistake looks in other code: with these lines of ours."""
    return NAMED[name]._replace(lines=lines)


ROOT = "(advantages.square().sum(dim=1, keepdim=True) / (group_size - 1)).sqrt()"
def k3_up_to(c: float) -> Mistake:
    """Another setting."""
    return mistake("k3_up_to", (kl_estimate, "torch.expm1(-d) + d",
                                f"(torch.expm1(-d) + d).clamp(max={c})"),
        says=f"k3 is kept below {c:g}, as in verl.")


def dual_clip(c: float) -> Mistake:
    """A setting that the course's objective doesn't have, and no mistake."""
    line = f".maximum(torch.where(advantages < 0, {c} * advantages, -torch.inf))"
    return mistake("dual_clip", (clipped_surrogate, "* advantages)", f"* advantages){line}"),
        says=f"It has a dual or two-sided clip. At a negative advantage no loss is above {c:g} "
        "times its size.")


def cut_off(c: float) -> Mistake:
    """A truncated importance weight."""
    return mistake("ratio_cut_off", *NAMED["negative_advantages_clipped_on_the_wrong_side"].lines,
        says=f"No ratio counts as more than {c:g}, at negative advantages too, and nothing stops "
        "it below. That's a truncated importance weight; as PPO's clip it would be on the wrong "
        "side where the advantage is negative.")


FORMS = MISTAKES + [
    alike("groups_mix_prompts",  # and not back again
          (group_advantages, ".double().view(-1, group_size)", ".double().view(group_size, -1).T")),
    alike("kl_div_of_sampled_tokens",  # the other way around
          (kl_estimate, K3, "log_probs.exp() * d")),
    alike("kl_div_without_log_target",  # whatever it is multiplied by
          *NAMED["kl_div_without_log_target"].lines, (grpo_loss, "if kl_weight:", "if True:")),
    alike("std_without_eps",
          (group_advantages, " + eps)\n    elif", ")\n    elif"),
          (group_advantages, "torch.where(equal[:, None], 0.0, advantages)", "advantages")),
    alike("mean_over_the_batch",  # and the std around that mean
          *NAMED["mean_over_the_batch"].lines, (group_advantages, STD, ROOT)),
    alike("mask_in_the_denominator_only",  # with a gradient for the padding
          *NAMED["mask_in_the_denominator_only"].lines, *NAMED["padding_read"].lines),
    alike("masked_row_divides_by_zero",  # with the gradient of a product with the mask
          *NAMED["masked_row_divides_by_zero"].lines, *NAMED["mask_by_multiplication"].lines),
    alike("kl_against_the_old_policy",  # with the opposite sign
          (grpo_loss, "kl_estimate(new, ref", "kl_estimate(old, new")),
    alike("kl_without_a_gradient",  # and of the old policy
          (grpo_loss, "kl_estimate(new, ref, estimator=estimator)", "old - ref")),
    alike("mask_off_by_one",  # to the other side
          (grpo_loss, MASK, f"mask = {RIGHT.format('completion_mask')}")),
    alike("mask_off_by_one",  # and not for what is read
          (aggregate, "(per_token, mask), whole", "(per_token, mask := "
           f"{RIGHT.format('mask')}), whole")),
    alike("sum_over_the_rows",  # each divided by the width
          (aggregate, "(rows * max_length)", "values.shape[1]")),
    alike("mean_over_the_padding",  # without any mask
          (aggregate, ROW_MEANS, "per_token.mean()"), *NAMED["padding_read"].lines),
]
VARIANTS = [  # published, or right under a condition, and not the course's objective
    mistake("cispo_two_bounds", (grpo_loss, "ratio.clamp(max=", "ratio.clamp(1 - clip[0], "),
        says="The weight of CISPO has a lower bound, too (equation 5 of arXiv 2506.13585)."),
    mistake("k1_times_the_ratio", (grpo_loss, "kl = kl * ratio if kl_correction else kl",
         "kl = (new - ref) * ratio"),
        says="The KL term is k1 times the ratio, which has the gradient of the KL."),
    mistake("k3_times_one", (grpo_loss, "kl = kl * ratio if kl_correction else kl",
         "kl = kl * (new - new.detach()).exp()"),
        says="The KL term is multiplied by a ratio of 1 with a gradient, as on-policy."),
    mistake("token_sum", (aggregate, "(rows * max_length)", "max_length"),
        says="All tokens of the batch are summed, so the step grows with the batch, unless "
        "something else divides."),
    mistake("std_of_the_others",
        (group_advantages, "equal = equal",
         "others = rewards.double().view(-1, group_size)[:, [[j for j in range(group_size) if j != "
         "i] for i in range(group_size)]]; std = (others.var(dim=2, correction=0) * (group_size - "
         "1) / max(1, group_size - 2)).sqrt(); equal = equal"),
        (group_advantages, "torch.where(equal[:, None], 0.0, advantages)",
         "((groups - others.mean(dim=2)) / torch.where(std > 0, std + eps, 1.0))"),
        says="Mean and standard deviation are those of the other answers, as in NeMo-RL."),
    alike("masked_rows_leave_the_denominator", *NAMED["masked_rows_leave_the_denominator"].lines),
    alike("masked_rows_leave_the_denominator",
          (aggregate, "(rows * max_length)", "(mask.any(dim=-1).sum() * max_length)")),
]
NO_CLIP = {  # no lines, but settings: which of the two bounds isn't there
    (True, True): mistake("no_clip"),
    (True, False): mistake("no_lower_bound"),
    (False, True): mistake("no_upper_bound"),
}
NOTES = {  # named mistakes that are none under a condition, and what is told instead
    "ratio_against_itself_though_there_are_old_log_probs": "On-policy. The ratio compares the "
    "policy with itself, which is right with one update per batch. With more it takes the old "
    "log-probs.",
    "population_std": "The standard deviation divides by G, as numpy's does. TRL and verl divide "
    "by G - 1, and the papers don't say. The advantages are sqrt(G / (G - 1)) larger.",
    "masked_row_divides_by_zero": "A row without a token is 0 divided by 0. That's right as long "
    "as every row has one.",
    "dr_grpo_divides_by_the_width": "The sum of all tokens is divided by the rows times the width "
    "of this batch. That's Dr. GRPO where every batch is as wide as completions may be long. A "
    "mean would leave the padding out.",
    "std_over_the_batch": "The standard deviation is that of the whole batch, as with TRL's "
    "scale_rewards='batch'.",
    "masked_rows_leave_the_denominator": "A row without a token leaves the mean, as in verl. In "
    "TRL it's a 0 that counts.",
    "no_clip": "There's no clip, so no ratio loses its gradient. That's right with one update per "
    "batch. With more, nothing keeps the policy near the old one.",
    "no_lower_bound": "The clip has no lower bound: at a negative advantage a token keeps its "
    "gradient, however unlikely it has become.",
    "no_upper_bound": "The clip has no upper bound: at a positive advantage a token keeps its "
    "gradient, however likely it has become.",
}
# fmt: on
