"""The task: what is asked, what is shown, what is kept apart, and what is paid for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import generator, tiny_llama
from torch import nn

from minigrpo import arithmetic
from minigrpo.arithmetic import (
    ANSWER,
    BLANK,
    BOXES,
    END_ANSWER,
    END_THINK,
    EOS,
    EXAMPLE,
    HARDER_LENGTHS,
    PAD,
    TAGS,
    THINK,
    TRAINED_LENGTHS,
    VOCABULARY,
    Arithmetic,
    ask,
    completion_ids,
    demonstration,
    draw_questions,
    evaluate,
    is_held_out,
    prompt_ids,
    read_question,
    running_totals,
    to_text,
    warmup_documents,
)
from minigrpo.rewards import format_reward, split_parts
from minigrpo.study.experiments import warmup_batch

ALL_LENGTHS = range(3, BOXES + 1)
QUESTIONS = st.integers(1, BOXES).flatmap(lambda k: st.tuples(*[st.integers(0, 9)] * k))


class Writer(nn.Module):
    """A policy that writes, after each prompt of length P, what a function of the question says."""

    def __init__(self, write, prompt_length: int) -> None:
        super().__init__()
        self.write, self.P = write, prompt_length
        self.scale = nn.Parameter(torch.tensor(200.0))

    def forward(self, input_ids, **_):
        logits = torch.zeros(*input_ids.shape, len(VOCABULARY))
        for row, ids in enumerate(input_ids):
            written = self.write(read_question(ids[: self.P]))
            logits[row, -1, written[len(ids) - self.P]] = 1
        return type("Output", (), {"logits": logits * self.scale, "past_key_values": None})


def test_the_running_totals_by_hand():
    for question, totals in (((7, 4, 9), [7, 1, 0]), ((0,), [0]), ((9, 9, 9, 9), [9, 8, 7, 6])):
        assert running_totals(question) == totals


@pytest.mark.parametrize("question", [(), (10, 1), (1,) * 10, (1, 10), (1, -1), (25,)])
def test_what_is_no_question_is_refused(question):
    for function in (running_totals, prompt_ids):
        with pytest.raises(ValueError, match="question: expected 1 to 9 digits, got"):
            function(question)


@pytest.mark.parametrize("held_out", [False, True])
def test_questions_are_drawn_as_asked(held_out):
    options = dict(lengths=(3, 8), held_out=held_out)
    drawn = draw_questions(400, generator(), **options)
    assert drawn == draw_questions(400, generator(), **options)
    assert drawn != draw_questions(400, generator(1), **options)
    assert {len(q) for q in drawn} == {3, 8}
    assert 140 < sum(len(q) == 3 for q in drawn) < 260
    assert {q[0] for q in drawn} == set(range(10))
    assert {term for q in drawn for term in q[1:]} == set(range(10))
    assert {is_held_out(q) for q in drawn} == {held_out}


@pytest.mark.parametrize("length", ALL_LENGTHS)
def test_one_question_in_eight_is_held_out_whatever_its_length(length):
    rows = torch.randint(10, (4000, length), generator=generator(length)).tolist()
    assert 0.10 < sum(is_held_out(tuple(row)) for row in rows) / 4000 < 0.15


def test_the_split_is_the_same_everywhere():
    """Fixed for good: another split would put held-out questions into a shipped model's past."""
    threes = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    held_out = [q for q in threes if is_held_out(q)]
    assert (len(held_out), held_out[:3]) == (126, [(0, 0, 3), (0, 0, 8), (0, 1, 7)])
    assert not is_held_out(EXAMPLE)


@pytest.mark.parametrize("lengths", [(3, 10), (1, 3)])
def test_questions_that_do_not_exist_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths: expected numbers from 2 to 9"):
        draw_questions(1, generator(), lengths=lengths)
    with pytest.raises(ValueError, match="lengths: expected numbers from 2 to 9"):
        Arithmetic(lengths=lengths).prompts(1, generator())
    with pytest.raises(ValueError, match="n: expected a whole number of 1 or more"):
        draw_questions(0, generator())


