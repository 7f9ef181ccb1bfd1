"""Speed and memory beside transformers and TRL: what docs/speed.md shows.

    python tools/experiments/bench.py --again --only trainer  # without --only twenty minutes

Each part has processes of its own. Writes data/results/bench.json after each part.
"""

import datetime
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import store
import torch
import transformers
from store import ROOT, Part, Results, Store
from torch import Tensor, nn

from minigrpo import grpo, logprobs
from minigrpo.arithmetic import EOS, PAD, Arithmetic
from minigrpo.grpo import GRPOConfig
from minigrpo.llama import load_policy
from minigrpo.notebook.setup import setup
from minigrpo.sampling import Rollouts, sample
from minigrpo.scaling.trl import QUIET, trl_settings

BODY = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
BODY |= {"hidden_size": 64, "intermediate_size": 128}  # the logits are all there is
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TOY = GRPOConfig(  # the rate is next to nothing, so that the lengths stay what they are
    prompts_per_step=16, group_size=8, max_new_tokens=16, eos_id=EOS, pad_id=PAD,
    how="token_mean", steps=12, lr=1e-9,
)  # fmt: skip
REAL = GRPOConfig(
    prompts_per_step=8, group_size=8, max_new_tokens=26, rows_per_pass=16, how="token_mean",
    steps=3, lr=1e-5,
)  # fmt: skip


def row(what: str, ours: list[float], peer: str, theirs: list[float]) -> Results:
    """Lowest, median, highest over the rounds; a ratio above 1 is in our favor."""
    ratio = [a / b if "per second" in what else b / a for a, b in zip(ours, theirs, strict=True)]
    sides = {"ours": ours, "theirs": theirs, "ratio": ratio}
    three = {k: [float(f"{of(v):.4g}") for of in (min, median, max)] for k, v in sides.items()}
    return {"what": what, "peer": peer, **three}


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What a process of its own finds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def mib() -> float:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (20 if sys.platform == "darwin" else 10)


def generate(rounds: int = 30) -> list[Results]:
    """Tokens per second that `sample` and transformers' `generate` write, in turn."""
    setup(seed=0)
    policy = load_policy()
    prompts = torch.stack(Arithmetic().prompts(16, torch.Generator().manual_seed(0)))
    own = {"completions_per_prompt": 8, "eos_id": EOS, "pad_id": PAD}
    peer = {"num_return_sequences": 8, "eos_token_id": EOS, "pad_token_id": PAD}
    peer |= {"attention_mask": torch.ones_like(prompts), "do_sample": True, "top_k": 0}
    rates: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        ours = sample(policy, prompts, max_new_tokens=16, **own).completions
        between = time.perf_counter()
        with torch.no_grad():
            theirs = policy.generate(prompts, max_new_tokens=16, **peer)[:, prompts.shape[1] :]
        ended = time.perf_counter()
        tokens = [int((ids != PAD).sum()) for ids in (ours, theirs)]
        rates.append((tokens[0] / (between - began), tokens[1] / (ended - between)))
    ours, theirs = zip(*rates[1:])  # the first round warms up
    what = "tokens per second, 16 x 8 completions"
    return [row(what, ours, "generate of transformers", theirs)]


def seconds(ours: bool, policy: nn.Module, task: Any, config: GRPOConfig) -> list[float]:
    """From one batch of rewards to the next, in our loop or in TRL's with the same settings."""
    batches: list[float] = []

    def reward(prompts: list, completions: list, ids: list | None = None, **more: Any) -> list:
        batches.append(time.perf_counter())
        texts = ids or prompts, more.get("completion_ids", completions)  # TRL gives text and ids
        return task.reward(*([torch.as_tensor(one) for one in some] for some in texts))

    if ours:
        list(grpo.train_grpo(policy, SimpleNamespace(prompts=task.prompts, reward=reward), config))
    else:
        train_trl(policy, task, reward, config)
    return [b - a for a, b in pairwise(batches)]


def train_trl(policy: nn.Module, task: Any, reward: Callable, config: GRPOConfig) -> None:
    """TRL's loop."""
    import trl
    from datasets import Dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")
    texts = config.prompts_per_step * config.group_size
    at_once = min(config.rows_per_pass, texts)
    own = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": texts // at_once}
    own |= {"reward_weights": None, "shuffle_dataset": False, "logging_strategy": "no"}
    settings = trl.GRPOConfig(tempfile.gettempdir(), **{**QUIET, **trl_settings(config), **own})
    order = torch.Generator().manual_seed(config.seed)
    prompts = task.prompts(config.prompts_per_step * config.steps, order)
    rows = [{"prompt": tokenizer.decode(ids), "ids": ids.tolist()} for ids in prompts]
    data = Dataset.from_list(rows)
    trl.GRPOTrainer(policy, reward, settings, data, processing_class=tokenizer).train()


