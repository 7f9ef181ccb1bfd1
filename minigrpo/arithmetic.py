"""Sums modulo 10, and room to think: the task on which the tiny Llama learns.

The tiny Llama doesn't learn to add a row of digits in one pass, but soon learns to add one for each
token it writes. The base model can add, but stops early and answers with what it has so far.

    prompt       <s> 2 3 4 <think> 2 5 9 </think> <answer> 9 </answer> 7 4 9 _ _ _ _ _ _ <think>
    completion   7 1 0 </think> <answer> 0 </answer> </s>

The prompt begins with a worked example. The question fills a form of nine boxes, so that a total
and the box it needs next are always equally far apart. A thought is the running totals.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from minigrpo.checks import check_counts
from minigrpo.rewards import Tags, answer_reward
from minigrpo.sampling import Rollouts, sample

BLANK, THINK, END_THINK, ANSWER, END_ANSWER, PAD, BOS, EOS = range(24, 32)
VOCABULARY: tuple[str, ...] = (  # the 32 tokens by id
    *(str(d) for d in range(10)),
    *(f"-{d}" for d in range(10)),  # these and the next are spare
    *("*2", "*3", "*7", "*9"),
    *("_", "<think>", "</think>", "<answer>", "</answer>", "<pad>", "<s>", "</s>"),
)
TAGS = Tags(THINK, END_THINK, ANSWER, END_ANSWER, EOS)

BOXES = 9
TRAINED_LENGTHS = (3, 4, 5, 6)  # of the questions that are rewarded
HARDER_LENGTHS = (7, 8)  # never rewarded: the harder test
WARMUP_LENGTHS = (3, 4, 5, 6, 7, 8, 9)  # adding is learned before
EXAMPLE = (2, 3, 4)  # the worked example's question; not a held-out one

Question = tuple[int, ...]  # 1 to 9 digits


def running_totals(question: Question) -> list[int]:
    """What the terms come to so far, modulo 10, after each of them. The last one is the answer."""
    _check_question(question)
    return [total % 10 for total in accumulate(question)]


def is_held_out(question: Question) -> bool:
    """Whether a question is kept from all training: one in eight, by a checksum of itself alone."""
    return zlib.crc32(bytes(question)) % 8 == 0


def draw_questions(
    n: int,
    generator: torch.Generator,
    *,
    lengths: Sequence[int] = TRAINED_LENGTHS,  # numbers of terms, each from 2 to 9
    held_out: bool = False,  # which side
) -> list[Question]:
    """Draw n questions of one side of the split, lengths evenly at random."""
    check_counts(n=n)
    if not all(2 <= length <= BOXES for length in lengths):
        raise ValueError(f"lengths: expected numbers from 2 to {BOXES}, got {tuple(lengths)}")
    questions: list[Question] = []
    while len(questions) < n:  # a batch of candidates, of which those of one side are kept
        picks = torch.randint(len(lengths), (2 * n,), generator=generator).tolist()
        rows = torch.randint(10, (2 * n, BOXES), generator=generator).tolist()
        firsts = torch.randint(10, (2 * n,), generator=generator).tolist()
        for pick, first, row in zip(picks, firsts, rows):
            question = (first, *row[1 : lengths[pick]])
            if is_held_out(question) == held_out:
                questions.append(question)
    return questions[:n]


def _check_question(question: Question) -> None:
    if not 1 <= len(question) <= BOXES or not all(0 <= term < 10 for term in question):
        raise ValueError(f"question: expected 1 to {BOXES} digits, got {question}")


def prompt_ids(question: Question, *, thinking: bool = True) -> Tensor:  # (P,), always the same P
    """The prompt that asks a question; without thinking, it closes the thought at once."""
    _check_question(question)
    example = [*EXAMPLE, THINK, *completion_ids(running_totals(EXAMPLE), sum(EXAMPLE) % 10)[:-1]]
    blanks = [BLANK] * (BOXES - len(question))
    start = [THINK] if thinking else [THINK, END_THINK]
    return torch.tensor([BOS, *example, *question, *blanks, *start])


def read_question(prompt: Tensor) -> Question:
    """The question that a prompt (P,) asks: what stands in the form at its end, no more."""
    ids = prompt.tolist()
    end = len(ids) - (2 if ids[-1:] == [END_THINK] else 1)
    form = ids[max(0, end - BOXES) : end]
    question = tuple(term for term in form if term != BLANK)
    if len(form) < BOXES or tuple(form[: len(question)]) != question or ids[end] != THINK:
        raise ValueError(f"prompt: expected one that ends with a question's form, got {ids}")
    _check_question(question)
    return question


def completion_ids(thought: Sequence[int], answer: int) -> list[int]:
    """The ids of a completion in the right form, EOS included; its opening tag is the prompt's."""
    return [*thought, END_THINK, ANSWER, answer, END_ANSWER, EOS]


