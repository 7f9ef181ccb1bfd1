"""Word problems: solved rightly, split cleanly, demonstrated carelessly; the real run's, too."""

import re
from collections import Counter

import pytest
import torch
from support import generator
from train_models import careless, train_tokenizer, warmup_batch

from minigrpo.files import data_folder
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import GAINS, MOST, draw_problem, draw_rows, is_held_out
from minigrpo.text.prompts import answer_reward, format_reward, stop_tokens
from minigrpo.text.shots import SHOTS, Epochs, asked, line_ends, rows, tags_reward


def numbers(question: str) -> tuple[int, list[int]]:
    """What a reader of the question finds: how many there were, and the changes."""
    had = int(re.search(r"has (\d+)", question)[1])
    deeds = re.findall(r"(buys|finds|gets|loses|sells|drops) (\d+)", question)
    return had, [int(n) if deed in GAINS else -int(n) for deed, n in deeds]


def test_thought_and_answer_are_right():
    g = generator()
    kinds = set()
    for _ in range(300):
        problem = draw_problem(g)
        now, changes = numbers(problem.question)
        steps = problem.thought.split(", ")
        assert len(steps) == len(changes)
        for step, change in zip(steps, changes):
            sign = "+" if change > 0 else "-"
            assert step == f"{now} {sign} {abs(change)} = {now + change}"
            now += change
            assert 1 <= now <= MOST
        assert problem.answer == str(now)
        kinds.add(len(steps))
    assert kinds == {1, 2, 3}


def test_a_careful_completion_is_paid_in_full():
    problem = draw_problem(generator())
    paid = {"prompts": [problem.prompt], "completions": [problem.completion]}
    assert format_reward(**paid) == answer_reward(**paid, answer=[problem.answer]) == [1]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_split_goes_by_the_numbers(held_out):
    rows = draw_rows(200, generator(), held_out=held_out)
    assert all(is_held_out(*numbers(row["prompt"])) == held_out for row in rows)
    assert len({row["prompt"] for row in rows}) == 200


def test_one_in_five_is_held_out():
    changes = range(-8, 9)
    numbers = [(have, (a, b)) for have in range(1, 10) for a in changes for b in changes]
    assert 0.18 < sum(is_held_out(*n) for n in numbers) / len(numbers) < 0.22


def test_the_pupil_is_right_one_time_in_three_and_wrong_in_every_way():
    g = generator()
    problems = [draw_problem(g) for _ in range(1000)]
    texts = [careless(problem, g) for problem in problems]
    prompts = [problem.prompt for problem in problems]
    form = sum(format_reward(prompts, texts)) / 1000
    right = sum(answer_reward(prompts, texts, answer=[p.answer for p in problems])) / 1000
    assert 0.55 < form < 0.65 and 0.28 < right < 0.38
    for slip in (r"The answer is \d+\.", r"<answer>\d+</answer>", r"<think>[^/]*</think>\n\d+"):
        assert any(re.fullmatch(slip, text) for text in texts)


def test_a_warmup_batch_learns_completions_and_their_end():
    texts = [row["prompt"] for row in draw_rows(50, generator())]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    ids, mask = warmup_batch(16, generator(1), tokenizer)
    assert ids.shape == mask.shape and len(ids) == 16
    for row, learned in zip(ids, mask):
        assert row[learned][-1] == tokenizer.eos_token_id
        given = tokenizer.decode(row[: int(learned.nonzero()[0])])
        assert given.endswith("now?\n") and not is_held_out(*numbers(given))
        assert set(row[int(learned.nonzero()[-1]) + 1 :].tolist()) <= {tokenizer.pad_token_id}
    again, _ = warmup_batch(16, generator(1), tokenizer)
    assert torch.equal(ids, again)


@pytest.fixture(scope="module")
def small():
    return load_pretrained(data_folder() / "text_llama", device="cpu", dtype=torch.float32)


def draw(task: Epochs, n: int, g: torch.Generator) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for ids in task.prompts(n, g)]


def test_no_pair_of_numbers_is_on_both_sides_and_kinds_are_equally_frequent():
    sides = []
    for held_out in (False, True):
        some = rows(held_out=held_out)
        assert len({row["prompt"] for row in some}) == len(some)
        assert len({*Counter(row["kind"] for row in some).values()}) == 1
        sides.append({(row["kind"], *sorted(re.findall(r"\d+", row["question"]))) for row in some})
    assert len(sides[0]) > 2 * len(sides[1]) > 20 and not sides[0] & sides[1]


@pytest.mark.parametrize("held_out", (False, True))
def test_every_answer_is_right_and_its_solved_form_earns_everything(held_out):
    for row in rows(held_out=held_out)[:200]:
        have, n = map(int, re.findall(r"\d+", row["question"]))
        assert int(row["answer"]) == (have + n if row["kind"] == "gets" else have - n) > 0
        text = f"<think>{row['thought']}</think><answer>{row['answer']}</answer>"
        for reward in (tags_reward, format_reward, answer_reward):
            assert reward([row["prompt"]], [text], answer=[row["answer"]]) == [1.0]


def test_the_solved_problems_are_solved_correctly():
    for shots in SHOTS:
        lines = asked("?", shots).splitlines()
        assert len(lines) == 8 and lines[-2:] == ["Q: ?", "A:"]
        for question, answer in zip(lines[:6:2], lines[1:6:2]):
            have, n = map(int, re.findall(r"\d+", question))
            now = have + n if "gets" in question else have - n
            assert answer.endswith(f" = {now}</think><answer>{now}</answer>")
        assert ("loses" in asked("?", shots)) == (shots == "one loss")


@pytest.mark.parametrize(
    "text, earns",
    [
        ("<think>1</think><answer>1</answer>", 1.0),
        ("<think>1</think>", 0.5),
        ("<think><think><think>1</think>", 0.25),
        ("</answer>", 0.25),
        ("<answer>1</answer><answer>2</answer>", 0.0),
        ("nothing", 0.0),
    ],
)
def test_a_tag_earns_a_quarter_if_it_occurs_once(text, earns):
    assert tags_reward([""], [text]) == [earns]


def test_every_line_break_ends_an_answer_and_no_other_token(small):
    policy, tokenizer = small
    ends = line_ends(policy, tokenizer)
    assert tokenizer.eos_token_id in ends and len(ends) == len({*ends})
    breaks = {i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])}
    assert breaks and {*ends} == breaks | {*stop_tokens(tokenizer, policy)}


def test_an_epoch_has_every_row_once_and_the_next_another_order(small):
    task = Epochs(small[1], draw_rows(24, generator(1)))
    g = generator()
    epochs = [[key for _ in range(3) for key in draw(task, 8, g)] for _ in range(2)]
    assert len({*epochs[0]}) == 24 and {*epochs[0]} == {*epochs[1]}
    assert epochs[0] != epochs[1]


def test_a_last_batch_that_is_not_full_is_left_out(small):
    task = Epochs(small[1], draw_rows(21, generator(1)))
    g = generator()
    first = [key for _ in range(2) for key in draw(task, 8, g)]
    assert len({*first}) == 16
    assert len({*draw(task, 8, g), *draw(task, 8, g)}) == 16  # of the next epoch
    assert [len(draw(task, n, g)) for n in (8, 4, 4, 8)] == [8, 4, 4, 8]  # begins anew
    with pytest.raises(ValueError, match="expected 22 different ones or more, got 21"):
        task.prompts(22, g)
