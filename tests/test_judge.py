"""The judge is a colleague: what it says is true, and no accident of an answer reaches further."""

import math
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from minigrpo.exercises import all_exercises, check, hint, judge, reader, show, solution
from minigrpo.exercises.form import Exercise, compiled, exercise, of_notebook
from minigrpo.exercises.judge import brief, judge_exercise
from minigrpo.exercises.reader import find, solution_source

JUDGE = sys.modules[judge_exercise.__module__]
KEY = "2.2"
alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarms on this platform")


def reference(log_probs, mask):
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


def stub(*arguments):
    raise NotImplementedError


def says(function, key=KEY, line=None):
    """The message about an answer that is not right."""
    status, message = judge(key, function, line)
    assert status == "not passed", message
    return message


def made(solution, *cases, remark: str = "", **settings) -> Exercise:
    """An exercise of these arguments."""
    solution = exercise("made up", **settings)(solution)
    solution.cases = {f"case {i}": arguments for i, arguments in enumerate(cases, start=1)}
    return Exercise("9.9", solution)


# what an answer may be


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (torch.ones(2), "got Tensor. Give check its name alone, without calling it."),
        (nn.Linear, "got the class Linear. Write a function"),
        (None, "got NoneType"),
        ((x for x in ()), "got generator"),
        (lambda *given: (yield), "got a generator, because it contains `yield`"),
    ],
)
def test_what_is_no_function_is_told_as_such(function, told):
    assert told in says(function)


def test_numbers_and_lists_of_numbers_are_taken_for_tensors():
    table = made(lambda x: x.sum(dim=1), (torch.ones(2, 3),))
    for kind in (list, tuple, lambda rows: [*rows], lambda rows: [float(r) for r in rows]):
        assert judge_exercise(table, lambda x, k=kind: k(x.sum(dim=1)))[0] == "passed"
    message = judge_exercise(table, lambda x: ["3", "3"])[1]
    assert "expected a tensor, got list with something else" in message
    number = made(lambda x: x.mean(), (torch.ones(2, 3),))
    for value in (1, 1.0, True, np.float32(1), torch.ones(())):
        assert judge_exercise(number, lambda x, v=value: v)[0] == "passed"
    message = judge_exercise(number, lambda x: "1")[1]
    assert "expected a number, got str" in message


# what it may do


def raises(error):
    def function(log_probs, mask):
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises(SystemExit(3)), "raised SystemExit: 3."),
        (raises(ValueError(f"{object()} is\nodd")), "raised ValueError: <object object> is."),
        (raises(KeyboardInterrupt()), "it was interrupted."),
        (lambda log_probs, mask: None, "returned None. Is the `return` missing?"),
        (lambda log_probs: None, "raised TypeError"),
        (lambda log_probs, mask: torch.complex(log_probs, log_probs).min(), "NotImplementedError"),
    ],
)
def test_whatever_it_raises_is_told(function, told):
    assert told in says(function)


