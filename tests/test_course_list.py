"""course.toml: it agrees with the notebooks, and everything that is made from it is up to date."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import course
import made_up
import nbformat
import pytest
import readme
from committed import figures, with_predicted
from listing import ROOT, notebooks

COURSE = notebooks()
COPIED = ("data", "notebooks", "docs", "figures", "recipes", "minigrpo", "tests", "tools")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "attacks", "cache")
TITLE = """# 99 Made up

| what it needs | minutes of reading | minutes of exercises | seconds to run | exercises |
|---|---|---|---|---|
| nothing | 100 | 15 | 999 on two cores | 3 |"""
ONE = '\n\n@exercise("{0}")\ndef {0}(n):\n    return n\n'
EXERCISES = '"""Made up."""\n\nfrom minigrpo.exercises.form import exercise\n'
EXERCISES += "".join(map(ONE.format, ("one", "two", "three")))


def test_what_is_made_of_the_list_is_up_to_date():
    for path, text in readme.lists().items():
        assert path.read_text("utf-8") == text, f"{path.name}: python tools/course/readme.py"
    maps = {path.name for path in (ROOT / "figures").glob("map_*.svg")}
    assert maps == {f"map_{notebook.number}.svg" for notebook in COURSE}


def test_every_notebook_is_in_the_list():
    there = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [notebook.file for notebook in COURSE] == there


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_an_entry_agrees_with_its_notebook(notebook):
    nb = with_predicted(nbformat.read(notebook.location, as_version=4), notebook.location)
    first = nb.cells[0].source.splitlines()[0]
    number = f"({notebook.number}|Appendix:)"
    assert re.fullmatch(rf"# {number} {re.escape(notebook.title)}(:.*)?", first)
    assert notebook.told["seconds to run"].split()[0] == str(notebook.seconds)
    assert notebook.told["exercises"] == str(notebook.exercises)
    assert notebook.path in ("core", "theory", "practice", "optional")
    assert len(notebook.built.split()) <= 10
    assert [cell.id for cell in nb.cells if cell.id == notebook.figure and figures(cell)]


def test_each_map_lights_the_parts_of_its_notebook_and_no_other():
    source = (ROOT / "figures" / "map.svg").read_text("utf-8")
    named = [part.split() for part in readme.PART.findall(source)]
    assert {number for part in named for number in part} <= {n.number for n in COURSE}
    for notebook in COURSE:
        text = readme.lit(source, notebook.number)
        groups = re.findall(r'<g class="part( lit)?">', text)
        assert [bool(lit) for lit in groups] == [notebook.number in part for part in named]
        assert f"<title>Map of the course: notebook {notebook.number}</title>" in text
        # a circle with its number is lit, and no circle of another
        circles = re.findall(r'<g class="part( lit)?"><circle class="num".*?>(\d\d|A)</text>', text)
        assert {digits for lit, digits in circles if lit} == {notebook.number}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the course with a made-up notebook: three files by hand, then the command."""
    root = tmp_path_factory.mktemp("copy")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, root)
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=LEFT_OUT)
    nbformat.write(made_up.notebook("1", text=TITLE), root / "notebooks" / "99_made_up.ipynb")
    (root / "minigrpo" / "exercises" / "99.py").write_text(EXERCISES)
    with (root / "course.toml").open("a") as entries:
        entry = made_up.ENTRY.format(number="99", stem="99_made_up", title="Made up")
        entries.write(entry.replace("seconds = 5", "seconds = 999"))
    command, env = [sys.executable, "tools/course/readme.py"], {"PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, env={**os.environ, **env}, check=True)
    return root


def text(copy: Path, name: str) -> str:
    return (copy / name).read_text("utf-8")


def test_a_new_notebook_is_in_the_tables_the_counts_and_the_maps(copy):
    many = readme.NUMBERS[len(COURSE) + 1].capitalize()
    exercises = sum(notebook.exercises for notebook in COURSE) + 3
    page = text(copy, "README.md")
    assert f"{many} notebooks that run on a laptop CPU" in page
    assert f"There are {exercises}. Your function" in page
    row = r"\| 99 \[Made up\]\(https://[^)]*/99_made_up\.html\) \(\[Colab\]\(https://colab\.[^)]*/"
    row += r"99_made_up\.ipynb\), \[file\]\(notebooks/99_made_up\.ipynb\)\) "
    assert re.search(row + r"\| what 99 builds \| 100 \+ 15 \|\n<!-- ", page)
    minutes = sum(int(notebook.told["minutes of reading"]) for notebook in COURSE) + 100
    assert f"about {readme.NUMBERS[round(minutes / 60)]} hours of reading" in page
    row = "[Made up](../notebooks/99_made_up.ipynb) | what 99 is about | core | 100 | 15 | 999 | 3"
    assert f"| 99 | {row} |\n" in text(copy, "docs/notebooks.md")
    assert f"{many} notebooks that build" in text(copy, "CITATION.cff")
    title = "<title>Map of the course: notebook 99</title>"
    assert title in text(copy, "figures/map_99.svg")


def test_a_new_notebook_is_executed_and_tested(copy):
    assert [notebook.number for notebook in course.choose(copy)][-1] == "99"
    spec = importlib.util.spec_from_file_location("conftest_of_the_copy", copy / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "MPLBACKEND", "MINIGRPO_PROGRESS"):  # which it sets
            patch.setenv(name, os.environ.get(name, ""))
        spec.loader.exec_module(module)
        module.pytest_unconfigure()
    assert module.LONGEST[0] == "99_made_up"
    tests = {f"tests/test_{name}.py" for name in ("notebooks", "site", "exercises")}
    tests |= {"notebooks/99_made_up.ipynb"}
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--nbval"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "::" in line and "99" in line]
    tested = {line.partition("::")[0] for line in lines}
    assert tested == tests
