"""Nothing that an answer is or does leads the judge astray, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import os
import random
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from minigrpo.exercises import check, judge
from minigrpo.exercises import judge as judge_key
from minigrpo.exercises.guard import contained
from minigrpo.exercises.judge import Case, brief, judge_exercise
from minigrpo.exercises.reader import find
from minigrpo.exercises.records import run

JUDGE = sys.modules[judge_exercise.__module__]


def reference(log_probs, mask):
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


def says(function, key="2.3"):
    """The message about an answer that is not right."""
    status, message = judge(key, function)
    assert status == "not passed", message
    return message


def cell(notebook: dict, source: str) -> None:
    """As a notebook does it: every cell is a file of its own, in one namespace."""
    number = notebook["cells"] = notebook.get("cells", 0) + 1
    run(source, f"<cell {number}>", notebook)


# what an answer may be ---------------------------------------------------------------------------


def test_a_constant_a_pattern_a_loss_or_a_table_beside_the_answer_is_fine():
    notebook: dict = {"__name__": "__main__"}
    cell(
        notebook,
        "import math, re, torch\nfrom torch import nn\nfrom math import inf\n"
        "EPS, NAMES, LAYER, LOSS = 0.0, ['a'], {'a': lambda x: x}, nn.MSELoss()\n"
        "ZERO = torch.zeros(())\nWORD = re.compile('a')\n"
        "def answer(log_probs, mask):\n"
        "    NAMES, LAYER, WORD.search('a'), LOSS(ZERO, ZERO), inf\n"
        "    return torch.where(mask.bool(), log_probs, ZERO + EPS).sum(dim=-1)\n",
    )
    assert judge("2.3", notebook["answer"])[0] == "passed"


@pytest.mark.parametrize(
    "value", ["torch.zeros(())", "0.0", "[0.0]", "{'a': 0.0}", "nn.Linear(1, 1)", "np.zeros(1)"]
)
def test_data_of_an_earlier_cell_is_refused_and_the_reader_is_told_what_to_do(value):
    notebook: dict = {"__name__": "__main__"}
    cell(notebook, f"import numpy as np, torch\nfrom torch import nn\nleftover = {value}")
    cell(
        notebook,
        "def answer(log_probs, mask):\n"
        "    leftover\n    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)\n",
    )
    message = says(notebook["answer"])
    assert "reads 'leftover' from the notebook" in message
    assert "define what you need inside the function" in message


def test_a_model_beside_the_answer_is_no_loss_module():
    source = "model = nn.Linear(1, 1)\ndef answer(log_probs, mask): return model(log_probs)"
    notebook = {"nn": nn}
    exec(source, notebook)  # no source to be had
    assert "reads 'model' from the notebook" in says(notebook["answer"])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (torch.ones(2), "got Tensor. Give check its name alone, without calling it."),
        (nn.Linear, "got the class Linear. Write a function"),
        (asyncio.sleep, "got a coroutine"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_function_is_told_as_such(answer, told):
    assert told in says(answer)


def test_a_generator_is_told_as_such():
    def answer(log_probs, mask):
        yield from log_probs

    assert "got a generator, because it contains `yield`" in says(answer)
    assert "got a generator" in judge("8.1", answer, 1)[1]


def test_a_function_of_another_name_is_asked_about():
    message = says(find("2.6").reference)
    assert "The exercise asks for sequence_log_probs, you gave perplexity." in message


def test_a_branch_that_is_not_written_yet_is_no_stub():
    def answer(log_probs, mask):
        if (mask == 1).all() or log_probs.isfinite().all():
            return reference(log_probs, mask)
        raise NotImplementedError

    assert "still raises NotImplementedError here" in says(answer)


def test_arguments_are_passed_by_name_where_the_notebook_does_so():
    def with_columns(log_probs, mask, **columns):
        return reference(log_probs, mask)

    record = dataclasses.replace(find("2.3"), reference=with_columns, wrong=())
    by_name = dataclasses.replace(record, keywords=("mask", "columns"))

    def right(log_probs, *, mask, **columns):
        assert columns == {"columns": None}
        return reference(log_probs, mask)

    assert judge_exercise(by_name, right)[0] == "passed"
    status, message = judge_exercise(by_name, lambda log_probs, real, **columns: 0)
    assert status == "not passed" and "argument" in message


def test_a_list_is_taken_where_the_record_says_so():
    listed = dataclasses.replace(find("2.3"), sequence=True, gradient=())

    def answer(log_probs, mask):
        return reference(log_probs, mask).tolist()

    assert judge_exercise(listed, answer)[0] == "passed"
    assert "expected a tensor, got list" in says(answer)
    for entry in (True, "1", None, [1.0]):
        assert (
            "expected a tensor, got list" in judge_exercise(listed, lambda lp, m, e=entry: [e])[1]
        )


def test_a_slip_is_told_by_name_in_a_list_as_in_a_tensor():
    def plain_average(mask, rows):
        parts = len(mask.split(rows))
        return [1 / parts] * parts

    told = "You give every part the same weight"
    for kind in (list, tuple, lambda weights: torch.tensor(weights, dtype=torch.double)):
        message = says(lambda mask, rows, kind=kind: kind(plain_average(mask, rows)), "11.2")
        assert told in message
        assert "expected [0.5556, 0.2222, 0.2222]\n  got      [0.3333, 0.3333, 0.3333]" in message
    listed = dataclasses.replace(find("11.2"), sequence=False)
    message = judge_exercise(listed, plain_average)[1]
    assert told not in message and "expected a tensor, got list" in message


# what an answer may do ---------------------------------------------------------------------------


def test_a_check_that_is_run_again_says_the_same_of_an_answer_that_calls_itself(capsys):
    notebook: dict = {"__name__": "__main__"}
    cell(notebook, "from minigrpo.exercises import check")
    cell(
        notebook,
        "def sequence_log_probs(log_probs, mask):\n"
        "    if log_probs.shape[1] > 0:\n"
        "        return log_probs[:, 0] + sequence_log_probs(log_probs[:, 1:], mask[:, 1:])\n"
        "    return log_probs.sum(dim=-1)",
    )
    for _ in range(3):
        cell(notebook, 'sequence_log_probs = check("2.3", sequence_log_probs)')
        assert notebook["sequence_log_probs"].status == "not passed"
    first, *others = capsys.readouterr().out.split("2.3 (log-prob of a sequence)")[1:]
    assert others == [first, first]


def swallows(log_probs, mask):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarms on this platform")
@pytest.mark.parametrize("answer", [lambda log_probs, mask: time.sleep(60), swallows])
def test_an_answer_that_never_ends_is_stopped(answer, monkeypatch):
    monkeypatch.setattr(JUDGE, "SECONDS", 0.4)
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    assert "was still running after 0 seconds. Is there a loop that never ends?" in says(answer)
    assert time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarms on this platform")
def test_all_cases_together_have_the_time(monkeypatch):
    def slow(log_probs, mask):
        time.sleep(0.25)
        return reference(log_probs, mask)

    monkeypatch.setattr(JUDGE, "SECONDS", 0.6)
    assert len(find("2.3").cases) >= 3
    assert "was still running after" in says(slow)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarms on this platform")
def test_a_review_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(sys.modules["minigrpo.exercises.review"], "SECONDS", 0.3)
    message = judge("8.1", lambda function: time.sleep(60), 1)[1]
    assert "was still running after 0 seconds on the right version" in message


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit


class Stop(BaseException):
    pass


def deeper(log_probs, mask):
    return deeper(log_probs, mask)


def raises(error):
    def answer(log_probs, mask):
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (raises(SystemExit(3)), "raised SystemExit: 3."),
        (raises(KeyboardInterrupt()), "raised KeyboardInterrupt."),
        (raises(Unspeakable()), "raised Unspeakable."),
        (raises(Stop("now")), "raised Stop: now."),
        (raises(GeneratorExit()), "raised GeneratorExit."),
        (deeper, "raised RecursionError"),
        (lambda lp, m: torch.nested.nested_tensor([lp.sum(-1)]), "nested tensor"),
        (lambda lp, m: 10**400, "expected a tensor, got "),
        (lambda lp, m: lp.sum(-1).detach().numpy(), "expected a tensor, got ndarray"),
        (lambda lp, m: lp.sum(-1).to(torch.complex64), "got complex numbers"),
        (lambda lp, m: torch.empty(len(lp), device="meta"), "raised NotImplementedError"),
    ],
)
def test_whatever_an_answer_raises_or_returns_is_reported(answer, told):
    assert told in says(answer)


def test_a_huge_whole_number_is_no_accident():
    assert "expected" in says(lambda samples, correct, k: 10**400, "6.4")


class Agrees(torch.Tensor):
    """Says that it is equal to anything."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.isclose, torch.Tensor.eq):
            return torch.ones(3, dtype=torch.bool)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_with_opinions_of_its_own_is_compared_as_a_plain_one():
    message = says(lambda lp, mask: (reference(lp, mask) + 1).as_subclass(Agrees))
    assert "expected [" in message


