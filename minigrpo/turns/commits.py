"""Find the commit that broke the build: the task on which the tiny Llama learns to use a tool.

Of 16 commits in a row, all are bad from one on. Nothing in the prompt says from which one. To find
out, the policy has to call a tool, which tests one commit.

    prompt       <s> 3 9 12                                       the number of a repository
    completion   <call> 7 </call> <result> bad </result>          the policy's call, a tool's reply
                 <call> 3 </call> <result> good </result>         again
                 <answer> 5 </answer> </s>                        the policy
"""

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread

import torch
from torch import Tensor, nn

from minigrpo.arithmetic import ANSWER, BOS, END_ANSWER, EOS, PAD
from minigrpo.config import GRPOConfig
from minigrpo.sampling import Rollouts, left_pad, sample

COMMITS = 16  # 0 to 15; the last one is always bad
GOOD, BAD, ERROR, CALL, END_CALL, RESULT, END_RESULT = range(16, 23)
VOCABULARY = (  # the 32 tokens by id; tags, padding and ends where `arithmetic` has them
    *map(str, range(COMMITS)),
    *("good", "bad", "error", "<call>", "</call>", "<result>", "</result>"),
    *("*1", "_", "*2", "*3", "<answer>", "</answer>", "<pad>", "<s>", "</s>"),  # three are spare
)
RUN = GRPOConfig(  # 4 calls with their results have 6 tokens each, the answer and the end 4
    steps=100, prompts_per_step=16, group_size=8, max_new_tokens=4 * 6 + 4, eos_id=EOS,
    call_id=END_CALL, pad_id=PAD, lr=5e-4, inner_epochs=2, how="token_mean",
)  # fmt: skip


def to_text(ids: Tensor) -> str:
    """Tokens (T,) as text, a blank between them."""
    return " ".join(VOCABULARY[i] for i in ids.tolist())


def first_bad(prompt: Tensor) -> int:
    """The commit to find: a checksum of the repository's number, which no Llama computes."""
    return zlib.crc32(bytes(prompt.tolist()[1:])) % COMMITS


def draw_prompts(n: int, generator: torch.Generator, *, held_out: bool = False) -> list[Tensor]:
    """n of the 4,096 repositories, (4,) each; one in eight is held out."""
    found: list[Tensor] = []
    while len(found) < n:
        prompt = torch.cat([torch.tensor([BOS]), torch.randint(COMMITS, (3,), generator=generator)])
        side = zlib.crc32(bytes([*prompt.tolist(), 1])) % 8 == 0
        found += [prompt] if side == held_out else []
    return found


@dataclass(frozen=True)
class Episode:
    """What happened in a completion, by its tokens and by who wrote them."""

    calls: list[tuple[int, bool]]  # the commit tested, and whether the tool called it bad
    bits: list[float]  # what each call told: log2(open before / open after)
    forged: int  # results that the policy wrote itself
    answer: int | None  # None: none in form
    open: tuple[int, int]  # the first and the last commit that may be the first bad one


def read_episode(completion: Tensor, own: Tensor) -> Episode:
    """completion (T,) without padding; own (T,) bool, True where the policy drew the token."""
    tokens, mine = completion.tolist(), own.tolist()
    calls, bits, forged, low, high = [], [], 0, 0, COMMITS - 1
    for t, token in enumerate(tokens):
        forged += token == RESULT and mine[t]
        if token in (GOOD, BAD) and not mine[t]:
            tested, bad, before = tokens[t - 3], token == BAD, high - low + 1
            low, high = (low, min(high, tested)) if bad else (max(low, tested + 1), high)
            calls.append((tested, bad))
            bits.append(math.log2(before / max(1, high - low + 1)))
    end = tokens[-4:]
    in_form = end[:1] == [ANSWER] and end[2:] == [END_ANSWER, EOS] and end[1] < COMMITS
    in_form = in_form and all(mine[-4:]) and tokens.count(ANSWER) == 1
    return Episode(calls, bits, forged, end[1] if in_form else None, (low, high))


def is_bad(prompt: Tensor, commit: int) -> bool:
    """The tool: whether a commit of a repository is bad."""
    return commit >= first_bad(prompt)


