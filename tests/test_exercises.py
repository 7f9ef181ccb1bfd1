"""The proof of the exercises: right answers pass, wrong ones are told what they are.

The proof is a list of holes, found by asking a judge about every answer on record. It must be
empty for the real judge, and must not be for one that is broken.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import warnings
from functools import cache

import pytest
import torch

from minigrpo import corpus
from minigrpo.exercises import all_exercises, check, hint, reader, solution
from minigrpo.exercises.judge import Case, Checked, Exercise, _arguments, unwrapped
from minigrpo.exercises.judge import judge_exercise as judge
from minigrpo.exercises.outside import notebook_data
from minigrpo.exercises.reader import find, solution_source
from minigrpo.exercises.records import notebooks, records

# Reviews, where the reader's function is a test, are proven in test_reviews.py.
EXERCISES = [exercise for exercise in all_exercises() if isinstance(exercise, Exercise)]
by_key = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)

JUDGE = sys.modules[judge.__module__]
RUN = JUDGE._run


@pytest.fixture(scope="module")
def outcomes() -> dict:
    return {}


@pytest.fixture
def once(outcomes, monkeypatch):
    """Each function meets each case once, however often the judge is asked.

    Once per number of threads: with two, everything is computed anew.
    """

    def run(exercise, function, case, seconds):
        key = (function, id(case), exercise.gradient, torch.get_num_threads())
        if key not in outcomes:
            outcomes[key] = RUN(exercise, function, case, seconds)
        return outcomes[key]

    monkeypatch.setattr(JUDGE, "_run", run)


def stub(*arguments, **by_name):
    raise NotImplementedError


def right_answers(exercise: Exercise):
    yield "reference", exercise.reference
    yield "the package", exercise.package
    yield from ((other.name, other.function) for other in exercise.others)


@cache
def generic_wrongs_of(key: str) -> list:
    """The same functions each time, for `once`."""
    return list(generic_wrongs(find(key)))


def in_order(exercise: Exercise, function):
    """Arguments passed by name are the last ones, in the order of the parameters."""

    def call(*arguments, **by_name):
        known = [value for name, value in by_name.items() if name in exercise.parameters]
        return function(*arguments, *known)

    return call


def generic_wrongs(exercise: Exercise):
    """Functions that spoil what the reference computes, each with what must be said."""
    for name, function, words in spoilt(exercise):
        yield name, in_order(exercise, function) if exercise.keywords else function, words

    # As in a notebook: the function and the data live in one namespace.
    notebook = {"reference": exercise.reference, "leftover": torch.ones(1)}
    exec("def reads_global(*a, **k):\n    leftover\n    return reference(*a, **k)", notebook)
    yield "reads a global", notebook["reads_global"], "reads 'leftover' from the notebook"


def spoilt(exercise: Exercise):
    """The same, for arguments in order."""
    reference = exercise.reference
    outcome = reference(*_arguments(exercise.cases[-1]))
    right = torch.as_tensor(outcome)

    yield "None", lambda *a: None, "returned None"
    yield "text", lambda *a: "42", "got str"
    yield "truth", lambda *a: True, "got bool"
    if not exercise.number:
        yield "a Python number", lambda *a: 1.5, "expected a tensor, got float"
    yield "one dimension more", lambda *a: torch.as_tensor(reference(*a))[None], "expected shape"
    yield "raises", lambda *a: 1 / 0, "raised ZeroDivisionError"
    if right.dtype == torch.bool:
        yield "whole numbers", lambda *a: reference(*a).long(), "expected true or false"
    elif not (exercise.number or right.is_floating_point()):
        yield "floating point", lambda *a: reference(*a).double(), "expected whole numbers"
        yield "off by one", lambda *a: reference(*a) + 1, "expected"
    else:
        yield "whole numbers", lambda *a: torch.as_tensor(reference(*a)).long(), "expected floating"
        yield (
            "NaN",
            lambda *a: torch.as_tensor(reference(*a)) * math.nan,
            "NaN where a number belongs",
        )
        yield "a little off", lambda *a: reference(*a) + 1e-3, "expected"
    if exercise.gradient:
        yield "detached", lambda *a: reference(*a).detach(), "gradient"
        # The value is the reference's, the gradient three times as large.
        yield (
            "wrong gradient",
            lambda *a: 3 * reference(*a) - 2 * reference(*a).detach(),
            "its gradient is not",
        )
    if isinstance(exercise.cases[0].arguments[0], torch.Tensor):
        name = next(iter(inspect.signature(reference).parameters))

        def in_place(first, *rest):
            value = reference(first.clone(), *rest)
            first.zero_()
            return value

        yield "changes its argument", in_place, f"changes its argument {name!r} in place"


def holes(exercise: Exercise, judge=judge) -> list[str]:
    """Everything that is judged otherwise than it should be."""
    found = []
    for name, function in right_answers(exercise):
        if judge(exercise, function)[0] != "passed":
            found.append(f"right answer refused: {name}")
    if judge(exercise, stub)[0] != "not attempted":
        found.append("the stub counts as an attempt")
    for wrong in exercise.wrong:
        status, message = judge(exercise, wrong.function)
        others = [w.name for w in exercise.wrong if w is not wrong and w.sentence in message]
        if status != "not passed" or wrong.sentence not in message or others:
            found.append(f"wrong answer: {wrong.name}")
    for name, function, words in generic_wrongs_of(exercise.key):
        status, message = judge(exercise, function)
        if status != "not passed" or words not in message:
            found.append(f"generic wrong: {name}: {message}")
    for i, lapse in enumerate(exercise.lapses):
        if judge(exercise, lapse)[0] != "not passed":
            found.append(f"lapse {i}")
    return found


@by_key
def test_every_answer_is_judged_rightly(exercise, once):
    assert holes(exercise) == []


@by_key
def test_a_judge_that_always_says_yes_is_found_out(exercise, once):
    found = holes(exercise, judge=lambda exercise, function: ("passed", "passed"))
    assert "the stub counts as an attempt" in found
    assert sum(hole.startswith("wrong answer") for hole in found) == len(exercise.wrong)
    assert sum(hole.startswith("generic") for hole in found) >= 5


@pytest.mark.parametrize(
    "exercise", [exercise for exercise in EXERCISES if exercise.gradient], ids=lambda e: e.key
)
def test_a_judge_that_compares_no_gradients_is_found_out(exercise, once):
    blind = dataclasses.replace(exercise, gradient=())
    found = holes(exercise, judge=lambda _, function: judge(blind, function))
    assert any("wrong gradient" in hole for hole in found)


@pytest.mark.parametrize(
    ("part", "blind", "unnoticed"),
    [
        ("_fault", lambda *a: None, "a little off"),
        ("_close", lambda *a: True, "a little off"),
        ("notebook_data", lambda *a: None, "reads a global"),
        ("_change", lambda *a: None, "changes its argument"),
        ("is_stub", lambda *a: False, "the stub counts as an attempt"),
        ("_alike", lambda *a: False, "wrong answer: `real = log_probs`"),
        ("_alike", lambda *a: True, "wrong answer: `real = log_probs * mask`"),
    ],
)
def test_a_judge_with_one_part_broken_is_found_out(part, blind, unnoticed, monkeypatch):
    monkeypatch.setattr(JUDGE, part, blind)
    assert any(unnoticed in hole for hole in holes(find("2.3")))


@by_key
def test_a_judge_that_always_says_no_is_found_out(exercise, once):
    found = holes(exercise, judge=lambda exercise, function: ("not passed", "no"))
    assert "right answer refused: reference" in found


@by_key
def test_every_case_is_needed(exercise, once):
    functions = [wrong.function for wrong in exercise.wrong] + list(exercise.lapses)
    for name in {case.name: None for case in exercise.cases}:
        cases = tuple(case for case in exercise.cases if case.name != name)
        fewer = dataclasses.replace(exercise, cases=cases, wrong=())  # nobody reads the sentence
        passing = [f for f in functions if judge(fewer, f)[0] == "passed"]
        assert passing, f"without the case {name!r} nothing wrong gets through"


@by_key
def test_record_is_complete(exercise):
    assert len(exercise.wrong) >= 3 and len(exercise.others) >= 1 and len(exercise.hints) >= 3
    sentences = [wrong.sentence for wrong in exercise.wrong]
    assert len(set(sentences)) == len(sentences)
    assert not any(a in b for a in sentences for b in sentences if a is not b)


@pytest.mark.parametrize("notebook", notebooks())
def test_each_notebook_has_at_least_three_exercises(notebook):
    assert len(records(notebook)) >= 3


def test_keys_are_unique_and_in_order():
    keys = [tuple(map(int, exercise.key.split("."))) for exercise in all_exercises()]
    assert keys == sorted(set(keys))


# what the reader gets --------------------------------------------------------------------------


def test_a_passed_answer_is_the_one_in_use(capsys):
    def mine(length):
        return torch.ones(length, length).tril().bool()

    checked = check("1.2", mine)
    assert (checked.passed, checked.status, checked.use) == (True, "passed", mine)
    assert checked(2).tolist() == [[True, False], [True, True]]
    assert capsys.readouterr().out == "1.2 (causal mask): passed, all 3 cases.\n"


def test_an_unattempted_answer_is_replaced_by_the_reference(capsys):
    checked = check("1.2", stub)
    assert not checked.passed and checked.status == "not attempted"
    assert checked.use is find("1.2").reference
    said = "1.2 (causal mask): using the course's version. Write yours above, or ask for hint"
    assert capsys.readouterr().out == f'{said}("1.2").\n'


def test_a_wrong_answer_is_replaced_by_the_reference(capsys):
    wrong = find("1.2").wrong[0]
    checked = check("1.2", wrong.function)
    assert checked.status == "not passed" and checked.use is find("1.2").reference
    assert wrong.sentence in capsys.readouterr().out


def test_what_check_returns_can_be_checked_again(capsys):
    assert check("1.2", check("1.2", find("1.2").reference)).passed


@pytest.mark.parametrize("answer", [stub, lambda length: None])
def test_a_check_cell_that_is_run_again_says_the_same(answer, capsys):
    """`f = check(key, f)` has replaced f by what check returned, the reference inside it."""
    first = check("1.2", answer)
    again = check("1.2", check("1.2", first))
    assert again.status == first.status != "passed"
    assert len(set(capsys.readouterr().out.split("1.2 (causal mask)"))) == 2


def test_what_check_returns_shows_no_address():
    assert repr(check("1.2", stub)) == "<exercise 1.2: not attempted>"


def test_not_a_function(capsys):
    assert check("1.2", 3).status == "not passed"
    assert "expected your function, got int" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [stub, lambda length: None])
def test_strict_mode_raises(monkeypatch, answer):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    with pytest.raises(AssertionError, match="1.2"):
        check("1.2", answer)


def test_strict_mode_lets_right_answers_pass(monkeypatch, capsys):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    assert check("1.2", find("1.2").reference).passed


@pytest.mark.parametrize("key", ["1.99", "12.1", "x", "", 2])
def test_an_unknown_key_is_told_which_there_are(key):
    with pytest.raises(KeyError, match="expected the key of an exercise .*1"):
        check(key, stub)


@by_key
def test_messages_are_the_same_every_time_and_name_no_address(exercise, once):
    first = [judge(exercise, wrong.function)[1] for wrong in exercise.wrong]
    torch.set_num_threads(2)
    assert [judge(exercise, wrong.function)[1] for wrong in exercise.wrong[:2]] == first[:2]
    torch.set_num_threads(1)
    first += [judge(exercise, answer)[1] for _, answer, _ in generic_wrongs_of(exercise.key)]
    assert not any("0x" in message or "<function" in message for message in first)


def test_an_exception_is_told_without_its_address_and_its_later_lines():
    def raises(length):
        raise ValueError(f"{object()} is\nodd")

    message = judge(find("1.2"), raises)[1]
    assert "raised ValueError: <object object> is." in message


def test_what_torch_cannot_do_is_not_a_stub():
    status, message = judge(find("2.1"), lambda probs: torch.complex(probs, probs).min())
    assert status == "not passed" and "raised NotImplementedError" in message


def leave(*arguments):
    raise SystemExit


@pytest.mark.parametrize(
    "answer",
    [
        leave,
        lambda lp, mask: (lp + 0j).sum(-1),
        lambda lp, mask: lp.sum(-1).to("meta"),
        lambda lp, mask: lp.sum(-1).to_sparse(),
        lambda lp, mask: lp.resize_(1, 1),
        lambda lp, mask: [lp],
        lambda: None,
    ],
)
def test_nothing_that_an_answer_does_is_raised(answer):
    assert judge(find("2.3"), answer)[0] == "not passed"


def test_warnings_are_not_for_readers(recwarn):
    def warns(length):
        warnings.warn("with a path", stacklevel=1)
        return torch.ones(length, length).tril().bool()

    assert judge(find("1.2"), warns)[0] == "passed"
    assert not recwarn.list


def test_an_argument_may_be_changed_in_a_copy_only():
    """Torch would refuse the second one in words of its own, which name a leaf."""

    def copies(log_probs, mask):
        log_probs = log_probs.clone()
        log_probs[mask == 0] = 0
        return log_probs.sum(-1)

    def writes(log_probs, mask):
        log_probs[mask == 0] = 0
        return log_probs.sum(-1)

    assert judge(find("2.3"), copies)[0] == "passed"
    status, message = judge(find("2.3"), writes)
    assert status == "not passed" and "changes its argument 'log_probs'" in message


def test_a_gradient_is_asked_for_under_no_grad_too():
    with torch.no_grad():
        assert judge(find("2.3"), find("2.3").reference)[0] == "passed"


def test_long_results_are_told_by_the_first_wrong_entry():
    def last_is_wrong(completions, eos_id):
        mask = find("2.5").reference(completions.repeat(1, 3), eos_id)
        return mask[:, : completions.shape[1]] ^ (torch.arange(completions.shape[1]) == 3)

    wide = Case("wide", (torch.full((4, 6), 5), 2))
    exercise = dataclasses.replace(find("2.5"), cases=(wide,))
    message = judge(exercise, last_is_wrong)[1]
    assert "Case 'wide':\n  at [0, 3]:\n  expected True\n  got      False\n" in message


def test_digits_show_the_difference():
    message = judge(find("1.1"), lambda ids: corpus.bigram_entropy(ids) + 2e-6)[1]
    assert "  expected 0.77785481\n  got      0.77785681\n" in message


def test_the_readers_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    judge(find("1.5"), lambda logits, t: torch.rand_like(logits))
    assert torch.equal(torch.rand(1), expected)


def test_a_helper_of_the_readers_own_is_allowed_but_looked_into():
    notebook = {"torch": torch, "size": torch.ones(3)}
    exec("def helper(n): return torch.ones(n, n).tril().bool()", notebook)
    exec("def good(length): return helper(length)", notebook)
    exec("def sly(n): size; return helper(n)\ndef bad(length): return sly(length)", notebook)
    assert judge(find("1.2"), notebook["good"])[0] == "passed"
    status, message = judge(find("1.2"), notebook["bad"])
    assert status == "not passed" and "'size'" in message


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("size", "size"),
        ("model", "model"),
        ("[size for _ in range(2)]", "size"),
        ("solved(length)", "size"),
        ("Helper.method", "size"),
        ("inf, float64, isfinite, Tensor, torch, length", None),
    ],
)
@pytest.mark.parametrize("decorator", ["", "@torch.no_grad()\n"])
def test_what_a_function_reads_from_the_notebook(line, name, decorator):
    notebook = {"model": torch.nn.Linear(1, 1), "size": torch.ones(3)}
    imports = "import torch\nfrom math import inf, isfinite\nfrom torch import float64, Tensor\n"
    exec(f"{imports}def sly(length): return size", notebook)
    exec("class Helper:\n    def method(self): return size", notebook)
    notebook["solved"] = Checked("1.2", notebook["sly"], "passed")
    exec(f"{decorator}def f(length):\n    {line}\n    return torch.ones(length)", notebook)
    assert notebook_data(notebook["f"], unwrapped) == name


def test_a_closure_is_looked_into():
    def outer(data):
        return lambda length: (data, torch.ones(length, length).tril().bool())[1]

    assert "'data'" in judge(find("1.2"), outer(torch.ones(1)))[1]
    assert judge(find("1.2"), outer(torch.ones))[0] == "passed"


def test_a_wrong_value_that_reads_the_notebook_is_told_so():
    notebook = {"torch": torch, "length_of_text": torch.ones(3)}
    exec("def f(length): return torch.ones(length, len(length_of_text)).bool()", notebook)
    assert "reads 'length_of_text'" in judge(find("1.2"), notebook["f"])[1]


def test_an_exercise_already_solved_may_be_used_in_the_next(capsys):
    notebook = {"torch": torch, "mask_of": Checked("1.1", find("1.2").reference, "passed")}
    exec("def good(length): return mask_of(length)", notebook)
    assert judge(find("1.2"), notebook["good"])[0] == "passed"


@by_key
def test_hints_lead_on_one_by_one(exercise, capsys, monkeypatch):
    monkeypatch.setattr(reader, "_hints_given", {})
    for _ in range(len(exercise.hints) + 1):
        hint(exercise.key)
    out = capsys.readouterr().out
    assert all(f"Hint {i + 1} of {len(exercise.hints)}" in out for i in range(len(exercise.hints)))
    assert all(text in out for text in exercise.hints)
    hint(exercise.key, 2)
    assert exercise.hints[1] in capsys.readouterr().out


def test_a_hint_that_is_not_there():
    with pytest.raises(ValueError, match="number: expected 1 to 3, got 9"):
        hint("1.2", 9)


@by_key
def test_the_printed_solution_passes_when_pasted(exercise, capsys):
    solution(exercise.key)
    printed = capsys.readouterr().out
    assert solution_source(exercise.key) in printed
    assert exercise.why in printed.replace("\n# ", " ")
    namespace: dict = {"__name__": "__main__"}
    exec(printed, namespace)
    assert judge(exercise, namespace[exercise.reference.__name__])[0] == "passed"


def test_what_an_attempt_does_to_a_list_does_not_reach_the_next_one():
    record = find("9.4")
    reference = record.reference

    def careless(completions, **others):
        result = reference(completions=completions, **others)
        completions.clear()
        return result

    judge(record, careless)
    assert judge(record, reference)[0] == "passed"
