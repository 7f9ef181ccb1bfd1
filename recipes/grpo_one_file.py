"""GRPO in one file: a language model learns from nothing but a reward for what it writes.

    python grpo_one_file.py             SmolLM2, 135 million weights, from the hub; a CPU will do
    python grpo_one_file.py --model Qwen/Qwen2.5-0.5B-Instruct --prompt chat --bf16     on a GPU
    python grpo_one_file.py --smoke     seconds, with the small model of this repository

Needs torch and transformers. To make it your own, copy it and replace `questions` and `reward`.
Algorithm 1 of DeepSeekMath (arXiv 2402.03300) with one reference for the whole run, and the mean
over all tokens of DAPO (arXiv 2503.14476).

Shapes: P questions and G answers to each make N = P * G rows, question by question. A prompt has S
tokens, padded on the left, a completion at most T; the vocabulary has V.
"""

import argparse
import copy
import csv
import os
import re
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# ---------------------------- The task: replace these two functions ----------------------------

ASK = "{name} has {have} {things} and {deed}. How many {things} does {name} have now?"
SHORT = "{name} has {have} {things}, {deed}. How many {things} now?\n"  # what the small model knows


def questions(ask: str = ASK) -> tuple[list[dict], list[dict]]:
    """Finite lists: questions to learn from, and to measure with, which have other numbers."""
    learned, held_out = [], []
    everything = product(range(2, 10), range(1, 10), ("Ann", "Ben", "Emma"), ("books", "pens"))
    for have, n, name, things in everything:
        for deed, answer in ((f"gets {n}", have + n), (f"loses {n}", have - n)):
            side = held_out if (have + 3 * n + answer) % 5 == 0 else learned
            text = ask.format(name=name, have=have, things=things, deed=deed)
            if answer > 0:
                side.append({"question": text, "answer": str(answer)})
    return learned, held_out


def reward(completion: str, answer: str) -> float:
    """0.2 for the form, 1 more for the right answer. It never sees the prompt."""
    form = r"\s*<think>[^<]*</think>\s*<answer>([^<]*)</answer>\s*"
    found = re.fullmatch(form, completion)
    return 0.2 + (found[1].strip() == answer) if found else 0.0


SYSTEM = """Think step by step, then answer with a number, in exactly this form:
<think> your steps </think> <answer> the number </answer>"""

SHOTS = """Q: Ben has 4 pens and gets 2. How many pens does Ben have now?
A: <think>4 + 2 = 6</think><answer>6</answer>
Q: Emma has 9 coins and loses 1. How many coins does Emma have now?
A: <think>9 - 1 = 8</think><answer>8</answer>
"""

# ---------------------------------------- The algorithm ----------------------------------------


class Rollouts(NamedTuple):
    prompt_ids: Tensor  # (N, S), padded on the left
    prompt_mask: Tensor  # (N, S) bool, True = real token
    completions: Tensor  # (N, T)
    completion_mask: Tensor  # (N, T) bool, True up to and including the token that ends it
    log_probs: Tensor  # (N, T) nats, with which each token was drawn; 0 where masked