def test_trouble_in_the_backward_pass_is_told_as_such():
    class Sick(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("nothing comes back")

    message = says(lambda log_probs, mask: Sick.apply(reference(log_probs, mask)))
    assert "right, but taking the gradient raised ValueError: nothing" in message


@alarms
def test_all_cases_together_have_the_time(monkeypatch):
    monkeypatch.setattr(JUDGE, "SECONDS", 0.3)
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    assert "all cases together took more than 0 seconds" in says(lambda *_: time.sleep(60))

    def slow(log_probs, mask):
        time.sleep(0.05)
        return reference(log_probs, mask)

    assert "all cases together took" in says(slow)
    assert time.monotonic() - began < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert "All versions together took more" in says(lambda f: time.sleep(60), "8.1", 1)


@alarms
def test_a_loop_that_catches_everything_is_stopped(monkeypatch):
    monkeypatch.setattr(JUDGE, "SECONDS", 0.3)

    def swallows(log_probs, mask):
        for _ in range(3):
            try:
                time.sleep(60)
            except BaseException:  # noqa: S110
                pass
        return reference(log_probs, mask)

    began = time.monotonic()
    judge(KEY, swallows)
    assert time.monotonic() - began < 60


def test_settings_and_random_numbers_are_put_back():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1), random.random(), np.random.rand()

    def careless(log_probs, mask):
        torch.set_printoptions(precision=1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        return torch.zeros(len(log_probs))

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    says(careless)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert "0.1235" in repr(torch.tensor(0.123456))


def test_arguments_belong_to_the_caller():
    def writes(log_probs, mask):
        log_probs[mask == 0] = 0
        return log_probs.sum(-1)

    assert judge(KEY, lambda log_probs, mask: writes(log_probs.clone(), mask))[0] == "passed"
    assert "changes its argument 'log_probs' in place" in says(writes)
    rows = made(lambda rows: torch.tensor(len(rows)), ([[1, 2], [3]],))
    message = judge_exercise(rows, lambda rows: torch.tensor(len([*rows, rows[0].pop()][1:])))[1]
    assert "changes its argument 'rows'" in message


# what it reads


def test_an_answer_that_reads_the_notebook_is_told():
    notebook = {"torch": torch, "real": torch.ones(3)}
    exec("def f(log_probs, mask): return log_probs.sum() + real", notebook)
    assert "Your function reads 'real' from the notebook" in says(notebook["f"])
    exec("def g(length): real; return torch.ones(length, length).tril().bool()", notebook)
    assert "Right numbers, but your function reads 'real'" in says(notebook["g"], "1.2")


# what is told


def test_a_plain_wrong_value_comes_before_nan_a_shape_or_a_gradient():
    def solution(x):
        return x * 2

    cases = [(torch.tensor([math.nan, 1.0]),), (torch.tensor([1.0]),), (torch.tensor([3.0, 4.0]),)]
    record = made(solution, *cases)
    message = judge_exercise(record, lambda x: x.nan_to_num(9.0) * 3)[1]
    assert "Case 'case 2':" in message and "expected [2]\n  got      [3]" in message


def test_a_slip_is_named_though_nan_is_there_too():
    """The habit of a product with the mask hides no mistake."""

    def solution(x, mask):
        """Said."""
        total = torch.where(mask.bool(), x, 0.0).sum(dim=-1)
        return total

    bad = torch.tensor([[1.0, math.nan]]), torch.tensor([[1, 0]])
    good = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 1]])
    record = made(solution, bad, good)
    only_there = {"return total + x.isnan().any()": "One is wrong."}  # where there is NaN
    record.reference.wrong = {"return -total": "The sign is wrong.", **only_there}
    assert "The sign is wrong." in judge_exercise(record, lambda x, m: -(x * m).sum(-1))[1]
    assert "is wrong." not in judge_exercise(record, lambda x, m: (x * m).sum(-1))[1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.tensor([[1.25, math.nan], [1e-8, -0.0]]), "[[ 1.25,   nan],\n [1e-08,     0]] (fl"),
        (torch.zeros(3, 100), "[0, 0, 0, 0, 0, ...] of shape (3, 100) (float32)"),
        ([torch.ones(2), "a"], "[[1, 1] (float32), 'a']"),
        (torch.tensor([True, False]), "[1, 0] (bool)"),
        (torch.tensor(2.5, dtype=torch.float64), "2.5 (float64)"),
        (object(), ""),
        (True, "True"),
    ],
)
def test_a_value_is_short_with_a_row_on_each_line(value, shown):
    assert brief(value).startswith(shown) and bool(brief(value)) == bool(shown)


def test_digits_show_the_difference_and_rounding_is_none():
    record = made(lambda x: x, (torch.tensor([1.2345]),))
    assert judge_exercise(record, lambda x: x * (1 + 1e-5))[0] == "passed"
    message = judge_exercise(record, lambda x: x + 3e-4)[1]
    assert "expected [1.2345]\n  got      [1.2348]" in message


def test_of_a_long_result_the_first_wrong_entry_is_told():
    record = made(lambda x: x, (torch.arange(60.0).view(2, 30),))
    message = judge_exercise(record, lambda x: x + 2 * (x > 33))[1]
    assert "\n  at       [1, 4]\n  expected 34\n  got      36\n" in message