def test_a_prompt_in_words():
    assert to_text(prompt_ids((7, 4, 9))) == (
        "<s> 2 3 4 <think> 2 5 9 </think> <answer> 9 </answer> 7 4 9 _ _ _ _ _ _ <think>"
    )
    assert to_text(prompt_ids((7, 4, 9), thinking=False)).endswith(
        " 7 4 9 _ _ _ _ _ _ <think> </think>"
    )
    assert to_text([7, END_THINK, ANSWER, 7, END_ANSWER, EOS, PAD, PAD]) == (
        "7 </think> <answer> 7 </answer> </s>"
    )


@given(QUESTIONS, st.booleans())
def test_the_question_is_read_back_from_its_prompt(question, thinking):
    assert read_question(prompt_ids(question, thinking=thinking)) == question


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: ids[:-1],  # no opening tag
        lambda ids: ids[-8:],  # not the whole form
        lambda ids: torch.cat([ids[:-4], torch.tensor([3, BLANK, BLANK, THINK])]),  # a hole
        lambda ids: torch.cat([ids[:-10], torch.full((9,), BLANK), ids[-1:]]),  # nothing asked
        lambda ids: ids[:0],
    ],
)
def test_a_prompt_without_a_question_is_refused(spoil):
    with pytest.raises(ValueError, match="prompt: expected|question: expected"):
        read_question(spoil(prompt_ids((1, 2, 3))))


@pytest.mark.parametrize("length", ALL_LENGTHS)
def test_an_impatient_worker_never_adds_all_and_answers_with_what_it_has(length):
    source = generator()
    question = draw_questions(1, source, lengths=(length,))[0]
    totals, added = running_totals(question), []
    for _ in range(2000):
        written = demonstration(question, source)
        assert format_reward(written, TAGS) == 1
        parts = split_parts(written, TAGS)
        thought = list(parts.thought)
        assert thought == totals[: len(thought)]
        assert not thought or parts.answer[0] == thought[-1]
        added.append(len(thought))
    assert max(added) == length - 1 or length > 6  # long ones are rarely seen through
    for j in range(3):  # it stops before a term with probability 0.6
        reached = sum(a >= j for a in added)
        if j < length - 1:
            assert 0.53 < sum(a == j for a in added) / reached < 0.67


def test_guesses_are_even():
    guesses = [
        demonstration((1, 2, 3), g, stop=1.0)[-3] for g in [generator()] for _ in range(3000)
    ]
    assert set(guesses) == set(range(10))
    assert max(map(guesses.count, range(10))) < 380


def test_stop_and_complete_are_probabilities():
    source, question = generator(), (1, 2, 3, 4)
    whole = completion_ids(running_totals(question), 0)
    assert demonstration(question, source, complete=1.0) == whole
    assert demonstration(question, source, stop=0.0)[:4] == [1, 3, 6, END_THINK]
    share = [demonstration(question, source, complete=0.2) == whole for _ in range(1000)]
    assert 150 < sum(share) < 250


def kinds(documents) -> dict[str, list[tuple[list[int], list[int]]]]:
    found: dict[str, list] = {"ledger": [], "torn": [], "demonstration": []}
    for given_ids, learned in documents:
        asked = "torn" if learned[-1] == END_THINK else "demonstration"
        found[asked if THINK in given_ids else "ledger"].append((given_ids, learned))
    return found


def test_the_base_model_never_sees_a_whole_thought_with_its_answer():
    documents = warmup_documents(3000, generator())
    found = kinds(documents)
    assert {len(read_question(torch.tensor(g))) for g, _ in found["demonstration"]} == {
        *ALL_LENGTHS
    }
    assert len(found["demonstration"]) == 1500
    assert 100 < len(found["torn"]) < 200
    for given_ids, learned in found["ledger"]:
        question = tuple(t for t in given_ids if t != BLANK)
        assert len(given_ids) == BOXES + 1
        assert learned == [*running_totals(question), EOS]
    for given_ids, learned in found["torn"]:
        question = read_question(torch.tensor(given_ids))
        assert learned == [*running_totals(question), END_THINK]  # and no answer
    for given_ids, learned in found["demonstration"]:
        question = read_question(torch.tensor(given_ids))
        assert given_ids == prompt_ids(question).tolist()
        assert learned.index(END_THINK) < len(question)


