"""The proof of the reviews: right tests pass, weak ones are told what they do not see.

As for the exercises, the proof is a list of holes, found by asking a judge about every test on
record. It must be empty for the real judge, and must not be for one that is broken.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import warnings

import pytest
import torch

from minigrpo.exercises import all_exercises, check, hint, reader, show, solution
from minigrpo.exercises.judge import Exercise
from minigrpo.exercises.outside import names_read
from minigrpo.exercises.reader import find, solution_source
from minigrpo.exercises.review import Review, Verdict, _judge_line, _try, code_lines, judge_review

REVIEWS = [record for record in all_exercises() if isinstance(record, Review)]
by_key = pytest.mark.parametrize("review", REVIEWS, ids=lambda r: r.key)


def stub(function):
    raise NotImplementedError


def calls(review: Review, function) -> None:
    """Call the version as the reference does, so that a spoilt test is no test without a call."""
    try:
        review.reference(function)
    except AssertionError:
        pass


def right_tests(review: Review):
    yield "reference", review.reference
    yield from ((other.name, other.function) for other in review.others)


def generic_wrongs(review: Review):
    """Spoilt tests, each with what must be said."""
    reference = review.reference

    def nothing(function):
        calls(review, function)

    def refuses_all(function):
        calls(review, function)
        raise AssertionError("expected 1,\ngot 2")

    def turned_round(function):
        with pytest.raises(AssertionError):
            reference(function)
        raise SystemExit  # not reached by the right version

    def upside_down(function):
        try:
            reference(function)
        except AssertionError:
            return
        raise AssertionError

    def crashes(function):
        calls(review, function)
        return {}["x"]

    def crashes_on_the_buggy(function):
        try:
            reference(function)
        except AssertionError as error:
            raise KeyError("x") from error

    blind = "misses the other|sees neither|does not see the bug"
    yield "asserts nothing", nothing, blind
    yield "asserts False", refuses_all, "refuses the right version too, .*which says: expected 1,"
    yield "upside down", upside_down, "upside down: it passes on (the|a) buggy version"
    yield "pytest.fail", turned_round, "crashed on the right version: Failed: "
    yield "KeyError", crashes, "crashed on the right version: KeyError: 'x'"
    yield "KeyError later", crashes_on_the_buggy, "crashed on (the|a) buggy version: KeyError: 'x'"
    yield "leaves", lambda function: (calls(review, function), exit()), "crashed on .*SystemExit"
    yield "wrong arguments", lambda function: function(), "inside the right version.*TypeError: mis"
    yield "no parameter", lambda: None, "crashed on the right version: TypeError"
    yield "calls nothing", lambda function: None, "There is no assert in your test"
    yield "refuses without a call", lambda f: refuse(), "never calls what it is given"
    yield "no test", 3, "expected your test, a function; got int"

    memory = []

    def remembers(function):
        calls(review, function)
        memory.append(function)
        assert len(memory) % (len(review.bugs) + 2) == 1

    yield "has a memory", remembers, "keeps something from one run to the next"

    def same_as_the_first(function, first=[]):  # noqa: B006
        try:
            reference(function)
            first.append("fine")
        except AssertionError:
            first.append("buggy")
        assert first[-1] == first[0]

    def tosses_a_coin(function):
        assert torch.rand(()) < 0.5
        reference(function)

    def looks_now_and_then(function):
        calls(review, function)
        if torch.rand(()) < 0.6:
            reference(function)

    yield "remembers the first", same_as_the_first, "keeps something from one run to the next"
    for test in (tosses_a_coin, looks_now_and_then):
        yield test.__name__, test, "doesn't say the same each time"


def refuse():
    raise AssertionError


def holes(review: Review, judge=judge_review) -> list[str]:
    """Everything that is judged otherwise than it should be."""
    found = []
    for name, test in right_tests(review):
        status, message, good = judge(review, test, review.line)
        if (status, good) != ("passed", True) or "passed" not in message:
            found.append(f"right test refused: {name}")
    if judge(review, stub, review.line)[0::2] != ("not attempted", False):
        found.append("the stub counts as an attempt")
    for weak in review.wrong:
        status, message, good = judge(review, weak.function, review.line)
        others = [w.name for w in review.wrong if w is not weak and w.sentence in message]
        if status != "not passed" or good or weak.sentence not in message or others:
            found.append(f"weak test: {weak.name}")
    for i, test in enumerate(review.lapses):
        status, message, good = judge(review, test, review.line)
        sentences = [also.sentence for also in (*review.also_right, *review.also_wrong)]
        if status != "not passed" or good or sum(s in message for s in sentences) != 1:
            found.append(f"lapse: {i}: {message}")
    for name, test, words in generic_wrongs(review):
        status, message, good = judge(review, test, review.line)
        if status != "not passed" or good or not re.search(words, message):
            found.append(f"generic wrong: {name}: {message}")
    for line, words in wrong_lines(review):
        status, message, good = judge(review, review.reference, line)
        if status != "not passed" or not good or words not in message or "passed" in message:
            found.append(f"wrong line: {line}: {message}")
    status, message, good = judge(review, review.reference, None)
    if (status, good) != ("not passed", True) or "Now name the" not in message:
        found.append(f"no line: {message}")
    return found


def wrong_lines(review: Review):
    """Lines that are not right, each with what must be said."""
    wanted = [bug.line for bug in review.bugs]
    last = len(code_lines(review))
    also = {line for bug in review.bugs for line in bug.also}
    others = [line for line in range(1, last + 1) if line not in {*wanted, *also}]
    yield last + 1, f"There is no line {last + 1}: the code has lines 1 to {last}."
    yield 0, "There is no line 0"
    yield (*wanted, others[0]), f"You name {len(wanted) + 1} lines; name {len(wanted)}."
    for line in ("5", "x", 1.5, (), ("a",), True, [None]):
        yield line, "line: expected the number of a line"
    if len(wanted) == 1:
        for line in others:
            yield line, f"Line {line} is not the wrong one."
    else:
        yield others[0], f"Line {others[0]} is not."
        yield wanted[1], f"Line {wanted[1]} is one of the two wrong lines, name the other too."
        yield (wanted[0], others[0]), "One of the two is wrong indeed, the other is not."
        yield others[:2], "Neither is a wrong one."


@by_key
def test_every_test_is_judged_rightly(review):
    assert holes(review) == []


@by_key
def test_a_judge_that_always_says_yes_is_found_out(review):
    found = holes(review, judge=lambda *arguments: ("passed", "passed", True))
    assert "the stub counts as an attempt" in found
    for kind, expected in [
        ("weak", len(review.wrong)),
        ("generic", len(list(generic_wrongs(review)))),
        ("lapse", len(review.lapses)),
        ("wrong line", len(list(wrong_lines(review)))),
        ("no line", 1),
    ]:
        assert sum(hole.startswith(kind) for hole in found) == expected


@by_key
def test_a_judge_that_always_says_no_is_found_out(review):
    found = holes(review, judge=lambda *arguments: ("not passed", "no", False))
    assert sum(hole.startswith("right test refused") for hole in found) == 1 + len(review.others)


@pytest.mark.parametrize(
    ("part", "broken", "unnoticed"),
    [
        ("_try", lambda *a: Verdict(), "right test refused: reference"),
        ("_try", lambda *a: Verdict(failed=True), "right test refused: reference"),
        ("_judge_line", lambda *a: ("passed", "found"), "wrong line: 1"),
        ("_judge_line", lambda *a: ("passed", "found"), "no line"),
        ("is_stub", lambda *a: False, "the stub counts as an attempt"),
        ("_assertion", lambda *a: "", "generic wrong: asserts False"),
        ("_weakness", lambda *a: "No.", "weak test: "),
        ("_beyond", lambda *a: "", "lapse: 0"),
        ("_unsteady", lambda *a: "", "generic wrong: looks_now_and_then"),
        ("_around", lambda *a: (), "generic wrong: remembers the first"),
        ("SEEDS", (0, 0), "generic wrong: looks_now_and_then"),
    ],
)
def test_a_judge_with_one_part_broken_is_found_out(part, broken, unnoticed, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(judge_review), part, broken)
    assert any(unnoticed in hole for hole in holes(find("8.7")))


@pytest.mark.parametrize("blind", [0, 1, 2])
@pytest.mark.parametrize("key", ["8.5", "8.6"])
def test_a_judge_that_tries_fewer_versions_is_found_out(key, blind):
    """Without one of the bugs, or with the right version in the place of the first bug."""
    review = find(key)
    bugs = list(review.bugs)
    bugs[blind % 2] = bugs[1 - blind % 2]
    if blind == 2:
        bugs[0] = dataclasses.replace(review.bugs[0], version=review.right)
    fewer = dataclasses.replace(review, bugs=tuple(bugs))

    def judge(_, test, line):
        return judge_review(fewer, test, line)

    assert holes(review, judge)


# the records -----------------------------------------------------------------------------------


def source(function) -> list[str]:
    """Its lines, the name of the function taken out."""
    first, *rest = inspect.getsource(function).splitlines()
    return [re.sub(r"^def \w+", "def f", first), *rest]


def only_in_first(first: list[str], second: list[str]) -> set[int]:
    """The numbers of the lines that the first has and the second has not, or elsewhere."""
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    same = {line for block in blocks for line in range(block.a + 1, block.a + block.size + 1)}
    return set(range(1, len(first) + 1)) - same


@by_key
def test_the_code_differs_from_the_right_one_in_the_named_lines_only(review):
    shown, right = source(review.code), source(review.right)
    assert only_in_first(shown, right) == {bug.line for bug in review.bugs}
    assert len(shown) <= len(right)
    for bug in review.bugs:
        assert only_in_first(source(bug.version), right) == {bug.line}


@by_key
def test_the_reference_fails_on_what_is_shown_and_on_each_bug_alone(review):
    review.reference(review.right)
    for version in (review.code, *(bug.version for bug in review.bugs)):
        with pytest.raises(AssertionError):
            review.reference(version)


@by_key
def test_record_is_complete(review):
    assert 6 <= len(code_lines(review)) <= 15
    assert all(len(line) <= 100 for line in code_lines(review))
    assert len(inspect.getsource(review.reference).splitlines()) <= 10
    assert (review.also_right or review.also_wrong) and review.lapses
    assert len(review.others) >= 2 and len(review.wrong) >= 3 and len(review.hints) == 3
    told = (*review.wrong, *review.also_right, *review.also_wrong)
    sentences = [answer.sentence for answer in told]
    assert not any(a in b for i, a in enumerate(sentences) for b in sentences[i + 1 :])
    assert not any(b in a for i, a in enumerate(sentences) for b in sentences[i + 1 :])


@by_key
@pytest.mark.parametrize("kind", ["also_right", "also_wrong"])
def test_every_version_is_needed(review, kind):
    versions = getattr(review, kind)
    for i, version in enumerate(versions):
        fewer = dataclasses.replace(review, **{kind: versions[:i] + versions[i + 1 :]})
        passing = [test for test in review.lapses if judge_review(fewer, test)[2]]
        assert passing, f"without the version {version.name!r} no weak test gets through"


@by_key
def test_the_reference_knows_the_other_versions(review):
    for version in review.also_right:
        review.reference(version.function)
    for version in review.also_wrong:
        with pytest.raises((AssertionError, TypeError)):  # no gradient is a None
            review.reference(version.function)


@by_key
def test_code_and_reference_need_the_imports_on_record_only(review):
    imported = {line.removeprefix("import ") for line in review.imports}
    assert imported <= {"torch", "math", "re"}
    for function in (review.code, review.right, review.reference):
        used = set(names_read(function.__code__)) & set(function.__globals__)
        assert used <= imported


def test_there_are_enough():
    assert len(REVIEWS) >= 7 and sum(len(review.bugs) == 2 for review in REVIEWS) >= 2


def texts(review: Review):
    yield from code_lines(review)
    yield from (review.title, *review.hints)
    yield from (bug.cure for bug in review.bugs)
    answers = (*review.others, *review.wrong, *review.also_right, *review.also_wrong)
    yield from (answer.sentence for answer in answers)
    tests = [test for _, test, *_ in (*right_tests(review), *generic_wrongs(review))]
    for test in (stub, *tests, *(weak.function for weak in review.wrong), *review.lapses):
        yield judge_review(review, test, review.line)[1]
    for line in (None, *(line for line, _ in wrong_lines(review))):
        yield _judge_line(review, line)[1]  # what is said about a line stands beside any test


@by_key
def test_texts_name_no_address_and_no_path(review):
    for text in texts(review):
        assert not re.search(r"0x|<function|\w/\w+/|\.py\b|_right_|http", text), text


@by_key
def test_neither_hints_nor_sentences_give_the_line_away(review):
    wanted = {str(bug.line) for bug in review.bugs}
    told = (*review.wrong, *review.also_right, *review.also_wrong)
    for text in (*review.hints, *(answer.sentence for answer in told)):
        assert not re.search(r"\b[Ll]ine \d", text)
    for line, _ in wrong_lines(review):
        said = _judge_line(review, line)[1]
        named = {str(n) for n in line} if isinstance(line, tuple | list) else {str(line)}
        last = str(len(code_lines(review)))
        told = set(re.findall(r"\d+", said)) & wanted
        assert told <= named | {"1", "2", last}


@by_key
def test_messages_are_the_same_every_time(review):
    tests = [*(weak.function for weak in review.wrong), *review.lapses]
    first = [judge_review(review, test, 1)[1] for test in tests]
    torch.set_num_threads(2)
    assert [judge_review(review, test, 1)[1] for test in tests] == first
    torch.set_num_threads(1)


# what the reader gets --------------------------------------------------------------------------


def full_mask(function):
    assert function(torch.ones(2, 2), torch.ones(2, 2)) == 1


def test_show_prints_the_code_with_its_numbers(capsys):
    show("8.7")
    assert capsys.readouterr().out == (
        " 1  def sequence_mean(losses, mask):\n"
        ' 2      """losses, mask (N, T), mask 1 for a real token -> (): mean of each row, then of '
        'the rows."""\n'
        " 3      real = mask.bool()\n"
        " 4      lengths = real.sum(dim=-1)\n"
        " 5      sums = losses.sum(dim=-1)\n"
        " 6      means = sums / lengths\n"
        " 7      return means.mean()\n"
    )


