"""The patients: runs with a bug that public code has had, or nearly had, and five healthy ones.

What is told of each in words stands in `patients.md`. Here is what is run: a switch that puts the
bug in, the sign by which a sick run is known, and the smallest test that exposes it. All patients
of a task run with the same settings, so that these give nothing away.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic import bugs
from minigrpo.clinic.bugs import switch
from minigrpo.clinic.charts import Chart
from minigrpo.clinic.smallest_tests import relative_change
from minigrpo.corpus import CharTokenizer
from minigrpo.files import data_folder
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.rewards import TextTask, answer_reward, letter_share
from minigrpo.study.experiments import SUMMIT

SHORT = replace(SUMMIT, steps=12, evaluate_every=1000, check=False)
"""The settings of the clinic: twelve steps of the run of notebook 07, without its own checks."""

LETTERS = replace(
    SHORT, eos_id=None, prompts_per_step=4, group_size=16, max_new_tokens=24,
    steps=10, lr=6e-4, kl_weight=0.0, entropy_weight=0.01, how="sequence_mean",
)  # fmt: skip


class Ragged(Arithmetic):
    """Every other prompt comes without the worked example."""

    def prompts(self, n, generator):
        prompts = super().prompts(n, generator)
        return [p if i % 2 else torch.cat([p[:1], p[-10:]]) for i, p in enumerate(prompts)]


def char_gpt() -> nn.Module:
    """The GPT that ships with the course."""
    return load_gpt(data_folder() / "char_gpt.safetensors").eval()


@dataclass(frozen=True, eq=False)
class Setting:
    """What the patients of a task share."""

    told: str
    task: Callable[[], Any] = Arithmetic
    base: Callable[[], nn.Module] = load_policy  # the policy to start from
    config: GRPOConfig = SHORT


SUMS = Setting("Sums of three to six digits, as in notebook 07. A correct answer gets 1.")
RAGGED = Setting(
    "Sums as in notebook 07, every other one without the worked example. A correct answer gets 1.",
    Ragged,
)
TENTHS = Setting(  # a weight whose sum over a group isn't exact in 32 bits
    "Sums of two digits. A correct answer earns its weight.",
    lambda: Arithmetic(lengths=(2,), grade=lambda *ids, **tags: 0.7 * answer_reward(*ids, **tags)),
)
LETTER = Setting(
    "The char-GPT of notebook 01. The reward should be the fraction of characters that are an e.",
    lambda: TextTask(["ROMEO:", "JULIET:", "HENRY:", "My lord"], letter_share), char_gpt, LETTERS,
)  # fmt: skip


NEWLINE = int(CharTokenizer().encode("\n")[0])
LINES = Setting(
    "The char-GPT of notebook 01. A text that ends its line within 24 characters gets 1.",
    lambda: TextTask(
        ["ROMEO:\nI", "JULIET:\nO", "HENRY:\nMy", "My lord"],
        lambda text: float(text.endswith("\n")),  # as the char-GPT's do one time in four
    ),
    char_gpt,
    replace(
        LETTERS, eos_id=NEWLINE, pad_id=NEWLINE, steps=9, lr=1e-4, inner_epochs=1,
        entropy_weight=0.0, how="token_mean",
    ),
)  # fmt: skip
"""Nobody's setting: it shows what some bugs do where stopping has to be learned."""


@dataclass(frozen=True)
class Sign:
    """The signature of a sick run: a reading that is beyond a threshold."""

    measurement: str  # of `measure.MEASUREMENTS`, or "dashboard"
    reading: str  # its line there
    threshold: float
    above: bool = True  # whether "beyond" means above
    index: int = -1  # of a reading that is several numbers

    def fits(self, value: float) -> bool:
        """Whether a value is beyond the threshold; NaN never is."""
        return value > self.threshold if self.above else value < self.threshold


@dataclass(frozen=True, eq=False)
class Patient:
    """One bug, or none."""

    name: str  # what a colleague would call it: the diagnosis
    sign_read: Sign | None = None  # None: healthy
    test: tuple[str, ...] = ()  # the smallest test that shows it, and what of a Loop it takes
    switch: bugs.Switch = ExitStack  # puts the bug in for the length of a block
    bug_settings: Mapping[str, Any] = field(default_factory=dict)  # those that are the bug itself
    setting: Setting = SUMS
    key: str = ""  # instead of the name, where two have one name, or to keep its number

    def config(self, *, sick: bool, **changes: Any) -> GRPOConfig:
        """The settings of the run."""
        return replace(self.setting.config, **{**changes, **(self.bug_settings if sick else {})})

    def __post_init__(self) -> None:
        """Its notes become attributes: ward, what, seen, shows, large, cure and harm."""
        notes = notes_by_diagnosis()[self.name]
        plain = {name: text for name, text in notes.items() if "(" not in name}
        vars(self).update({n: notes.get(f"{n} ({self.key})", text) for n, text in plain.items()})

    @property
    def question(self) -> str:
        """What the smallest test asks, in words."""
        if not self.test:
            return "none finds a bug (with another engine, allow the ratio a percent or two)."
        words = self.test[0].replace("_", " ").replace("log prob", "log-prob")
        return re.sub(r"\bkl\b", "KL", words) + "?"


