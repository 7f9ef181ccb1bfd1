"""GRPO in one file: a language model learns from nothing but a reward for what it writes.

    python grpo_one_file.py            SmolLM2, 135 million weights, from the hub; a CPU will do
    python grpo_one_file.py --model Qwen/Qwen2.5-0.5B-Instruct --chat --bf16       on a GPU
    python grpo_one_file.py --ask      before anything learns: is there something to learn from?
    python grpo_one_file.py --smoke    seconds, with the small model that ships with the course

To make it yours, replace `SHOTS`, `make_data` and `reward`. It's Algorithm 1 of DeepSeekMath (arXiv
2402.03300) with one reference for the whole run, and DAPO's mean over all tokens (2503.14476): the
loop of notebook 07 and of minigrpo/grpo.py, for a tokenizer and texts.
Shapes: N = P * G rows, G completions for each of P prompts; S prompt tokens, T completion tokens.
"""

import argparse
import copy
import os
import re
import sys
import tempfile
import time
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

Settings = argparse.Namespace  # what `parse` returns
FREE = ("steps", "save_every", "eval_every", "out", "ask")  # may change when a run goes on
FIVE = ("reward", "frac_reward_zero_std", "truncated", "entropy", "grad_norm")  # to watch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# -------------------------------- The task: replace it with yours --------------------------------
SHOTS = [
    {"role": "user", "content": "Ben has 4 pens, gets 2. How many pens now?"},
    {"role": "assistant", "content": "<think>4 + 2 = 6</think><answer>6</answer>"},
    {"role": "user", "content": "Emma has 9 coins, loses 1. How many coins now?"},
    {"role": "assistant", "content": "<think>9 - 1 = 8</think><answer>8</answer>"},
]


def make_data() -> tuple[list[dict], list[dict]]:
    """Questions to learn from, and held-out ones with other pairs of numbers."""
    learned, held_out = [], []
    words = product(("Ann", "Ben", "Emma"), ("books", "cups", "pens"))
    for (name, things), (n, have) in product(words, combinations(range(1, 10), 2)):
        rows = held_out if (have + 2 * n) % 5 == 0 else learned
        for deed, answer in (("gets", have + n), ("loses", have - n)):
            question = f"{name} has {have} {things}, {deed} {n}. How many {things} now?"
            rows.append({"question": question, "answer": str(answer), "kind": deed})
    return learned, held_out


def reward(completion: str, answer: str) -> float:
    """0.2 for the form, and 1 more for the right answer. It never sees the prompt."""
    form = re.fullmatch(r"\s*<think>[^<]*</think>\s*<answer>([^<]*)</answer>\s*", completion)
    return 0.2 + (form[1].strip() == answer) if form else 0.0


# ----------------------------------------- The algorithm -----------------------------------------
class Rollouts(NamedTuple):
    """N completions, with the prompts they answer."""

    ids: Tensor  # (N, S + T), padded on both sides
    mask: Tensor  # (N, S + T) bool, True = real token
    log_probs: Tensor  # (N, T), with which each token was drawn: the old ones of the ratio


def rollout(
    policy: nn.Module, tokenizer, prompts: list[dict], G: int, cfg: Settings, greedy: bool = False
) -> tuple[Rollouts, list[str], Tensor]:
    """Ask each question G times: N = P * G completions, their texts, and their rewards (N,)."""
    chats = [[*SHOTS, {"role": "user", "content": row["question"]}] for row in prompts]
    texts = ["".join(turn["content"] + "\n" for turn in chat) for chat in chats]
    if cfg.chat:  # the template writes the special tokens, too
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, padding=True, add_special_tokens=not cfg.chat, return_tensors="pt")
    prompt_ids, prompt_mask = batch["input_ids"].to(DEVICE), batch["attention_mask"].to(DEVICE)
    rollouts = sample(policy, prompt_ids, prompt_mask.bool(), G, cfg, greedy)
    completions = rollouts.ids[:, prompt_ids.shape[1] :]  # (N, T)
    stops = completions.new_tensor(policy.generation_config.eos_token_id)
    real = rollouts.mask[:, prompt_ids.shape[1] :] & ~torch.isin(completions, stops)
    texts = [tokenizer.decode(ids[written]) for ids, written in zip(completions, real)]
    answers = [row["answer"] for row in prompts for _ in range(G)]
    return rollouts, texts, torch.tensor([*map(reward, texts, answers)], dtype=torch.float64)


