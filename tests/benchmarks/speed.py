"""How much faster the package is than the plain way to do the same. Ratios, not absolute times.

    python tests/benchmarks/speed.py                        # everything, 5 to 15 minutes
    python tests/benchmarks/speed.py --only scoring sampling
    python tests/benchmarks/speed.py --quick                # does it run? figures are rough

Both sides of a comparison run in this process, in turns, with the same threads (one, unless
MINIGRPO_THREADS says otherwise), so that a busy machine slows both alike. Medians, with the range
of the runs in brackets.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.nn.functional as F
import transformers
from letters import PROMPTS
from torch import Tensor, nn

from minigrpo.corpus import CharTokenizer, load_corpus, offline_text, random_batch, split
from minigrpo.gpt import GPT, GPTConfig, load_gpt
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.logprobs import token_log_probs
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.pretrain import PretrainConfig, pretrain, validation_loss
from minigrpo.rewards import TextTask
from minigrpo.runtime import data_folder, setup
from minigrpo.sampling import Rollouts, left_pad, sample

ROWS, PROMPT = 64, 16
TARGET_LOSS = 1.88
EVALUATE_EVERY = 20  # steps


@dataclass(frozen=True)
class Line:
    """A line of the table: two sides, their ratio, and the ratio to reach."""

    what: str
    ours: str
    plain: str
    ratio: str
    target: str = ""


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternate(*sides: Callable[[], object], repeats: int) -> list[list[float]]:
    """Seconds of each side, measured in turns."""
    rounds = [[seconds(side) for side in sides] for _ in range(repeats)]
    return [list(times) for times in zip(*rounds)]


def spread(values: list[float], digits: int) -> str:
    """Median, lowest and highest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def quotient(slow: list[float], fast: list[float]) -> str:
    """How many times faster, with the range over the rounds."""
    return spread([s / f for s, f in zip(slow, fast)], 1)


# ---------------------------------------------------------------------------------------------
# scoring


@torch.no_grad()
def score_token_by_token(model: nn.Module, ids: Tensor) -> Tensor:
    """A forward pass for every token of every row, over the text before it."""
    log_probs = torch.zeros(len(ids), ids.shape[1] - PROMPT)
    for row in range(len(ids)):
        for end in range(PROMPT, ids.shape[1]):
            logits = model(ids[row : row + 1, :end]).logits[0, -1]
            log_probs[row, end - PROMPT] = logits.log_softmax(-1)[ids[row, end]]
    return log_probs


@torch.no_grad()
def score_position_by_position(model: nn.Module, ids: Tensor) -> Tensor:
    """A forward pass for every position, all rows at once."""
    columns = [
        model(ids[:, :end]).logits[:, -1].log_softmax(-1).gather(1, ids[:, end : end + 1])
        for end in range(PROMPT, ids.shape[1])
    ]
    return torch.cat(columns, dim=1)


@torch.no_grad()
def score_in_one_pass(model: nn.Module, ids: Tensor) -> Tensor:
    return token_log_probs(model, ids)[:, PROMPT - 1 :]


def scoring(quick: bool) -> list[Line]:
    """64 completions of 64 characters after prompts of 16."""
    model = load_gpt(data_folder() / "char_gpt.safetensors")
    text = CharTokenizer().encode(offline_text())
    ids = random_batch(text, ROWS, PROMPT + 64, torch.Generator().manual_seed(0))
    some = 2 if quick else ROWS
    expected = score_in_one_pass(model, ids)
    torch.testing.assert_close(score_position_by_position(model, ids), expected, atol=1e-3, rtol=0)
    by_token = score_token_by_token(model, ids[:some])
    torch.testing.assert_close(by_token, expected[:some], atol=1e-3, rtol=0)
    one_pass, by_row, by_position = alternate(
        lambda: score_in_one_pass(model, ids),
        lambda: score_token_by_token(model, ids[:some]),
        lambda: score_position_by_position(model, ids),
        repeats=3,
    )
    by_row = [t * ROWS / some for t in by_row]
    what = "s to score 64 x 64 characters"
    scaled = f", scaled from {some} rows" if some < ROWS else ""
    return [
        Line(
            f"{what} / a pass per token{scaled}",
            spread(one_pass, 3),
            spread(by_row, 2),
            quotient(by_row, one_pass),
            "20 or more",
        ),
        Line(
            f"{what} / a pass per position",
            spread(one_pass, 3),
            spread(by_position, 2),
            quotient(by_position, one_pass),
        ),
    ]


# ---------------------------------------------------------------------------------------------
# sampling