@cache
def records(file: str) -> dict[str, dict[str, str]]:
    """`patients.md` or `night.md` as a dictionary: by name, then by what is told."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    parts = (part.strip().splitlines() for part in text.split("\n## ")[1:])
    pairs = {name: [line.partition(":")[::2] for line in lines if line] for name, *lines in parts}
    return {name: {key: told.strip() for key, told in some} for name, some in pairs.items()}


def notes_by_diagnosis() -> dict[str, dict[str, str]]:
    return records("patients.md")


def run(patient: Patient, seed: int = 0) -> Chart:
    """Train with the bug."""
    with patient.switch():
        return trained(patient, patient.config(sick=True, seed=seed))


def trained(patient: Patient, config: GRPOConfig) -> Chart:
    """Train with these settings and the code that is in place."""
    policy = patient.setting.base()
    start = [p.detach().clone() for p in policy.parameters()]
    done: list[StepMetrics] = []
    stopped = None
    try:
        for metrics in train_grpo(policy, patient.setting.task(), config):
            done.append(metrics)  # what was done before a stop is kept
    except FloatingPointError as error:  # what the loop says of a loss that is NaN
        stopped = str(error)
    moved = relative_change(start, policy.parameters())
    return Chart(done, policy, moved, stopped)


def where_it_hurts(name: str, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, list[Chart]]:
    """Runs of a bug, and of its healthy twin, where stopping has to be learned; one per seed."""
    sick, healthy = replace(record(name), setting=LINES), Patient("healthy", setting=LINES)
    both = {"with the bug": sick, "healthy twin": healthy}
    return {who: [run(patient, seed) for seed in seeds] for who, patient in both.items()}


# fmt: off
SCORER, TOKEN = "scorer against sampler", "gradient per token"
EQUAL, PULL, BOARD = "groups", "gradient at zero advantage", "dashboard"
EXCHANGED, EXAMPLE = "exchange tests", "rewards, another worked example (fraction)"
PATIENTS: tuple[Patient, ...] = (
    Patient("a grader that never matches",
        Sign(EQUAL, "equal groups, last steps", 0.99),
        ("a_right_answer_is_rewarded", "reward", "right"), switch("answer_compared_as_text")),
    Patient("a sampler that does not know the end",
        Sign(BOARD, "truncated (completions/clipped_ratio)", 0.5), ("completions_end", "sample"),
        bug_settings={"eos_id": None}),
    Patient("logits not shifted", Sign(SCORER, "largest difference (nats)", 1.0),
        ("a_certain_text_has_log_prob_0", "score"),
        switch("logits_not_shifted", sample=bugs.scored_twice)),
    Patient("a learning rate that moves nothing",
        Sign("weight change", "relative weight change", 1e-3, above=False),
        ("weights_move", "policy", "train"), bug_settings={"lr": 1e-6}),
    Patient("old log-probs not detached",
        Sign(TOKEN, "A = +1, ratio 1.0, first token", 1e-6, above=False),
        ("the_ratio_has_a_gradient", "loss"), switch("old_is_new_with_its_graph")),
    Patient("a reward that reads the prompt", Sign(EXCHANGED, EXAMPLE, 0.1),
        ("a_wrong_answer_is_not_rewarded", "reward", "wrong"),
        switch(reward=bugs.reads_the_prompt)),
    Patient("a policy that grades its own samples",
        Sign(BOARD, "entropy (entropy)", 0.6, above=False),
        ("rewards_do_not_ask_the_policy", "rewards"), switch("graded_by_its_own_probability"),
        setting=LETTER, key="a policy scored on its own samples"),
    Patient("KL to another model", Sign(BOARD, "KL to the reference (kl)", 0.01, index=0),
        ("the_kl_is_0_before_the_first_update", "first_kl"),
        switch(frozen_copy=bugs.another_reference)),
    Patient("a KL that uses the policy ratio",
        Sign(PULL, "the KL term alone, weight 1", 1e-6, above=False),
        ("the_loss_depends_on_the_reference", "loss_with_kl"), switch("kl_against_the_old_policy")),
    Patient("k1 as the loss",
        Sign(PULL, "the KL term, its mean over all of four tokens", 1e-3, above=False),
        ("the_kl_term_has_a_mean_gradient", "kl"), switch("gradient_of_k1")),
    Patient("the clip on the wrong side", Sign(TOKEN, "A = -1, ratio 0.5", 1e-6),
        ("a_low_ratio_of_a_bad_token_is_left_alone", "loss"),
        switch("negative_advantages_clipped_on_the_wrong_side")),
    Patient("the entropy bonus detached",
        Sign(PULL, "the entropy bonus alone, weight 1", 1e-6, above=False),
        ("the_entropy_bonus_has_a_gradient", "loss_with_entropy"), switch("entropy_detached"),
        setting=LETTER, key="the entropy bonus detached 14"),
    Patient("stale old log-probs", Sign(SCORER, "the same in batches 2 to 4", 0.02),
        ("the_ratio_is_1_at_every_first_update", "first_ratios"),
        switch(sample=bugs.one_batch_late), setting=TENTHS),
    Patient("top-p in the sampler only",
        Sign(SCORER, "mean of scorer's / sampler's probability", 0.98, above=False),
        ("sampler_and_scorer_agree", "sample", "rescore"),
        switch(sample=bugs.sampled_with(top_p=0.8)), setting=RAGGED),
    Patient("a temperature in the sampler only",
        Sign(SCORER, "largest of scorer's / sampler's probability", 1.2),
        ("sampler_and_scorer_agree", "sample", "rescore"),
        switch(sample=bugs.sampled_with(temperature=0.7)), setting=LETTER,
        key="a temperature in the sampler only 3"),
    Patient("0 divided by 0", Sign(BOARD, "steps done", 9.5, above=False),
        ("equal_rewards_give_no_advantage", "advantages"),
        switch("equal_rewards_not_exactly_zero", "std_without_eps")),
    Patient("no floor under the standard deviation",
        Sign(EQUAL, "largest |advantage| where all rewards are equal", 0.1),
        ("equal_rewards_give_no_advantage", "advantages"),
        switch("equal_rewards_not_exactly_zero", "rounding_above_the_eps"), setting=TENTHS),
    Patient("groups that mix prompts",
        Sign(EQUAL, "widest range of advantages in such a group", 0.1),
        ("luck_of_the_prompt_is_no_advantage", "advantages"), switch("groups_mix_prompts"),
        setting=TENTHS),
    Patient("EOS masked out", Sign(TOKEN, "A = +1, ratio 1.0, </s>", 1e-6, above=False),
        ("the_loss_is_the_one_by_hand", "first_step"), switch("eos_masked")),
    Patient("the mask in the denominator only", Sign(TOKEN, "padding", 1e-6),
        ("the_padding_gets_no_gradient", "loss"),
        switch("mask_in_the_denominator_only", "padding_read", "padding_scored",
            "others_tokens_scored", sample=bugs.scored_twice),
        key="the mask in the denominator only 5"),
    Patient("prompts padded on the right",
        Sign(EXCHANGED, "log-probs, a row's padding left out (largest change)", 1.0),
        ("prompts_end_in_the_last_column", "pad"), switch("padded_on_the_right"), setting=RAGGED),
    Patient("a token mean per micro-batch",
        Sign("loss by hand", "from the logged loss to the one over all tokens", 1e-4),
        ("the_loss_is_the_one_by_hand", "first_step"), switch(grpo_loss=bugs.per_micro_batch),
        setting=RAGGED),
    Patient("the product ratio on long text", Sign(BOARD, "gradient norm (grad_norm)", 5, index=0),
        ("a_small_drift_of_a_long_text_keeps_its_gradient", "loss"),
        bug_settings={"level": "sequence"}, setting=LETTER),
    Patient("healthy", setting=RAGGED, key="healthy, ordinary"),
    Patient("healthy", setting=TENTHS, key="healthy, tenths 4"),
    Patient("healthy", setting=LETTER, key="healthy, letters 16"),
    Patient("healthy", key="healthy, sums 62"),
    Patient("healthy", switch=switch(sample=bugs.rounded), key="healthy, rounded sampler"),
)
# fmt: on
"""Every patient; its name is the diagnosis. Some diagnoses in `patients.md` have no patient."""


def numbered() -> tuple[Patient, ...]:
    """The patients in the order of their numbers, which gives nothing away."""
    return tuple(
        sorted(PATIENTS, key=lambda p: hashlib.sha256((p.key or p.name).encode()).hexdigest())
    )


def names() -> tuple[str, ...]:
    """All diagnoses in the order of their numbers, which is that of the alphabet."""
    return tuple(sorted(notes_by_diagnosis(), key=str.lower))


def record(name: str) -> Patient:
    """The first patient with this name, or a KeyError."""
    found = next((patient for patient in PATIENTS if patient.name == name), None)
    if found is None:
        raise KeyError(f"name: expected one of those in PATIENTS, got {name!r}")
    return found