def score(policy: nn.Module, rollouts: Rollouts, cfg: Settings) -> Tensor:
    """Log-probs (N, T) of the completions under the policy as it is now, with gradient."""
    ids, mask, T = rollouts.ids, rollouts.mask, rollouts.log_probs.shape[1]
    dist, _ = predict(policy, ids[:, :-1], mask[:, :-1], cfg, last=T)  # (N, T, V)
    log_probs = dist.gather(-1, ids[:, -T:, None])[..., 0]  # (N, T)
    return log_probs.masked_fill(~mask[:, -T:], 0.0)


def learn(
    policy: nn.Module,
    reference: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: Tensor,  # (N,)
    cfg: Settings,
) -> list[dict]:
    """K updates on the same rollouts; returns the metrics of each."""
    T, advantages = rollouts.log_probs.shape[1], advantages.to(rollouts.log_probs)
    tokens = rollouts.mask[:, -T:].sum()  # of all N rows: passes divide by it, so that they add up
    rows = advantages if reference is None else torch.ones_like(advantages)
    rows = rows.nonzero()[:, 0]  # without a KL, an advantage of 0 has no gradient
    updates = []
    for _ in range(cfg.inner_epochs):
        optimizer.zero_grad()
        apart = 0.0
        for start in range(0, len(rows), cfg.rows_per_pass):  # the gradients of passes add up
            some = rows[start : start + cfg.rows_per_pass]
            batch = Rollouts(*(values[some] for values in rollouts))
            log_probs = score(policy, batch, cfg)  # (n, T)
            apart += (log_probs.detach() - batch.log_probs).abs().sum().item()
            with torch.no_grad():
                ref_log_probs = score(reference, batch, cfg) if reference else None
            loss = grpo_loss(log_probs, batch.log_probs, advantages[some, None], cfg, ref_log_probs)
            ((loss * batch.mask[:, -T:]).sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        seen = max(1, rollouts.mask[rows, -T:].sum().item())
        updates.append({"grad_norm": norm.item(), "mismatch": apart / seen})
    return updates


def measure(
    rollouts: Rollouts, rewards: Tensor, G: int, stops: list[int], updates: list[dict]
) -> dict[str, float]:
    """The five numbers to watch, and two more."""
    T, groups = rollouts.log_probs.shape[1], rewards.view(-1, G)
    real, tokens = rollouts.mask[:, -T:], rollouts.mask[:, -T:].sum().item()
    ended = torch.isin(rollouts.ids[:, -T:], rollouts.ids.new_tensor(stops)) & real
    return {
        "reward": rewards.mean().item(),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(dim=1).double().mean().item(),
        "truncated": 1 - ended.any(dim=1).double().mean().item(),
        "entropy": -rollouts.log_probs.sum().item() / tokens,  # nats per token, estimated
        "grad_norm": updates[-1]["grad_norm"],
        "length": tokens / len(rewards),
        # Nats per token between sampler and scorer before the first update: 0, but for rounding.
        "mismatch": updates[0]["mismatch"],
    }


def alarm(log: list[dict]) -> str:
    """What is wrong with a run that begins like this, if anything is."""
    first = {name: {step[name] for step in log[:3]} for name in log[0]}
    if first["frac_reward_zero_std"] == {1.0}:
        return "in every group all rewards are equal, so nothing is learned: grade by hand, --ask"
    if first["truncated"] == {1.0}:
        return "no completion ends: raise --max-new-tokens, or look at --stop and at the prompt"
    return ""


@torch.no_grad()
def sample(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    G: int,
    cfg: Settings,
    greedy: bool = False,
) -> Rollouts:
    """G completions of each prompt (P, S), temperature 1, prompt by prompt."""
    S, T = prompt_ids.shape[1], cfg.max_new_tokens
    ids = pad(prompt_ids, (0, T)).repeat_interleave(G, dim=0)  # (N, S + T)
    mask = pad(prompt_mask, (0, T)).repeat_interleave(G, dim=0)
    stops = ids.new_tensor(policy.generation_config.eos_token_id)
    dist, cache = predict(policy, prompt_ids, prompt_mask, cfg)  # each prompt is read once
    dist = dist.repeat_interleave(G, dim=0)  # (N, 1, V)
    cache.batch_repeat_interleave(G)
    log_probs = dist.new_zeros(len(ids), T)
    active = torch.arange(len(ids), device=ids.device)  # rows that are still being written
    for end in range(S, S + T):
        if end > S:  # the newest token is enough, because the cache keeps the others
            newest, seen = ids[active, end - 1 : end], mask[active, :end]
            dist, cache = predict(policy, newest, seen, cfg, cache=cache)
        dist = dist[:, -1]  # (active, V)
        token = dist.argmax(dim=-1) if greedy else dist.exp().multinomial(1)[:, 0]  # (active,)
        ids[active, end], mask[active, end] = token, True  # the one that ends it included
        log_probs[active, end - S] = dist.gather(1, token[:, None])[:, 0]
        going = ~torch.isin(token, stops)
        if not going.any():
            break
        if not going.all():
            active = active[going]
            cache.batch_select_indices(going.nonzero()[:, 0])
    return Rollouts(ids[:, : end + 1], mask[:, : end + 1], log_probs[:, : end + 1 - S])


def predict(
    policy: nn.Module, ids: Tensor, mask: Tensor, cfg: Settings, last: int = 1, cache=None
) -> tuple[Tensor, object]:
    """Log-probs of the V possible next tokens at the `last` places of ids, and the cache."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs = {"attention_mask": mask.long(), "position_ids": positions, "logits_to_keep": last}
    caching = {"past_key_values": cache, "use_cache": not torch.is_grad_enabled()}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=cfg.bf16):
        out = policy(ids, **inputs, **caching)
    dtype = torch.float32 if cfg.bf16 else None  # as it is
    return out.logits.log_softmax(dim=-1, dtype=dtype), out.past_key_values


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) -> (N,): how much better than average for this prompt, in standard deviations."""
    groups = rewards.double().view(-1, group_size)  # (P, G)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # exactly 0, despite rounding
    return advantages.masked_fill(equal, 0.0).flatten()


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    A: Tensor,
    cfg: Settings,
    ref_log_probs: Tensor | None = None,
) -> Tensor:
    """(N, T): each token's clipped objective, A is (N, 1), and its KL (k3) to the reference."""
    ratio = (log_probs - old_log_probs).exp()  # new over old
    loss = -torch.minimum(ratio * A, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * A)
    if ref_log_probs is not None:
        d = log_probs - ref_log_probs
        loss = loss + cfg.kl_weight * (torch.expm1(-d) + d)
    return loss