@by_key
def test_show_numbers_every_line_of_the_buggy_code(review, capsys):
    show(review.key)
    printed = capsys.readouterr().out.splitlines()
    expected = inspect.getsource(review.code).splitlines()
    assert [int(line[:2]) for line in printed] == list(range(1, len(expected) + 1))
    assert [line[4:] for line in printed] == expected


def test_show_has_nothing_to_show_for_an_exercise():
    with pytest.raises(KeyError, match="expected the key of a review"):
        show("2.3")
    with pytest.raises(KeyError, match="expected the key of an exercise"):
        show("8.99")


def test_a_right_test_and_a_right_line(capsys):
    reference = find("8.7").reference
    checked = check("8.7", reference, line=5)
    assert (checked.passed, checked.status, checked.use) == (True, "passed", reference)
    assert capsys.readouterr().out == (
        "8.7 (mean over the real tokens): passed, your test fails on the buggy version and passes "
        "on the right one. Line 5: found.\n"
    )


@pytest.mark.parametrize("line", [(6, 8), [8, 6], {6, 8}])
def test_two_lines_in_any_order(line, capsys):
    assert check("8.5", find("8.5").reference, line=line).passed
    assert "Lines 6 and 8: found." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [(None, "not passed", "Now name the wrong line"), (4, "not passed", "Line 4 is not the wrong")],
)
def test_a_right_test_is_in_use_whatever_the_line(line, status, words, capsys):
    mine = find("8.7").others[0].function
    checked = check("8.7", mine, line=line)
    assert (checked.passed, checked.status, checked.use) == (False, status, mine)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("test", [stub, full_mask, 3])