def test_gradients_that_are_right_in_the_sum_alone_are_seen():
    """Every row has the gradient of the row beside it."""

    record = made(lambda x: x.sum(dim=1), (torch.ones(3, 2),), gradient="x")

    def crossed(x):
        value = x.sum(dim=1)
        beside = value.roll(1, dims=0)
        return value.detach() + 2 * beside - 2 * beside.detach()

    message = judge_exercise(record, crossed)[1]
    assert "the value is right, but its gradient is not" in message
    cut = says(lambda log_probs, mask: reference(log_probs, mask).detach())
    assert "no gradient flows back to log_probs" in cut
    with torch.no_grad():  # in a cell that has it, too
        assert judge_exercise(record, crossed)[1] == message


def test_where_the_gradient_is_0_a_result_without_a_graph_is_right():
    def solution(x, weight):
        return x.sum() * weight + 1

    def skips(x, weight):
        return x.sum() * weight + 1 if weight else torch.tensor(1.0)

    record = made(solution, (torch.ones(2), 0), (torch.ones(2), 2), gradient="x")
    assert judge_exercise(record, skips)[0] == "passed"
    assert "flows back to x." in judge_exercise(record, lambda x, w: skips(x.detach(), w))[1]


def test_of_errors_alike_the_one_that_is_quickest_to_read_is_shown():
    cases = [(torch.full((99,), 5.0),), (torch.full((40,), 5.0),), (torch.tensor([3.0]),)]
    record = made(lambda x: x.sum(), *cases, (torch.tensor([0.01]),))
    assert "Case 'case 3':" in judge_exercise(record, lambda x: x.sum() * 2)[1]


def test_a_function_of_another_name_is_asked_about():
    message = says(find("2.1").reference)
    assert "The exercise asks for sequence_log_probs, you gave token_log_probs." in message


def test_two_tables_are_compared_as_one_and_a_generator_may_be_drawn_from():
    def both(x, generator):
        drawn = torch.multinomial(x, 1, generator=generator)
        return drawn, x.gather(1, drawn)

    record = made(both, (torch.ones(2, 3) / 3, torch.Generator().manual_seed(1)))
    assert judge_exercise(record, both)[0] == "passed"
    assert judge_exercise(record, lambda *given: [*both(*given)])[0] == "passed"
    negative = judge_exercise(record, lambda x, g: (both(x, g)[0], -both(x, g)[1]))[1]
    assert "expected [[[" in negative and "generator" not in negative
    assert "shape (2, 2, 1), got (8,)" in judge_exercise(record, lambda x, g: (x, x[:, :1]))[1]
    assert "shape (2, 2, 1), got (2, 3)" in judge_exercise(record, lambda x, g: x)[1]


def test_a_branch_that_is_not_written_yet_is_no_stub():
    def half(log_probs, mask):
        if mask.all():
            return reference(log_probs, mask)
        raise NotImplementedError

    assert "your function raises NotImplementedError here" in says(half)


# what the reader gets


def test_what_check_returns_is_the_readers_function_or_the_solution(capsys):
    def mine(length):
        """Mine."""
        return torch.ones(length, length).tril().bool()

    checked = check("1.2", mine)
    assert (checked.passed, checked.status, checked.use) == (True, "passed", mine)
    assert checked(2).tolist() == [[True, False], [True, True]] and checked.__doc__ == "Mine."
    assert "1.2 (causal mask): passed, all" in capsys.readouterr().out
    checked = check("1.2", stub)
    assert repr(checked) == "<exercise 1.2: not attempted>"
    assert checked.use is find("1.2").reference
    assert capsys.readouterr().out.startswith("1.2 (causal mask): using the course's version. ")
    sentence, slip = find("1.2").slips[0]
    checked = check("1.2", slip)
    assert checked.status == "not passed" and checked.use is find("1.2").reference
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("function", [stub, lambda length: None, find("1.2").reference])
def test_a_check_that_gets_nothing_new_says_so(function, capsys):
    """After a SyntaxError in the cell above, `f` is still what the last check returned."""
    first = check("1.2", function)
    capsys.readouterr()
    assert check("1.2", first).status == first.status
    asked = "nothing new since the last check.\nDid the cell that defines causal_mask run?"
    said = capsys.readouterr().out
    assert said.startswith(f"1.2 (causal mask): {first.status}, but {asked}")