# ------------------------------- Around it: text, model, and files -------------------------------
def stop(why: str):
    """End with a sentence, and with exit code 2."""
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def load(cfg):
    """Model and tokenizer. What can be checked before the weights are loaded is checked before."""
    if cfg.model[:1] in "./~" and not Path(cfg.model).expanduser().is_dir():
        stop(f"--model {cfg.model}: no such folder")
    try:
        config = AutoConfig.from_pretrained(cfg.model)
        tokenizer = AutoTokenizer.from_pretrained(cfg.model, padding_side="left")
    except (OSError, ValueError) as error:
        stop(f"cannot load --model {cfg.model}: {str(error).splitlines()[0]}")
    if cfg.chat and not tokenizer.chat_template:
        stop(f"{cfg.model} has no chat template: leave --chat out")
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    logits = cfg.rows_per_pass * cfg.max_new_tokens * config.get_text_config().vocab_size
    # 4 bytes each: weight, gradient, AdamW's two averages, reference; logit, log-prob, gradients.
    needed = 4 * (weights * (5 if cfg.kl_weight else 4) + logits * 4)
    there = float("inf")  # Windows doesn't say
    if DEVICE == "cuda":
        there = torch.cuda.mem_get_info()[0]
    elif hasattr(os, "sysconf"):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        stop(f"{cfg.model} needs {needed / 2**30:.1f} GiB, and there are {there / 2**30:.1f}")
    # Float32 even with --bf16: most steps of AdamW are too small for a weight in bfloat16.
    policy = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    stops = torch.tensor([policy.generation_config.eos_token_id]).flatten().tolist()
    if cfg.stop:
        stops += [i for i in range(len(tokenizer)) if cfg.stop in tokenizer.decode([i])]
    policy.generation_config.eos_token_id = stops  # saved with the model
    return policy.to(DEVICE).eval(), tokenizer