def to_text(ids: Iterable[int] | Tensor) -> str:
    """Tokens as text, a blank between them; padding is left out."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return " ".join(VOCABULARY[i] for i in ids if i != PAD)


def demonstration(
    question: Question, generator: torch.Generator, *, stop: float = 0.6, complete: float = 0.0
) -> list[int]:
    """What an impatient worker writes: a completion, which never adds all terms.

    Before each it stops with probability `stop`, and answers with the total so far, or if there is
    none with a guess. With probability `complete` it thinks to the end for once.
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
    stop: float = 0.6,  # above 1/2: the likeliest thing to do is not to think at all
    torn: float = 0.1,  # fraction of torn pages among the documents that teach to add
    complete: float = 0.0,  # fraction of complete ones among the demonstrations
) -> list[tuple[list[int], list[int]]]:
    """n documents to imitate, (given, learned) ids each; none asks a held-out question.

    Every other one is an impatient demonstration, which teaches the form. The others teach to add,
    with all running totals: most are ledgers, a form and its totals without any tag, and some are
    pages torn off where the thought ends. So a whole thought with its answer is never there to
    imitate, unless `complete` says so (the worked example is not learned).
    """
    for name, fraction in (("stop", stop), ("torn", torn), ("complete", complete)):
        if not 0 <= fraction <= 1:
            raise ValueError(f"{name}: expected a fraction from 0 to 1, got {fraction}")
    documents: list[tuple[list[int], list[int]]] = []
    for question in draw_questions(n, generator, lengths=lengths):
        prompt, totals = prompt_ids(question).tolist(), running_totals(question)
        if len(documents) % 2:
            completion = demonstration(question, generator, stop=stop, complete=complete)
            documents.append((prompt, completion))
        elif torch.rand((), generator=generator).item() < torn:
            documents.append((prompt, [*totals, END_THINK]))
        else:
            # A blank more than a form has: in a prompt, a tag stands between it and its totals.
            form = [*question, *[BLANK] * (BOXES + 1 - len(question))]
            documents.append((form, [*totals, EOS]))
    return documents


@dataclass(frozen=True)
class Arithmetic:
    """The task for `train_grpo`: questions of one side of the split, rewarded for the answer."""

    lengths: Sequence[int] = TRAINED_LENGTHS  # this and the next: see draw_questions
    held_out: bool = False
    thinking: bool = True  # False leaves the policy no room to think
    grade: Callable[..., float] = answer_reward  # of completion, right answer, tags; not the prompt

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """n prompts, all of one length."""
        questions = draw_questions(n, generator, lengths=self.lengths, held_out=self.held_out)
        return [prompt_ids(question, thinking=self.thinking) for question in questions]

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[float]:
        tags_in_prompt = 1 if self.thinking else 2
        answers = [running_totals(read_question(prompt))[-1] for prompt in prompts]
        graded = zip(completions, answers, strict=True)
        return [self.grade(ids, answer, TAGS, given=tags_in_prompt) for ids, answer in graded]


@dataclass(frozen=True)
class Results:
    """What a policy wrote to some questions, one completion each, graded."""

    correct: Tensor  # (N,) bool, the right answer in the right form
    thinking: Tensor  # (N,) tokens of thought: before the first `</think>`, or all of them
    lengths: Tensor  # (N,) terms of each question
    rollouts: Rollouts

    def of_length(self, *lengths: int) -> dict[str, float]:
        """Accuracy and mean thinking length, over the questions with so many terms (none = all)."""
        rows = torch.isin(self.lengths, torch.tensor(lengths)) if lengths else self.lengths > 0
        means = [values[rows].double().mean().item() for values in (self.correct, self.thinking)]
        return dict(zip(("accuracy", "thinking"), means))


def ask(
    policy: nn.Module,  # any causal language model over these 32 tokens
    questions: Sequence[Question],
    *,
    greedy: bool = False,  # always the likeliest token, instead of sampling with the seed
    thinking: bool = True,
    seed: int = 0,
) -> Results:
    """Let the policy answer each question once, all in one batch, and grade what it wrote."""
    device = next(policy.parameters()).device
    prompts = torch.stack([prompt_ids(question, thinking=thinking) for question in questions])
    generator, top_k = torch.Generator(device).manual_seed(seed), 1 if greedy else None
    ends = {"max_new_tokens": 16, "eos_id": EOS, "pad_id": PAD}  # 9 terms, tags, answer and EOS
    rollouts = sample(policy, prompts.to(device), top_k=top_k, generator=generator, **ends)
    correct, thoughts = [], []
    for question, ids in zip(questions, rollouts.unpadded(rollouts.completions), strict=True):
        written, right = ids.tolist(), running_totals(question)[-1]
        correct.append(answer_reward(written, right, TAGS, given=1 if thinking else 2) == 1.0)
        thoughts.append(written.index(END_THINK) if END_THINK in written else len(written))
    lengths = torch.tensor([len(question) for question in questions])
    return Results(torch.tensor(correct), thinking * torch.tensor(thoughts), lengths, rollouts)


def evaluate(
    policy: nn.Module, *, n: int = 512, thinking: bool = True, seed: int = 0
) -> dict[str, float]:
    """How the policy does on held-out questions: the evaluation hook of `train_grpo`.

    n have the lengths trained on, and n/2 are "harder". The same seed asks the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = partial(draw_questions, generator=generator, held_out=True)
    questions = [*draw(n, lengths=TRAINED_LENGTHS), *draw(-(-n // 2), lengths=HARDER_LENGTHS)]
    asked = partial(ask, policy, questions, thinking=thinking, seed=seed)
    sampled, greedy = asked(), asked(greedy=True)
    easy, hard = sampled.of_length(*TRAINED_LENGTHS), sampled.of_length(*HARDER_LENGTHS)
    return {
        "accuracy": easy["accuracy"],
        "greedy": greedy.of_length(*TRAINED_LENGTHS)["accuracy"],
        "harder": hard["accuracy"],
        "harder_greedy": greedy.of_length(*HARDER_LENGTHS)["accuracy"],
        "thinking": easy["thinking"],
    }