def test_any_other_test_is_replaced_by_the_reference(test, capsys):
    review = find("8.7")
    checked = check("8.7", test, line=5)
    assert not checked.passed and checked.use is review.reference
    checked(review.right)
    with pytest.raises(AssertionError):
        checked(review.code)


def test_a_weak_test_is_told_what_it_does_not_see(capsys):
    assert check("8.7", full_mask, line=4).status == "not passed"
    assert capsys.readouterr().out == (
        "8.7 (mean over the real tokens): not right yet. Your test does not see the bug: it passes "
        "on both versions. Your mask is full, so no completion is shorter than another. Nearly "
        "every bug of a mask hides there. Take rows of different lengths.\n"
        "Line 4 is not the wrong one.\n"
        'Try hint("8.7").\n'
    )


def test_the_assertion_that_failed_is_told():
    def refuses(function):
        value = function(torch.ones(1, 1), torch.ones(1, 1))
        torch.testing.assert_close(
            value,
            torch.tensor(3.0),
        )

    message = judge_review(find("8.7"), refuses)[1]
    assert (
        "refuses the right version too, at `torch.testing.assert_close( value, torch.tensor(3.0), "
        ")`, which says: Scalars are not close!." in message
    )


def test_an_assertion_without_source_is_told_by_what_it_says():
    notebook = {"torch": torch}
    exec("def test(f):\n    f(torch.ones(1, 1), torch.ones(1, 1))\n    assert 0, 'no'", notebook)
    message = judge_review(find("8.7"), notebook["test"])[1]
    assert "refuses the right version too, which says: no." in message


