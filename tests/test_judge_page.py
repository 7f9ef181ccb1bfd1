"""docs/judge.md and the judge in a test of one's own: what the page says is so."""

import inspect
import re
import subprocess
import sys

import pytest
from make_trl_answers import LOSS_CASES
from packaging.requirements import Requirement
from test_project import project, text

from minigrpo import objective
from minigrpo.clinic.judge import Report, assert_grpo_loss, command, judge_loss
from minigrpo.clinic.judge.asking import role
from minigrpo.clinic.judge.trl_answers import VARIANTS

PAGE = text("docs/judge.md")


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = PAGE.partition(f"\n| {header}")[2].partition("\n\n")[0].splitlines()[2:]
    assert table, f"no table begins with {header}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def blocks(kind: str) -> list[str]:
    """The blocks of code of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_it_is_short_and_its_numbers_are_those_of_the_files():
    assert len(PAGE.split()) <= 900
    assert f"{LOSS_CASES} batches under {len(VARIANTS)} settings" in PAGE
    torch, safetensors = (Requirement(word) for word in project()["project"]["dependencies"])
    assert f"{torch.name} and {safetensors.name}" in PAGE
    lowest = min(s.version for s in torch.specifier)
    assert f"{torch.name} {lowest} or newer" in PAGE


@pytest.mark.parametrize("verdict", rows("verdict"), ids=lambda row: row[0])
def test_a_verdict_has_the_exit_code_of_the_table(verdict, monkeypatch):
    name, begins, _, code = verdict
    report = Report(name, *[[]] * (len(Report._fields) - 1))._replace(text=begins)
    monkeypatch.setattr(command, "judge_file", lambda *_, **__: report)
    assert command.main(["mine.py:loss"]) == int(code)
    assert report.passed == (int(code) == 0)


def test_the_inputs_and_options_are_understood_under_the_names_of_the_table():
    for ours, _, theirs in rows("input"):
        to, number = re.match(r"`(\w+)`", ours)[1], re.search("clip|kl|max", ours)
        usual = {"default": 0.2} if number else {}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = re.findall(r"`(\w+)`", theirs)
        assert names
        for name in names:
            meant = role(inspect.Parameter(name, kind, **usual))
            assert meant and meant.partition(" ")[0] == to, f"{name} is {meant}"


def test_the_command_has_the_options_of_the_table(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    helped = capsys.readouterr().out
    told = [re.match(r"`(--[a-z]+)", option)[1] for option, _ in rows("option")]
    assert sorted(told) == sorted(re.findall(r"^  (--[a-z]+)", helped, re.MULTILINE))
    algorithms = dict(rows("option"))["`--as dapo`"]
    assert re.findall(r"`(\w+)`", algorithms) == [*objective.VARIANTS]
    assert " ".join(helped.split()).count(", ".join([*objective.VARIANTS][:-1])) == 1


def test_the_command_starts_without_torch_and_a_broken_one_is_told(tmp_path, monkeypatch, capsys):
    code = "import sys, minigrpo.clinic.judge.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    (tmp_path / "mine.py").write_text("def loss(logps, old_logps, advantages, mask): ...")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert command.main([f"{tmp_path / 'mine.py'}:loss"]) == 2
    told = "Not judged: the judge itself can't be loaded: libcudart.so.12: no such file.\n"
    assert capsys.readouterr().out == told


@pytest.fixture
def my_loss(tmp_path, monkeypatch):
    """The example of the page, with a word of it exchanged, as a module that can be imported."""

    def write(old: str = "", new: str = ""):
        (tmp_path / "my_loss.py").write_text(blocks("python")[0].replace(old, new), "utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "my_loss", raising=False)
        names: dict = {}
        exec(blocks("python")[1], names)
        return names

    return write


def test_the_test_of_the_page_passes_and_fails_with_the_name_of_the_mistake(my_loss):
    my_loss()["test_the_loss_is_right"]()
    names = my_loss("torch.min", "torch.max")
    with pytest.raises(AssertionError, match=r"^Mistake: max_for_min\."):
        names["test_the_loss_is_right"]()


def test_notes_pass_and_a_loss_that_nobody_knows_does_not(my_loss):
    assert_grpo_loss(objective.grpo_loss)
    on_policy = my_loss("logps - old_logps", "logps - logps.detach()")["loss"]
    assert judge_loss(on_policy).verdict == "notes"
    assert_grpo_loss(on_policy)
    strange = my_loss("(gain * mask)", "(gain * mask).sin()")["loss"]
    with pytest.raises(AssertionError, match="Unknown: not a variant that the judge knows"):
        assert_grpo_loss(strange)
    assert not judge_loss(strange).mistakes  # what the page says to ask in its place
    with pytest.raises(AssertionError, match="Not judged: expected a function"):
        assert_grpo_loss(3)
