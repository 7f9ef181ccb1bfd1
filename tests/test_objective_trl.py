"""The objective is that of TRL: compared with TRL's own GRPOTrainer, and with its stored answers.

The live tests call the methods of the installed TRL (`trl_peer`); the others read what those
methods answered (`make_trl_answers`) and need no TRL.
"""

import inspect
import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from make_trl_answers import random_case, random_rewards
from make_trl_answers import trl_advantages_of as ask_advantages
from make_trl_answers import trl_losses as ask_losses
from support import must_fail_on
from torch import Tensor
from torch.testing import assert_close

from minigrpo import objective
from minigrpo.clinic.catalogue import MISTAKES
from minigrpo.clinic.judge.trial import ADVANTAGES
from minigrpo.clinic.judge.trl_answers import LEVELS, SCALES, VARIANTS, Answers, Case, translated
from minigrpo.clinic.judge.verdict import CAUTIONS
from minigrpo.objective import equal_groups, group_advantages, grpo_loss

Answer = tuple[Tensor, Tensor, Tensor | None, dict[str, float]]
"""Loss, its gradients with respect to log_probs and entropy (None: no dependence), metrics."""

SHARES = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


@pytest.fixture(scope="module")
def peer():
    """TRL, or no test."""
    pytest.importorskip("trl", reason="needs TRL (Python 3.11 or newer): pip install -e '.[scale]'")
    import trl_peer

    return trl_peer


@cache
def frozen() -> Answers:
    """The stored answers."""
    return Answers()


def our_answer(case: Case, **settings: Any) -> Answer:
    """What minigrpo says, in the form of `trl_peer.trl_loss`."""
    log_probs = case.log_probs.clone().requires_grad_()
    entropy = case.entropy.clone().requires_grad_()
    arguments = translated(**settings)
    loss, metrics = grpo_loss(
        log_probs,
        case.old_log_probs,
        case.advantages,
        case.mask,
        ref_log_probs=case.ref_log_probs if arguments["kl_weight"] else None,
        entropy=entropy,
        **arguments,
    )
    gradients = torch.autograd.grad(loss, (log_probs, entropy), allow_unused=True)
    return loss.detach(), *gradients, metrics


def assert_same_answer(case: Case, settings: dict[str, Any], ours: Answer, theirs: Answer) -> None:
    """To 1e-9: the loss, both gradients, and the metrics that both have."""
    where = f"{settings} on {case.mask.tolist()}"
    for what, mine, peers in zip(("loss", "gradient", "entropy gradient"), ours, theirs):
        assert (mine is None) == (peers is None), f"{what} of {where}"
        if mine is not None:
            near(mine, peers, f"{what} of {where}")

    mine, peers = dict(ours[3]), dict(theirs[3])
    if "cispo_clip_ratio" in peers:
        peers["clip_ratio/high_mean"] = peers.pop("cispo_clip_ratio")
    if settings.get("beta"):
        peers.pop("policy_loss", None)  # TRL's holds the KL term, ours does not
    shared = mine.keys() & peers.keys()
    assert shared >= {"entropy", "clip_ratio/high_mean"}
    assert ("kl" in shared) == bool(settings.get("beta"))
    N, T = case.mask.shape
    by_row = settings.get("importance_sampling_level") == "sequence"
    for name in shared:
        value = mine[name]
        if T == 1 and name != "policy_loss" and not (by_row and name in SHARES):
            # TRL takes any metric of one column for one number per row and divides by the rows,
            # masked ones too; ours by the tokens.
            value = value * case.mask.sum().item() / N
        if name in SHARES:
            # TRL divides the two counts in float32.
            value = torch.tensor(value, dtype=torch.float32).item()
        mine_and_peers = torch.tensor([value, peers[name]], dtype=torch.float64)
        near(*mine_and_peers, f"{name} of {where}")


def near(mine: Tensor, peers: Tensor, what: str, tolerance: float = 1e-9, **options: Any) -> None:
    """Equal up to the tolerance, relative and absolute."""
    assert_close(
        mine, peers, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}", **options
    )