def ask(policy, tokenizer, rows: list[dict], cfg) -> None:
    """Before training: how often is it right, and in how many groups is there a difference?"""
    rows = [rows[i] for i in torch.randperm(len(rows))[: 8 * cfg.prompts_per_step]]
    batches = [
        rows[i : i + cfg.prompts_per_step] for i in range(0, len(rows), cfg.prompts_per_step)
    ]
    found = [rollout(policy, tokenizer, batch, cfg.group_size, cfg)[-1] for batch in batches]
    found, kinds = torch.cat(found).view(len(rows), -1), [row.get("kind", "all") for row in rows]
    for kind in dict.fromkeys(("all", *sorted(kinds))):
        groups = found[[kind in ("all", own) for own in kinds]]  # (questions, G)
        right, differ = (groups >= 1).double(), (groups != groups[:, :1]).any(dim=1).double()
        print(f"{kind}, {len(groups)} questions: pass@1 {right.mean():.2f}", end=", ")
        print(f"pass@{cfg.group_size} {right.amax(dim=1).mean():.2f}", end=", ")
        print(f"groups that differ {differ.mean():.2f}")


def main(cfg) -> None:
    """Measure, train, measure, save. The same command goes on from the last checkpoint."""
    data, held_out = make_data()
    learned, asked = ({row["question"] for row in rows} for rows in (data, held_out))
    for wrong, why in (
        (learned & asked, "make_data: some questions to learn from are held out, too"),
        (len(data) < cfg.prompts_per_step, f"--prompts-per-step: there are {len(data)} questions"),
    ):
        if wrong:
            stop(why)
    settings = {k: v for k, v in vars(cfg).items() if k not in FREE}
    cfg.out.mkdir(parents=True, exist_ok=True)
    checkpoint = cfg.out / "checkpoint.pt"
    state = torch.load(checkpoint, map_location="cpu") if checkpoint.exists() else {}
    if state and state["settings"] != settings:
        stop(f"{cfg.out} holds a run with other settings: name another --out")
    policy, tokenizer = load(cfg)
    torch.manual_seed(cfg.seed)
    if cfg.ask:
        return ask(policy, tokenizer, data, cfg)
    reference = copy.deepcopy(policy).requires_grad_(False) if cfg.kl_weight else None
    optimizer = torch.optim.AdamW(policy.parameters(), cfg.lr, (0.9, 0.99), weight_decay=0.0)
    if state:
        policy.load_state_dict(state.pop("policy"))
        optimizer.load_state_dict(state.pop("optimizer"))
    else:
        before = rollout(policy, tokenizer, held_out, 1, cfg, greedy=True)[-1]
        state = {"settings": settings, "before": before, "log": []}
    log = state["log"]
    for step in range(len(log) + 1, cfg.steps + 1):
        began = time.perf_counter()
        torch.manual_seed(10**6 * cfg.seed + step)  # a run that was stopped goes on with the same
        prompts = [data[i] for i in torch.randperm(len(data))[: cfg.prompts_per_step]]
        rollouts, texts, rewards = rollout(policy, tokenizer, prompts, cfg.group_size, cfg)
        advantages = group_advantages(rewards, cfg.group_size)  # (N,)
        updates = learn(policy, reference, optimizer, rollouts, advantages, cfg)
        stops = policy.generation_config.eos_token_id
        metrics = measure(rollouts, rewards, cfg.group_size, stops, updates)
        metrics["seconds"] = time.perf_counter() - began
        print(step, *(f"{name} {metrics[name]:.3g}" for name in FIVE), repr(texts[0]), flush=True)
        metrics["held_out"] = ""
        if step % cfg.eval_every == 0:
            now = rollout(policy, tokenizer, held_out, 1, cfg, greedy=True)[-1]
            metrics["held_out"] = now.mean().item()
            print(f"held-out reward after {step} steps: {now.mean():.3f} (greedy)", flush=True)
        log.append({"step": step, **metrics})
        if step == min(3, cfg.steps) and (wrong := alarm(log)):
            print(f"\n!!! After {step} steps {wrong}\n", file=sys.stderr, flush=True)
        lines = [",".join(map(str, line)) for line in (log[0], *(each.values() for each in log))]
        (cfg.out / "log.csv").write_text("\n".join(lines) + "\n")
        if step == cfg.steps or step % cfg.save_every == 0:
            weights = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | weights, cfg.out / "checkpoint.part")
            os.replace(cfg.out / "checkpoint.part", checkpoint)  # whole, or not at all
    after = rollout(policy, tokenizer, held_out, 1, cfg, greedy=True)[-1]
    for when, rewards in (("before", state["before"]), ("after", after)):
        standard_error = rewards.std() / len(rewards) ** 0.5
        print(f"held-out reward {when}: {rewards.mean():.3f} +- {standard_error:.3f} (greedy)")
    policy.save_pretrained(cfg.out / "model")
    tokenizer.save_pretrained(cfg.out / "model")


