"""The run of notebook 09 with both text models, and where almost no reward comes, three seeds each.

    python tools/experiments/text_runs.py --only night    # the night shift of notebook 08 alone
    python tools/experiments/text_runs.py --model FOLDER  # what rounding costs the real model

Writes data/results/text.json and night.json after each run, ten minutes on one core in all.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import store
import torch
import turns
from store import ROOT, Results, Store
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.arithmetic import BOS, EOS, Arithmetic, to_text
from minigrpo.clinic import bugs
from minigrpo.clinic import patients as clinic
from minigrpo.clinic.bugs import Bug, score, switch
from minigrpo.clinic.patients import records
from minigrpo.corpus import CharTokenizer
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook.setup import setup
from minigrpo.sampling import Rollouts
from minigrpo.study.experiments import SUMMIT
from minigrpo.text import prompts as text
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows, evaluate
from minigrpo.text.prompts import Text, answer_reward, format_reward
from minigrpo.turns.commits import COMMITS, Bisect, read_episode
from minigrpo.turns.commits import to_text as in_words

World = tuple[nn.Module, Any, GRPOConfig, Callable[[Any], str]]  # the last one: ids as text
Pair = tuple[float, float]

FAMILIES = ("gpt2", "llama")
PROBLEMS, PROBLEMS_SEED = 2000, 1  # for training
SCORES = ("form", "right", "length")
HELD_OUT, HELD_OUT_SEED = 128, 5  # problems to measure on


def soft_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """0.1 for each tag that occurs exactly once, as in notebook 09."""
    found = [re.findall(r"</?think>|</?answer>", text.text_of(one)) for one in completions]
    return [sum(0.1 for tag in set(tags) if tags.count(tag) == 1) for tags in found]


@dataclass(frozen=True)
class Arm:
    """A base model, how it is asked, and what it is rewarded for."""

    family: str
    chat: bool = False  # as it never was asked in its warm-up, so almost no answer is right
    rewards: tuple[str, ...] = ("form", "answer")
    weights: tuple[float, ...] = (1.0, 2.0)
    steps: int = 30


REWARDS = {"form": format_reward, "answer": answer_reward, "tags": soft_reward}
ARMS = {
    **{family: Arm(family) for family in FAMILIES},
    "chat, answer": Arm("gpt2", True, ("answer",), (1.0,), 60),
    "chat, answer and tags": Arm("gpt2", True, ("answer", "tags"), (1.0, 1.0), 60),
}


class Run(NamedTuple):
    """What is varied."""

    arm: str
    seed: int


RUNS = [Run(arm, seed) for arm, seed in product(ARMS, range(3))]


def config(arm: Arm, seed: int, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run, which are those of notebook 09."""
    return GRPOConfig(
        steps=arm.steps, prompts_per_step=16, group_size=8, max_new_tokens=40, inner_epochs=2,
        lr=1e-4, how="token_mean", kl_weight=0.01, evaluate_every=5, eos_id=stops, pad_id=pad_id,
        seed=seed,
    )  # fmt: skip


def problems(chat: bool, held_out: bool) -> list[dict[str, Any]]:
    """To train or to measure on, as chats if they are to be."""
    n, seed = (HELD_OUT, HELD_OUT_SEED) if held_out else (PROBLEMS, PROBLEMS_SEED)
    rows = draw_rows(n, torch.Generator().manual_seed(seed), held_out=held_out)
    said = [[{"role": "user", "content": row["prompt"].strip()}] for row in rows]
    return [{**row, "prompt": new} for row, new in zip(rows, said)] if chat else rows