@torch.no_grad()
def write_row_by_row(model: nn.Module, prompts: Tensor, new: int) -> list[Tensor]:
    """Without a cache: the whole text is read again for every character, a row after the other."""
    texts = []
    for prompt in prompts:
        ids = prompt[None]
        for _ in range(new):
            probs = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
        texts.append(ids)
    return texts


def sampling(quick: bool) -> list[Line]:
    """64 rows of 128 characters after prompts of 16."""
    model, new = load_gpt(data_folder() / "char_gpt.safetensors"), 128
    text = CharTokenizer().encode(offline_text())
    prompts = random_batch(text, ROWS, PROMPT, torch.Generator().manual_seed(0))
    some = 2 if quick else ROWS
    sample(model, prompts, max_new_tokens=8)  # warm up
    together, by_row = alternate(
        lambda: sample(model, prompts, max_new_tokens=new),
        lambda: write_row_by_row(model, prompts[:some], new),
        repeats=3,
    )
    by_row = [t * ROWS / some for t in by_row]
    scaled = f", scaled from {some} rows" if some < ROWS else ""
    return [
        Line(
            f"characters/s, 64 x 128 / row by row, no cache{scaled}",
            spread([ROWS * new / t for t in together], 0),
            spread([ROWS * new / t for t in by_row], 0),
            quotient(by_row, together),
            "15 or more",
        )
    ]


# ---------------------------------------------------------------------------------------------
# a step of GRPO


def plain_grpo(policy: nn.Module, task: TextTask, config: GRPOConfig) -> Iterator[Tensor]:
    """The loop of train_grpo as the formulas are read; yields the rewards of each step.

    To write a character the whole text is read again. The old policy is scored once more after it
    has written, and the reference policy too, whatever its weight.
    """

    def score(model: nn.Module, written: Rollouts) -> Tensor:
        log_probs = token_log_probs(model, written.input_ids, written.attention_mask)
        return log_probs[:, -config.max_new_tokens :]

    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0
    )
    sampling, order = (torch.Generator().manual_seed(config.seed) for _ in range(2))
    for _ in range(config.steps):
        questions = task.prompts(config.prompts_per_step, order)
        prompts = [question for question in questions for _ in range(config.group_size)]
        written = sample(
            policy,
            *left_pad(prompts),
            max_new_tokens=config.max_new_tokens,
            generator=sampling,
            use_cache=False,
        )
        rewards = torch.tensor(task.reward(prompts, list(written.completions)))
        advantages = group_advantages(rewards, config.group_size)
        with torch.no_grad():
            old, ref = score(policy, written), score(reference, written)
        for _ in range(config.inner_epochs):
            log_probs = score(policy, written)
            mask = written.completion_mask
            loss, _ = grpo_loss(log_probs, old, advantages, mask, ref_log_probs=ref, **config.loss)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
        yield rewards


def step(quick: bool) -> list[Line]:
    """The run of notebook 03: 4 prompts, 16 completions each of 24 characters, 2 updates a step."""
    rounds = 3 if quick else 15
    config = GRPOConfig(level="sequence", inner_epochs=2, lr=3e-4, steps=1 + rounds)
    task = TextTask(PROMPTS)
    base = load_gpt(data_folder() / "char_gpt.safetensors").eval()
    ours = train_grpo(copy.deepcopy(base), task, config)
    plain = plain_grpo(copy.deepcopy(base), task, config)
    # Both write the same texts, and are warm after it.
    torch.testing.assert_close(next(ours).rewards, next(plain), check_dtype=False)
    cached, uncached = alternate(lambda: next(ours), lambda: next(plain), repeats=rounds)
    return [
        Line(
            "s per step of GRPO, 64 x 24 characters / no cache, every policy scored",
            spread(cached, 3),
            spread(uncached, 3),
            quotient(uncached, cached),
        )
    ]


# ---------------------------------------------------------------------------------------------
# training


@dataclass
class Run:
    """A training run, advanced piece by piece; what is measured on the way is not timed."""

    model: nn.Module
    steps: Iterator[float]  # seconds of each step
    window: int  # tokens
    spent: float = 0.0
    done: bool = False
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def advance(self, val: Tensor) -> None:
        """Train a few steps, then evaluate: in windows of its own length, and of 65 tokens."""
        taken = list(islice(self.steps, EVALUATE_EVERY))
        self.done = len(taken) < EVALUATE_EVERY
        self.spent += sum(taken)
        for name, length in (("own", self.window), ("65", 65)):
            loss = validation_loss(self.model, val, length, max_windows=200)
            self.curves.setdefault(name, []).append((self.spent, loss))
        if all(self.reached(name) is not None for name in self.curves):
            self.done = True

    def reached(self, name: str) -> float | None:
        """Seconds until the loss was reached, None if it never was."""
        return next((spent for spent, loss in self.curves[name] if loss <= TARGET_LOSS), None)

    def tell(self, name: str) -> str:
        if (when := self.reached(name)) is not None:
            return f"{when:.1f}"
        best = min(loss for _, loss in self.curves[name])
        return f"not in {self.spent:.1f} (best {best:.3f})"