@pytest.mark.parametrize("function", [stub, lambda length: None])
def test_strict_mode_raises(monkeypatch, function):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    with pytest.raises(AssertionError, match="1.2"):
        check("1.2", function)
    assert check("1.2", find("1.2").reference).passed


@pytest.mark.parametrize("key", ["1.99", "13.1", "x", "", 2])
def test_an_unknown_key_is_told_which_there_are(key):
    with pytest.raises(KeyError, match="expected the key of an exercise .*1"):
        check(key, stub)


def test_hints_lead_on_one_by_one(capsys, monkeypatch):
    monkeypatch.setattr(reader, "_hints_given", {})
    hints = find(KEY).hints.strip().splitlines()
    for number, text in enumerate(hints, start=1):
        hint(KEY)
        assert capsys.readouterr().out == f"Hint {number} of {len(hints)} for {KEY}: {text}\n"
    hint(KEY)
    assert f'no more than {len(hints)}. solution("{KEY}")' in capsys.readouterr().out


@pytest.mark.parametrize("record", all_exercises(), ids=str)
def test_the_printed_solution_passes_when_pasted(record, capsys):
    solution(record.key)
    printed = capsys.readouterr().out
    assert solution_source(record.key) in printed and "minigrpo.exercises" not in printed
    begins = record.key.split(".")[0] + "."
    others = [e.reference for e in all_exercises() if e.key.startswith(begins)]  # it may call them
    namespace: dict = {one.__name__: one for one in others}
    pasted = compiled(printed, record.reference.__name__, namespace)
    assert judge(record.key, pasted, record.line)[0] == "passed"


# reviews

each_review = pytest.mark.parametrize("review", of_notebook("08").values(), ids=lambda r: r.key)


@each_review
def test_a_right_test_without_its_line_is_in_use_and_has_not_passed(review, capsys):
    checked = check(review.key, review.reference)
    assert checked.status == "not passed" and checked.use is review.reference
    assert "Now name the " in capsys.readouterr().out
    assert judge(review.key, review.reference, review.line)[0] == "passed"
    others = {*range(1, len(review.shown) + 1)} - {*review.line}
    others -= {number for also in review.also_lines.values() for number in also}
    assert "wrong" in says(review.reference, review.key, min(others))
    assert "line: expected the number of a line" in says(review.reference, review.key, 99)
    assert "line: expected the number" in says(review.reference, review.key, 5.0)
    for number in [n for also in review.also_lines.values() for n in also]:  # mended there
        assert f"Line {number}: found." in judge(review.key, review.reference, number)[1]


@each_review
def test_the_code_is_shown_with_its_numbers(review, capsys):
    show(review.key)
    printed = capsys.readouterr().out.splitlines()
    assert [line[4:] for line in printed] == review.shown
    for (right, planted), _ in review.bugs.items():
        assert planted.strip() in map(str.strip, review.shown)
        assert right.strip() not in map(str.strip, review.shown)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("    function('4', '4')", "There is no assert in your test"),
        ("    assert True", "never calls what it is given"),
        ("    got = function('4', '4')\n"
         "    assert (got == 1, 'an answer')", "a pair is always true"),
        ("    x = torch.rand(2)\n    assert function(str(x), '4') == 9",
         "draws other numbers each time (rand). Choose"),
        ("    got = function('4', '4')\n    assert got == 7",
         "refuses the right version, at `assert got == 7`"),
        ("    function('4')\n    assert True", "crashed on"),
        ("    try:\n        assert function('4', '4') == 7\n"
         "    except AssertionError:\n        pass", "The except around your assert"),
    ],
)  # fmt: skip
def test_a_weak_test_is_told_what_it_is(text, told):
    names = {"torch": torch}
    warnings.simplefilter("ignore")  # Python warns of a pair, too
    test = compiled(f"def test_it(function):\n{text}\n", "test_it", names, "<a weak test>")
    assert told in says(test, "8.3", 1)


def test_a_pytest_fail_is_an_assertion():
    review = find("8.3")

    def fails(function):
        try:
            review.reference(function)
        except AssertionError:
            pytest.fail("not the answer")

    assert judge("8.3", fails, review.line)[0] == "passed"


def test_a_stub_of_a_review_is_no_test_yet():
    status, message = judge("8.3", stub)
    assert status == "not attempted" and "no test yet" in message