def base(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy before the run, with its tokenizer."""
    return load_pretrained(ROOT / "data" / f"text_{family}", device="cpu", dtype=torch.float32)


@cache
def drawn() -> dict[str, str]:
    """The problems to train and to measure on, as checksums."""
    return {k: store.of_data(problems(False, k == "held out")) for k in ("training", "held out")}


def settings() -> Results:
    """What decides how the runs go, beside the code of the package."""
    common = asdict(config(Arm("gpt2"), 0, (0,), 1))
    for varied in ("steps", "seed", "eos_id", "pad_id"):
        del common[varied]
    return {
        "base": {f: store.of_folder(ROOT / "data" / f"text_{f}") for f in FAMILIES},
        "arms": {name: asdict(arm) for name, arm in ARMS.items()},
        "rows": [PROBLEMS, PROBLEMS_SEED, HELD_OUT, HELD_OUT_SEED],
        "drawn": drawn(),
        "config": common,
        "code": store.of_code(soft_reward, problems, measure),
    }


def measure(one: Run) -> Results:
    """One run; the scores on held-out problems before it and on the way."""
    setup(seed=0)
    arm, curve = ARMS[one.arm], {}
    policy, tokenizer = base(arm.family)
    stops = text.stop_tokens(tokenizer, policy)
    functions, rows = [REWARDS[name] for name in arm.rewards], problems(arm.chat, held_out=False)
    task = text.TextProblems(tokenizer, rows, functions, arm.weights, stops)
    asked = problems(arm.chat, held_out=True)
    held_out = partial(evaluate, tokenizer=tokenizer, rows=asked, seed=HELD_OUT_SEED)
    store.keep(curve, 0, held_out(policy))
    own = config(arm, one.seed, stops, tokenizer.pad_token_id)
    for m in train_grpo(policy, task, own, evaluate=held_out):
        if m.evaluation:
            store.keep(curve, m.step, m.evaluation)
    return {**one._asdict(), "curve": curve}


# the night shift of notebook 08 --------------------------------------------------------------

LIMIT = 3.0  # TRL's vllm_importance_sampling_clip_max: a completion whose product is above counts 0
SUMS = replace(SUMMIT, steps=160, prompts_per_step=4, evaluate_every=10**6, check=False)
BY_ROW = {"how": "sequence_mean", "inner_epochs": 1}
COARSE = 3  # bits that are left of each weight
EVERY = 40  # steps between two copies of the weights
DROPPED = 0.1
COLD = 0.7  # the temperature of an engine of its own
SHOWN = 16  # completions of the last batch, at most


class TwoStarts(Arithmetic):
    """Two BOS, by a template and by a tokenizer that don't know of each other."""

    def prompts(self, n, generator):
        return [torch.cat([torch.tensor([BOS]), p]) for p in super().prompts(n, generator)]


class OtherOrder(Arithmetic):
    """The answers of a batch are repeated one after another, and its prompts each four times."""

    def reward(self, prompts, completions):
        return super().reward((prompts[::4] * len(prompts))[: len(prompts)], completions)


class Two(Arithmetic):
    """Questions of two digits."""

    def prompts(self, n, generator):
        return Arithmetic(lengths=(2,)).prompts(n, generator)


def plain(ids: torch.Tensor) -> str:
    """Without the tokens at start and end."""
    return to_text([i for i in ids.tolist() if i not in (BOS, EOS)])


def sums(task: type[Arithmetic] = Arithmetic, **changes: Any) -> World:
    """As in notebook 07, with few prompts, so that it's noisy."""
    return load_policy(), task(), replace(SUMS, **changes), plain


def words(family: str = "llama", **changes: Any) -> World:
    """As in notebook 09, with few prompts."""
    policy, tokenizer = base(family)
    stops = text.stop_tokens(tokenizer, policy)
    task = text.TextProblems(tokenizer, problems(False, held_out=False), weights=(1.0, 2.0),
                             stops=stops)  # fmt: skip
    own = config(Arm(family), 0, stops, tokenizer.pad_token_id)
    fixed = {"prompts_per_step": 4, "check": False, "evaluate_every": 10**6}
    return policy, task, replace(own, **{**fixed, **changes}), tokenizer.decode


def lines(**changes: Any) -> World:
    """Ends of lines, as in notebook 08."""
    own = replace(clinic.LINES.config, prompts_per_step=2, group_size=8, **changes)
    return clinic.char_gpt(), clinic.LINES.task(), own, CharTokenizer().decode


def build(task: type[Bisect] = Bisect, seed: int = 4) -> World:
    """The beginning of a run of notebook 12, from the base that forges a result now and then."""
    return load_policy(turns.SHIPPED[0.1]), task(), replace(turns.RUN, steps=4, seed=seed), in_words


def coarse(healthy: bugs.Function) -> bugs.Function:
    """The engine's copy of the weights is rounded to a few bits."""

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        engine = copy.deepcopy(model)
        with torch.no_grad():
            for p in engine.parameters():
                digits, exponent = torch.frexp(p)
                p.copy_(torch.ldexp((digits * 2**COARSE).round() / 2**COARSE, exponent))
        return healthy(engine, *args, **options)

    return sample


def now_and_then(healthy: bugs.Function) -> bugs.Function:
    """The engine gets the trainer's weights at the start, and then every so many steps."""
    copies: list[nn.Module] = []

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        copies.append(copies[-1] if len(copies) % EVERY else copy.deepcopy(model))
        return healthy(copies[-1], *args, **options)

    return sample


def in_step(healthy: bugs.Function) -> bugs.Function:
    """The engine has the trainer's weights."""
    return healthy


def left_on(healthy: bugs.Function) -> bugs.Function:
    """Dropout is on wherever the trainer scores."""

    def scored(model: nn.Module, *args: Any, **options: Any) -> Any:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p, module.training = DROPPED, True
        try:
            return healthy(model, *args, **options)
        finally:
            model.eval()

    return scored


def shared(healthy: bugs.Function) -> bugs.Function:
    """The reference is the policy itself, and scores what the policy scores."""
    return lambda log_probs, *args, **options: healthy(
        log_probs, *args, **{**options, "ref_log_probs": log_probs.detach()}
    )


def tokenized_again(healthy: bugs.Function) -> bugs.Function:
    """The trainer makes ids from the text, and 12 becomes 1 and 2: a token is its pieces' sum."""

    def scored(policy: nn.Module, r: Rollouts, own: GRPOConfig) -> tuple[Tensor, ...]:
        rows = []
        for ids, mine in zip(r.unpadded(r.completions), r.unpadded(r.own)):
            words = [[1, i - 10] if 10 <= i < COMMITS else [i] for i in ids.tolist()]
            at = torch.arange(len(words)).repeat_interleave(torch.tensor([*map(len, words)]))
            text = torch.tensor(sum(words, []))
            rows.append((text, torch.ones_like(at).bool(), 0.0 * at, mine[at], at))
        *columns, at = (nn.utils.rnn.pad_sequence([*some], batch_first=True) for some in zip(*rows))
        values = healthy(policy, Rollouts(r.prompt_ids, r.prompt_mask, *columns), own)
        return tuple(torch.zeros_like(r.log_probs).scatter_add(1, at, x) for x in values)

    return scored


class Night(NamedTuple):
    """How a run goes; minigrpo/clinic/night.md has what is told and shown of it."""

    world: Callable[[], World] = sums
    mistakes: tuple[str, ...] = ()
    bugs: Mapping[str, Bug] = {}
    engine: Bug | None = None  # what writes the completions, if the trainer doesn't


NIGHT = {
    "eight tokens": Night(
        partial(sums, max_new_tokens=8), bugs={"frozen_copy": bugs.another_reference}
    ),
    "low tide": Night(
        partial(sums, Two, kl_weight=0.0, entropy_weight=0.1),
        ("entropy_penalty_instead_of_a_bonus",),
    ),
    "short measure": Night(
        partial(lines, steps=5, seed=1), ("eos_masked",), {"grpo_loss": bugs.per_micro_batch}
    ),
    "coarse engine": Night(partial(words, steps=120), engine=coarse),
    "two readings": Night(
        partial(words, "gpt2", steps=30, prompts_per_step=2),
        bugs={"completion_log_probs_and_entropy": left_on}, engine=in_step,
    ),
    "now and then": Night(partial(sums, steps=140), engine=now_and_then),
    "one late": Night(
        partial(sums, lr=4e-4, seed=7, kl_weight=0.0, **BY_ROW),
        bugs={"sample": bugs.one_batch_late}, engine=in_step,
    ),
    "uphill": Night(partial(sums, steps=80, seed=1), ("loss_minimises_the_objective",)),
    "other order": Night(partial(sums, OtherOrder, group_size=4), bugs={"grpo_loss": shared}),
    "two starts": Night(partial(sums, TwoStarts, steps=2), bugs={"reward": bugs.reads_the_prompt}),
    "leaps": Night(partial(sums, lr=2e-4, seed=3)),
    "own shadow": Night(
        partial(sums, inner_epochs=1, seed=9), ("kl_against_the_old_policy",), {"sample": coarse}
    ),
    "downhill": Night(
        partial(sums, steps=60, lr=3e-4, seed=10, kl_weight=0.5, **BY_ROW), ("k1_as_the_loss",)
    ),
    "open build 1": Night(build, engine=bugs.sampled_with(temperature=COLD)),
    "open build 2": Night(partial(build, turns.Proof), engine=in_step),
    "open build 3": Night(build, bugs={"score": lambda _: turns.results_unseen}, engine=in_step),
    "open build 4": Night(partial(build, seed=6), bugs={"score": tokenized_again}, engine=in_step),
    "open build 5": Night(build, engine=in_step),
}  # fmt: skip


class NightRun(NamedTuple):
    """Which one."""

    name: str


def of_trl(m: StepMetrics) -> dict[str, float]:
    """A step in the words of TRL's log."""
    return {
        "loss": m.loss,
        "grad_norm": m.grad_norm,
        "reward": m.reward,
        "reward_std": m.rewards.std().item(),
        "frac_reward_zero_std": m.frac_reward_zero_std,
        "kl": m.kl or 0.0,
        "entropy": m.entropy,
        "clip_ratio/region_mean": m.clip_low + m.clip_high,
        "completions/mean_length": m.mean_length,
        "completions/clipped_ratio": m.truncated,
    }


@contextmanager
def engine(bug: bugs.Bug | None) -> Iterator[tuple[list[dict[str, float]], list[Pair]]]:
    """As TRL with vLLM: an engine writes, and the trainer scores what it wrote once more.

    Yields the log, and of each completion of the last batch the log-probs of both. It counts as
    often as its product of ratios says, if that isn't above the limit.
    """
    logged, weight, sums = [], [], []

    def written(healthy: bugs.Function) -> bugs.Function:
        write = bug(healthy)

        def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
            rollouts = write(model, *args, **options)
            scored = score(model, rollouts, options["temperature"])
            apart = scored - rollouts.log_probs
            ratio = apart.sum(dim=1).exp()
            weight[:] = [ratio.where(ratio <= LIMIT, 0.0)]
            difference, (ratio,) = apart[rollouts.own].abs(), weight
            sums[:] = zip(rollouts.log_probs.sum(dim=1).tolist(), scored.sum(dim=1).tolist())
            logged.append({
                "sampling/sampling_logp_difference/mean": difference.mean().item(),
                "sampling/sampling_logp_difference/max": difference.max().item(),
                "sampling/importance_sampling_ratio/min": ratio.min().item(),
                "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
                "sampling/importance_sampling_ratio/max": ratio.max().item(),
            })  # fmt: skip
            return replace(rollouts, log_probs=scored)

        return sample

    def weighed(healthy: bugs.Function) -> bugs.Function:
        return lambda *args, **options: healthy(*args, **options) * weight[0]

    patches = {"sample": written, "group_advantages": weighed} if bug else {}
    with switch(**patches)():
        yield logged, sums


def night(one: NightRun) -> Results:
    """One run: its log, or what was written at its end."""
    setup(seed=0)
    run = NIGHT[one.name]
    policy, task, own, decode = run.world()
    curve: dict[str, list[float]] = {}
    with engine(run.engine) as (logged, both), switch(*run.mistakes, **run.bugs)():
        for m in train_grpo(policy, task, own):
            for name, value in {**of_trl(m), **(logged[-1] if logged else {})}.items():
                curve.setdefault(name, []).append(value and float(f"{value:.3g}"))
    about, r, rows = records("night.md")[one.name], m.rollouts, []
    _, _, shown = about["shows"].partition(" ")
    for row in range(min(SHOWN, len(r.completions))):
        prompt = r.prompt_ids[row][r.prompt_mask[row]]
        written = r.completions[row][r.completion_mask[row]]
        engine_says, trainer_says = (round(x, 3) for x in (both[row] if both else (0, 0)))
        of_row = {"reward": m.rewards[row].item(), "prompt": len(prompt), "tokens": len(written),
                  "engine": engine_says, "trainer": trainer_says}  # fmt: skip
        of_row = {name: of_row[name] for name in about.get("rows", "").split(", ") if name}
        rows.append([decode(prompt), decode(written), of_row])
    what = {"curve": {name: curve[name] for name in shown.split(", ") if name}}
    what |= {"rows": rows} if "rows" in about else {}
    return {**one._asdict(), "config": size(own), **what}


def told(run: Night) -> list[str]:
    """What is different in a run, as text."""
    changes = getattr(run.world, "keywords", {})
    given = [getattr(one, "__name__", one) for one in getattr(run.world, "args", ())]
    given += [f"{name}={value}" for name, value in changes.items()]
    return [*run.mistakes, *run.bugs, *given]


def size(own: GRPOConfig) -> str:
    """What is told of the settings."""
    updates = f"{own.inner_epochs} update{'s' * (own.inner_epochs > 1)} per batch"
    over = "tokens" if own.how == "token_mean" else "completions of their token means"
    return (
        f"{own.steps} steps of {own.prompts_per_step} prompts x {own.group_size} completions of at "
        f"most {own.max_new_tokens} tokens, {updates}, learning rate {own.lr:g}, KL weight "
        f"{own.kl_weight:g}, entropy bonus {own.entropy_weight:g}. The loss is a mean over {over}, "
        "and the log's kl and entropy are means over tokens."
    )


def night_settings() -> Results:
    """What decides how the night's runs go."""
    tasks = (TwoStarts, OtherOrder, Two)
    runs = (sums, plain, words, lines, *tasks, coarse, now_and_then, in_step, left_on, shared)
    tools = (build, tokenized_again, turns.results_unseen, turns.Proof, Bisect, read_episode)
    models = ("text_llama", "text_gpt2", "tiny_llama", "turns_forger")
    data = [ROOT / "data" / name for name in models]
    return {
        "base": [*map(store.of_folder, data), store.of_file(ROOT / "data/char_gpt.safetensors")],
        "config": [asdict(SUMS), asdict(turns.RUN)],
        "runs": {name: told(run) for name, run in NIGHT.items()},
        "numbers": [LIMIT, SHOWN, COARSE, EVERY, DROPPED, COLD],
        "code": store.of_code(*runs, *tools, engine, of_trl, night),
    }


CHATS = (
    "Natalia sold 48 clips in April and half as many in May. How many in all? Think step by step.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Show your work.",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain to a child why the sky is blue.",
    "List five uses of a paper clip.",
    "Translate into French: the library opens at nine in the morning.",
)
ROUNDED = {  # whether by autocast, and how it samples
    "float32": (False, {}),
    "bfloat16": (True, {}),
    "top-p 0.9": (True, {"top_p": 0.9}),
    "temperature 0.7": (True, {"temperature": 0.7}),
}


def rounding(folder: str) -> dict[str, dict[str, float]]:
    """How far sampler and scorer are apart in a real model before any update, on the processor.

    Of the log-ratio its root mean square, its mean, without the sign as well, and the largest, in
    nats; and the mean difference of the probabilities, without the sign. 96 tokens of six chats.
    """
    policy, tokenizer = load_pretrained(folder, device="cpu", dtype=torch.float32)
    prompts = [[{"role": "user", "content": chat}] for chat in CHATS]
    found = {}
    for name, (bf16, own) in ROUNDED.items():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            rollouts, _ = text.write(policy, tokenizer, prompts, max_new_tokens=96, **own)
            scored = token_log_probs(policy, rollouts.input_ids, rollouts.attention_mask)
        written, old = rollouts.completion_mask, rollouts.log_probs.double()
        new = scored[:, -old.shape[1] :].double()
        apart, other = (new - old)[written], (new.exp() - old.exp())[written]
        sizes = {"rms": apart.pow(2).mean().sqrt(), "mean": apart.mean()}
        sizes |= {"absolute": apart.abs().mean(), "largest": apart.abs().max()}
        sizes["probabilities"] = other.abs().mean()
        found[name] = {key: float(f"{value.item():.2g}") for key, value in sizes.items()}
        print(name, int(written.sum()), found[name], flush=True)
    return found


STORE = Store("text.json", RUNS, settings)
NIGHT_STORE = Store("night.json", [NightRun(name) for name in NIGHT], night_settings)
PARTS = {"text": [(STORE, measure)], "night": [(NIGHT_STORE, night)]}


def main(arguments: list[str] | None = None) -> None:
    """What is missing, or with --model how a real model's log-probs are rounded."""
    chosen = store.options(arguments, PARTS, **{"--model": {"help": "a folder: only rounding"}})
    if chosen.model:
        return STORE.save(STORE.stored(), rounding=rounding(chosen.model))
    return store.command(PARTS, arguments)


if __name__ == "__main__":
    main()
