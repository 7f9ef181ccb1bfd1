"""The patients: runs with a bug that a public implementation has had.

Every record says what the bug does, where it was seen, by which sign a run that has it is known,
the smallest test that exposes it, and the cure. `run(record, seed)` gives the chart of the sick
run, `run(record, seed, sick=False)` that of the healthy one under the same settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic import bugs
from minigrpo.clinic import loop_tests as tests
from minigrpo.clinic.charts import VITAL_SIGNS, Chart, measured
from minigrpo.clinic.smallest_tests import relative_change
from minigrpo.files import data_folder
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.rewards import Tags, TextTask, letter_share, split_parts
from minigrpo.study.experiments import SUMMIT

SHORT = replace(SUMMIT, steps=10, evaluate_every=1000, check=False)
"""The settings of the clinic: ten steps of the run of notebook 07, without its own checks."""


@dataclass(frozen=True)
class Patient:
    """One bug."""

    name: str  # what a colleague would call it
    ward: str  # the symptom it is brought in with
    what: str  # what the code does wrong
    seen: str  # which kind of implementation had it, with a public thread where there is one
    sign: str  # the signature of a sick run, in words
    vital_sign: str  # the signature as a number: a name in `VITAL_SIGNS`
    threshold: float  # the sick are beyond it and the healthy are not
    test: Callable[[GRPOConfig], None]  # passes on healthy code, fails with the bug
    cure: str  # in one line
    above: bool = True  # whether "beyond" means above
    switch: bugs.Switch = ExitStack  # puts the bug in for the length of a block
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the sick and the healthy run
    bug_settings: Mapping[str, Any] = field(default_factory=dict)  # those that are the bug itself
    task: Callable[[], Any] = Arithmetic
    base: Callable[[], nn.Module] = load_policy  # the policy to start from

    def config(self, *, sick: bool) -> GRPOConfig:
        """The settings of the run."""
        return replace(SHORT, **{**self.settings, **(self.bug_settings if sick else {})})

    @property
    def question(self) -> str:
        """What the smallest test asks, in words."""
        words = self.test.__name__.replace("_", " ").replace("log prob", "log-prob")
        return re.sub(r"\bkl\b", "KL", words) + "?"

    def statistic(self, chart: Chart) -> float:
        """The vital sign of a chart."""
        return VITAL_SIGNS[self.vital_sign](chart)

    def is_sick(self, chart: Chart) -> bool:
        """Whether a chart has the signature."""
        value = measured(self.statistic, chart)
        return value > self.threshold if self.above else value < self.threshold


def run(patient: Patient, seed: int = 0, *, sick: bool = True, steps: int | None = None) -> Chart:
    """Train with the bug, or without it under the same settings, and steps if they are given."""
    policy = patient.base()
    start = [p.detach().clone() for p in policy.parameters()]
    done: list[StepMetrics] = []
    stopped, told = None, replace(patient.config(sick=False), seed=seed)
    told = told if steps is None else replace(told, steps=steps)
    with patient.switch() if sick else ExitStack():
        try:
            config = replace(patient.config(sick=sick), seed=seed, steps=told.steps)
            for metrics in train_grpo(policy, patient.task(), config):
                done.append(metrics)  # what was done before a stop is kept
        except FloatingPointError as error:  # what the loop says of a loss that is NaN
            stopped = str(error)
    moved = relative_change(start, policy.parameters())
    asked = policy if patient.base is load_policy else None  # there are questions for the Llama
    return Chart(told, done, asked, moved, stopped)


def caught(patient: Patient) -> bool:
    """Whether the smallest test tells the bug from the healthy code."""
    patient.test(patient.config(sick=False))  # the healthy code passes, or this raises
    return complaint(patient) is not None


def complaint(patient: Patient) -> str | None:
    """What the smallest test says of the sick code; None if it says nothing."""
    with patient.switch():
        try:
            patient.test(patient.config(sick=True))
        except AssertionError as error:
            return str(error)
    return None


# --------------------------------------------------------------------------------------------
# tasks and policies


def nearness(completion: Tensor, answer: int, tags: Tags, *, given: int) -> float:
    """1 for the right answer, 0.2 less for each step that it is off on the ring of ten digits."""
    parts = split_parts(completion, tags, given=given)
    if parts is None or len(parts.answer) != 1 or parts.answer[0] not in range(10):
        return 0.0
    off = abs(parts.answer[0] - answer)
    return 1 - min(off, 10 - off) / 5


class Ragged(Arithmetic):
    """Every other prompt comes without the worked example."""

    def prompts(self, n, generator):
        prompts = super().prompts(n, generator)
        return [p if i % 2 else torch.cat([p[:1], p[-10:]]) for i, p in enumerate(prompts)]


@dataclass(frozen=True)
class SevenTenths(Arithmetic):
    """Pays 0.7 for the right answer to a sum of two digits."""

    lengths: Sequence[int] = (2,)

    def reward(self, prompts, completions):
        return [0.7 * paid for paid in super().reward(prompts, completions)]


@dataclass(frozen=True)
class Nearness(Arithmetic):
    """Pays a sum of three to six digits by how near the answer is; groups seldom are equal."""

    lengths: Sequence[int] = (3, 4, 5, 6)
    score: Callable[..., float] = nearness


def letters() -> TextTask:
    """The task of notebook 03: the letter e."""
    return TextTask(["ROMEO:", "JULIET:", "HENRY:", "My lord"], letter_share)


def char_gpt() -> nn.Module:
    """The GPT that ships with the course."""
    return load_gpt(data_folder() / "char_gpt.safetensors").eval()


# --------------------------------------------------------------------------------------------
# the patients

WARDS = (
    "the reward stays flat",
    "the reward rises, right answers do not",
    "the KL is wrong",
    "the ratio is not 1 at the first update",
    "completions run to the limit",
    "the entropy is wrong",
    "the loss is NaN",
    "all looks fine, and it learns, only something else or worse",
)
"""The symptoms with which a run is brought in."""

FLAT, HACKED, KL, RATIO, LENGTH, ENTROPY, NAN, FINE = WARDS
GITHUB = "https://github.com/"
LETTERS = {
    "eos_id": None, "prompts_per_step": 4, "group_size": 8, "max_new_tokens": 48, "lr": 3e-4,
    "kl_weight": 0.0, "how": "sequence_mean",
}  # fmt: skip
ON_POLICY = {"inner_epochs": 1, "kl_weight": 0.0, "steps": 5}

PATIENTS: tuple[Patient, ...] = (
    Patient(
        name="logits not shifted",
        ward=FLAT,
        what="scores each token with the logits at its own position, which predict the next one",
        seen="a tiny-Llama notebook; off by one after a refactor: "
        f"{GITHUB}PrimeIntellect-ai/prime-rl/pull/1525",
        sign="the reward stays below 0.3, and the gradient is large",
        vital_sign="reward, last steps",
        threshold=0.3,
        above=False,
        test=tests.a_certain_text_has_log_prob_0,
        cure="score token t + 1 with the logits at position t",
        switch=bugs.loop(completion_log_probs_and_entropy=bugs.unshifted, sample=bugs.scored_twice),
    ),
    Patient(
        name="a learning rate that moves nothing",
        ward=FLAT,
        what="trains a fresh or small model with the learning rate of a large one, 1e-6",
        seen="a tiny-Llama notebook that copied the setting of a model of billions of parameters",
        sign="after the run the weights have moved by less than a thousandth of their size",
        vital_sign="change of the weights, of their size",
        threshold=1e-3,
        above=False,
        test=tests.weights_move,
        cure="choose the learning rate by how far the weights move, and watch the reward",
        settings={"steps": 5},
        bug_settings={"lr": 1e-6},
    ),
    Patient(
        name="old log-probs not detached",
        ward=FLAT,
        what="computes old from new with the graph attached, so their ratio has no gradient",
        seen="the counterpart of a question that is asked again and again (why is the ratio "
        f"always 1?): {GITHUB}huggingface/trl/issues/2608",
        sign="the norm of the gradient is 0 in every step",
        vital_sign="norm of the gradient, largest",
        threshold=1e-3,
        above=False,
        test=tests.the_ratio_has_a_gradient,
        cure="detach the old log-probs, or compute them under no_grad",
        switch=bugs.loop(grpo_loss=bugs.graph_in_old),
        settings={"steps": 5},
    ),
    Patient(
        name="groups that mix prompts",
        ward=FINE,
        what="reshapes the rewards the wrong way round, so that a group holds several prompts",
        seen="from-scratch notebooks, and a mean over the batch: "
        f"{GITHUB}XU-YIJIE/grpo-flat/issues/2",
        sign="completions of a question that all were wrong, or all right, get advantages",
        vital_sign="largest advantage where all rewards are equal",
        threshold=0.1,
        test=tests.luck_of_the_prompt_is_no_advantage,
        cure="rewards.view(-1, group_size), prompt by prompt",
        switch=bugs.loop(group_advantages=bugs.interleaved),
        settings={"steps": 5},
    ),
    Patient(
        name="a reward that reads the prompt",
        ward=HACKED,
        what="takes the first answer in prompt and completion, the worked example's, for the right "
        "one",
        seen="a tiny-Llama notebook whose check is satisfied by the prompt alone",
        sign="the reward is ahead of the right answers on held-out questions by more than 0.4",
        vital_sign="reward above right answers, at the end",
        threshold=0.4,
        test=tests.a_wrong_answer_is_not_rewarded,
        cure="a reward gets the completion, and never the prompt's text",
        switch=lambda: bugs.exchanged(
            Arithmetic, {"reward": lambda healthy: bugs.ReadsThePrompt.reward}
        ),
        settings={"steps": 20},
    ),
    Patient(
        name="KL to another model",
        ward=KL,
        what="measures the KL to a network that the policy did not start from",
        seen="a tiny-Llama notebook with a second random network; a reference loaded from disk: "
        f"{GITHUB}huggingface/trl/issues/3948",
        sign="the KL is above 1 nat per token at the very first step",
        vital_sign="KL, first step",
        threshold=0.1,
        test=tests.the_kl_is_0_before_the_first_update,
        cure="the reference is a frozen copy of the policy before its first update",
        switch=bugs.loop(frozen_copy=bugs.another_reference),
        settings={"steps": 5},
    ),
    Patient(
        name="a KL that uses the policy ratio",
        ward=KL,
        what="puts the old log-probs where those of the reference belong",
        seen="a char-GPT notebook that appends the policy's ratio to the list of reference ratios",
        sign="the KL stays near 0 while the policy has clearly changed",
        vital_sign="KL, last steps",
        threshold=0.01,
        above=False,
        test=tests.the_loss_depends_on_the_reference,
        cure="score the batch with the reference policy as well",
        switch=bugs.loop(grpo_loss=bugs.kl_to_old),
    ),
    Patient(
        name="k1 as the loss",
        ward=KL,
        what="adds log_probs - ref_log_probs to the loss, whose mean gradient is 0",
        seen=f"a well-known course's scripts; {GITHUB}allenai/open-instruct/issues/534",
        sign="with a weight of 1 the KL is twice the healthy one, and now and then below 0",
        vital_sign="KL, last steps",
        threshold=0.07,
        test=tests.the_kl_term_has_a_mean_gradient,
        cure="k3, or better k2, in the loss; k1 belongs into the reward",
        settings={"kl_weight": 1.0, "steps": 15},
        bug_settings={"estimator": "k1"},
    ),
    Patient(
        name="the clip on the wrong side",
        ward=KL,
        what="takes the maximum instead of the minimum where the advantage is negative",
        seen="a well-known course's scripts, mended in "
        f"{GITHUB}rasbt/reasoning-from-scratch/pull/240",
        sign="with eight updates per batch the KL runs ahead: nothing stops what is pushed down",
        vital_sign="KL, last steps",
        threshold=0.13,
        test=tests.a_low_ratio_of_a_bad_token_is_left_alone,
        cure="the minimum, for both signs",
        switch=bugs.terms(clipped_surrogate=bugs.wrong_side),
        settings={"inner_epochs": 8, "lr": 2e-4, "steps": 3},
    ),
    Patient(
        name="stale old log-probs",
        ward=RATIO,
        what="copies the weights into the old policy before the update, so old is one batch late",
        seen="a char-GPT notebook",
        sign="from the second step on the first ratio of a batch is off 1",
        vital_sign="ratio off 1, any step",
        threshold=0.02,
        test=tests.the_ratio_is_1_at_every_first_update,
        cure="keep the log-probs that the batch was sampled with",
        switch=bugs.loop(sample=bugs.one_batch_late),
        settings={"inner_epochs": 1, "steps": 8},
    ),
    Patient(
        name="top-p in the sampler only",
        ward=RATIO,
        what="samples from the likeliest tokens that make up 0.8, and scores with all of them",
        seen=f"a GRPO-from-scratch article; {GITHUB}huggingface/trl/issues/6789",
        sign="the ratio is off 1 before anything was learned, below it only",
        vital_sign="ratio off 1, first step",
        threshold=0.02,
        test=tests.sampler_and_scorer_agree,
        cure="no top-p and no top-k in training",
        switch=bugs.loop(sample=bugs.sampled_with(top_p=0.8)),
        settings={"inner_epochs": 1, "steps": 5},
    ),
    Patient(
        name="a temperature in the sampler only",
        ward=RATIO,
        what="samples with temperature 0.7 and scores with 1",
        seen=f"a small GRPO repository; {GITHUB}huggingface/trl/pull/3029",
        sign="the ratio is off 1 before anything was learned, above it too",
        vital_sign="ratio, largest",
        threshold=1.1,
        test=tests.sampler_and_scorer_agree,
        cure="divide the logits by the temperature when scoring too",
        switch=bugs.loop(sample=bugs.sampled_with(temperature=0.7)),
        settings={"inner_epochs": 1, "steps": 5},
    ),
    Patient(
        name="a sampler that does not know the end",
        ward=LENGTH,
        what="samples without the id of the end token, or with that of another token",
        seen="a tiny-Llama notebook whose end token is a data word",
        sign="no completion ends: all are cut off at the limit",
        vital_sign="share cut off at the limit",
        threshold=0.5,
        test=tests.completions_end,
        cure="give the sampler the tokenizer's own EOS, and watch the share that is cut off",
        settings={"steps": 5},
        bug_settings={"eos_id": None},
    ),
    Patient(
        name="EOS masked out",
        ward=FINE,
        what="makes the mask from ids != pad where pad and EOS are the same token",
        seen=f"a GRPO-from-scratch article; {GITHUB}huggingface/trl/pull/4970",
        sign="the loss is the one by hand only if the last token of each row is not counted",
        vital_sign="loss, off the one by hand",
        threshold=1e-4,
        test=tests.the_loss_is_the_one_by_hand,
        cure="make the mask from positions: up to and including the first EOS",
        switch=bugs.loop(learn=bugs.eos_masked),
        settings=ON_POLICY,
    ),
    Patient(
        name="the entropy bonus detached",
        ward=ENTROPY,
        what="computes the entropy for the log, without gradient, and adds it to the loss",
        seen="small repositories in which one entropy serves as metric and as bonus",
        sign="with a weight of 1 the entropy falls as if there were no bonus",
        vital_sign="entropy, last steps",
        threshold=0.25,
        above=False,
        test=tests.the_entropy_bonus_has_a_gradient,
        cure="compute the bonus with gradient; check it at advantages of 0",
        switch=bugs.loop(grpo_loss=bugs.detached_entropy),
        settings={"entropy_weight": 1.0, "steps": 15},
    ),
    Patient(
        name="a policy scored on its own samples",
        ward=ENTROPY,
        what="grades a policy by how probable its own completions are under itself",
        seen="evaluations by the perplexity of a model's own text",
        sign="the reward climbs towards 1 and the entropy falls towards 0: it repeats itself",
        vital_sign="entropy, last steps",
        threshold=0.6,
        above=False,
        test=tests.rewards_do_not_ask_the_policy,
        cure="grade by a rule or by a fixed model; compare on texts that neither of them wrote",
        switch=bugs.loop(rollout=bugs.confidence),
        settings={**LETTERS, "max_new_tokens": 24, "group_size": 16, "steps": 10, "lr": 6e-4},
        task=letters,
        base=char_gpt,
    ),
    Patient(
        name="no floor under the std",
        ward=FINE,
        what="divides by the std of equal rewards, which rounding has left slightly above 0",
        seen=f"a training library; {GITHUB}NVIDIA-NeMo/RL/pull/4161",
        sign="groups in which all rewards are 0.7 get a large advantage, the same for all",
        vital_sign="largest advantage where all rewards are equal",
        threshold=0.1,
        test=tests.equal_rewards_give_no_advantage,
        cure="exactly 0 for equal rewards, and 1e-4 under the line, in this order",
        switch=bugs.loop(group_advantages=bugs.no_floor),
        task=SevenTenths,
    ),
    Patient(
        name="0 divided by 0",
        ward=NAN,
        what="divides by the std as it is, which is 0 when all rewards of a group are equal",
        seen=f"small repositories; {GITHUB}ruc-datalab/DeepAnalyze/issues/116",
        sign="all is well, until a batch has a group of equal rewards: then the loss is NaN",
        vital_sign="stopped by a loss that is NaN (1 = yes)",
        threshold=0.5,
        test=tests.equal_rewards_give_no_advantage,
        cure="exactly 0 for equal rewards, and 1e-4 under the line",
        switch=bugs.loop(group_advantages=bugs.zero_over_zero),
        settings={"steps": 20, "prompts_per_step": 8},
        task=Nearness,
    ),
    Patient(
        name="the mask below the line only",
        ward=FINE,
        what="sums over the filling too, and divides by the number of real tokens",
        seen=f"a GRPO-from-scratch article; {GITHUB}alibaba/ROLL/pull/444",
        sign="learns more slowly, and the KL to the reference is above 1 nat per token",
        vital_sign="KL, last steps",
        threshold=0.6,
        test=tests.the_padding_gets_no_gradient,
        cure="torch.where(mask, x, 0), before the sum",
        switch=bugs.loop(
            completion_log_probs_and_entropy=bugs.padding_counted,
            sample=bugs.scored_twice,
            grpo_loss=bugs.denominator_only,
        ),
    ),
    Patient(
        name="prompts padded on the right",
        ward=FINE,
        what="fills short prompts up on the right, so that they end in padding",
        seen="tutorials that call generate with a tokenizer's default side",
        sign="the short prompts of a batch are hardly ever answered rightly",
        vital_sign="reward of the shortest prompts, first step",
        threshold=0.1,
        above=False,
        test=tests.prompts_end_in_the_last_column,
        cure="pad prompts on the left, and pass the mask",
        switch=bugs.loop(left_pad=bugs.padded_on_the_right),
        settings={"steps": 5, "prompts_per_step": 32},
        task=Ragged,
    ),
    Patient(
        name="a token mean per micro-batch",
        ward=FINE,
        what="takes the token mean in each micro-batch, and the mean of these",
        seen=f"gradient accumulation in several trainers; {GITHUB}huggingface/trl/issues/2995",
        sign="the loss is not the one by hand, with the last tokens or without",
        vital_sign="loss, off the one by hand",
        threshold=1e-4,
        test=tests.the_loss_is_the_one_by_hand,
        cure="divide the sum of every micro-batch by the token count of the whole batch",
        switch=bugs.loop(grpo_loss=bugs.per_micro_batch),
        settings=ON_POLICY,
    ),
    Patient(
        name="the product ratio on long text",
        ward=FINE,
        what="multiplies the ratios of all tokens and clips the product",
        seen="a char-GPT notebook and a GPT-2 notebook; "
        f"{GITHUB}rasbt/reasoning-from-scratch/issues/243",
        sign="nearly half of the ratios is clipped, a few percent in the healthy run",
        vital_sign="share clipped, last steps",
        threshold=0.2,
        test=tests.a_small_drift_of_a_long_text_keeps_its_gradient,
        cure="one ratio per token",
        settings={**LETTERS, "steps": 4},
        bug_settings={"level": "sequence"},
        task=letters,
        base=char_gpt,
    ),
)
"""Every bug of the clinic; its name is the diagnosis."""


def record(name: str) -> Patient:
    """The patient with this name; capital letters and spaces do not matter. Or a KeyError."""
    for one in PATIENTS:
        if one.name.lower() == " ".join(name.lower().split()):
            return one
    raise KeyError(f"name: expected one of those in PATIENTS, got {name!r}")