def test_complete_demonstrations_only_where_they_were_asked_for():
    found = kinds(warmup_documents(2000, generator(), complete=0.2, torn=0.0))
    assert not found["torn"]
    whole = [
        learned.index(END_THINK) == len(read_question(torch.tensor(given_ids)))
        for given_ids, learned in found["demonstration"]
    ]
    assert 150 < sum(whole) < 250


def test_a_batch_is_what_the_documents_are():
    ids, mask = warmup_batch(64, generator(3), complete=0.5)
    documents = warmup_documents(64, generator(3), complete=0.5)
    assert ids.shape == mask.shape and mask.dtype == torch.bool
    for row, real, (given_ids, learned) in zip(ids, mask, documents, strict=True):
        assert row[real].tolist() == learned
        assert row.tolist()[: len(given_ids)] == given_ids
        assert set(row.tolist()[len(given_ids) + len(learned) :]) <= {PAD}


@pytest.mark.parametrize("name", ["torn", "stop", "complete"])
def test_a_share_is_between_0_and_1(name):
    with pytest.raises(ValueError, match=f"{name}: expected a fraction from 0 to 1, got 1.5"):
        warmup_batch(4, generator(), **{name: 1.5})


def test_held_out_questions_are_in_neither_warm_up_nor_training():
    """Everything asked is collected from the very ids that a model gets to see."""
    seen = set()
    for seed in range(10):
        for given_ids, _ in warmup_documents(200, generator(seed)):
            form = given_ids if THINK not in given_ids else given_ids[-BOXES - 1 : -1]
            seen.add(tuple(t for t in form if t != BLANK))
        task = Arithmetic(lengths=ALL_LENGTHS)
        seen |= {read_question(prompt) for prompt in task.prompts(200, generator(seed))}
    task = Arithmetic(lengths=ALL_LENGTHS, held_out=True)
    held_out = {read_question(prompt) for prompt in task.prompts(1000, generator())}
    assert len(seen) > 1000 and len(held_out) > 500
    assert not seen & held_out
    assert EXAMPLE not in held_out  # the one question that is in every prompt


def replaced(prompt: torch.Tensor, seed: int) -> torch.Tensor:
    """Everything but the form and the tag at the end, drawn anew."""
    other = prompt.clone()
    head = len(prompt) - BOXES - 1
    other[:head] = torch.randint(32, (head,), generator=generator(seed))
    return other


COMPLETIONS = [
    completion_ids([7, 1, 0], 0),  # right
    completion_ids([7, 1], 1),
    completion_ids([], 9),  # the example's answer
    [EOS],
]


@pytest.mark.parametrize("grade", [None, format_reward])
def test_rewards_are_unchanged_when_the_prompt_is_replaced(grade):
    task = Arithmetic()
    if grade is not None:
        task = Arithmetic(grade=lambda completion, answer, tags, given: grade(completion, tags))
    prompt = prompt_ids((7, 4, 9))
    completions = [torch.tensor(ids) for ids in COMPLETIONS]
    rewards = task.reward([prompt] * 4, completions)
    if grade is None:
        assert rewards == [1, 0, 0, 0]
    for seed in range(20):
        assert task.reward([replaced(prompt, seed)] * 4, completions) == rewards
    # Even a prompt that ends with the right answer in its tags is worth nothing.
    cheat = torch.cat([torch.tensor([THINK, END_THINK, ANSWER, 0, END_ANSWER]), prompt])
    assert task.reward([cheat] * 4, completions) == rewards


def test_each_completion_is_graded_by_its_own_question():
    task = Arithmetic()
    prompts = task.prompts(50, generator())
    answers = [running_totals(read_question(p))[-1] for p in prompts]
    right = [torch.tensor(completion_ids([], answer)) for answer in answers]
    assert task.reward(prompts, right) == [1.0] * 50
    rolled = task.reward(prompts, right[1:] + right[:1])
    assert rolled == [float(a == b) for a, b in zip(answers, answers[1:] + answers[:1])]


def test_without_room_to_think_the_answer_comes_at_once():
    task = Arithmetic(thinking=False)
    (prompt,) = task.prompts(1, generator())
    assert prompt[-2:].tolist() == [THINK, END_THINK]
    answer = running_totals(read_question(prompt))[-1]
    at_once = completion_ids([], answer)[1:]
    assert task.reward([prompt] * 2, [at_once, completion_ids([], answer)]) == [1.0, 0.0]