def test_what_an_answer_patches_or_sets_is_put_back():
    before = torch.exp, torch.isclose, torch.Tensor.__eq__, torch.nn.functional.softmax, math.exp
    folder, environment = os.getcwd(), dict(os.environ)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1), random.random(), np.random.rand()

    def answer(log_probs, mask):
        torch.isclose = lambda a, b, **_: torch.ones_like(a, dtype=torch.bool)
        torch.Tensor.__eq__ = lambda self, other: True
        torch.Tensor.helper = torch.exp = torch.nn.functional.softmax = math.exp = len
        sys.modules["minigrpo.logprobs"].masked_mean = None
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        torch.use_deterministic_algorithms(True)
        sys.setrecursionlimit(500)
        os.environ["MINIGRPO_STRICT"] = "1"
        os.chdir("/")
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        return torch.zeros(len(log_probs))

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    says(answer)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    after = torch.exp, torch.isclose, torch.Tensor.__eq__, torch.nn.functional.softmax, math.exp
    assert after == before and not hasattr(torch.Tensor, "helper")
    assert sys.modules["minigrpo.logprobs"].masked_mean is not None
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not (torch.is_anomaly_enabled() or torch.are_deterministic_algorithms_enabled())
    assert (os.getcwd(), dict(os.environ)) == (folder, environment)
    assert sys.getrecursionlimit() > 500