def our_recipe(train: Tensor, steps: int) -> Run:
    """Notebook 01: two wide layers, Muon for the matrices, windows of 128 tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(max_position_embeddings=128))
    metrics = pretrain(
        model,
        lambda generator: random_batch(train, 16, 128, generator),
        PretrainConfig(steps=steps),
    )

    def times() -> Iterator[float]:
        before = 0.0
        for m in metrics:
            yield m.seconds - before
            before = m.seconds

    return Run(model, times(), window=128)


def nanogpt_recipe(train: Tensor, steps: int) -> Run:
    """The CPU recipe of nanoGPT's readme, a schedule around our GPT: AdamW and cosine decay.

    As there: 4 layers, 128 wide, 4 heads, 64 characters in, 12 rows, head and embedding tied,
    weights drawn with standard deviation 0.02, no dropout.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(max_position_embeddings=65, width=128, num_layers=4, num_heads=4))
    nn.init.normal_(model.position_embedding.weight, std=0.02)
    model.lm_head.weight = model.token_embedding.weight
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    generator = torch.Generator().manual_seed(0)

    def step(i: int) -> None:
        decay = 0.5 * (1 + math.cos(math.pi * max(0, i - 100) / (steps - 100)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (i + 1) / 100 if i < 100 else 1e-4 + decay * 9e-4
        windows = random_batch(train, 12, 65, generator)
        logits = model(windows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Run(model, (seconds(lambda i=i: step(i)) for i in range(steps)), window=65)


def training(quick: bool) -> list[Line]:
    """Seconds of training until the loss on the validation text is 1.88 nats per character."""
    corpus = load_corpus()
    if not corpus.is_shakespeare:
        print(f"training is left out: it needs tinyshakespeare\n{corpus.describe()}")
        return []
    train, val = split(CharTokenizer().encode(corpus.text))
    ours = our_recipe(train, 42 if quick else 420)
    theirs = nanogpt_recipe(train, 200 if quick else 2000)
    while not (ours.done and theirs.done):
        for run, pieces in ((ours, 1), (theirs, 5)):  # so that both last about as long
            for _ in range(pieces):
                if not run.done:
                    run.advance(val)
        losses = (
            f"{run.curves['65'][-1][1]:.3f} after {run.spent:.1f} s" for run in (ours, theirs)
        )
        print("  training, validation loss in windows of 65:", " | ".join(losses), flush=True)
    lines = []
    for name, how in (("own", "own windows"), ("65", "windows of 65")):
        mine, other = ours.reached(name), theirs.reached(name)
        if mine is None:
            ratio = "-"
        elif other is None:
            ratio = f"below {mine / theirs.spent:.2f}"
        else:
            ratio = f"{mine / other:.2f}"
        what = f"s to loss {TARGET_LOSS}, {how} / nanoGPT's recipe"
        lines.append(Line(what, ours.tell(name), theirs.tell(name), ratio, "0.5 or less"))
    return lines


# ---------------------------------------------------------------------------------------------

SECTIONS = {"scoring": scoring, "sampling": sampling, "step": step, "training": training}


def show(lines: list[Line]) -> None:
    """Print one table with aligned columns."""
    rows = [("what / against", "minigrpo", "against", "ratio", "target")]
    rows += [(line.what, line.ours, line.plain, line.ratio, line.target) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        first, *rest = (cell.ljust(width) for cell, width in zip(row, widths))
        print("  ".join([first, *rest]).rstrip())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections alone"
    )
    parser.add_argument("--quick", action="store_true", help="a rough and short run")
    options = parser.parse_args(arguments)
    # One thread unless told otherwise: a second one waits for the first in models this small, and
    # on a busy machine that would slow the many small calls of the plain way most.
    os.environ.setdefault("MINIGRPO_THREADS", "1")
    setup(seed=0)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} "
        f"of {os.cpu_count()} cores" + (", quick run: rough figures" if options.quick else "")
    )
    lines = []
    for section in options.only:
        lines += SECTIONS[section](options.quick)
    show(lines)


if __name__ == "__main__":
    main()