@pytest.mark.parametrize("test", [stub, full_mask])
def test_a_check_cell_that_is_run_again_says_the_same(test, capsys):
    """`t = check(key, t)` has replaced t by what check returned, the reference inside it."""
    first = check("8.7", test, line=5)
    again = check("8.7", check("8.7", first, line=5), line=5)
    assert again.status == first.status != "passed"
    assert len(set(capsys.readouterr().out.split("8.7 (mean"))) == 2


@pytest.mark.parametrize("line", [None, 4, 5])
@pytest.mark.parametrize("name", ["stub", "full mask", "reference"])
def test_strict_mode_wants_the_test_and_the_line(name, line, monkeypatch, capsys):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    reference = find("8.7").reference
    test = {"stub": stub, "full mask": full_mask, "reference": reference}[name]
    if (name, line) == ("reference", 5):
        assert check("8.7", test, line=line).passed
        return
    with pytest.raises(AssertionError, match="8.7"):
        check("8.7", test, line=line)


@by_key
def test_the_line_on_record_is_what_check_wants(review, monkeypatch, capsys):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    assert check(review.key, review.reference, line=review.line).passed


def test_a_line_does_no_harm_to_other_exercises(capsys):
    assert check("1.2", find("1.2").reference, line=3).passed


@by_key
def test_the_printed_solution_passes_when_pasted(review, capsys):
    solution(review.key)
    printed = capsys.readouterr().out
    paragraphs = printed.replace("\n# ", " ")
    assert all(f"Line {bug.line}: {bug.cure}" in paragraphs for bug in review.bugs)
    assert review.why in paragraphs
    for text in (printed, solution_source(review.key)):
        namespace: dict = {"__name__": "__main__"}
        exec(text, namespace)
        test = namespace[review.reference.__name__]
        assert judge_review(review, test, review.line)[0] == "passed"