def test_a_review_puts_back_too():
    def answer(function):
        torch.allclose = lambda *a, **k: True
        torch.manual_seed(3)

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    judge("8.1", answer, 1)
    assert torch.rand(1) == expected and torch.allclose.__module__ != __name__


def test_a_module_that_an_answer_imports_stays():
    with contained(reference, 1.0):
        torch.something_new = math
        torch.something_else = 1
    assert torch.something_new is math and not hasattr(torch, "something_else")
    del torch.something_new


def test_a_counter_of_the_notebook_is_put_back():
    notebook = {"torch": torch, "calls": 0}
    exec(
        "def answer(log_probs, mask):\n"
        "    global calls\n    calls += 1\n    return log_probs.sum(dim=-1) * calls",
        notebook,
    )
    first = says(notebook["answer"])
    assert says(notebook["answer"]) == first and notebook["calls"] == 0


def test_what_an_answer_prints_is_shown_short_and_below_the_verdict(capsys):
    def answer(log_probs, mask):
        for line in range(5000):
            print(f"line {line} {'x' * 200}")
        return log_probs.sum(dim=-1)

    message = says(answer)
    assert capsys.readouterr().out == ""
    printed = message[message.index("it printed:") :].splitlines()
    assert len(printed) == 5 and printed[1].startswith("  line 0 x") and len(printed[1]) < 90
    assert printed[-1] == "  ..."

    def right(log_probs, mask):
        print("shape", tuple(log_probs.shape))
        return reference(log_probs, mask)

    check("2.3", right)
    assert "passed, all" in (out := capsys.readouterr().out) and "\n  it printed:\n  shape (" in out