def trainer(updates: int, rounds: int = 3, config: GRPOConfig = TOY) -> Results:
    """Completions trained on per second, in turn."""
    setup(seed=0)
    rates: tuple[list[float], list[float]] = [], []
    for seed in range(rounds):
        one = replace(config, inner_epochs=updates, seed=seed)
        for rate, ours in zip(rates, (True, False)):
            rate.append(16 * 8 / median(seconds(ours, load_policy(), Arithmetic(), one)))
    what = f"completions trained on per second, {updates} update{'s' * (updates > 1)} per batch"
    return row(what, rates[0], "GRPOTrainer of TRL", rates[1])


def llama(**shape: Any) -> nn.Module:
    """Random weights, all cores. Its EOS is in no vocabulary, so every completion is full."""
    setup(seed=0)
    torch.set_num_threads(os.cpu_count() or 1)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **ends)).eval()


class Even:
    """Prompts of 160 random digits; the reward is the fraction of even tokens."""

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        return [*torch.randint(0, 10, (n, 160), generator=generator)]

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        return [(ids % 2 == 0).double().mean().item() for ids in completions]


def a_step(ours: bool, shape: Results, config: GRPOConfig) -> tuple[list[float], ...]:
    """Seconds, and MiB at peak: of the whole process, and beside the model."""
    model, built = llama(**shape), mib()
    return seconds(ours, model, Even(), config), [peak := mib()], [peak - built]


def real_model(shape: Results = SMOLLM2, config: GRPOConfig = REAL) -> list[Results]:
    """Three steps in the shape of SmolLM2-135M."""
    size = "135 million parameters, all cores"
    most = f"MiB at peak in three steps, {size}"
    what = (f"seconds per step of GRPO, {size}", f"{most}, the whole process")
    sides = (apart(a_step, ours, shape, config) for ours in (True, False))
    rows = zip((*what, f"{most}, beside the model"), *sides)
    return [row(name, ours, "GRPOTrainer of TRL", theirs) for name, ours, theirs in rows]


@torch.no_grad()
def scored(ours: bool, N: int, V: int) -> float:
    """MiB that it takes to score N rows of random tokens, to log-probs and entropies."""
    model, ids = llama(vocab_size=V, **BODY), torch.randint(0, V, (N, 60))
    real = torch.ones_like(ids, dtype=torch.bool)
    r = Rollouts(ids[:, :20], real[:, :20], ids[:, 20:], real[:, 20:], torch.zeros(N, 40))
    before = mib()
    if ours:
        grpo.score(model, r, GRPOConfig())
    else:  # from a distribution of the size of all logits
        logits = torch.cat(logprobs.completion_logits(model, *r.text), dim=1)
        distribution = logprobs.next_token_log_probs(logits)
        distribution.gather(-1, r.completions[..., None]), logprobs.token_entropy(distribution)
    return mib() - before


def scoring(V: int = 151_936) -> list[Results]:
    """Memory of scoring 128 rows; the plain way gets 16, as all would take more than 20 GiB."""
    ours, theirs = apart(scored, True, 128, V), apart(scored, False, 16, V) * 128 / 16
    what = f"MiB beside the model, scoring 128 rows at V = {V:,}"
    return [row(what, [ours], "a log-softmax of all logits, scaled from 16 rows", [theirs])]


PARTS = {
    "generate": lambda: apart(generate),
    "trainer": lambda: [apart(trainer, updates) for updates in (1, 2)],
    "scoring": scoring,
    "real_model": real_model,
}
TABLES = {"speed": ("generate", "trainer"), "real size": ("scoring", "real_model")}


def machine() -> Results:
    """What a ratio depends on, beside the processor."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "trl")}
    return {"cores": os.cpu_count(), "threads": 1, "python": platform.python_version(), **versions}


def measure(one: Part) -> Results:
    """A part with its day and processor."""
    measured = f"{datetime.date.today()}, {platform.processor() or platform.machine()}"
    return {**one._asdict(), "measured": measured, "rows": PARTS[one.part]()}


STORE = Store("bench.json", [Part(name) for name in PARTS], machine)


def table(parts: tuple[str, ...]) -> str:
    """For docs/speed.md: medians, ratios with their range; below them, when they were measured."""
    stored = store.load(STORE.file)
    lines = ["| what | minigrpo | peer | ratio |", "|---|---|---|---|"]
    runs = [run for run in stored["runs"] if run["part"] in parts]
    for one in (one for run in runs for one in run["rows"]):
        values = one["ours"][1], one["theirs"][1], *one["ratio"]
        ours, theirs, low, ratio, high = (f"{v:,.{max(0, 3 - len(str(int(v))))}f}" for v in values)
        span = f" ({low} to {high})" if low != high else ""
        lines.append(f"| {one['what']} | {ours} | {theirs} ({one['peer']}) | {ratio}{span} |")
    on = "{cores} cores, {threads} thread unless a row says otherwise; Python {python}, "
    on += "torch {torch}, transformers {transformers}, TRL {trl}."
    notes = on.format_map(stored["settings"]), ". ".join({r["measured"]: 0 for r in runs}) + "."
    return "\n".join([*lines, *(f"\n*{note}*" for note in notes)])


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    options = store.options(arguments, PARTS)
    STORE.fill(measure, options.again, only=[Part(name) for name in options.only])


if __name__ == "__main__":
    main()