def parse(arguments=None) -> argparse.Namespace:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=shown)
    add = parser.add_argument
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a hub's name, or a folder")
    add("--chat", action="store_true", help="ask through the chat template, not in plain lines")
    add("--stop", default="\n", help="ends a completion, as the model's own end does")
    add("--steps", default=20, type=int, help="batches of completions")
    add("--prompts-per-step", default=8, type=int, help="P, questions in a batch")
    add("--group-size", default=8, type=int, help="G, completions of each question, 2 or more")
    add("--max-new-tokens", default=32, type=int, help="T, of a completion at most")
    add("--inner-epochs", default=1, type=int, help="updates from the same completions")
    add("--rows-per-pass", default=16, type=int, help="fewer only take less memory")
    add("--lr", default=1e-5, type=float, help="learning rate of AdamW, constant")
    add("--clip", default=0.2, type=float, help="epsilon, how far a ratio may push")
    add("--kl-weight", default=0.0, type=float, help="beta, of the KL to the model at the start")
    add("--bf16", action="store_true", help="compute in bfloat16, on a GPU")
    add("--seed", default=0, type=int, help="of the questions and of sampling")
    add("--ask", action="store_true", help="sample, print how often it is right, and train nothing")
    add("--eval-every", default=10, type=int, help="steps between two looks at held-out questions")
    add("--save-every", default=10, type=int, help="steps between checkpoints")
    add("--out", default="runs/grpo", type=Path, help="for checkpoint.pt, log.csv and model/")
    add("--smoke", action="store_true", help="two steps of a small model")
    if parser.parse_args(arguments).smoke:  # other defaults
        small = str(Path(__file__).parent.parent / "data" / "text_llama")
        parser.set_defaults(model=small, stop="", steps=2, lr=1e-3, kl_weight=0.01)
        parser.set_defaults(out=Path(tempfile.mkdtemp()))
    cfg = parser.parse_args(arguments)
    if cfg.group_size < 2:
        stop(f"--group-size {cfg.group_size}: a group of one has nothing to be compared with")
    least = ("steps", "prompts_per_step", "max_new_tokens", "inner_epochs", "rows_per_pass")
    for name in (*least, "eval_every", "save_every"):
        if getattr(cfg, name) < 1:
            stop(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(cfg, name)}")
    return cfg


if __name__ == "__main__":
    try:
        options = parse()
        on = torch.cuda.get_device_name() if DEVICE == "cuda" else "the CPU, since there's no GPU"
        print("" if DEVICE == "cuda" else "!!! ", f"This runs on {on}.", sep="", flush=True)
        if options.smoke:
            right, wrong = (f"<think>so</think><answer>{n}</answer>" for n in (12, 13))
            paid = reward(right, "12"), reward(wrong, "12")
            print("a right completion earns {}, a wrong one {}".format(*paid))
            assert paid[0] > paid[1], "the reward doesn't know a right answer"
        main(options)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the last checkpoint")