def test_each_case_has_fresh_arguments():
    seen = []

    def answer(log_probs, mask, seen=seen):
        assert all(log_probs is not a and mask is not b for a, b in seen)
        seen.append((log_probs, mask))
        return reference(log_probs, mask)

    assert judge("2.3", answer)[0] == judge("2.3", answer)[0] == "passed"
    assert len(seen) == 2 * len(find("2.3").cases)


# arguments belong to the caller ----------------------------------------------------------------


def lists(rows, weight):
    return weight * torch.tensor([float(sum(row["ids"])) for row in rows])


LISTS = dataclasses.replace(
    find("2.3"),
    reference=lists,
    gradient=(),
    cases=(Case("nested", ([{"ids": [1, 2]}, {"ids": [3]}], torch.ones(2))),),
    wrong=(),
)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("rows[0]['ids'].pop()", "changes its argument 'rows' in place"),
        ("rows[1]['new'] = 0", "changes its argument 'rows' in place"),
        ("rows.reverse()", "changes its argument 'rows' in place"),
        ("weight.mul_(2)", "changes its argument 'weight' in place"),
        ("weight.requires_grad_()", "switches requires_grad of its argument 'weight'"),
        ("weight.resize_(1)", "changes its argument 'weight' in place"),
    ],
)
def test_a_change_of_an_argument_is_seen(line, told):
    names = {"lists": lists}
    exec(
        f"def answer(rows, weight):\n    out = lists(rows, weight)\n    {line}\n    return out",
        names,
    )

    def answer(rows, weight):
        return names["answer"](rows, weight).detach()

    assert told in judge_exercise(LISTS, answer)[1]
    assert judge_exercise(LISTS, lists)[0] == "passed"


def test_a_tensor_inside_a_list_is_looked_at_too():
    def total(rows):
        return torch.stack([row.sum() for row in rows])

    case = Case("rows", ([torch.ones(2), torch.zeros(3)],))
    exercise = dataclasses.replace(LISTS, reference=total, cases=(case,))
    assert judge_exercise(exercise, total)[0] == "passed"

    def switches(rows):
        return total([row.requires_grad_() for row in rows]).detach()

    def writes(rows):
        return total([row.mul_(1).add_(0) for row in rows[:1]] + [rows[1].add_(1) - 1])

    assert "switches requires_grad of its argument 'rows'" in judge_exercise(exercise, switches)[1]
    assert "changes its argument 'rows' in place" in judge_exercise(exercise, writes)[1]


def test_a_gradient_left_in_an_argument_is_seen():
    def answer(log_probs, mask):
        out = reference(log_probs, mask)
        out.sum().backward(retain_graph=True)
        return out

    assert "leaves a gradient in its argument 'log_probs'" in says(answer)


def test_a_result_that_still_carries_its_graph_is_refused():
    cut = dataclasses.replace(find("2.3"), reference=lambda lp, mask: reference(lp, mask).detach())
    assert judge_exercise(cut, cut.reference)[0] == "passed"
    status, message = judge_exercise(cut, reference)
    assert status == "not passed" and "still carries its graph" in message


# what is told --------------------------------------------------------------------------------


def test_the_inputs_of_the_failing_case_are_shown():
    message = says(lambda log_probs, mask: log_probs.sum(dim=-1) + 1)
    lines = message.splitlines()
    at = lines.index("  with")
    assert re.fullmatch(r"    log_probs = \[\[.*\]\]", lines[at + 1])
    assert re.fullmatch(r"    mask = \[\[[01, \]\[]*\]\]", lines[at + 2])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.tensor([[0.123456, math.nan], [math.inf, -0.0]]), "[[0.1235, nan], [inf, 0]]"),
        (torch.zeros(3, 100), "[0, 0, 0, 0, 0, ...] of shape (3, 100)"),
        ([torch.ones(2), "a"], "[[1, 1], 'a']"),
        (torch.zeros(0, 3), "[]"),
        (torch.tensor([True, False]), "[1, 0]"),
        ("x" * 200, "'" + "x" * 159 + " ..."),
        (object(), ""),
        (True, "True"),
    ],
)
def test_a_value_in_one_short_line(value, shown):
    assert brief(value) == shown


