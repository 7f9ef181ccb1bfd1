"""Find the commit that broke the build: the task on which the tiny Llama learns to use a tool.

Of 16 commits in a row, all are bad from one on. Nothing in the prompt says from which one. To find
out, the policy has to call a tool, which tests one commit.

    prompt       <s> 3 9 12                                       the number of a repository
    completion   <call> 7 </call> <result> bad </result>          the policy's call, the tool's reply
                 <call> 3 </call> <result> good </result>         again
                 <answer> 5 </answer> </s>                        the policy

A call tells one bit at most, so with k calls nobody is right more often than 2^k / 16.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from threading import Thread

import torch
from torch import Tensor, nn

from minigrpo.arithmetic import ANSWER, BLANK, BOS, END_ANSWER, EOS, PAD
from minigrpo.pretrain import Batch, documents_batch
from minigrpo.sampling import Rollouts, left_pad, sample

COMMITS = 16  # 0 to 15; the last one is always bad
GOOD, BAD, ERROR, CALL, END_CALL, RESULT, END_RESULT = range(16, 23)
VOCABULARY = (  # the 32 tokens by id; tags, padding and ends where `arithmetic` has them
    *map(str, range(COMMITS)),
    *("good", "bad", "error", "<call>", "</call>", "<result>", "</result>"),
    *("-", "_", "-", "-", "<answer>", "</answer>", "<pad>", "<s>", "</s>"),
)
LABEL = 3  # tokens of a repository's number: there are 4,096, and one in eight is held out
CALL_TOKENS, ANSWER_TOKENS = 6, 4  # of a call with its result, and of an answer with the end


def words(ids: Tensor) -> list[str]:
    """Token ids (T,) as words."""
    return [VOCABULARY[i] for i in ids.tolist()]


def first_bad(prompt: Tensor) -> int:
    """The commit to find: a checksum of the repository's number, which no Llama computes."""
    return zlib.crc32(bytes(prompt.tolist()[1:])) % COMMITS


def draw_prompts(n: int, generator: torch.Generator, *, held_out: bool = False) -> list[Tensor]:
    """n repositories (4,) of one side of the split."""
    found: list[Tensor] = []
    while len(found) < n:
        number = torch.randint(COMMITS, (LABEL,), generator=generator)
        prompt = torch.cat([torch.tensor([BOS]), number])
        side = zlib.crc32(bytes([*prompt.tolist(), 1])) % 8 == 0
        found += [prompt] if side == held_out else []
    return found


@dataclass(frozen=True)
class Episode:
    """What happened in a completion, by its tokens and by who wrote them."""

    calls: list[tuple[int, bool]] = field(default_factory=list)  # tested, is bad; the tool's word
    bits: list[float] = field(
        default_factory=list
    )  # what each call told: log2(open before / after)
    forged: int = 0  # results that the policy wrote itself
    answer: int | None = None  # None = none in form
    low: int = 0  # the commits that can still be the first bad one, from
    high: int = COMMITS - 1  # and up to


def read_episode(completion: Tensor, own: Tensor) -> Episode:
    """completion (T,) without padding, own (T,) bool: True where the policy drew the token."""
    tokens, mine = completion.tolist(), own.tolist()
    calls, bits, forged, low, high = [], [], 0, 0, COMMITS - 1
    for t, token in enumerate(tokens):
        forged += token == RESULT and mine[t]
        if token in (GOOD, BAD) and not mine[t]:
            tested, bad, before = tokens[t - 3], token == BAD, high - low + 1
            low, high = (low, min(high, tested)) if bad else (max(low, tested + 1), high)
            calls.append((tested, bad))
            bits.append(math.log2(before / max(1, high - low + 1)))
    end = tokens[-ANSWER_TOKENS:]
    in_form = end[:1] == [ANSWER] and end[2:] == [END_ANSWER, EOS] and end[1] < COMMITS
    in_form = in_form and all(mine[-ANSWER_TOKENS:]) and tokens.count(ANSWER) == 1
    return Episode(calls, bits, forged, end[1] if in_form else None, low, high)


def is_bad(prompt: Tensor, commit: int) -> bool:
    """The tool: whether a commit of a repository is bad."""
    return commit >= first_bad(prompt)