def garbled(case: Case) -> Case:
    """The case with NaN, infinities and huge numbers where the mask is 0."""
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
    pattern = garbage.repeat(-(-case.mask.numel() // 4) + 4)  # long enough for every start below
    changed = {}
    for start, name in enumerate(("log_probs", "old_log_probs", "ref_log_probs", "entropy")):
        values = getattr(case, name)
        if values is not None:
            junk = pattern[start : start + values.numel()].view_as(values)
            changed[name] = torch.where(case.mask.bool(), values, junk)
    return case._replace(**changed)


LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo", max_completion_length=12),
    "dapo": dict(loss_type="dapo"),
    "cispo": dict(loss_type="cispo"),
}
CLIPS = [(0.2, None), (0.2, 0.28), (3e-4, 4e-4), (0.5, 3.0)]
CAPS = [1.25, 2.0, 5.0]
KL_TERMS = [dict()] + [
    dict(beta=beta, use_bias_correction_kl=corrected)
    for beta, corrected in product((0.04, 1.0), (False, True))
]
CASES_PER_SETTING = 6  # more than a thousand in all


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_gradients_and_metrics_are_those_of_trl(peer, loss_type, level):
    generator = torch.Generator().manual_seed(100 * list(LOSS_TYPES).index(loss_type) + len(level))
    knobs = product(KL_TERMS, (0.0, 0.03), (False, True), range(CASES_PER_SETTING))
    for kl_term, entropy_coef, first_update, repeat in knobs:
        settings = dict(
            **LOSS_TYPES[loss_type],
            **kl_term,
            importance_sampling_level=level,
            entropy_coef=entropy_coef,
        )
        if loss_type == "cispo":
            settings["epsilon_high"] = CAPS[repeat % len(CAPS)]
        else:
            settings["epsilon"], settings["epsilon_high"] = CLIPS[repeat % len(CLIPS)]
        case = random_case(generator)
        if first_update:
            case = case._replace(old_log_probs=None)
        # TRL never sees what stands under the mask; ours sees it, and must answer the same.
        ours, theirs = our_answer(garbled(case), **settings), peer.trl_loss(case, **settings)
        assert_same_answer(case, settings, ours, theirs)


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_trl(peer, scale):
    generator = torch.Generator().manual_seed(3)
    equal_sets = 0
    for _ in range(120):
        rewards, group_size = random_rewards(generator)
        ours = group_advantages(rewards, group_size, scale=scale)
        theirs, metrics = peer.trl_advantages(rewards, group_size, scale)
        assert ours.dtype == theirs.dtype == torch.float64
        near(ours, theirs, f"{scale} of {rewards.tolist()} by {group_size}")
        # The one exception: equal rewards, of which TRL's rounding may leave a trace.
        equal = equal_groups(rewards, group_size)
        assert (ours.view(-1, group_size)[equal] == 0).all()
        equal_sets += int(equal.any())
        if scale != "batch":  # TRL then counts on the std of the batch
            share = equal.float().mean().item()
            assert metrics["frac_reward_zero_std"] == share
    assert equal_sets > 10


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_a_published_variant_has_the_settings_of_its_namesake(name):
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(grpo_loss).parameters.values()
        if parameter.default is not inspect.Parameter.empty
    }
    variant = dict(objective.VARIANTS[name])
    assert variant.pop("scale") == ("none" if name == "dr_grpo" else "group")
    if name == "dr_grpo":
        variant["max_length"] = VARIANTS[name]["max_completion_length"]  # the caller's to choose
    wanted = translated(**VARIANTS[name])
    assert {key: (defaults | variant)[key] for key in wanted} == wanted


def test_stored_answers_are_what_trl_answers_now(peer):
    stored = frozen()
    assert stored.versions["trl"] == peer.VERSION, "run: python tests/make_trl_answers.py"
    now = ask_losses(stored.cases) | ask_advantages(stored.reward_cases)
    assert now.keys() == {name for name in stored.tensors if "/" in name}
    for name, values in now.items():
        # NaN is TRL's clip_ratio/low_min and high_max of rows that are all masked.
        near(values, stored.tensors[name], name, tolerance=1e-12, equal_nan=True)


# What TRL does too does not show in its answers, and one mistake ends in an error.
SILENT = {*CAUTIONS, "advantages_along_the_tokens"} - {"equal_rewards_not_exactly_zero"}
SHOWN = [mistake for mistake in MISTAKES if mistake.name not in SILENT]


@must_fail_on(
    *(mistake.name for mistake in SHOWN if mistake.lines[0][0] not in ADVANTAGES),
    "clipped_whatever_the_advantage",  # in the metrics alone
)
def test_losses_are_the_stored_ones():
    stored = frozen()
    for variant, settings in VARIANTS.items():
        for case, theirs in zip(stored.cases, stored.losses(variant)):
            assert_same_answer(case, settings, our_answer(garbled(case), **settings), theirs)


@must_fail_on(
    *(mistake.name for mistake in SHOWN if mistake.lines[0][0] in ADVANTAGES),
)
def test_advantages_are_the_stored_ones():
    stored = frozen()
    for scale in SCALES:
        for (rewards, group_size), theirs in zip(stored.reward_cases, stored.advantages(scale)):
            ours = group_advantages(rewards, group_size, scale=scale)
            near(ours, theirs, f"{scale} of {rewards.tolist()} by {group_size}")
            assert (ours.view(-1, group_size)[equal_groups(rewards, group_size)] == 0).all()