def test_a_sentence_is_told_only_if_everything_agrees():
    """Both crash, but not for the same reason."""
    wrong = dataclasses.replace(find("2.3").wrong[0], function=lambda lp, mask: lp + [1])
    exercise = dataclasses.replace(find("2.3"), wrong=(wrong,))
    assert wrong.sentence in judge_exercise(exercise, lambda lp, mask: lp + [1])[1]
    message = judge_exercise(exercise, lambda lp, mask: lp + "text")[1]
    assert wrong.sentence not in message and "raised TypeError" in message


def test_a_difference_is_told_with_as_many_digits_as_it_takes_and_rounding_is_none():
    assert judge("2.3", lambda lp, mask: reference(lp, mask) * (1 + 1e-8))[0] == "passed"
    message = says(lambda lp, mask: reference(lp, mask) + 1e-5 / 3)
    expected, got = re.search(r"  expected (.*)\n  got      (.*)\n", message).groups()
    assert expected != got
    assert max(map(len, re.findall(r"\.(\d+)", expected + got))) <= 8


def test_of_a_long_result_the_first_wrong_entry_is_told():
    def long(log_probs, mask):
        return torch.arange(60.0).double().view(2, 30)

    def wrong(log_probs, mask):
        return long(log_probs, mask) + 2 * (torch.arange(60) > 33).view(2, 30)

    exercise = dataclasses.replace(find("2.3"), reference=long, gradient=(), wrong=())
    message = judge_exercise(exercise, wrong)[1]
    assert "\n  at [1, 4]:\n  expected 34\n  got      36\n" in message


def test_nan_is_told_as_such():
    message = says(lambda lp, mask: reference(lp, mask) * math.nan)
    assert "NaN where a number belongs:" in message


def test_gradients_that_are_right_in_the_sum_alone_are_seen():
    """Every row has the gradient of the row beside it."""

    def answer(log_probs, mask):
        value = reference(log_probs, mask)
        beside = value.roll(1, dims=0)
        return value.detach() + beside - beside.detach()

    assert "the value is right, but its gradient is not" in says(answer)


def test_numbers_are_of_double_precision_unless_a_case_is_to_be_taken_as_given():
    seen = []

    def answer(log_probs, mask):
        seen.append(log_probs.dtype)
        return reference(log_probs, mask)

    given = torch.ones(1, 2), torch.ones(1, 2)
    cases = Case("as given", given, as_given=True), Case("otherwise", given)
    exercise = dataclasses.replace(find("2.3"), cases=cases, wrong=())
    assert judge_exercise(exercise, answer)[0] == "passed"
    assert seen == [torch.float32, torch.float64]


def test_whole_numbers_are_compared_exactly():
    def large(log_probs, mask):
        return torch.tensor([10**9, 10**9 + (log_probs.dim() == 3)])

    exercise = dataclasses.replace(find("2.3"), reference=large, gradient=(), wrong=())
    assert judge_exercise(exercise, large)[0] == "passed"
    assert (
        judge_exercise(exercise, lambda lp, mask: torch.tensor([10**9, 10**9 + 1]))[0] != "passed"
    )


@pytest.mark.parametrize(
    ("test", "told"),
    [
        (lambda function: function(torch.ones(1, 1), torch.ones(1, 1)), "There is no assert"),
        (lambda function: print("fine"), "There is no assert in your test"),
    ],
)
def test_a_test_without_an_assert_is_told_so(test, told):
    assert told in judge("8.7", test, 1)[1]


def helper(found):
    assert found > 0


def test_an_assert_in_a_helper_counts():
    message = judge(
        "8.7", lambda function: helper(function(torch.ones(1, 1), torch.ones(1, 1))), 1
    )[1]
    assert "There is no assert" not in message


def test_the_signature_of_judge():
    assert [*inspect.signature(judge_key).parameters] == ["key", "function", "line"]
    assert judge("2.3", reference) == (
        "passed",
        f"2.3 ({find('2.3').title}): passed, all {len(find('2.3').cases)} cases.",
    )
