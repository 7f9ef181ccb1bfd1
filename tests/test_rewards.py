"""Rewards see the completion only and are hard to cheat; tasks draw from the generator only."""

import itertools

import pytest
import torch

from minigrpo.corpus import CharTokenizer
from minigrpo.rewards import (
    Parts,
    Tags,
    TextTask,
    answer_reward,
    format_reward,
    letter_share,
    pass_at_k,
    split_parts,
)


def ids(text: str) -> torch.Tensor:
    return CharTokenizer().encode(text)


@pytest.mark.parametrize(
    ("text", "share"), [("eeee", 1.0), ("see me", 0.5), ("oh", 0.0), ("", 0.0), ("E", 0.0)]
)
def test_letter_share(text, share):
    assert letter_share(text) == share == letter_share(3 * text)  # writing more raises nothing
    assert letter_share("banana", "a") == 0.5


def test_the_prompt_is_never_read():
    task = TextTask(["eeeeee", "oooooo"])
    completions = [ids("see"), ids("oh")]
    first = task.reward([ids("eeeeee")] * 2, completions)
    assert first == task.reward([ids("oooooo")] * 2, completions) == [2 / 3, 0.0]


def test_prompts_come_from_the_generator_and_repeat_as_late_as_possible():
    task = TextTask(["a", "bb", "ccc"])
    drawn = [task.prompts(7, torch.Generator().manual_seed(s)) for s in (0, 0, 1, 2)]
    texts = [[CharTokenizer().decode(p) for p in prompts] for prompts in drawn]
    assert texts[0] == texts[1]
    assert any(texts[0] != other for other in texts[2:])
    assert set(texts[0][:3]) == set(texts[0][3:6]) == {"a", "bb", "ccc"}
    assert len(texts[0]) == 7


def test_any_function_of_the_text_is_a_reward():
    task = TextTask(["O"], lambda text: float(text.count("!")))
    assert task.reward([ids("O!")] * 2, [ids("!!"), ids("no")]) == [2.0, 0.0]


@pytest.mark.parametrize("texts", [["a", ""], "ROMEO:", []])
def test_a_task_without_prompts_is_refused(texts):
    with pytest.raises(ValueError, match="texts: expected a list of texts, none empty"):
        TextTask(texts)


WORDS = ["<think>", "</think>", "<answer>", "</answer>", "<eos>", *"0123456789"]
IDS = Tags(*range(5))
TEXT = Tags(*WORDS[:5])


def both(text: str, grade, *arguments, **options) -> float:
    """Grade the words as a text and as ids; the two must agree."""
    words = text.replace("~", " ").split()
    as_ids = [WORDS.index(word) for word in words]
    answer_ids = [WORDS.index(answer) for answer in arguments]
    of_text = grade(text.replace("~", "\n"), *arguments, TEXT, **options)
    for completion in (as_ids, tuple(as_ids), torch.tensor(as_ids, dtype=torch.long)):
        assert grade(completion, *answer_ids, IDS, **options) == of_text
    assert isinstance(of_text, float)
    return of_text


def grades(text: str, answer: str = "7", **options) -> tuple[float, float, float]:
    """Answer and format reward, and whether there is a thought."""
    parts = split_parts(text.replace("~", "\n"), TEXT, **options)
    return (
        both(text, answer_reward, answer, **options),
        both(text, format_reward, **options),
        float(parts is not None and len(parts.answer) == 1 and len(parts.thought) > 0),
    )


RIGHT = "3 7 </think> <answer> 7 </answer> <eos>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, (1, 1, 1)),
        ("3~7~</think>~<answer>~7~</answer>~<eos>", (1, 1, 1)),  # a thought of several lines
        ("</think> <answer> 7 </answer> <eos>", (1, 1, 0)),  # right, without thinking
        ("3 7 </think> <answer> 3 </answer> <eos>", (0, 1, 1)),  # wrong, in the right form
    ],
)
def test_the_rewards(text, expected):
    assert grades(text) == expected


CHEATS = {  # longer than the completions that are all tried below
    "two answers in two spans": "3 </think> <answer> 7 </answer> <answer> 7 </answer> <eos>",
    "another answer first": "3 </think> <answer> 3 </answer> <answer> 7 </answer> <eos>",
    "a second answer in the span's own tags": "3 </think> <answer> 3 <answer> 7 </answer> <eos>",
    "an answer inside the thought, too": "<answer> 7 </answer> </think> <answer> 7 </answer> <eos>",
    "two ends of the thought": "3 </think> 7 </think> <answer> 7 </answer> <eos>",
    "the worked example of the prompt, written once more": (
        "3 7 </think> <answer> 7 </answer> <think> 3 7 </think> <answer> 7 </answer> <eos>"
    ),
}


@pytest.mark.parametrize("text", CHEATS.values(), ids=CHEATS)
def test_no_reward_for(text):
    assert grades(text) == (0, 0, 0)


def test_an_answer_of_two_tokens_is_none_among_ids_and_a_wrong_one_in_a_text():
    text = "3 </think> <answer> 3 7 </answer> <eos>"
    ids = [WORDS.index(word) for word in text.split()]
    for answer in ("3", "7"):
        assert answer_reward(ids, WORDS.index(answer), IDS) == 0
        assert answer_reward(text, answer, TEXT) == 0
    assert format_reward(ids, IDS) == 0
    assert format_reward(text, TEXT) == 1  # the words of a text are not the grader's business
    assert answer_reward(text, "3 7", TEXT) == 1