@by_key
def test_the_code_runs_as_it_is_shown(review):
    namespace: dict = {}
    exec("\n".join((*review.imports, *code_lines(review))), namespace)
    with pytest.raises(AssertionError):
        review.reference(namespace[review.code.__name__])


@by_key
def test_hints_lead_on_one_by_one(review, capsys, monkeypatch):
    monkeypatch.setattr(reader, "_hints_given", {})
    for _ in range(4):
        hint(review.key)
    out = capsys.readouterr().out
    assert all(f"Hint {i} of 3 for {review.key}: " in out for i in (1, 2, 3))
    assert all(text in out for text in review.hints)


# what a test may do ----------------------------------------------------------------------------


def test_versions_cannot_be_told_apart_by_their_looks():
    seen = set()

    def looks(function):
        find("8.7").reference(function)
        seen.add((function.__name__, inspect.getsource(function)))

    def looks_only(function):
        full_mask(function)
        assert "torch.where" in inspect.getsource(function)

    judge_review(find("8.7"), looks)
    assert len(seen) == 1
    assert not judge_review(find("8.7"), looks_only, 5)[2]


def test_warnings_and_random_numbers_are_kept_from_the_reader(recwarn):
    def noisy(function):
        warnings.warn("with a path", stacklevel=1)
        losses = torch.rand(2, 3)
        losses[1, 1:] = 9
        mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        expected = (losses[0].mean() + losses[1, 0]) / 2
        assert torch.isclose(function(losses, mask), expected)

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert judge_review(find("8.7"), noisy, 5)[0] == "passed"
    assert torch.equal(torch.rand(1), expected) and not recwarn.list


