"""How much faster the package is than the plain way to do the same.

    python tools/bench.py --only scoring sampling step training

Both sides of a comparison run in this process, in turns, with the same threads, so that a busy
machine slows both alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.nn.functional as F
from letters import PROMPTS
from lines import Line, alternate, over, seconds
from torch import Tensor, nn

from minigrpo.corpus import CharTokenizer, load_corpus, offline_text, random_batch, split
from minigrpo.files import data_folder
from minigrpo.gpt import GPT, GPTConfig, load_gpt
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.logprobs import token_log_probs
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.pretrain import PretrainConfig, pretrain, validation_loss
from minigrpo.rewards import TextTask
from minigrpo.sampling import Rollouts, left_pad, sample

ROWS, PROMPT = 64, 16
TARGET_LOSS = 1.88
SOME = 16  # rows of the plain way, which takes each by itself: the others are as slow
SEEDS = 2  # of training, minutes each


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
    some = 2 if quick else SOME
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
    what = "seconds to score 64 x 64 characters"
    return [
        Line(
            what,
            f"a pass per token, scaled from {some} rows",
            "torch",
            one_pass,
            by_row,
            over(by_row, one_pass),
            "20 or more",
        ),
        Line(
            what, "a pass per position", "torch", one_pass, by_position, over(by_position, one_pass)
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
    some = 2 if quick else SOME
    sample(model, prompts, max_new_tokens=8)  # warm up
    together, by_row = alternate(
        lambda: sample(model, prompts, max_new_tokens=new),
        lambda: write_row_by_row(model, prompts[:some], new),
        repeats=3,
    )
    ours = [ROWS * new / t for t in together]
    theirs = [some * new / t for t in by_row]
    return [
        Line(
            "characters per second, 64 rows of 128",
            f"row by row, no cache, {some} rows",
            "torch",
            ours,
            theirs,
            over(ours, theirs),
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
            settings = {"ref_log_probs": ref, **config.loss_settings}
            loss, _ = grpo_loss(log_probs, old, advantages, mask, **settings)
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
            "seconds per step of GRPO, 64 x 24 characters",
            "no cache, every policy scored",
            "torch",
            cached,
            uncached,
            over(uncached, cached),
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
    every: int  # steps between evaluations
    spent: float = 0.0
    done: bool = False
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def advance(self, val: Tensor) -> None:
        """Train a few steps, then evaluate: in windows of its own length, and of 65 tokens."""
        taken = list(islice(self.steps, self.every))
        self.done = len(taken) < self.every
        self.spent += sum(taken)
        losses = {
            length: validation_loss(self.model, val, length, max_windows=200)
            for length in {self.window, 65}
        }
        for name, length in (("own", self.window), ("65", 65)):
            self.curves.setdefault(name, []).append((self.spent, losses[length]))
        if all(self.reached(name) is not None for name in self.curves):
            self.done = True

    def reached(self, name: str) -> float | None:
        """Seconds until the loss was reached, None if it never was."""
        return next((spent for spent, loss in self.curves[name] if loss <= TARGET_LOSS), None)


def our_recipe(train: Tensor, steps: int, seed: int = 0) -> Run:
    """Notebook 01: two wide layers, Muon for the matrices, windows of 128 tokens."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(max_position_embeddings=128))
    metrics = pretrain(
        model,
        lambda generator: random_batch(train, 16, 128, generator),
        PretrainConfig(steps=steps, seed=seed),
    )

    def times() -> Iterator[float]:
        before = 0.0
        for m in metrics:
            yield m.seconds - before
            before = m.seconds

    return Run(model, times(), window=128, every=20)


def nanogpt_recipe(train: Tensor, steps: int, seed: int = 0) -> Run:
    """The CPU recipe of nanoGPT's readme, a schedule around our GPT: AdamW and cosine decay.

    As there: 4 layers, 128 wide, 4 heads, 64 characters in, 12 rows, head and embedding tied,
    weights drawn with standard deviation 0.02, no dropout.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(max_position_embeddings=65, width=128, num_layers=4, num_heads=4))
    nn.init.normal_(model.position_embedding.weight, std=0.02)
    model.lm_head.weight = model.token_embedding.weight
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    generator = torch.Generator().manual_seed(seed)

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

    return Run(model, (seconds(lambda i=i: step(i)) for i in range(steps)), window=65, every=50)


def race(train: Tensor, val: Tensor, quick: bool, seed: int) -> tuple[Run, Run]:
    """Both recipes in turns, until both have reached the loss or come to their end."""
    ours = our_recipe(train, 42 if quick else 420, seed)
    theirs = nanogpt_recipe(train, 200 if quick else 2000, seed)
    while not (ours.done and theirs.done):
        for run, pieces in ((ours, 1), (theirs, 2)):  # so that both last about as long
            for _ in range(pieces):
                if not run.done:
                    run.advance(val)
        losses = (
            f"{run.curves['65'][-1][1]:.3f} after {run.spent:.1f} s" for run in (ours, theirs)
        )
        print("  training, validation loss in windows of 65:", " | ".join(losses), flush=True)
    return ours, theirs


def training(quick: bool) -> list[Line]:
    """Seconds of training until the loss on the validation text is 1.88 nats per character."""
    corpus = load_corpus()
    if not corpus.is_shakespeare:
        print(f"training is left out: it needs tinyshakespeare\n{corpus.describe()}")
        return []
    train, val = split(CharTokenizer().encode(corpus.text))
    races = [race(train, val, quick, seed) for seed in range(1 if quick else SEEDS)]
    lines = []
    for name, how in (("own", "own windows"), ("65", "windows of 65")):
        mine = [ours.reached(name) for ours, _ in races]
        other = [theirs.reached(name) for _, theirs in races]
        if None in mine:
            print(f"  the loss of {TARGET_LOSS} was not reached ({how}): no line")
            continue
        peer = "nanoGPT's CPU recipe"
        if None in other:  # it has trained at least so long, and the ratio is at most this
            peer += ", which stopped above it"
            other = [t or theirs.spent for t, (_, theirs) in zip(other, races)]
        what = f"seconds to a loss of {TARGET_LOSS}, {how}"
        ratio = over(mine, other)
        lines.append(Line(what, peer, "torch", mine, other, ratio, "0.5 or less", less=True))
    return lines