def train_grpo(policy, reference, optimizer, tokenizer, rows, o, done=0):
    """Ask, let the policy answer, compare the answers of a group, learn. Yields what it saw."""
    stops = stop_ids(policy, tokenizer, o)
    for step in range(done + 1, o.steps + 1):
        began = time.perf_counter()
        asked = batch(rows, step, o)  # P of them
        generator = torch.Generator(o.device).manual_seed(10**6 * o.seed + step)
        r = sample(policy, *encode(tokenizer, asked, o), o.group_size, stops, o, generator)
        texts, answers = decode(tokenizer, r, stops), [row["answer"] for row in asked]
        rewards = [reward(text, answers[i // o.group_size]) for i, text in enumerate(texts)]
        advantages = group_advantages(torch.tensor(rewards), o.group_size)  # (N,)
        advantages = advantages.to(r.log_probs)  # the same device and precision
        for _ in range(o.inner_epochs):
            grad_norm = learn(policy, reference, optimizer, r, advantages, o)
        tokens = r.completion_mask.sum().item()
        metrics = {
            "step": step,
            "reward": sum(rewards) / len(rewards),
            "no_spread": (advantages == 0).double().mean().item(),  # rows that teach nothing
            "entropy": -r.log_probs.sum().item() / tokens,  # nats per token, from the sample
            "length": tokens / len(rewards),
            "grad_norm": grad_norm,
            "seconds": time.perf_counter() - began,
        }
        yield metrics, texts


@torch.no_grad()
def sample(policy, prompt_ids, prompt_mask, G, stops, o, generator=None) -> Rollouts:
    """G completions of each prompt (P, S), all at once, a token at a time; no generator: greedy."""
    S, T = prompt_ids.shape[1], o.max_new_tokens
    ids = pad(prompt_ids, (0, T)).repeat_interleave(G, dim=0)  # (N, S + T)
    mask = pad(prompt_mask, (0, T)).repeat_interleave(G, dim=0)
    logits, cache = next_logits(policy, prompt_ids, prompt_mask, o)  # each prompt is read once
    logits = logits.repeat_interleave(G, dim=0)  # (N, 1, V)
    cache.batch_repeat_interleave(G)
    log_probs = logits.new_zeros(len(ids), T)
    active = torch.arange(len(ids), device=ids.device)  # rows that are still being written
    for end in range(S, S + T):
        if end > S:  # the newest token alone: the cache keeps the others
            newest, seen = ids[active, end - 1 : end], mask[active, :end]
            logits, cache = next_logits(policy, newest, seen, o, cache)
        distribution = logits[:, -1].log_softmax(dim=-1)  # (active, V)
        token = distribution.argmax(dim=-1, keepdim=True)  # (active, 1)
        if generator is not None:
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
        ids[active, end], mask[active, end] = token[:, 0], True
        log_probs[active, end - S] = distribution.gather(1, token)[:, 0]
        going = ~torch.isin(token[:, 0], stops)
        active = active[going]
        if len(active) == 0:
            break
        cache.batch_select_indices(going.nonzero()[:, 0])
    ids, mask, log_probs = ids[:, : end + 1], mask[:, : end + 1], log_probs[:, : end + 1 - S]
    return Rollouts(ids[:, :S], mask[:, :S], ids[:, S:], mask[:, S:], log_probs)


def score(policy, r: Rollouts, o) -> Tensor:
    """Log-probs (N, T) of what was written, under the policy as it is now, with gradient."""
    ids = torch.cat([r.prompt_ids, r.completions], dim=1)  # (N, S + T)
    mask = torch.cat([r.prompt_mask, r.completion_mask], dim=1)
    T = r.completions.shape[1]
    logits = next_logits(policy, ids, mask, o, last=T + 1)[0][:, :-1]  # (N, T, V), one place before
    chosen = logits.gather(-1, r.completions[..., None])[..., 0]
    return torch.where(r.completion_mask, chosen - logits.logsumexp(dim=-1), 0.0)


def next_logits(policy, ids, mask, o, cache=None, last=1):
    """Logits at the `last` positions, and the cache: the same for the sampler and the scorer."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # padding moves none
    given = {"attention_mask": mask.long(), "position_ids": positions, "past_key_values": cache}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=o.bf16):
        output = policy(ids, **given, use_cache=last == 1, logits_to_keep=last)
    return output.logits.float() if o.bf16 else output.logits, output.past_key_values


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) -> (N,): how much better than the other answers to the same question."""
    groups = rewards.double().view(-1, group_size)  # (P, G)
    better = groups - groups.mean(dim=1, keepdim=True)
    better = better / (groups.std(dim=1, keepdim=True) + 1e-4)
    equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, better).flatten()  # float64


def grpo_loss(log_probs, old_log_probs, advantages, ref_log_probs, o) -> Tensor:
    """(N, T): of each token the clipped objective, and the KL (k3) to the reference if any."""
    ratio, A = (log_probs - old_log_probs).exp(), advantages[:, None]  # new over old; (N, 1)
    loss = -torch.minimum(ratio * A, ratio.clamp(1 - o.clip[0], 1 + o.clip[1]) * A)
    if ref_log_probs is not None:
        d = ref_log_probs - log_probs
        loss = loss + o.kl_weight * (torch.expm1(d) - d)
    return loss


def learn(policy, reference, optimizer, r: Rollouts, advantages: Tensor, o) -> float:
    """One update. The policy sees `rows_per_pass` at a time; the gradients of the passes add up."""
    tokens = r.completion_mask.sum()  # of the whole batch, so they add up to that of its mean
    rows = torch.arange(len(advantages), device=advantages.device)
    if not reference:  # then a row whose advantage is 0 has no gradient
        rows = rows[advantages != 0] if advantages.any() else rows[:1]
    for some in rows.split(o.rows_per_pass):
        part = Rollouts(*(field[some] for field in r))
        ref_log_probs = score(reference, part, o) if reference else None
        log_probs = score(policy, part, o)  # (rows, T)
        loss = grpo_loss(log_probs, part.log_probs, advantages[some], ref_log_probs, o)
        (torch.where(part.completion_mask, loss, 0.0).sum() / tokens).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm.item()


# ------------------------------- Around it: text, model, files -------------------------------


def encode(tokenizer, rows: list[dict], o) -> tuple[Tensor, Tensor]:
    """Prompts as ids (P, S), padded on the left so that all end together, and their mask."""
    texts = [row["question"] for row in rows]
    if o.prompt == "shots":
        texts = [f"{SHOTS}Q: {text}\nA:" for text in texts]
    if o.prompt == "chat":
        system = {"role": "system", "content": SYSTEM}
        chats = [[system, {"role": "user", "content": text}] for text in texts]
        given = {"tokenize": False, "add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(chat, **given) for chat in chats]
    # A chat template has written the special tokens already.
    ids = [tokenizer(text, add_special_tokens=o.prompt != "chat")["input_ids"] for text in texts]
    S = max(map(len, ids))
    mask = torch.tensor([[False] * (S - len(row)) + [True] * len(row) for row in ids])
    return torch.tensor([[0] * (S - len(row)) + row for row in ids]).to(o.device), mask.to(o.device)


def decode(tokenizer, r: Rollouts, stops: Tensor) -> list[str]:
    """The texts of the completions, without the token that ended them."""
    kept = r.completion_mask & ~torch.isin(r.completions, stops)
    clean = {"clean_up_tokenization_spaces": False}
    return [tokenizer.decode(ids[real], **clean) for ids, real in zip(r.completions, kept)]


def stop_ids(policy, tokenizer, o) -> Tensor:
    """The tokens that end a completion; after solved problems an answer is one line."""
    ends = policy.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    if o.prompt == "shots":
        ends |= {i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])}
    return torch.tensor(sorted(ends), device=o.device)


def batch(rows: list[dict], step: int, o) -> list[dict]:
    """The P rows of this step: in every epoch a new order, each row once."""
    epoch, place = divmod(step - 1, len(rows) // o.prompts_per_step)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(o.seed + epoch))
    return [rows[i] for i in order.split(o.prompts_per_step)[place]]


def held_out_reward(policy, tokenizer, rows: list[dict], o) -> str:
    """The mean reward of greedy answers, and its standard error."""
    stops, found = stop_ids(policy, tokenizer, o), []
    for at in range(0, len(rows), 32):
        some = rows[at : at + 32]
        r = sample(policy, *encode(tokenizer, some, o), 1, stops, o)
        found += map(reward, decode(tokenizer, r, stops), [row["answer"] for row in some])
    found = torch.tensor(found)
    return f"{found.mean():.3f} +- {found.std() / len(found) ** 0.5:.3f}"


def load_policy(o):
    """Model and tokenizer. What can be known before the weights are loaded is checked before."""
    try:
        config, tokenizer = (c.from_pretrained(o.model) for c in (AutoConfig, AutoTokenizer))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {o.model}: not found: {str(error).splitlines()[0]}") from None
    if o.prompt == "chat" and not tokenizer.chat_template:
        raise ValueError(f"--model {o.model} has no chat template: pass --prompt shots")
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    # 4 bytes for a weight, its gradient, AdamW's two averages and the reference's weight; and for
    # a logit of one pass, of which the backward pass makes three more.
    logits = o.rows_per_pass * o.max_new_tokens * config.get_text_config().vocab_size
    needed = count * (20 if o.kl_weight else 16) + 16 * logits
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if o.device == "cuda":
        there = torch.cuda.mem_get_info()[0]
    if needed > there:
        GiB = f"{needed / 2**30:.1f} GiB or more, and there are {there / 2**30:.1f}"
        raise ValueError(f"--model {o.model} needs {GiB}")
    # Weights in float32, also with --bf16: in bfloat16 most steps of the optimizer round to none.
    policy = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32)
    return policy.to(o.device).eval(), tokenizer


@contextmanager
def whole(path: Path):
    """A file to write to, which takes its name when it is complete."""
    yield path.with_suffix(".part")
    os.replace(path.with_suffix(".part"), path)


def main(o: argparse.Namespace) -> None:
    """Measure, train, measure, save. A run that was stopped goes on from its checkpoint."""
    policy, tokenizer = load_policy(o)
    learned, held_out = questions(SHORT if o.prompt == "plain" else ASK)
    held_out = held_out[:: max(1, len(held_out) // o.questions)]  # about so many
    if o.group_size < 2 or len(learned) < o.prompts_per_step:
        raise ValueError(
            f"a group has 2 completions or more, a step at most {len(learned)} prompts"
        )
    reference = copy.deepcopy(policy).requires_grad_(False) if o.kl_weight else None
    optimizer = torch.optim.AdamW(policy.parameters(), o.lr, (0.9, 0.99), weight_decay=0.0)
    checkpoint = o.out / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) for k, v in vars(o).items() if k not in ("steps", "save_every", "out")}
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        if state["settings"] != settings:
            raise ValueError(f"--out {o.out} holds a run with other settings: name a new folder")
        policy.load_state_dict(state.pop("policy"))
        optimizer.load_state_dict(state.pop("optimizer"))
    else:
        before = held_out_reward(policy, tokenizer, held_out, o)
        state = {"settings": settings, "log": [], "before": before}
    log = state["log"]
    for line, texts in train_grpo(policy, reference, optimizer, tokenizer, learned, o, len(log)):
        log.append(line)
        print(f"{line['step']:4} reward {line['reward']:.2f} {texts[0]!r}", flush=True)
        with whole(o.out / "log.csv") as part, part.open("w", newline="") as file:
            csv.writer(file).writerows([[*line], *(each.values() for each in log)])
        if line["step"] == o.steps or line["step"] % o.save_every == 0:
            weights = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            with whole(checkpoint) as part:
                torch.save(state | weights, part)
    after = held_out_reward(policy, tokenizer, held_out, o)
    print(f"held out, reward of greedy answers: {state['before']} before, {after} after")
    policy.save_pretrained(o.out / "model")
    tokenizer.save_pretrained(o.out / "model")
    print(f"{o.out}: model, log.csv, checkpoint.pt")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder or a hub's name")
    add("--prompt", default="shots", choices=("shots", "chat", "plain"), help="see `encode`")
    add("--out", default="runs/one_file", type=Path, help="for checkpoint, log.csv and model")
    add("--steps", default=20, type=int, help="batches of rollouts")
    add("--prompts-per-step", default=8, type=int, help="P, questions in a batch")
    add("--group-size", default=8, type=int, help="G, completions of each")
    add("--max-new-tokens", default=26, type=int, help="T, of a completion at most")
    add("--inner-epochs", default=1, type=int, help="updates on the same rollouts")
    add("--rows-per-pass", default=16, type=int, help="scored at a time; changes memory alone")
    add("--lr", default=1e-5, type=float, help="learning rate of AdamW, constant")
    add("--clip", default=(0.2, 0.2), type=float, nargs=2, help="below and above a ratio of 1")
    add("--kl-weight", default=0.0, type=float, help="of the KL to the policy of the start")
    add("--questions", default=128, type=int, help="held out, about")
    add("--save-every", default=10, type=int, help="steps between checkpoints")
    add("--seed", default=0, type=int, help="of the order of questions and of sampling")
    add("--bf16", action="store_true", help="matrix products in bfloat16, for a GPU")
    add("--device", default="cuda" if gpu else "cpu", help="cuda or cpu")
    add("--smoke", action="store_true", help="two steps of a small model, on the CPU")
    o = parser.parse_args(arguments)
    if o.smoke:  # other defaults
        small = str(Path(__file__).parents[1] / "data" / "text_llama")
        parser.set_defaults(model=small, prompt="plain", out=Path(mkdtemp()), device="cpu")
        parser.set_defaults(steps=2, questions=16, inner_epochs=2, kl_weight=0.01, lr=1e-3)
        torch.set_num_threads(1)  # several are slower for a model this small
        o = parser.parse_args(arguments)
    return o


if __name__ == "__main__":
    try:
        main(options())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the last checkpoint")