def test_a_gradient_is_there_under_no_grad_too():
    with torch.no_grad():
        assert judge_review(find("8.9"), find("8.9").reference, 4)[0] == "passed"


def test_arguments_are_remembered_as_they_were_given():
    """A test that spoils its own data afterwards is still told by what it called with."""

    def spoils(function):
        mask = torch.ones(2, 2)
        assert function(torch.ones(2, 2), mask=mask) == 1
        mask.zero_()

    message = judge_review(find("8.7"), spoils)[1]
    assert "Your mask is full" in message


def test_odd_arguments_are_no_reason_to_fail():
    def odd(function):
        assert function([[5, 2, 2]], 4, None) is not None

    review = find("8.2")
    status, message, _ = judge_review(review, odd)
    assert status == "not passed" and "crashed inside the right version" in message

    def raises(trial):
        raise ValueError

    weak = dataclasses.replace(review.wrong[0], when=raises)
    bad = dataclasses.replace(review, wrong=(weak,))
    assert "does not see the bug" in judge_review(bad, review.wrong[1].function)[1]


def test_an_interrupt_ends_the_trial():
    versions = []

    def interrupts(function):
        versions.append(function)
        raise KeyboardInterrupt

    status, message, _ = judge_review(find("8.7"), interrupts)
    assert status == "not passed" and "interrupted" in message and len(versions) == 1


def test_a_differentiated_result_is_noticed_in_either_way():
    def backward(function):
        function(torch.ones(1, 1, requires_grad=True), torch.ones(1)).backward()

    def grad(function):
        leaf = torch.ones(1, 1, requires_grad=True)
        torch.autograd.grad(function(leaf, torch.ones(1)) * 2, leaf)

    def value(function):
        function(torch.ones(1, 1, requires_grad=True), torch.ones(1)).item()

    for test, expected in ((backward, True), (grad, True), (value, False)):
        (call,) = _try(test, find("8.9").right).calls
        assert call.differentiated is expected


def test_a_review_is_no_exercise():
    assert not any(isinstance(review, Exercise) for review in REVIEWS)


def test_another_line_in_which_the_bug_can_be_mended_is_right_too():
    review = find("8.4")
    (bug,) = review.bugs
    for line in bug.also:
        status, message, _ = judge_review(review, review.reference, line)
        assert status == "passed" and f"Line {line}: found." in message
    status, message, _ = judge_review(review, review.reference, bug.also)
    assert status == "not passed" and "You name 2 lines; name 1." in message


def test_a_test_that_crashed_on_the_right_version_is_no_test():
    review, calls = REVIEWS[0], []

    def crashes_once(function):
        calls.append(function)
        if len(calls) == 1:
            raise ValueError("not ready")
        review.reference(function)

    assert judge_review(review, crashes_once)[0] == "not passed"


def test_a_check_leaves_the_random_numbers_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    judge_review(REVIEWS[0], REVIEWS[0].reference)