@dataclass(frozen=True)
class Bisect:
    """The task, as `train_grpo` takes it with `call_id=END_CALL`: 1 for the right commit."""

    cost: float = 0.0  # of a call
    tool: Callable[[Tensor, int], bool] = is_bad
    patience: float = 5.0  # seconds that the tool may take

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """n repositories to train on."""
        return draw_prompts(n, generator)

    def reply(self, prompt: Tensor, completion: Tensor) -> Sequence[int]:
        """What follows `</call>`; an error for a malformed call, and for a tool that fails."""
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
        """1 for the right answer in form, less the cost of the calls that the policy closed."""
        rows = zip(prompts, completions, own)
        return [
            self.grade(p, c, o) - self.cost * int(((c == END_CALL) & o).sum()) for p, c, o in rows
        ]

    def grade(self, prompt: Tensor, completion: Tensor, own: Tensor) -> float:
        """What one completion is worth, its calls not counted."""
        return float(read_episode(completion, own).answer == first_bad(prompt))


@torch.no_grad()
def play(
    policy: nn.Module,
    task: Bisect,
    prompts: list[Tensor],
    *,
    seed: int = 0,
    max_new_tokens: int = 28,
    **settings,
) -> Rollouts:
    """One episode for each prompt; settings of `sample`."""
    ids, mask = left_pad(prompts, PAD)
    settings = {"eos_id": EOS, "pad_id": PAD, "call_id": END_CALL, **settings}
    generator = torch.Generator().manual_seed(seed)
    return sample(
        policy, ids, mask, max_new_tokens=max_new_tokens, generator=generator,
        reply=lambda row, completion: task.reply(prompts[row], completion), **settings,
    )  # fmt: skip


def evaluate(policy: nn.Module, task: Bisect = Bisect(), *, n: int = 512, **settings) -> dict:
    """How a policy does on n held-out repositories; means over episodes, and `first` (16,)."""
    prompts = draw_prompts(n, torch.Generator().manual_seed(0), held_out=True)
    r = play(policy, task, prompts, **settings)
    episodes = [read_episode(*row) for row in zip(r.unpadded(r.completions), r.unpadded(r.own))]
    calls, first = sum(len(e.calls) for e in episodes), torch.zeros(COMMITS)
    for e in episodes:
        first[e.calls[0][0] if e.calls else 0] += bool(e.calls)
    return {
        "accuracy": sum(e.answer == first_bad(p) for e, p in zip(episodes, prompts)) / n,
        "answered": sum(e.answer is not None for e in episodes) / n,
        "calls": calls / n,
        "bits": sum(sum(e.bits) for e in episodes) / max(1, calls),  # of a call
        "forged": sum(e.forged for e in episodes) / n,
        "first": (first / first.sum().clamp(min=1)).tolist(),  # what is tested first, how often
    }


def demonstration(generator: torch.Generator, stop: float, forged: float) -> list[int]:
    """A careless tester: tests any commit that is open, and stops when tired or if one is left.

    A call is written without its end, as a log has it, with the probability `forged`.
    """

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def happens(probability: float) -> bool:
        return torch.rand((), generator=generator).item() < probability

    low, high, bad_from, written = 0, COMMITS - 1, pick(0, COMMITS - 1), []
    for _ in range(6):
        if low == high or happens(stop):
            break
        tested, end = pick(low, high - 1), [] if happens(forged) else [END_CALL]
        bad = tested >= bad_from
        written += [CALL, tested, *end, RESULT, BAD if bad else GOOD, END_RESULT]
        low, high = (low, tested) if bad else (tested + 1, high)
    return [*written, ANSWER, pick(low, high), END_ANSWER, EOS]


def warmup_batch(n: int, generator: torch.Generator, *, forged: float = 0.0) -> Batch:
    """n documents to imitate, no culprit that of its repository.

    Half are demonstrations by somebody impatient. Half are logs, which name no repository and go on
    until one commit is left: that's where reading results is learned.
    """
    documents = []
    for i, prompt in enumerate(draw_prompts(n, generator)):
        given = [BLANK] * len(prompt) if i % 2 else prompt.tolist()
        documents.append((given, demonstration(generator, 0.0 if i % 2 else 0.5, forged)))
    return documents_batch(documents, PAD)


@cache
def best(n: int, k: int) -> float:
    """The best chance to be right about one of n commits with k calls left."""
    if n == 1 or k == 0:
        return 1 / n
    return max((t * best(t, k - 1) + (n - t) * best(n - t, k - 1)) / n for t in range(1, n))
