"""The runs behind notebook 12: a tiny Llama and its tool, over seeds and bases, and with mistakes.

    python tools/experiments/turns.py --only "the run"   this arm, as far as it isn't stored yet
Without --only, all of them (two and a half hours). Writes data/results/turns.json after each run.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from time import process_time
from typing import Any, NamedTuple
from unittest import mock

import store
import torch
from store import Results, Seed, Store, at_the_end, keep, load, of_code, of_folder, spread
from torch import Tensor, nn
from train_models import TURNS_ROWS, TURNS_WARMUP, turns_warm_up

from minigrpo import grpo
from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig, score
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.logprobs import next_token_log_probs, past_padding, token_entropy
from minigrpo.objective import group_advantages
from minigrpo.sampling import Rollouts
from minigrpo.turns import commits
from minigrpo.turns.commits import BAD, COMMITS, GOOD, RESULT, RUN, Bisect, read_episode

EVERY, HELD_OUT = 10, 512  # steps between evaluations, and the episodes of one
SHIPPED = {0.0: data_folder() / "turns_llama", 0.1: data_folder() / "turns_forger"}
Learned = tuple[Rollouts, Tensor]  # what is learned from: rollouts, and their advantages


def recomputed(policy: nn.Module, r: Rollouts, advantages: Tensor) -> Learned:
    """Old log-probs by a second reading, as many libraries have them."""
    with torch.no_grad():
        return replace(r, log_probs=grpo.score(policy, r, RUN)[0]), advantages


def loss_on_results(policy: nn.Module, r: Rollouts, advantages: Tensor) -> Learned:
    return recomputed(policy, replace(r, own=r.completion_mask), advantages)


def tokenized_again(policy: nn.Module, r: Rollouts, advantages: Tensor) -> Learned:
    """The ids are made from the text, and 12 comes out as 1 and 2, which nobody has drawn."""
    rows = []
    for ids, own in zip(r.unpadded(r.completions), r.unpadded(r.own)):
        words = [[1, i - 10] if 10 <= i < COMMITS else [i] for i in ids.tolist()]
        written = torch.tensor(sum(words, []))
        mine = own.repeat_interleave(torch.tensor([*map(len, words)]))
        rows.append((written, torch.ones_like(mine), 0.0 * written, mine))
    columns = (nn.utils.rnn.pad_sequence([*some], batch_first=True) for some in zip(*rows))
    return recomputed(policy, Rollouts(r.prompt_ids, r.prompt_mask, *columns), advantages)


def results_unseen(policy: nn.Module, r: Rollouts, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """`score` with the mask of the loss for attention and positions, too."""
    mask, P = torch.cat([r.prompt_mask, r.own], dim=1), r.prompt_ids.shape[1]
    logits = policy(r.input_ids, **past_padding(mask, mask.shape[1])).logits[:, P - 1 : -1]
    log_probs = next_token_log_probs(logits).gather(-1, r.completions[..., None])[..., 0]
    return log_probs.where(r.own, 0.0), token_entropy(logits.detach()).where(r.own, 0.0)


def by_turn(policy: nn.Module, r: Rollouts, advantages: Tensor) -> Learned:
    """Each turn a row of its own, for what is earned from it on: the bits, of 4, and the answer."""
    turn = (r.own.int().diff(dim=1, prepend=torch.zeros(len(r.own), 1).int()) == 1).cumsum(1) - 1
    to_go = torch.full((len(turn), int(turn.max()) + 1), float("nan"))  # (N, turns)
    texts = zip(r.prompt_ids, r.unpadded(r.completions), r.unpadded(r.own), r.unpadded(turn))
    for row, (prompt, ids, own, at) in enumerate(texts):
        parts = [read_episode(ids[at < k], own[at < k]) for k in range(int(at.max()) + 2)]
        told = torch.tensor([sum(part.bits) / 4 for part in parts])
        to_go[row, : len(told) - 1] = Bisect().grade(prompt, ids, own) + told[-1] - told[:-1]
    groups = to_go.view(-1, RUN.group_size, to_go.shape[1])  # a row without a turn is average
    groups = groups.where(groups.isfinite(), groups.nanmean(dim=1, keepdim=True)).nan_to_num()
    A = group_advantages(groups.permute(2, 0, 1).flatten(), RUN.group_size)  # turn by turn
    rows = [
        (*r.text[:3], r.completion_mask & (turn <= k), r.log_probs, r.own & (turn == k))
        for k in range(to_go.shape[1])
    ]
    return Rollouts(*map(torch.cat, zip(*rows))), A


def bits_for_all(policy: nn.Module, r: Rollouts, advantages: Tensor) -> Learned:
    """The same reward, bits and answer, in one advantage per episode."""
    rows = [*zip(r.prompt_ids, r.unpadded(r.completions), r.unpadded(r.own))]
    earned = [Bisect().grade(*row) + sum(read_episode(*row[1:]).bits) / 4 for row in rows]
    return r, group_advantages(torch.tensor(earned), RUN.group_size)


@dataclass(frozen=True)
class Proof(Bisect):
    """1 if the transcript proves the answer: it is bad, and the commit before it good."""

    honest: bool = False  # counts what the tool has said, not what merely stands there

    def grade(self, prompt: Tensor, completion: Tensor, own: Tensor) -> float:
        ids, said = completion.tolist(), {-1: GOOD, COMMITS - 1: BAD}
        for t, token in enumerate(ids):
            if token in (GOOD, BAD) and ids[t - 1] == RESULT and not (self.honest and own[t]):
                said[ids[t - 3] if ids[t - 2] >= COMMITS else ids[t - 2]] = token
        answer = read_episode(completion, own).answer
        return float(answer is not None and (said.get(answer - 1), said.get(answer)) == (GOOD, BAD))


class Arm(NamedTuple):  # as it is, the run of notebook 12
    changes: Mapping[str, Any] = {}  # settings of GRPOConfig
    base: int = 0  # the seed of the base model; 0 ships
    seeds: range = range(10)
    task: Bisect = Bisect()
    lesson: Callable[..., Learned] | None = None
    score: Callable[..., tuple[Tensor, Tensor]] = score
    forged: float = 0.0  # of the base: calls in its documents that are not closed
    skilled: bool = False  # starts where the run of notebook 12 with the same seed ends


ROOM = {"max_new_tokens": 40}  # for six calls
ARMS = {
    "choosing: plain": Arm(base=3),
    "choosing: KL weight 0.01": Arm({"kl_weight": 0.01}, base=3),
    "choosing: entropy bonus 0.01": Arm({"entropy_weight": 0.01}, base=3),
    "choosing: 32 repositories": Arm({"prompts_per_step": 32}, base=3),
    "the run": Arm(),
    "the run, base 1": Arm(base=1),
    "the run, base 2": Arm(base=2),
    "loss on the tool's tokens": Arm(lesson=loss_on_results),
    "tokenized again": Arm(lesson=tokenized_again),
    "the loss's mask for attention": Arm(score=results_unseen, lesson=recomputed),
    "advantage per turn": Arm({"rows_per_pass": 128}, lesson=by_turn),
    "bits, and one advantage": Arm(lesson=bits_for_all),
    "price 0.1": Arm(ROOM, task=Bisect(cost=0.1)),
    "price 0.2": Arm(ROOM, task=Bisect(cost=0.2)),
    "price 0.2, skilled": Arm(ROOM, task=Bisect(cost=0.2), skilled=True),
    "the same, scale none": Arm({**ROOM, "scale": "none"}, task=Bisect(cost=0.2), skilled=True),
    "proof": Arm(task=Proof(), forged=0.1),
    "proof, price 0.03": Arm(task=Proof(cost=0.03), forged=0.1),
    "proof by the tool": Arm(task=Proof(honest=True), forged=0.1),
}


@cache
def base(seed: int, forged: float, skill: int | None) -> nn.Module:
    """A base model, after a run with the seed `skill` if that's asked; what ships isn't made."""
    policy = tiny_llama(seed) if seed else load_policy(SHIPPED[forged])
    if seed:
        list(turns_warm_up(policy, replace(TURNS_WARMUP, seed=seed), forged=forged))
    if skill is not None:
        list(grpo.train_grpo(policy, Bisect(), replace(RUN, seed=skill)))
    return policy.eval()


def measure(arm: Arm, one: Seed) -> Results:
    """One run: scores on the way, what is tested first at the end, and an episode of the end."""
    policy = copy.deepcopy(base(arm.base, arm.forged, one.seed if arm.skilled else None))
    config, learn = replace(RUN, **arm.changes, seed=one.seed), grpo.learn
    curve, done, seconds = {}, [], 0.0  # CPU, evaluation left out

    def taught(policy, reference, optimizer, *learned):
        learned = arm.lesson(policy, *learned[:2]) if arm.lesson else learned[:2]
        return learn(policy, reference, optimizer, *learned, config)

    with mock.patch.multiple(grpo, learn=taught, score=arm.score):
        steps, room = grpo.train_grpo(policy, arm.task, config), config.max_new_tokens
        for step in range(config.steps + 1):
            began = process_time()
            done += [next(steps)] if step else []
            seconds += process_time() - began
            if step % EVERY == 0:
                scores = commits.evaluate(policy, arm.task, n=HELD_OUT, max_new_tokens=room)
                first = [round(share, 3) for share in scores.pop("first")]
                keep(curve, step, scores)
    text = commits.to_text(done[-1].rollouts.unpadded(done[-1].rollouts.completions)[0])
    rewards = [round(m.reward, 4) for m in done[EVERY - 1 :: EVERY]]
    kept = {"seed": one.seed, "seconds": round(seconds), "reward": rewards, "curve": curve}
    return {**kept, "ratio": round(max(m.ratio_max for m in done), 1), "first": first, "text": text}


def settings(arm: Arm) -> Results:
    """All that decides how the runs go."""
    task, code = arm.task, (commits.is_bad, read_episode, Bisect, Proof, arm.score)
    made = [asdict(TURNS_WARMUP), TURNS_ROWS, arm.base]
    return {
        "base": made if arm.base else of_folder(SHIPPED[arm.forged]),
        "config": asdict(replace(RUN, **arm.changes)),
        "task": [type(task).__name__, task.cost, getattr(task, "honest", None), arm.skilled],
        "code": of_code(*code, *filter(None, [arm.lesson])),
        "measured with": [EVERY, HELD_OUT],
    }


def store_of(name: str) -> Store:
    arm = ARMS[name]
    return Store("turns.json", [*map(Seed, arm.seeds)], partial(settings, arm), (name,))


COLUMNS = {
    "right answers": at_the_end("accuracy", 2),
    "calls": at_the_end("calls", 1),
    "bits of a call": at_the_end("bits", 2),
    "largest ratio": lambda runs: spread([run["ratio"] for run in runs], 0),
    "CPU seconds": lambda runs: spread([run["seconds"] for run in runs], 0),
}


def table() -> str:
    """One line per arm: the end of its runs, and what they took."""
    return store.table(COLUMNS, ((name, one["runs"]) for name, one in load("turns.json").items()))


PARTS = {name: [(store_of(name), partial(measure, arm))] for name, arm in ARMS.items()}
main = partial(store.command, PARTS)


if __name__ == "__main__":
    main()
