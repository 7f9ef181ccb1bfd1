"""Sums modulo 10, and room to think: the task on which the tiny Llama learns.

A question is a row of terms; the answer is what they come to, modulo 10, worked out from left to
right. A model of two layers cannot add six digits in one pass, but it can add one digit for each
token it writes. The base model knows how to add and is impatient: it stops early, and answers with
what it has so far.

    prompt       <s> 2 3 4 <think> 2 5 9 </think> <answer> 9 </answer> 7 4 9 _ _ _ _ _ _ <think>
    completion   7 1 0 </think> <answer> 0 </answer> </s>

The prompt begins with a worked example. The question stands in a form of nine boxes, so that a
total and the box it needs next are always equally far apart: without the form, a model of this
size has a hard time finding the next term. A thought is the row of running totals.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minigrpo.checks import is_whole_number
from minigrpo.pretrain import documents_batch
from minigrpo.rewards import Tags, answer_reward
from minigrpo.sampling import Rollouts, sample

TIMES = {20: 2, 21: 3, 22: 7, 23: 9}
BLANK, THINK, END_THINK, ANSWER, END_ANSWER, PAD, BOS, EOS = range(24, 32)

VOCABULARY: tuple[str, ...] = (
    *(str(d) for d in range(10)),  # as a term: add it
    *(f"-{d}" for d in range(10)),  # subtract it
    *(f"*{factor}" for factor in TIMES.values()),
    *("_", "<think>", "</think>", "<answer>", "</answer>", "<pad>", "<s>", "</s>"),
)
"""The 32 tokens by id."""

TAGS = Tags(THINK, END_THINK, ANSWER, END_ANSWER, EOS)
OPERATIONS = {"add": range(10), "mixed": range(24)}
"""The ids of the terms that may follow the first, which is always a digit."""

BOXES = 9
TRAINED_LENGTHS = (3, 4, 5, 6)  # of the questions that are rewarded
HARDER_LENGTHS = (7, 8)  # never rewarded: the harder test
WARMUP_LENGTHS = (3, 4, 5, 6, 7, 8, 9)  # adding is learned before
EXAMPLE = (2, 3, 4)  # the worked example's question; not a held-out one
HELD_OUT = 8  # one question in so many

Question = tuple[int, ...]
"""Ids of the terms, 1 to 9 of them, worked out from left to right; the first is a digit."""


# --------------------------------------------------------------------------------------------
# questions


def running_totals(question: Question) -> list[int]:
    """What the terms come to so far, modulo 10, after each of them. The last one is the answer.

    Raises:
        ValueError: no terms, more than there are boxes, or ids that are no terms.
    """
    _check_question(question)
    totals = [question[0]]
    for term in question[1:]:
        if term < 10:
            total = totals[-1] + term
        elif term < 20:
            total = totals[-1] - (term - 10)
        else:
            total = totals[-1] * TIMES[term]
        totals.append(total % 10)
    return totals


def is_held_out(question: Question) -> bool:
    """Whether a question is kept from all training: about one in eight, by a fixed checksum.

    A property of the question itself, so the two sides of the split cannot meet, however they are
    drawn. Python's own hash() would not do: it may change with the version.
    """
    return zlib.crc32(bytes(question)) % HELD_OUT == 0


def draw_questions(
    n: int,
    generator: torch.Generator,
    *,
    lengths: Sequence[int] = TRAINED_LENGTHS,
    operations: str = "add",
    held_out: bool = False,
) -> list[Question]:
    """Draw n questions of one side of the split, lengths evenly at random.

    Args:
        n: how many, 1 or more.
        generator: the source of randomness.
        lengths: numbers of terms, each from 2 to 9.
        operations: "add" for digits, "mixed" for all of `OPERATIONS`.
        held_out: which side.

    Raises:
        ValueError: unknown operations, lengths out of range, or n below 1.
    """
    if operations not in OPERATIONS:
        raise ValueError(f"operations: expected one of {', '.join(OPERATIONS)}, got {operations!r}")
    if not is_whole_number(n) or n < 1:
        raise ValueError(f"n: expected a whole number of 1 or more, got {n!r}")
    whole = all(map(is_whole_number, lengths))
    if not lengths or not whole or not all(2 <= length <= BOXES for length in lengths):
        raise ValueError(f"lengths: expected numbers from 2 to {BOXES}, got {tuple(lengths)}")
    highest, questions = len(OPERATIONS[operations]), []
    while len(questions) < n:  # a batch of candidates, of which those of one side are kept
        picks = torch.randint(len(lengths), (2 * n,), generator=generator).tolist()
        rows = torch.randint(highest, (2 * n, BOXES), generator=generator).tolist()
        firsts = torch.randint(10, (2 * n,), generator=generator).tolist()
        for pick, first, row in zip(picks, firsts, rows):
            question = (first, *row[1 : lengths[pick]])
            if is_held_out(question) == held_out:
                questions.append(question)
    return questions[:n]


def _check_question(question: Question) -> None:
    good = 1 <= len(question) <= BOXES and all(0 <= term < BLANK for term in question)
    if not good or question[0] >= 10:
        raise ValueError(
            f"question: expected 1 to {BOXES} ids of terms (0 to {BLANK - 1}), the first a digit, "
            f"got {tuple(question)}"
        )


# --------------------------------------------------------------------------------------------
# prompts, completions, text


def prompt_ids(question: Question, *, thinking: bool = True) -> Tensor:
    """The prompt that asks a question: (P,), the same P for every question.

    thinking: False closes the thought at once, so that the policy must answer without one.
    """
    _check_question(question)
    example = [*EXAMPLE, THINK, *completion_ids(running_totals(EXAMPLE), sum(EXAMPLE) % 10)[:-1]]
    blanks = [BLANK] * (BOXES - len(question))
    start = [THINK] if thinking else [THINK, END_THINK]
    return torch.tensor([BOS, *example, *question, *blanks, *start])


def read_question(prompt: Tensor) -> Question:
    """The question that a prompt asks: what stands in the form at its end. (P,) -> terms.

    Nothing before the form is looked at.

    Raises:
        ValueError: the prompt does not end with a form.
    """
    ids = prompt.tolist()
    end = len(ids) - (2 if ids[-1:] == [END_THINK] else 1)
    form = ids[max(0, end - BOXES) : end]
    question = tuple(term for term in form if term != BLANK)
    if len(form) < BOXES or tuple(form[: len(question)]) != question or ids[end] != THINK:
        raise ValueError(f"prompt: expected one that ends with a question's form, got {ids}")
    _check_question(question)
    return question


def completion_ids(thought: Sequence[int], answer: int, *, thinking: bool = True) -> list[int]:
    """The ids of a completion in the right form, EOS included; its opening tag is the prompt's."""
    end = [END_THINK] if thinking else []
    return [*thought, *end, ANSWER, answer, END_ANSWER, EOS]