@pytest.mark.parametrize("given, prompt", [(0, ""), (1, "<think>"), (2, "<think> </think>")])
def test_the_prompt_may_have_written_the_first_tags(given, prompt):
    thought = "" if given == 2 else "3 7"
    whole = f"<think> {thought} </think> <answer> 7 </answer> <eos>"
    completion = whole[len(prompt) :].strip() if given < 2 else "<answer> 7 </answer> <eos>"
    assert grades(completion, given=given) == (1, 1, float(given < 2))
    for other in {0, 1, 2} - {given}:
        assert grades(completion, given=other) == (0, 0, 0)


def test_exactly_one_sequence_of_tags_counts():
    """Every completion of up to five tokens, and of six with an EOS at the end, from seven."""
    alphabet = "TtaAe37"  # the five tags, two digits
    ids = dict(zip(alphabet, [0, 1, 2, 3, 4, WORDS.index("3"), WORDS.index("7")]))
    words = [word for length in range(6) for word in itertools.product(alphabet, repeat=length)]
    words += [(*word, "e") for word in itertools.product(alphabet, repeat=5)]
    right, formed, of_text = [], [], []
    for word in words:
        completion, text = [ids[c] for c in word], " ".join(WORDS[ids[c]] for c in word)
        right += ["".join(word)] * (answer_reward(completion, ids["7"], IDS) == 1.0)
        formed += ["".join(word)] * (format_reward(completion, IDS) == 1.0)
        of_text += ["".join(word)] * (answer_reward(text, "7", TEXT) == 1.0)
    assert right == of_text == ["ta7Ae", "3ta7Ae", "7ta7Ae"]
    assert {*formed} == {*right, "ta3Ae", "3ta3Ae", "7ta3Ae"}


def test_the_parts():
    assert split_parts(RIGHT, TEXT) == Parts(("3 7",), ("7",))
    ids = [WORDS.index(word) for word in RIGHT.split()]
    assert split_parts(ids, IDS) == Parts((8, 12), (12,))
    assert split_parts([8, *range(5)], IDS, given=0) is None  # something before them
    assert split_parts("</think><answer></answer><eos>", TEXT) == Parts((), ())
    assert split_parts("a <b> \\d [x] </think><answer> y z </answer>") == Parts(
        ("a <b> \\d [x]",), ("y z",)
    )


@pytest.mark.parametrize(
    ("written", "answer", "reward"),
    [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("42", "\n42 ", 1),
        ("42.0", "42", 0),
        ("420", "42", 0),
        ("It is 42", "42", 0),
        ("x = 1\ny = 2", "x = 1\ny = 2", 1),
        ("*", ".", 0),  # an answer is no pattern
    ],
)
def test_the_answer_of_a_text(written, answer, reward):
    """Without an EOS, as a tokenizer decodes that leaves out special tokens."""
    text = f"first this,\nthen that\n</think>\n<answer>{written}</answer>\n"
    assert answer_reward(text, answer) == reward
    assert format_reward(text) == 1
    assert answer_reward(text.replace("<answer>", "<Answer>"), answer) == 0


@pytest.mark.parametrize("grade", [format_reward, split_parts])
def test_bad_input_is_refused(grade):
    with pytest.raises(TypeError, match="completion: expected ids or text as the tags are, got 'a"):
        grade("a text", IDS)
    with pytest.raises(TypeError, match="completion: expected ids or text as the tags are, got .1"):
        grade([1, 2], TEXT)
    with pytest.raises(
        ValueError, match=r"completion: expected one row of ids, got shape \(2, 3\)"
    ):
        grade(torch.zeros(2, 3).long(), IDS)
    with pytest.raises(
        ValueError, match="expected different tags, .* and given 0, 1 or 2, got .* and 3"
    ):
        grade("a text", TEXT, given=3)
    with pytest.raises(ValueError, match="expected different tags"):
        grade([1], Tags(0, 1, 2, 2))
    with pytest.raises(ValueError, match="all ids or all text"):  # or every reward would be 0
        grade([1], IDS._replace(eos="</s>"))


@pytest.mark.parametrize(
    ("answer", "tags", "error"),
    [
        (7, TEXT, TypeError),
        ("7", IDS, TypeError),
        (" ", TEXT, ValueError),
        ("7</answer>", TEXT, ValueError),
        (4, IDS, ValueError),
    ],
)
def test_an_answer_that_nobody_can_give_is_refused(answer, tags, error):
    with pytest.raises(error, match="answer: expected (ids or text as|one that can stand)"):
        answer_reward([] if tags is IDS else "", answer, tags)


def test_pass_at_k_counts_the_picks():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            right = [True] * c + [False] * (n - c)
            picks = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, picks)) / len(picks))


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)], ids=str)
def test_pass_at_k_refuses(arguments):
    with pytest.raises(ValueError, match="expected 0 to 4 correct, and k from 1"):
        pass_at_k(*arguments)


def test_a_tag_with_white_space_is_found():
    tags = Tags("<think>", "</think>\n", "<answer>", "</answer>")
    assert answer_reward("why </think>\n<answer> 4 </answer>", "4", tags) == 1


def test_a_tag_may_begin_like_another():
    tags = Tags("<t", "<t>", "<a", "<a>")
    assert answer_reward("why <t> <a 4 <a>", "4", tags) == 1
