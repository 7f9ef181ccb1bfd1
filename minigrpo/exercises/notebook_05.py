"""The exercises of notebook 05: ragged batches, rewards that cannot be cheated, pass at k."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minigrpo import rewards, sampling
from minigrpo.arithmetic import ANSWER, END_ANSWER, END_THINK, EOS, PAD, TAGS, THINK
from minigrpo.exercises.engine import Answer, Case, Exercise
from minigrpo.exercises.notebook_02 import _loop, _up_to_last
from minigrpo.rewards import Tags

# 5.1 ----------------------------------------------------------------------------------------


def left_pad(rows, pad_id):
    """rows: 1-D ids, not all equally long -> (2, N, S): ids, and mask with 1 = real token"""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return torch.stack([ids, mask])


def _right_pad(rows: Sequence[Tensor], pad_id: int) -> Tensor:
    ids = pad_sequence(list(rows), batch_first=True, padding_value=pad_id)
    ones = [torch.ones_like(row) for row in rows]
    return torch.stack([ids, pad_sequence(ones, batch_first=True)])


def _with_mask(function: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """The right ids, and a mask made from them and pad_id."""

    def answer(rows: Sequence[Tensor], pad_id: int) -> Tensor:
        ids = left_pad(rows, pad_id)[0]
        return torch.stack([ids, function(ids, pad_id).long()])

    return answer


def _pad_on_the_left(rows: Sequence[Tensor], pad_id: int) -> Tensor:
    def pad(tensors: Sequence[Tensor], value: int) -> Tensor:
        return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left")

    return torch.stack([pad(list(rows), pad_id), pad([torch.ones_like(r) for r in rows], 0)])


def _joined(rows: Sequence[Tensor], pad_id: int) -> Tensor:
    width = max(len(row) for row in rows)
    ids = [torch.cat([row.new_full((width - len(row),), pad_id), row]) for row in rows]
    lengths = torch.tensor([[len(row)] for row in rows])
    return torch.stack([torch.stack(ids), (torch.arange(width) >= width - lengths).long()])


LEFT_PAD = Exercise(
    key="5.1",
    title="pad on the left",
    reference=left_pad,
    imports=("import torch",),
    package=lambda rows, pad_id: torch.stack([x.long() for x in sampling.left_pad(rows, pad_id)]),
    others=(
        Answer(
            "pad_sequence",
            _pad_on_the_left,
            "torch.nn.utils.rnn.pad_sequence with padding_side='left', for the rows and for rows "
            "of ones.",
        ),
        Answer(
            "joined",
            _joined,
            "put the right number of pads before each row with torch.cat; a column is real if "
            "its number is at least S minus the length of the row.",
        ),
        Answer(
            "there and back",
            lambda rows, pad_id: _right_pad([row.flip(0) for row in rows], pad_id).flip(-1),
            "turn every row round, pad on the right, and turn the whole batch round.",
        ),
    ),
    wrong=(
        Answer(
            "padded on the right",
            _right_pad,
            "You pad on the right. The next token is written after the last column, so the model "
            "would continue the padding. Every row has to end in the last column.",
        ),
        Answer(
            "turned round once",
            lambda rows, pad_id: _right_pad(rows, pad_id).flip(-1),
            "You pad on the right and turn the result round: the padding is on the left now, but "
            "every text stands backwards. Turn each row round before, as well.",
        ),
        Answer(
            "ids on the right, mask on the left",
            lambda rows, pad_id: torch.stack([_right_pad(rows, pad_id)[0], left_pad(rows, 0)[1]]),
            "Your mask belongs to padding on the left, but your ids are padded on the right. Move "
            "the ids.",
        ),
        Answer(
            "ids on the left, mask on the right",
            lambda rows, pad_id: torch.stack([left_pad(rows, pad_id)[0], _right_pad(rows, 0)[1]]),
            "Your ids are padded on the left, but your mask is made for padding on the right. Its "
            "ones have to stand at the end, as the real tokens do.",
        ),
        Answer(
            "mask from the values",
            _with_mask(lambda ids, pad_id: ids != pad_id),
            "You make the mask with ids != pad_id. A real token may have the id of the padding; "
            "your mask hides it. Take the length of each row instead.",
        ),
        Answer(
            "mask from the first other value",
            _with_mask(lambda ids, pad_id: (ids != pad_id).cumsum(1) > 0),
            "You begin the text at the first token that is not pad_id. A text may begin with that "
            "id; your mask hides it. Take the length of each row instead.",
        ),
        Answer(
            "mask upside down",
            lambda rows, pad_id: (
                left_pad(rows, pad_id) ^ torch.tensor([0, 1])[:, None, None]  # 0 and 1 exchanged
            ),
            "Your mask is upside down: 1 is for a real token, 0 for padding.",
        ),
        Answer(
            "mask of ones",
            _with_mask(lambda ids, pad_id: torch.ones_like(ids)),
            "Your mask is 1 everywhere, so the model would read the padding as text. Put 0 where "
            "you padded.",
        ),
        Answer(
            "padded with 0",
            lambda rows, pad_id: left_pad(rows, 0),
            "You fill with 0. In our vocabulary 0 is a digit; fill with pad_id.",
        ),
        Answer(
            "mask padded with pad_id",
            lambda rows, pad_id: torch.stack(
                [_pad_on_the_left([row**n for row in rows], pad_id)[0] for n in (1, 0)]
            ),
            "You fill the mask with pad_id, like the ids. The mask is 0 where you padded.",
        ),
        Answer(
            "cut to the shortest",
            lambda rows, pad_id: left_pad([r[-min(map(len, rows)) :] for r in rows], pad_id),
            "You cut all rows to the length of the shortest, and throw away text. Fill the short "
            "rows up to the longest instead.",
        ),
        Answer(
            "sorted",
            lambda rows, pad_id: left_pad(sorted(rows, key=len, reverse=True), pad_id),
            "You sort the rows by length. Answers and rewards keep the old order, and would then "
            "belong to other rows. Leave the rows where they are.",
        ),
        Answer(
            "mask first",
            lambda rows, pad_id: left_pad(rows, pad_id).flip(0),
            "You return the mask first and the ids second. Exchange them.",
        ),
    ),
    # Tuples: what a function writes into a list would still be there for the next one.
    cases=(
        Case(
            "four lengths, and text with the id of the padding",
            (
                (
                    torch.tensor([5, 9, 6]),
                    torch.tensor([8]),
                    torch.tensor([1, 0, 9, 4, 2]),
                    torch.tensor([9, 3]),
                ),
                9,
            ),
        ),
        Case("a single row", ((torch.tensor([5, 6, 7]),), PAD)),
    ),
    hints=(
        "The model writes the next token after the last column. What has to stand there, in every "
        "row?",
        "Start from a batch of pads, torch.full((len(rows), width), pad_id), and a mask of zeros, "
        "where width is the length of the longest row.",
        "Row i goes into ids[i, width - len(row):]. Put 1 at the same place of the mask, and "
        "return torch.stack([ids, mask]).",
    ),
    lapses=(lambda rows, pad_id: left_pad(rows, pad_id).squeeze(),),
)


# 5.2 ----------------------------------------------------------------------------------------


def completion_mask(completions, eos_id):
    """completions (N, T) -> (N, T) bool, True up to and including the first EOS of each row"""
    is_eos = completions == eos_id
    eos_before = is_eos.cumsum(dim=1) - is_eos.long()  # the position's own EOS does not count
    return eos_before == 0


def _first_eos(completions: Tensor, eos_id: int) -> Tensor:
    """Columns are compared with the column of the first EOS, or with the width."""
    is_eos = completions == eos_id
    width = completions.shape[1]
    first = torch.where(is_eos.any(1), is_eos.long().argmax(1), width)
    return torch.arange(width) <= first[:, None]


COMPLETION_MASK = Exercise(
    key="5.2",
    title="where a completion ends",
    reference=completion_mask,
    imports=(),
    package=sampling.completion_mask,
    others=(
        Answer("row by row", _loop, "find the first EOS of each row in a loop."),
        Answer(
            "compare columns",
            _first_eos,
            "find the column of the first EOS with argmax (the width where there is none), and "
            "keep the columns up to it.",
        ),
    ),
    wrong=(
        Answer(
            "without the EOS",
            lambda ids, eos: (ids == eos).cumsum(1) == 0,
            "You mask out the EOS itself. The policy chose it like any other token, and if it is "
            "never trained, the policy cannot learn when to stop. Keep it.",
        ),
        Answer(
            "every token that is not EOS",
            lambda ids, eos: ids != eos,
            "You ask of every token whether it is the EOS. So the EOS is masked out, and what "
            "follows it counts as text. Ask where the first EOS stands.",
        ),
        Answer(
            "every token that is not padding",
            lambda ids, eos, pad=PAD: ids != pad,
            "You keep whatever is not the padding of our vocabulary. Elsewhere the rows are "
            "filled with other ids, often with the EOS. Find the first EOS of each row instead.",
        ),
        Answer(
            "up to the last EOS",
            _up_to_last,
            "You keep everything up to the last EOS of the row. The text ends at the first one; "
            "where rows are filled with EOS, you would train on all the padding.",
        ),
        Answer(
            "from the EOS on",
            lambda ids, eos: (ids == eos).cumsum(1) > 0,
            "Your mask is True from the first EOS on. True is for what the policy wrote: up to "
            "there.",
        ),
        Answer(
            "after the EOS",
            lambda ids, eos: ~completion_mask(ids, eos),
            "Your mask is upside down: True stands after the end. True is for the tokens up to "
            "and including the first EOS.",
        ),
        Answer(
            "one too many",
            lambda ids, eos: (
                torch.arange(ids.shape[1]) <= completion_mask(ids, eos).sum(1)[:, None]
            ),
            "You keep one token too many, the one after the EOS. The EOS is the last.",
        ),
        Answer(
            "rows without EOS have no text",
            lambda ids, eos: _loop(ids, eos) & (ids == eos).any(1, keepdim=True),
            "A row without EOS is all False in your mask. It was cut off at the longest length "
            "allowed, and all of its tokens are real.",
        ),
        Answer(
            "rows without EOS end at once",
            lambda ids, eos: torch.arange(ids.shape[1]) <= (ids == eos).long().argmax(1)[:, None],
            "A row without EOS keeps one token in your mask: argmax returns 0 when there is "
            "nothing to find, as if the EOS came first. All tokens of such a row are real.",
        ),
        Answer(
            "the end of the first row",
            lambda ids, eos: completion_mask(ids, eos)[:1].expand(len(ids), -1),
            "You use the end of the first row for all rows. Each row has its own end: work along "
            "dim=1.",
        ),
        Answer(
            "down the columns",
            lambda ids, eos: (ids == eos).cumsum(0) - (ids == eos).long() == 0,
            "You count down the columns, from row to row. A text runs along its row: dim=1.",
        ),
        Answer(
            "everything",
            lambda ids, eos: torch.ones_like(ids, dtype=torch.bool),
            "Your mask is True everywhere, so the padding would be trained like text.",
        ),
    ),
    cases=(
        Case(
            "no EOS, EOS in the middle, first, last, and three of them",
            (
                torch.tensor(
                    [
                        [7, 1, 0, 3, 5],
                        [7, EOS, PAD, PAD, PAD],
                        [EOS, PAD, PAD, PAD, PAD],
                        [7, 1, 0, 3, EOS],
                        [7, EOS, 4, EOS, EOS],
                        [7, EOS, 4, PAD, PAD],
                    ]
                ),
                EOS,
            ),
        ),
        Case(
            "EOS and padding are both 0",
            (torch.tensor([[5, 6, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8]]), 0),
        ),
    ),
    hints=(
        "Take one row: [7, EOS, 4, EOS]. Which tokens did the policy write before it was done?",
        "(completions == eos_id).cumsum(dim=1) counts the EOS up to and including each position.",
        "A token is real if no EOS stands before it: take the position's own EOS, is_eos.long(), "
        "away from the count, and compare with 0.",
    ),
    # A name of this module would count as data read from the notebook; a default does not.
    lapses=(
        lambda ids, eos: completion_mask(ids, 0),
        lambda ids, eos, end=EOS: completion_mask(ids, eos or end),  # takes the id 0 for "no EOS"
    ),
)


# 5.3 ----------------------------------------------------------------------------------------


def grade(completion, answer, tags):
    """completion (T,) ids written after <think>, answer an id -> 1.0 or 0.0"""
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    thought = ids[:-5]
    all_tags = {tags.think, tags.end_think, tags.answer, tags.end_answer, tags.eos}
    return float(ids[-5:] == ending and all_tags.isdisjoint(thought))


def _walk(completion: Tensor, answer: int, tags: Tags) -> float:
    ids = completion.tolist()
    if tags.end_think not in ids:
        return 0.0
    at = ids.index(tags.end_think)
    if any(tag in ids[:at] for tag in (tags.think, tags.answer, tags.end_answer, tags.eos)):
        return 0.0
    return float(ids[at + 1 :] == [tags.answer, answer, tags.end_answer, tags.eos])


def _spelled(pattern: str) -> Callable[[Tensor, int, Tags], float]:
    """A grader that spells the completion in letters and compares them with a pattern.

    T <think>, t </think>, A <answer>, a </answer>, E EOS, + the right answer, - any other token.
    The right pattern is [-+]*tA[+]aE.
    """

    # A default, because a string in the closure would count as data read from the notebook.
    def answer(completion: Tensor, right: int, tags: Tags, pattern: str = pattern) -> float:
        letters = dict(zip(tags.form, "TtAaE", strict=True))
        letters[right] = "+"
        spelled = "".join(letters.get(token, "-") for token in completion.tolist())
        return float(re.fullmatch(pattern, spelled) is not None)

    return answer


def _index_all(completion: Tensor, answer: int, tags: Tags) -> float:
    ids = completion.tolist()
    ids.index(tags.end_think), ids.index(tags.answer), ids.index(tags.end_answer)
    return grade(completion, answer, tags)


def _first_of_span(completion: Tensor, answer: int, tags: Tags) -> float:
    """Right but for an empty span, of which it takes the first token."""
    ids = completion.tolist()
    span = ids[ids.index(tags.answer) + 1 :] if tags.answer in ids else [0]
    span = span[: span.index(tags.end_answer)] if tags.end_answer in span else span
    span[0]
    return grade(completion, answer, tags)


def _counted(completion: Tensor, answer: int, tags: Tags) -> float:
    """Each tag once, and the right answer after <answer>; not where the tags stand."""
    ids = completion.tolist()
    once = all(ids.count(tag) == 1 for tag in tags.form[1:]) and tags.think not in ids
    return float(once and [answer, tags.end_answer] == ids[ids.index(tags.answer) + 1 :][:2])


def _written(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.long)


def _form_alone(completion: Tensor, answer: int, tags: Tags) -> float:
    return _spelled("[-+]*tA[-+]aE")(completion, answer, tags)


GRADE = Exercise(
    key="5.3",
    title="grade an answer",
    reference=grade,
    imports=(),
    package=rewards.answer_reward,
    others=(
        Answer(
            "from the first </think>",
            _walk,
            "what follows the first </think> must be exactly <answer> x </answer> EOS, and no "
            "other tag may stand before it.",
        ),
        Answer(
            "spelled",
            _spelled("[-+]*tA[+]aE"),
            "spell the completion with one letter for each kind of token, and compare the word "
            "with a pattern, with re.fullmatch.",
        ),
    ),
    wrong=(
        Answer(
            "anywhere",
            _spelled(".*[+].*"),
            "You look for the answer anywhere in the completion. A policy that writes all ten "
            "digits is then always right. Look only between <answer> and </answer>.",
        ),
        Answer(
            "the last word",
            _spelled(".*[+][TtAaE]*"),
            "You take the last token that is not a tag. The policy is then paid without ever "
            "writing <answer>. Compare the tags too.",
        ),
        Answer(
            "first span",
            _spelled("[^A]*A[+]a.*"),
            "You look at the first answer span and at nothing else. It may stand in the middle of "
            "the thought, or have a second one after it. Compare the whole completion.",
        ),
        Answer(
            "somewhere in the first span",
            _spelled("[^A]*A[^a]*[+][^a]*a.*"),
            "You ask whether the answer is in the first span, and look at nothing else. All ten "
            "digits written there are always right, and the form is not asked for. Compare the "
            "whole completion.",
        ),
        Answer(
            "last span",
            _spelled(".*A[+]a[^A]*"),
            "You look at the last answer span and at nothing else. The policy may then correct "
            "itself as often as it likes, and never end. Compare the whole completion.",
        ),
        Answer(
            "any span",
            _spelled(".*A[+]a.*"),
            "You are content if one of the answer spans is right. The policy will write ten of "
            "them. Only one span is allowed.",
        ),
        Answer(
            "only the end",
            _spelled(".*tA[+]aE"),
            "You compare the end and not what comes before it. There the policy may have answered "
            "once already. No tag is allowed in the thought.",
        ),
        Answer(
            "answers in the thought",
            _spelled("[-+Aa]*tA[+]aE"),
            "You allow an answer span inside the thought, beside the one at the end. Each tag may "
            "stand there once: none of them in the thought.",
        ),
        Answer(
            "second <think>",
            _spelled("[-+T]*tA[+]aE"),
            "You allow a second <think> in the thought. The prompt has written the only one. "
            "Forbid this tag before the end as well.",
        ),
        Answer(
            "second </think>",
            _spelled("[-+t]*tA[+]aE"),
            "You cut at the last </think>, so there may be several. The thought ends at the first "
            "one, and nothing but the answer span follows.",
        ),
        Answer(
            "EOS in the thought",
            _spelled("[-+E]*tA[+]aE"),
            "You allow an EOS in the thought. The text ended there; nothing after it counts.",
        ),
        Answer(
            "words before the answer",
            _spelled("[-+]*t[-+]*A[+]aE"),
            "You allow words between </think> and <answer>. That is thinking outside the thought. "
            "The two tags have to stand side by side.",
        ),
        Answer(
            "one of several in the span",
            _spelled("[-+]*tA[-+]*[+][-+]*aE"),
            "You ask whether the answer is in the span. A policy that writes all ten digits there "
            "is always right. The span must be that one token: compare with ==.",
        ),
        Answer(
            "first token of the span",
            _spelled("[-+]*tA[+][-+]*aE"),
            "You compare the first token of the span and not the others. 4 9 is not 4. The "
            "</answer> has to follow at once.",
        ),
        Answer(
            "last token of the span",
            _spelled("[-+]*tA[-+]*[+]aE"),
            "You compare the last token of the span and not the others. 9 4 is not 4. The "
            "<answer> has to stand right before it.",
        ),
        Answer(
            "all of an empty span",
            _spelled("[-+]*tA[+]*aE"),
            "You accept an empty span. Asked whether all tokens of nothing are right, Python says "
            "yes. There has to be exactly one token.",
        ),
        Answer(
            "empty span crashes",
            _first_of_span,
            "Your function crashes when nothing stands between <answer> and </answer>. The policy "
            "may write that too, and earns 0.0. Compare lists, which may be empty.",
        ),
        Answer(
            "no tag crashes",
            _index_all,
            "Your function crashes when a tag is missing: .index raises an error if it finds "
            "nothing. Such completions are common, and earn 0.0. Ask first whether the tag is "
            "there.",
        ),
        Answer(
            "not closed",
            _spelled("[-+]*tA[+]a?E"),
            "You do not ask for the </answer>. The form is part of the task: every tag has to be "
            "there.",
        ),
        Answer(
            "not ended",
            _spelled("[-+]*tA[+]aE?"),
            "You do not ask for the EOS. A text that was cut off is paid like a finished one, and "
            "the policy does not learn to stop. The last id has to be tags.eos.",
        ),
        Answer(
            "words after the answer",
            _spelled("[-+]*tA[+]a[-+]*E"),
            "You allow words between </answer> and EOS. Nothing may stand there: after its answer "
            "the policy has to stop.",
        ),
        Answer(
            "words after the end",
            _spelled("[-+]*tA[+]aE.*"),
            "You stop reading at the EOS. What stands behind it was written too. The EOS has to be "
            "the last id.",
        ),
        Answer(
            "tags counted",
            _counted,
            "You count the tags and do not look at their order. An answer that is given before "
            "the thought has ended must not be paid. Compare whole lists.",
        ),
        Answer(
            "<think> expected",
            _spelled("T[-+]*tA[+]aE"),
            "You wait for a <think> at the beginning. The prompt has written it already, so the "
            "completion begins inside the thought, and nobody would ever be paid.",
        ),
        Answer(
            "thought demanded",
            _spelled("[-+]+tA[+]aE"),
            "You ask for a thought. It may be empty: whether thinking pays is for the policy to "
            "find out. Only the form and the answer count here.",
        ),
        Answer(
            "form alone",
            _form_alone,
            "You do not compare the answer, or it makes no difference: the right form with a "
            "wrong answer earns 1.0. The token in the span has to be answer.",
        ),
        Answer(
            "half for the form",
            lambda c, answer, tags: (grade(c, answer, tags) + _form_alone(c, answer, tags)) / 2,
            "You pay half for the form. Guessing in the right form is then the easy way to earn "
            "something. Here it is 1.0 or 0.0, nothing between.",
        ),
    ),
    cases=(
        Case(
            "right, and the answer is 0",
            (_written(7, 1, 0, END_THINK, ANSWER, 0, END_ANSWER, EOS), 0, TAGS),
        ),
        Case(
            "wrong, with the right number in the thought",
            (_written(7, 1, 0, END_THINK, ANSWER, 1, END_ANSWER, EOS), 0, TAGS),
        ),
        Case("no thought", (_written(END_THINK, ANSWER, 4, END_ANSWER, EOS), 4, TAGS)),
        Case(
            "two spans, the first is right",
            (
                _written(7, END_THINK, ANSWER, 4, END_ANSWER, ANSWER, 9, END_ANSWER, EOS),
                4,
                TAGS,
            ),
        ),
        Case(
            "two spans, the last is right",
            (
                _written(7, END_THINK, ANSWER, 9, END_ANSWER, ANSWER, 4, END_ANSWER, EOS),
                4,
                TAGS,
            ),
        ),
        Case(
            "a span in the thought",
            (
                _written(ANSWER, 9, END_ANSWER, 7, END_THINK, ANSWER, 4, END_ANSWER, EOS),
                4,
                TAGS,
            ),
        ),
        Case(
            "a second <think>",
            (_written(7, THINK, 1, END_THINK, ANSWER, 4, END_ANSWER, EOS), 4, TAGS),
        ),
        Case(
            "a second </think>",
            (_written(7, END_THINK, 1, END_THINK, ANSWER, 4, END_ANSWER, EOS), 4, TAGS),
        ),
        Case(
            "an EOS in the thought",
            (_written(7, EOS, 1, END_THINK, ANSWER, 4, END_ANSWER, EOS), 4, TAGS),
        ),
        Case(
            "a word between </think> and <answer>",
            (_written(7, END_THINK, 1, ANSWER, 4, END_ANSWER, EOS), 4, TAGS),
        ),
        Case(
            "two tokens in the span, the first is right",
            (_written(7, END_THINK, ANSWER, 4, 9, END_ANSWER, EOS), 4, TAGS),
        ),
        Case(
            "two tokens in the span, the last is right",
            (_written(7, END_THINK, ANSWER, 9, 4, END_ANSWER, EOS), 4, TAGS),
        ),
        Case("an empty span", (_written(4, END_THINK, ANSWER, END_ANSWER, EOS), 4, TAGS)),
        Case("no </answer>", (_written(7, END_THINK, ANSWER, 4, EOS), 4, TAGS)),
        Case("no EOS", (_written(7, END_THINK, ANSWER, 4, END_ANSWER), 4, TAGS)),
        Case(
            "a word between </answer> and EOS",
            (_written(7, END_THINK, ANSWER, 4, END_ANSWER, 9, EOS), 4, TAGS),
        ),
        Case(
            "a word after the EOS",
            (_written(7, END_THINK, ANSWER, 4, END_ANSWER, EOS, 9), 4, TAGS),
        ),
        Case(
            "answered before </think>",
            (_written(7, ANSWER, 4, END_ANSWER, END_THINK, EOS), 4, TAGS),
        ),
        Case("cut off in the thought", (_written(7, 1, 4), 4, TAGS)),
    ),
    hints=(
        "Only one ending is right. Which five ids are these?",
        "Make a list: ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]. "
        "With ids = completion.tolist() you can compare ids[-5:] with it, whatever was written.",
        "What is left, ids[:-5], is the thought. None of the five tags may be in it, neither "
        "tags.think nor those of the ending. Return float(...) of both together.",
    ),
    number=True,
    lapses=(
        _spelled("[-+]*tA[+]a(A[-+]a)*E"),
        _spelled("[-+]*t(A[-+]a)*A[+]aE"),
        _spelled("[-+]*(tA[+]a|A[+]a[-+]*t)E"),
        _spelled("[-+]*(tA[+]aE)?"),  # no tags at all
        lambda c, answer, tags: grade(c, answer, tags) if answer else 0.0,
    ),
)


# 5.4 ----------------------------------------------------------------------------------------


def format_reward(text):
    """text: what was written after <think> -> 1.0 or 0.0"""
    # The brackets keep the tags: thought, </think>, between, <answer>, answer, </answer>, after
    pieces = re.split(r"(</?think>|</?answer>)", text)
    if len(pieces) != 7:
        return 0.0  # too many tags, or too few
    _, end_think, between, begin, answer, end, after = [piece.strip() for piece in pieces]
    in_order = [end_think, begin, end] == ["</think>", "<answer>", "</answer>"]
    return float(in_order and between == "" and answer != "" and after == "")


LINE = re.RegexFlag(0)  # without DOTALL the dot stays in its line


def _fits(pattern: str, flags: re.RegexFlag = re.DOTALL) -> Callable[[str], float]:
    """A reward by pattern; % stands for text without a tag, & for an answer."""
    pattern = pattern.replace("&", r"(?!\s*</answer>)%")
    pattern = pattern.replace("%", r"(?:(?!</?think>|</?answer>).)*")

    def answer(text: str, pattern: str = pattern, flags: re.RegexFlag = flags) -> float:
        return float(re.fullmatch(pattern, text, flags) is not None)

    return answer


def _without_a_tag(text: str) -> float:
    other = r"(?:(?!</?think>|</?answer>).)*"
    pattern = rf"{other}</think>\s*<answer>\s*(?!\s*</answer>){other}</answer>\s*"
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def _cut_and_strip(text: str) -> float:
    thought, end_think, rest = text.partition("</think>")
    rest = rest.strip()
    if not (end_think and rest.startswith("<answer>") and rest.endswith("</answer>")):
        return 0.0
    answer = rest[len("<answer>") : -len("</answer>")]
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    clean = not any(tag in part for tag in tags for part in (thought, answer))
    return float(clean and answer.strip() != "")


def _once_each(text: str) -> bool:
    counts = [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
    return counts == [0, 1, 1, 1]


def _count_and_fit(text: str) -> float:
    pattern = r".*</think>\s*<answer>.*\S.*</answer>\s*"
    return float(_once_each(text) and re.fullmatch(pattern, text, re.DOTALL) is not None)


def _last_end_of_thought(text: str) -> float:
    thought, end_think, rest = text.rpartition("</think>")
    return format_reward(thought.replace("</think>", "") + end_think + rest)


def _cut_at_tags(text: str) -> float:
    text.split("</think>")[1]  # IndexError without the tag
    return format_reward(text)


FORMAT_REWARD = Exercise(
    key="5.4",
    title="a reward for the form",
    reference=format_reward,
    imports=("import re",),
    package=rewards.format_reward,
    others=(
        Answer(
            "text without a tag",
            _without_a_tag,
            "re.fullmatch, with a part for text that contains no tag: (?:(?!tag).)* reads on as "
            "long as no tag begins here.",
        ),
        Answer(
            "cut and strip",
            _cut_and_strip,
            "text.partition('</think>'); the rest, stripped, begins with <answer> and ends with "
            "</answer>; no tag in the two parts.",
        ),
        Answer(
            "count, then fit",
            _count_and_fit,
            "count each tag first; once each of them stands there just once, a plain .* in "
            "re.fullmatch is safe.",
        ),
    ),
    wrong=(
        Answer(
            "search",
            lambda text: float(
                re.search(r"</think>\s*<answer>.*?</answer>", text, re.DOTALL) is not None
            ),
            "You look for the form somewhere in the text (re.search, or re.match, which does not "
            "look at the end). What stands around it is not seen. Use re.fullmatch, and forbid "
            "further tags.",
        ),
        Answer(
            "search, answer not empty",
            lambda text: float(
                re.search(r"</think>\s*<answer>\s*[^<\s].*?</answer>", text, re.DOTALL) is not None
            ),
            "You find the form, with an answer in it, somewhere in the text. The policy may write "
            "what it likes before and after, further answers too. The whole text has to fit.",
        ),
        Answer(
            "$ at every line",
            lambda text: float(
                re.match(r".*?</think>\s*<answer>.*?</answer>\s*$", text, re.DOTALL | re.MULTILINE)
                is not None
            ),
            "With re.MULTILINE your $ matches at the end of every line, so the policy may write on "
            "in the next one. Use re.fullmatch without $. And .*? runs over further tags.",
        ),
        Answer(
            "the dot runs over tags",
            _fits(r".*</think>\s*<answer>.*</answer>\s*"),
            "Your .* runs over tags, so a second answer counts as part of the first, and it is "
            "content with nothing. The lazy .*? does the same: with fullmatch it is stretched "
            "until all fits. Forbid tags inside the parts, or count them.",
        ),
        Answer(
            "the dot runs over tags, no white space at the end",
            _fits(r".*</think>\s*<answer>.*</answer>"),
            "Your .* (or .*?, it is the same here) runs over tags, so two answers count as one, "
            "and none at all as well. And white space after </answer>, which does no harm, earns "
            "nothing. Forbid tags inside the parts, or count them.",
        ),
        Answer(
            "the dot runs over tags, answer not empty",
            _fits(r".*</think>\s*<answer>\s*\S.*</answer>\s*"),
            "Nothing keeps .* from running over a tag: a second answer counts as part of the "
            "first, a second <think> as part of the thought. .*? does not help, fullmatch "
            "stretches it. Forbid tags inside the parts, or count them.",
        ),
        Answer(
            "the dot stops at a new line, and runs over tags",
            _fits(r".*</think>\s*<answer>.*</answer>\s*", LINE),
            "Two things. The dot does not match a new line unless you pass re.DOTALL, so thoughts "
            "of several lines earn nothing. And it does match tags, so two answers earn 1.0.",
        ),
        Answer(
            "the dot stops at a new line",
            _fits(r"%</think>\s*<answer>&</answer>\s*", LINE),
            "A thought of several lines earns nothing: in a pattern the dot does not match a new "
            "line, unless you pass re.DOTALL.",
        ),
        Answer(
            "no < allowed",
            lambda text: float(
                re.fullmatch(r"[^<]*</think>\s*<answer>\s*[^<\s][^<]*</answer>\s*", text)
                is not None
            ),
            "You forbid the character < in the thought, so that 3 < 4 earns nothing. Only the "
            "tags themselves are forbidden.",
        ),
        Answer(
            "no < allowed, empty answer",
            _fits(r"[^<]*</think>\s*<answer>[^<]+</answer>\s*"),
            "Two things. You forbid the character < where only tags are forbidden, so 3 < 4 in a "
            "thought earns nothing. And an answer of white space earns 1.0.",
        ),
        Answer(
            "empty answer",
            _fits(r"%</think>\s*<answer>%</answer>\s*"),
            "You accept an answer that is empty, or nothing but white space. Strip it and look "
            "whether anything is left.",
        ),
        Answer(
            "tags anywhere",
            lambda text: float(all(t in text for t in ("</think>", "<answer>", "</answer>"))),
            "You only look whether the tags are in the text. Their order, their number and what "
            "stands around them count too.",
        ),
        Answer(
            "tags counted",
            lambda text: float(_once_each(text)),
            "You count the tags, and that is not enough: their order, what stands between and "
            "after them, and the empty answer are not looked at.",
        ),
        Answer(
            "points for tags",
            lambda text: sum(text.count(t) == 1 for t in ("</think>", "<answer>", "</answer>")) / 3,
            "You give points for each tag. A policy collects them without ever answering. It is "
            "1.0 for the whole form and 0.0 for anything else.",
        ),
        Answer(
            "text after the end",
            _fits(r"%</think>\s*<answer>&</answer>%"),
            "You allow text after </answer>. The policy would go on talking. Only white space may "
            "stand there.",
        ),
        Answer(
            "text between",
            _fits(r"%</think>%<answer>&</answer>\s*"),
            "You allow text between </think> and <answer>. Only white space may stand there.",
        ),
        Answer(
            "second <think>",
            lambda text: format_reward(text.replace("<think>", "")),
            "You allow a second <think> in the thought. The prompt has written the only one: the "
            "text must not contain it.",
        ),
        Answer(
            "second </think>",
            _last_end_of_thought,
            "You cut at the last </think>, so there may be several. Each tag has to be there "
            "exactly once.",
        ),
        Answer(
            "not closed",
            lambda text: format_reward(text + "</answer>" * ("</answer>" not in text)),
            "You do not ask for </answer>. A text that was cut off in its answer earns 0.0.",
        ),
        Answer(
            "no tag crashes",
            _cut_at_tags,
            "Your function crashes when a tag is missing: what split or a match did not find "
            "cannot be taken out. Such texts are common, and earn 0.0. Look first.",
        ),
        Answer(
            "<think> expected",
            _fits(r"\s*<think>%</think>\s*<answer>&</answer>\s*"),
            "You wait for a <think> at the beginning. The prompt has written it already, so the "
            "text begins inside the thought, and nobody would ever be paid.",
        ),
        Answer(
            "thought demanded",
            lambda text: format_reward(text) * (text.split("</think>")[0].strip() != ""),
            "You ask for a thought that is not empty. It may be empty: only the form is paid here.",
        ),
        Answer(
            "a new line demanded",
            _fits(r"%</think>\n<answer>&</answer>\s*"),
            "You ask for a new line between </think> and <answer>. Any white space will do, and "
            r"none as well: \s*.",
        ),
        Answer(
            "white space demanded",
            _fits(r"%</think>\s+<answer>&</answer>\s*"),
            "You ask for white space between </think> and <answer>. It is allowed, but there may "
            r"be none: \s* instead of \s+.",
        ),
        Answer(
            "no white space between",
            _fits(r"%</think><answer>&</answer>\s*"),
            "You allow no white space between </think> and <answer>. It does no harm, and models "
            r"like to put a new line there: \s*.",
        ),
        Answer(
            "no white space at the end",
            _fits(r"%</think>\s*<answer>&</answer>"),
            r"You allow no white space after </answer>. It does no harm: \s* at the end.",
        ),
        Answer(
            "numbers only",
            _fits(r"%</think>\s*<answer>\s*-?[0-9.]+\s*</answer>\s*"),
            "You accept only numbers as the answer. The form says nothing about what the answer "
            "is; anything but nothing will do.",
        ),
    ),
    cases=(
        Case("all in one line", ("7 1 0</think><answer>0</answer>",)),
        Case("two lines of thought", ("7 and 4:\n11, so 1</think>\n<answer>1</answer>",)),
        Case("a < in the thought", ("3 < 4</think> <answer>4</answer>",)),
        Case("white space everywhere", (" 7 </think> <answer> 1 </answer> \n",)),
        Case("an answer in words", ("7</think> <answer>forty two</answer>",)),
        Case("no thought", ("</think> <answer>4</answer>",)),
        Case("an empty answer", ("7</think> <answer> </answer>",)),
        Case("two answers", ("7</think> <answer>4</answer> <answer>5</answer>",)),
        Case("text after the end", ("7</think> <answer>4</answer> or 5",)),
        Case("text after the end, in a new line", ("7</think> <answer>4</answer>\nor 5",)),
        Case("text between the parts", ("7</think> So: <answer>4</answer>",)),
        Case("a second <think>", ("7 <think> 1</think> <answer>4</answer>",)),
        Case("a second </think>", ("7 </think> 1</think> <answer>4</answer>",)),
        Case("answered before </think>", ("7 <answer>4</answer></think>",)),
        Case("cut off in the answer", ("7</think> <answer>4",)),
        Case("cut off in the thought", ("7 1",)),
    ),
    hints=(
        "How could a text please your pattern and still contain two answers, or go on after the "
        "end? Try it on paper before you write the next pattern.",
        "Cut the text at its tags: re.split(r'(</?think>|</?answer>)', text) keeps them, because "
        "of the brackets. How many pieces has a text of the right form?",
        "Seven: thought, </think>, between, <answer>, answer, </answer>, after. Strip them all. "
        "The three tags have to be these, between and after empty, and the answer not.",
    ),
    number=True,
    lapses=(
        _fits(r"%</think>\s*<answer>&</answer>(?-s:%)\s*"),
        _fits(r"%</think>\s*<answer>&</answer>\s*(?:\n%)?"),
        _fits(r"%(?:</think>\s*<answer>&</answer>|<answer>%</answer></think>)\s*"),
        _fits(r"%</think>\s*(?:<answer>&</answer>\s*)+"),
    ),
)


# 5.5 ----------------------------------------------------------------------------------------


def pass_at_k(samples, correct, k):
    """samples, correct of them right; k of them drawn, none twice -> chance that one is right"""
    all_wrong = math.comb(samples - correct, k)  # 0 if there are fewer than k wrong ones
    return 1 - all_wrong / math.comb(samples, k)


def _draw_by_draw(samples: int, correct: int, k: int) -> float:
    all_wrong, wrong = 1.0, samples - correct
    for drawn in range(k):
        all_wrong *= max(wrong - drawn, 0) / (samples - drawn)
    return 1 - all_wrong


def _by_product(samples: int, correct: int, k: int) -> Tensor:
    if samples - correct < k:
        return torch.tensor(1.0, dtype=torch.float64)
    left = torch.arange(samples - correct + 1, samples + 1, dtype=torch.float64)
    return 1 - (1 - k / left).prod()


def _every_draw(samples: int, correct: int, k: int) -> float:
    draws = [min(draw) < correct for draw in itertools.combinations(range(samples), k)]
    return sum(draws) / len(draws)


def _by_factorials(samples: int, correct: int, k: int) -> float:
    def choose(n: int, k: int) -> int:
        return math.factorial(n) // (math.factorial(k) * math.factorial(n - k))

    return 1 - choose(samples - correct, k) / choose(samples, k)


PASS_AT_K = Exercise(
    key="5.5",
    title="pass at k",
    reference=pass_at_k,
    imports=("import math",),
    package=rewards.pass_at_k,
    others=(
        Answer(
            "draw by draw",
            _draw_by_draw,
            "multiply the chances that the first draw is wrong, then the second, and so on: "
            "(n - c) / n, (n - c - 1) / (n - 1), ...",
        ),
        Answer(
            "product",
            _by_product,
            "the product of 1 - k / i for i from n - c + 1 to n, as in the code of the paper.",
        ),
        Answer(
            "every draw",
            _every_draw,
            "go through all draws with itertools.combinations and count; only for small numbers.",
        ),
    ),
    wrong=(
        Answer(
            "drawn with putting back",
            lambda n, c, k: 1 - (1 - c / n) ** k,
            "That is 1 - (1 - c/n)^k, as if each sample were put back after it was drawn. It comes "
            "out too low on average. Draw without putting back: count the draws with math.comb.",
        ),
        Answer(
            "pass at 1",
            lambda n, c, k: c / n,
            "That is the share of right samples, which is pass at 1. With k tries the chance is "
            "higher.",
        ),
        Answer(
            "k times pass at 1",
            lambda n, c, k: min(1.0, k * c / n),
            "You multiply the share of right samples by k. Draws with two right samples are then "
            "counted twice. Ask how likely it is that all k are wrong.",
        ),
        Answer(
            "k times pass at 1, without limit",
            lambda n, c, k: k * c / n,
            "You multiply the share of right samples by k, and that can be more than 1. Ask how "
            "likely it is that all k are wrong.",
        ),
        Answer(
            "all right",
            lambda n, c, k: math.comb(c, k) / math.comb(n, k),
            "That is the chance that all k are right. One right sample is enough: take 1 minus "
            "the chance that all k are wrong.",
        ),
        Answer(
            "all wrong",
            lambda n, c, k: math.comb(n - c, k) / math.comb(n, k),
            "That is the chance that all k are wrong. Take 1 minus it.",
        ),
        Answer(
            "at least one wrong",
            lambda n, c, k: 1 - math.comb(c, k) / math.comb(n, k),
            "You have exchanged right and wrong: this is the chance that at least one of the k is "
            "wrong. The wrong samples are n - c.",
        ),
        Answer(
            "exactly one right",
            lambda n, c, k: c * math.comb(n - c, k - 1) / math.comb(n, k),
            "That is the chance that exactly one of the k is right. Two or more are fine too.",
        ),
        Answer(
            "too few wrong ones: crash",
            _by_factorials,
            "Your function takes the factorial of a negative number when there are fewer than k "
            "wrong samples. Then every draw contains a right one, and the result is 1. math.comb "
            "knows that: it returns 0.",
        ),
        Answer(
            "too few wrong ones: 0",
            lambda n, c, k: 0.0 if n - c < k else pass_at_k(n, c, k),
            "With fewer than k wrong samples you return 0. But then k samples cannot all be wrong: "
            "the result is 1.",
        ),
        Answer(
            "any right sample",
            lambda n, c, k: float(c > 0),
            "Your result is 1 as soon as one of all samples is right. That is pass at n; only k of "
            "them are drawn. Or did you divide with //, which throws the fraction away?",
        ),
        Answer(
            "in percent",
            lambda n, c, k: 100 * pass_at_k(n, c, k),
            "The number is right, but in percent. A probability is between 0 and 1.",
        ),
    ),
    cases=(
        Case("2 of 10 are right, 3 are drawn", (10, 2, 3)),
        Case("fewer wrong ones than are drawn", (4, 3, 2)),
        Case("none is right", (6, 0, 3)),
    ),
    hints=(
        "It is easier to ask for the opposite of 'at least one is right'. What is that?",
        "All k are wrong. They come from the n - c wrong samples: how many ways are there to draw "
        "k of these, and how many to draw k of all n?",
        "math.comb(n, k) counts the ways. The result is 1 - math.comb(n - c, k) / math.comb(n, k).",
    ),
    number=True,
    lapses=(
        lambda n, c, k: 1.0 if c else 0.0,
        # Fails when there is nothing to multiply.
        lambda n, c, k: (
            1 - functools.reduce(lambda a, b: a * b, [1 - k / i for i in range(n - c + 1, n + 1)])
        ),
    ),
)

EXERCISES = (
    LEFT_PAD,
    COMPLETION_MASK,
    GRADE,
    FORMAT_REWARD,
    PASS_AT_K,
)