@dataclass(frozen=True)
class Bisect:
    """The task for `train_grpo`, as `RUN` takes it: 1 for the right commit."""

    cost: float = 0.0  # of a call
    tool: Callable[[Tensor, int], bool] = is_bad
    patience: float = 5.0  # seconds that the tool may take

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        return draw_prompts(n, generator)

    def reply(self, prompt: Tensor, completion: Tensor) -> Sequence[int]:
        """What follows `</call>`; "error" to a malformed call, and if the tool fails or hangs."""
        call, said = completion[-3:].tolist(), []

        def ask() -> None:
            with suppress(Exception):
                said.append(BAD if self.tool(prompt, call[1]) else GOOD)

        if len(call) == 3 and call[0] == CALL and call[1] < COMMITS:
            thread = Thread(target=ask, daemon=True)
            thread.start()
            thread.join(self.patience)
        return [RESULT, *(said or [ERROR]), END_RESULT]

    def reward(self, prompts, completions, own) -> list[float]:
        """The grade of each episode, less the cost of the calls that the policy closed."""
        grades = map(self.grade, prompts, completions, own)
        closed = [int((ids == END_CALL)[mine].sum()) for ids, mine in zip(completions, own)]
        return [grade - self.cost * calls for grade, calls in zip(grades, closed)]

    def grade(self, prompt: Tensor, completion: Tensor, own: Tensor) -> float:
        return float(read_episode(completion, own).answer == first_bad(prompt))


def play(
    policy: nn.Module, task: Bisect, prompts: list[Tensor], *, seed: int = 0, **settings
) -> Rollouts:
    """One episode for each prompt; settings of `sample`, where they are not those of `RUN`."""
    settings, G = {**RUN.sampling_settings, **settings}, settings.get("completions_per_prompt", 1)
    return sample(
        policy, *left_pad(prompts, PAD), generator=torch.Generator().manual_seed(seed), **settings,
        reply=lambda row, completion: task.reply(prompts[row // G], completion),
    )  # fmt: skip


def evaluate(policy: nn.Module, task: Bisect = Bisect(), *, n: int = 512, **settings) -> dict:
    """How a policy does on n held-out repositories, as means; settings of `play`."""
    prompts = draw_prompts(n, torch.Generator().manual_seed(0), held_out=True)
    r = play(policy, task, prompts, **settings)
    episodes = [read_episode(*row) for row in zip(r.unpadded(r.completions), r.unpadded(r.own))]
    calls, n = sum(len(e.calls) for e in episodes), len(episodes)
    first = [e.calls[0][0] for e in episodes if e.calls]
    return {
        "accuracy": sum(e.answer == first_bad(p) for e, p in zip(episodes, r.prompt_ids)) / n,
        "answered": sum(e.answer is not None for e in episodes) / n,
        "calls": calls / n,
        "bits": sum(sum(e.bits) for e in episodes) / max(1, calls),  # of a call
        "forged": sum(e.forged for e in episodes) / n,
        "first": [first.count(c) / max(1, len(first)) for c in range(COMMITS)],  # how often each
    }


@cache
def best(n: int = COMMITS, k: int = 4) -> float:
    """The best chance to be right about n open commits with k calls: a bit each, so 2^k / n."""
    return 1 / n if n == 1 or k == 0 else max(after(t, n, k) for t in range(1, n))


def after(t: int, n: int = COMMITS, k: int = 4) -> float:
    """The same if the first call parts t commits from the others, and the rest is perfect."""
    return (t * best(t, k - 1) + (n - t) * best(n - t, k - 1)) / n


@cache
def careless(n: int = COMMITS, stop: float = 0.5, k: int = COMMITS) -> tuple[float, float]:
    """The chance to be right, and the calls, of the tester that the base imitates, with k calls."""
    if n == 1 or k == 0:
        return 1 / n, 0.0
    ways = [(t / n, careless(t, stop, k - 1), careless(n - t, stop, k - 1)) for t in range(1, n)]
    right, calls = (sum(p * a[i] + (1 - p) * b[i] for p, a, b in ways) / (n - 1) for i in (0, 1))
    return stop / n + (1 - stop) * right, (1 - stop) * (1 + calls)


def pays_up_to(right: float, calls: float) -> float:
    """The price of a call at which so many of them, for such a chance, are worth a mere guess."""
    return (right - 1 / COMMITS) / calls