def to_text(ids: Iterable[int] | Tensor) -> str:
    """Tokens as text, a blank between them; padding is left out."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return " ".join(VOCABULARY[i] for i in ids if i != PAD)


# --------------------------------------------------------------------------------------------
# demonstrations


def demonstration(
    question: Question, generator: torch.Generator, *, stop: float = 0.6, complete: float = 0.0
) -> list[int]:
    """What an impatient worker writes: a completion.

    Before each term it stops with probability `stop`, and it never adds all of them; then it
    answers with the total so far, or, if it has not even begun, with a guess. With probability
    `complete` it thinks to the end for once and answers rightly.
    """
    totals = running_totals(question)
    if torch.rand((), generator=generator).item() < complete:
        return completion_ids(totals, totals[-1])
    stops = torch.rand(len(totals) - 1, generator=generator) < stop
    added = int(stops.nonzero()[0]) if stops.any() else len(totals) - 1
    guess = int(torch.randint(10, (), generator=generator))
    return completion_ids(totals[:added], totals[added - 1] if added else guess)


def warmup_documents(
    n: int,
    generator: torch.Generator,
    *,
    lengths: Sequence[int] = WARMUP_LENGTHS,
    operations: str = "add",
    stop: float = 0.6,
    torn: float = 0.1,
    complete: float = 0.0,
) -> list[tuple[list[int], list[int]]]:
    """n documents to imitate, none of which asks a held-out question: (given, learned) ids each.

    Every other document is an impatient demonstration, which teaches the form. The others teach to
    add, with all running totals: most are ledgers, a form and its totals without any tag, and a
    share `torn` are pages of the right form, torn off where the thought ends. So thinking to the
    end is nothing unheard of, but a whole thought with its answer is never there to imitate,
    unless `complete` says so (the worked example in the prompts is given, not learned). `stop` is
    above 1/2, so that the likeliest thing for the base model to do is not to think at all.

    Args:
        n: how many.
        generator: the source of randomness.
        lengths, operations: see `draw_questions`.
        torn: share of torn pages among the documents that teach to add, 0 to 1.
        stop, complete: see `demonstration`, 0 to 1.

    Raises:
        ValueError: a share out of range, and what `draw_questions` raises.
    """
    for name, share in (("stop", stop), ("torn", torn), ("complete", complete)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: expected a share from 0 to 1, got {share}")
    documents: list[tuple[list[int], list[int]]] = []
    for question in draw_questions(n, generator, lengths=lengths, operations=operations):
        prompt, totals = prompt_ids(question).tolist(), running_totals(question)
        if len(documents) % 2:
            completion = demonstration(question, generator, stop=stop, complete=complete)
            documents.append((prompt, completion))
        elif torch.rand((), generator=generator).item() < torn:
            documents.append((prompt, [*totals, END_THINK]))
        else:
            # One blank more than the form has, so that it ends as far from its totals as in a
            # prompt, where a tag stands between them.
            form = [*question, *[BLANK] * (BOXES + 1 - len(question))]
            documents.append((form, [*totals, EOS]))
    return documents


def warmup_batch(
    n: int, generator: torch.Generator, **options: Sequence[int] | str | float
) -> tuple[Tensor, Tensor]:
    """A batch of `warmup_documents` (with these options) for `pretrain`.

    Returns:
        ids (n, S), padded on the right, and the loss mask (n, S), 1 on what is to be learned.
    """
    return documents_batch(warmup_documents(n, generator, **options), PAD)


# --------------------------------------------------------------------------------------------
# the task


@dataclass(frozen=True)
class Arithmetic:
    """The task for `train_grpo`: questions of one side of the split, and a reward for the answer.

    Attributes:
        lengths, operations, held_out: see `draw_questions`.
        thinking: False leaves the policy no room to think.
        score: (completion, right answer, tags, given=...) -> reward, by default `answer_reward`.
            It sees the completion only. The prompt is read for one purpose, to look up the right
            answer, and of the prompt nothing but the form at its end.

    Raises:
        ValueError: see `draw_questions`.
    """

    lengths: Sequence[int] = TRAINED_LENGTHS
    operations: str = "add"
    held_out: bool = False
    thinking: bool = True
    score: Callable[..., float] = answer_reward

    def __post_init__(self) -> None:
        self.prompts(1, torch.Generator())  # what it refuses, it refuses before any training

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """n prompts, all of one length."""
        questions = draw_questions(
            n,
            generator,
            lengths=self.lengths,
            operations=self.operations,
            held_out=self.held_out,
        )
        return [prompt_ids(question, thinking=self.thinking) for question in questions]

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[float]:
        """The score of each completion."""
        given = 1 if self.thinking else 2
        answers = [running_totals(read_question(prompt))[-1] for prompt in prompts]
        return [
            self.score(completion, answer, TAGS, given=given)
            for completion, answer in zip(completions, answers, strict=True)
        ]


# --------------------------------------------------------------------------------------------
# how good is a policy


@dataclass(frozen=True)
class Results:
    """What a policy wrote to some questions, one completion each, graded.

    Attributes:
        correct: (N,) bool, the right answer in the right form.
        thinking: (N,) tokens of thought: those before the first `</think>`, or all of them.
        lengths: (N,) terms of each question.
        rollouts: what was written.
    """

    correct: Tensor
    thinking: Tensor
    lengths: Tensor
    rollouts: Rollouts

    def of_length(self, *lengths: int) -> dict[str, float]:
        """Accuracy and mean thinking length, over the questions with so many terms (none = all).

        Raises:
            ValueError: no question has so many.
        """
        rows = torch.isin(self.lengths, torch.tensor(lengths)) if lengths else self.lengths > 0
        if not rows.any():
            asked = self.lengths.unique().tolist()
            raise ValueError(f"lengths: expected some of {asked}, which were asked, got {lengths}")
        return {
            "accuracy": self.correct[rows].double().mean().item(),
            "thinking": self.thinking[rows].double().mean().item(),
        }


def ask(
    policy: nn.Module,
    questions: Sequence[Question],
    *,
    greedy: bool = False,
    thinking: bool = True,
    max_new_tokens: int = 16,
    seed: int = 0,
) -> Results:
    """Let the policy answer each question once, all in one batch, and grade what it wrote.

    Args:
        policy: any causal language model over these 32 tokens; the mode it is in is kept.
        questions: of any lengths.
        greedy: always the likeliest token, instead of sampling with the seed.
        thinking: False asks with the thought closed at once.
        max_new_tokens: room for thought, tags, answer and EOS; 16 is enough for 9 terms.
        seed: of a generator of its own, so asking changes nothing else.

    Raises:
        ValueError: no questions, or what is no question.
    """
    if not questions:
        raise ValueError("questions: expected one or more, got none")
    device = next(policy.parameters()).device
    prompts = torch.stack([prompt_ids(question, thinking=thinking) for question in questions])
    rollouts = sample(
        policy,
        prompts.to(device),
        max_new_tokens=max_new_tokens,
        top_k=1 if greedy else None,
        eos_id=EOS,
        pad_id=PAD,
        generator=torch.Generator(device).manual_seed(seed),
    )
    correct, thoughts = [], []
    rows = zip(rollouts.completions.cpu(), rollouts.completion_mask.cpu())
    for question, (ids, real) in zip(questions, rows, strict=True):
        written, right = ids[real].tolist(), running_totals(question)[-1]
        correct.append(answer_reward(written, right, TAGS, given=1 if thinking else 2) == 1.0)
        thoughts.append(written.index(END_THINK) if END_THINK in written else len(written))
    return Results(
        correct=torch.tensor(correct),
        thinking=torch.tensor(thoughts) if thinking else torch.zeros(len(questions)).long(),
        lengths=torch.tensor([len(question) for question in questions]),
        rollouts=rollouts,
    )


def evaluate(
    policy: nn.Module,
    *,
    n: int = 512,
    operations: str = "add",
    thinking: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """How the policy does on held-out questions: the evaluation hook of `train_grpo`.

    n questions of the lengths that are trained on, and n/2 of the harder ones; the same seed asks
    the same questions, so that one evaluation can be compared with the next.

    Returns:
        accuracy: sampled, at the lengths trained on; greedy: the same, with the likeliest tokens;
        harder, harder_greedy: at lengths never trained on; thinking: tokens of thought, mean,
        sampled, at the lengths trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    questions = []
    for count, lengths in ((n, TRAINED_LENGTHS), (-(-n // 2), HARDER_LENGTHS)):
        questions += draw_questions(
            count, generator, lengths=lengths, operations=operations, held_out=True
        )
    sampled = ask(policy, questions, thinking=thinking, seed=seed)
    greedy = ask(policy, questions, thinking=thinking, greedy=True)
    easy, hard = sampled.of_length(*TRAINED_LENGTHS), sampled.of_length(*HARDER_LENGTHS)
    return {
        "accuracy": easy["accuracy"],
        "greedy": greedy.of_length(*TRAINED_LENGTHS)["accuracy"],
        "harder": hard["accuracy"],
        "harder_greedy": greedy.of_length(*HARDER_LENGTHS)["accuracy"],
        "thinking": easy["thinking"],
    }