def thinker(question):
    return completion_ids(running_totals(question), running_totals(question)[-1])


def lazy(question):
    totals = running_totals(question)
    return completion_ids(totals[:2], totals[1]) if len(question) > 4 else thinker(question)


@pytest.mark.parametrize("greedy", [False, True])
def test_results_by_number_of_terms(greedy):
    questions = [(1, 2, 3), (1, 2, 3, 4, 5), (9, 9, 9, 0, 8), (1, 9, 0, 0, 0)]
    results = ask(Writer(lazy, len(prompt_ids((1,)))), questions, greedy=greedy)
    assert results.correct.tolist() == [True, False, False, True]
    assert results.thinking.tolist() == [3, 2, 2, 2]
    assert results.of_length(3) == {"accuracy": 1, "thinking": 3}
    assert results.of_length(5) == {"accuracy": 1 / 3, "thinking": 2}
    assert results.of_length() == results.of_length(3, 5) == {"accuracy": 0.5, "thinking": 2.25}
    assert math.isnan(results.of_length(4)["accuracy"])  # the mean of nothing


def test_a_policy_that_never_stops_is_wrong_and_thinks_to_its_limit():
    results = ask(Writer(lambda q: [1] * 20, len(prompt_ids((1,)))), [(1, 2)])
    assert results.of_length() == {"accuracy": 0, "thinking": 16}


def test_without_thinking_there_is_no_thought():
    def write(question):
        return completion_ids([], running_totals(question)[-1])[1:]

    policy = Writer(write, len(prompt_ids((1,), thinking=False)))
    results = ask(policy, [(1, 2), (3, 4, 5)], thinking=False)
    assert results.of_length() == {"accuracy": 1, "thinking": 0}


def test_asking_leaves_the_random_numbers_alone_and_repeats_itself():
    policy = tiny_llama(vocab_size=32, context=64)
    state = torch.get_rng_state()
    first, again = (ask(policy, [(1, 2, 3)] * 20, seed=4) for _ in range(2))
    assert torch.equal(first.rollouts.completions, again.rollouts.completions)
    other = ask(policy, [(1, 2, 3)] * 20, seed=5)
    assert first.rollouts.completions.tolist() != other.rollouts.completions.tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_hook_asks_held_out_questions(monkeypatch):
    asked = []

    def spy(policy, questions, **options):
        asked.append(questions)
        return ask(policy, questions, **options)

    monkeypatch.setattr(arithmetic, "ask", spy)
    scores = evaluate(Writer(lazy, len(prompt_ids((1,)))), n=21)
    assert asked[0] == asked[1]  # sampled and greedy
    assert len(asked[0]) == 21 + 11
    assert all(map(is_held_out, asked[0]))
    easy, hard = asked[0][:21], asked[0][21:]
    assert {len(q) for q in easy} <= {*TRAINED_LENGTHS}
    assert {len(q) for q in hard} == {*HARDER_LENGTHS}
    right = [lazy(q)[-3] == running_totals(q)[-1] for q in asked[0]]
    assert scores["accuracy"] == scores["greedy"] == sum(right[:21]) / 21
    assert scores["harder"] == scores["harder_greedy"] == sum(right[21:]) / 11
    assert scores["thinking"] == sum(lazy(q).index(END_THINK) for q in easy) / 21


def test_the_seed_decides_what_the_hook_asks_and_sampled_is_not_greedy(monkeypatch):
    asked = []

    def answered(policy, questions, *, greedy=False, thinking=True, seed=0):
        asked.append((questions, thinking, seed))
        lengths = torch.tensor([len(question) for question in questions])
        right, long = torch.full_like(lengths, greedy), torch.full_like(lengths, 9 if greedy else 2)
        return arithmetic.Results(right, torch.where(lengths > 6, 30, long), lengths, None)

    monkeypatch.setattr(arithmetic, "ask", answered)
    for seed in (0, 0, 1):
        found = evaluate(None, n=20, thinking=False, seed=seed)
        sampled = {"accuracy": 0, "harder": 0, "thinking": 2}
        assert found == {**sampled, "greedy": 1, "harder_greedy": 1}
    questions, thinking, seeds = zip(*asked)
    assert questions[0] == questions[2] != questions[4]
    assert not any(thinking) and seeds[::2] == (0, 0, 1)
