"""tools/course/check.py: what it runs, and how files are shared out."""

import importlib.util
import os
from types import SimpleNamespace

import check
import pytest

ROOT = check.ROOT
NOTEBOOKS = {f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")}


def test_every_notebook_is_compared_strictly_and_the_audit_stands_apart(monkeypatch):
    monkeypatch.setattr(check, "lacks", lambda path: None)
    *lint, both = check.commands("test")
    assert lint == [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    assert {word for word in both if word.endswith(".ipynb")} == NOTEBOOKS
    assert "--nbval" in both and "--nbval-lax" not in both
    assert "tests" in both and "--ignore=tests/audit" in both
    *_, units = check.commands("test", "tests")
    (cells,) = check.commands("test", "notebooks")
    assert {*units} | {*cells} == {*both} and "tests" not in cells and not NOTEBOOKS & {*units}
    (audit,) = check.commands("audit")
    assert audit[-1] == "tests/audit" and (ROOT / audit[-1]).is_dir()
    assert f"-n {check.cores()} --dist loadfile" in " ".join(audit)
    assert 1 <= check.cores() <= os.cpu_count()


def test_a_notebook_without_its_library_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(check, "lacks", lambda path: "trl" if path.stem.startswith("10") else None)
    (cells,) = check.commands("test", "notebooks")
    assert len(NOTEBOOKS & {*cells}) == len(NOTEBOOKS) - 1
    assert "because trl is not installed" in capsys.readouterr().out


def test_a_command_runs_without_options_from_outside_and_without_a_network(monkeypatch):
    seen = []

    def ran(command, **given):
        seen.append((command, given))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(check.subprocess, "run", ran)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nbval-lax")
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    assert check.main(["test"]) == 7  # the first that fails is the last
    ((command, given),) = seen
    assert command[1:] == ["-m", "ruff", "check", "."] and given["cwd"] == ROOT
    environment = given["env"]
    assert "PYTEST_ADDOPTS" not in environment and environment["MINIGRPO_THREADS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "tests" / "offline")
    with pytest.raises(SystemExit, match="make audit"):
        check.main(["tests"])


@pytest.fixture
def root_conftest():
    """The module conftest.py beside the package, which shares the tests out."""
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_longest_go_first_and_a_file_stays_together(root_conftest):
    stems = {path.stem for path in (*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("tests/**/*.py"))}
    assert {*root_conftest.LONGEST} <= stems
    names = [
        "tests/test_a.py::a",
        "notebooks/07_grpo.ipynb::Cell 0",
        "notebooks/01_char_gpt.ipynb::",
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    root_conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    assert [item.nodeid for item in items] == [names[1], names[2], names[0]]
    assert root_conftest.share(names[1]) == "notebooks/07_grpo.ipynb"
