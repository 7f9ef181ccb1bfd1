"""The files around the package agree with one another."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from listing import notebooks, tomllib
from packaging.requirements import Requirement
from test_house import imports

from minigrpo.clinic.judge.trl_answers import Answers

ROOT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    """The text of a file of the repository."""
    path = ROOT / name
    assert path.is_file(), f"{name} is missing"
    return path.read_text(encoding="utf-8")


def project() -> dict:
    """The tables of pyproject.toml."""
    return tomllib.loads(text("pyproject.toml"))


def extra(name: str) -> list[Requirement]:
    """What an extra of pyproject.toml asks for."""
    return [*map(Requirement, project()["project"]["optional-dependencies"][name])]


def pins() -> list[Requirement]:
    """The pins of requirements.txt: a line that is not a name, such as a path, is an error."""
    lines = re.sub(r"(^|\s)#.*", "", text("requirements.txt"), flags=re.MULTILINE).splitlines()
    return [Requirement(line) for line in lines if line]


def targets() -> set[str]:
    """The targets of the Makefile that a person calls."""
    found = re.search(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)
    assert found, "the Makefile has no .PHONY line"
    return set(found[1].split())


@pytest.mark.parametrize("pin", pins(), ids=str)
def test_pin_is_exact_and_within_its_range(pin):
    needed = [*map(Requirement, project()["project"]["dependencies"]), *extra("course")]
    needed += extra("lab")  # the last range counts: the course's torch is newer than the judge's
    ranges = {requirement.name: requirement.specifier for requirement in needed}
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert pin.name in ranges
    assert ranges[pin.name].contains(exact.version), f"{pin} is outside {ranges[pin.name]}"


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_every_python_gets_one_pin_of_each_package(minor):
    python = {"python_version": f"3.{minor}"}
    names = [pin.name for pin in pins() if not pin.marker or pin.marker.evaluate(python)]
    wanted = ["jupyter", "latex2mathml", "matplotlib", "nbval", "requests", "torch", "transformers"]
    assert sorted(names) == wanted
    assert {requirement.name for requirement in extra("lab")} < {*names}
    assert project()["project"]["requires-python"] == ">=3.10,<3.14"


def test_a_notebook_finds_the_package_beside_its_folder_or_says_that_it_is_missing(tmp_path):
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = "from importlib.util import find_spec; print(find_spec('minigrpo.grpo').origin)"
    command = [sys.executable, "-S", "-c"]  # -S: nothing is installed
    folder = ROOT / "notebooks"
    found = subprocess.check_output([*command, code], cwd=folder, env=bare, text=True)
    assert found.strip() == str(ROOT / "minigrpo" / "grpo.py")
    shutil.copy(folder / "minigrpo.py", tmp_path)
    command = [*command, "import minigrpo"]
    ran = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert f"minigrpo is not in {tmp_path.parent}" in ran.stderr


def test_ranges_end_before_the_next_major_version():
    extras = project()["project"]["optional-dependencies"].values()
    named = [*project()["project"]["dependencies"], *sum(extras, [])]
    for requirement in map(Requirement, named):
        if requirement.name != "minigrpo":
            assert {"<", ">="} == {s.operator for s in requirement.specifier}, requirement


def test_the_judge_needs_two_packages_and_every_other_extra_brings_the_course():
    needed = [*map(Requirement, project()["project"]["dependencies"])]
    assert {requirement.name for requirement in needed} == {"torch", "safetensors"}
    for name in {*project()["project"]["optional-dependencies"]} - {"course", "lab"}:
        assert "minigrpo[course]" in map(str, extra(name)), name


def test_trl_is_wanted_where_there_is_one_and_the_stored_answers_are_of_its_range():
    (trl,) = (requirement for requirement in extra("scale") if requirement.name == "trl")
    assert trl.specifier.contains(Answers().versions["trl"])
    wanted = [trl.marker.evaluate({"python_version": f"3.{minor}"}) for minor in (10, 11, 12, 13)]
    assert wanted == [False, True, True, True]


@pytest.mark.parametrize("document", ["Makefile", "docs/help.md"])
def test_whoever_tests_installs_every_extra(document):
    extras = {*project()["project"]["optional-dependencies"]}
    extras -= {"lab", "course"}  # requirements.txt pins the one, and the others bring the other
    assert f".[{','.join(sorted(extras))}]" in text(document)


def test_options_leave_the_comparison_of_notebooks_alone():
    assert "nbval" not in str(project()["tool"]["pytest"]["ini_options"]["addopts"])


def test_the_makefile_explains_its_targets():
    assert set(re.findall(r"echo 'make ([a-z-]+)", text("Makefile"))) == targets() - {"help"}


def test_files_called_by_the_makefile_exist():
    scripts = re.findall(r"\b(?:tools|tests|recipes)/[\w/]+\.py", text("Makefile"))
    modules = re.findall(r"-m (minigrpo\.\S+)", text("Makefile"))
    assert scripts and modules
    for path in [*scripts, *(f"{module.replace('.', '/')}.py" for module in modules)]:
        assert (ROOT / path).is_file(), f"the Makefile calls {path}"


def recipe(target: str) -> str:
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)[1]


def test_make_results_makes_every_stored_result():
    tools = re.findall(r"(tools/[\w/]+\.py)", recipe("results"))
    assert len(set(tools)) == len(tools)
    assert tools[-1] == "tools/course/readme.py"  # which shows what was measured
    stored = {path.stem for path in (ROOT / "data" / "results").glob("*.json")}
    stored -= {"bench", "real_run", "real_steps", "gpu", "judged"}  # of commands of their own
    for name in stored:
        makers = [tool for tool in tools[:-1] if f'"{name}.json"' in text(tool)]
        assert len(makers) == 1, f"{name}.json is made by {makers}"
        assert f"| `{name}.json` | " in text("data/README.md")
    for name in ("real_run", "real_steps", "gpu", "judged"):
        assert f"| `{name}.json` | " in text("data/README.md")
    for target, name in (("real", "real_run"), ("real", "real_steps"), ("gpu", "gpu")):
        assert f'"{name}.json"' in text(re.search(r"tools/[\w/]+\.py", recipe(target))[0])
    assert recipe("results").count(".py $(if $(AGAIN),--again)\n") == len(tools) - 1


NUMBERS = [notebook.number for notebook in notebooks()]


def glossary() -> list[tuple[str, str]]:
    """The words of the glossary, each with the number of the notebook that explains it, if any."""
    row = r"^\| ([^|]+?) \| [^|]+ \| (\d\d|A|)\s*\|$"
    return re.findall(row, text("GLOSSARY.md"), re.MULTILINE)


def names(word: str) -> list[str]:
    """All names of a word such as "supervised fine-tuning (SFT), warm-up"."""
    return [name for name in re.split(r"[,()]\s*|\s\(", word) if name]


def cells(number: str) -> list[nbformat.NotebookNode]:
    (notebook,) = (notebook for notebook in notebooks() if notebook.number == number)
    return nbformat.read(notebook.location, as_version=4).cells


def markdown(number: str) -> str:
    """All that a notebook says in prose."""
    return "\n".join(cell.source for cell in cells(number) if cell.cell_type == "markdown")


def says(prose: str, word: str) -> bool:
    """Whether a text has a word under one of its names, whole: "rank" isn't in "frank"."""
    ways = "|".join(map(re.escape, names(word)))
    return bool(re.search(rf"(?<![\w-])(?:{ways})(?:s|es)?(?!\w)", prose, re.IGNORECASE))


def test_the_glossary_names_a_notebook_that_has_the_word():
    words = glossary()
    assert len(words) > 100 and words == sorted(words, key=lambda word: word[0].lower())
    prose = {number: markdown(number) for number in NUMBERS}
    assert [word for word, n in words if n and not says(prose[n], word)] == []
    assert [word for word, n in words if not n and any(says(p, word) for p in prose.values())] == []


def test_the_glossary_names_the_first_notebook_that_introduces_the_word():
    bold = {}
    for number in NUMBERS:  # code may have ** too
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", markdown(number), flags=re.DOTALL).lower()
        found = re.findall(r"\*\*([^*\n]+)\*\*", prose)
        bold[number] = {name for told in found for name in names(told.rstrip("."))}
    late = []
    for word, number in glossary():
        ways = {way.lower() + plural for way in names(word) for plural in ("", "s", "es")}
        first = min((n for n in bold if ways & bold[n]), default=None)
        if first is not None and not "" < number <= first:
            late.append(f"{word}: {number or 'no number'}, but introduced in bold by {first}")
    assert late == [], "GLOSSARY.md"


def test_the_notebook_of_a_symbol_has_its_name_in_code():
    rows = re.findall(r"^\| \$.+\$ \| (.*?) \|.*\| (\d\d|A) \|$", text("GLOSSARY.md"), re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| \$", text("GLOSSARY.md"), re.MULTILINE)) > 20
    for code, number in rows:
        source = "\n".join(cell.source for cell in cells(number))
        for name in re.findall(r"`(\w+)", code):
            assert re.search(rf"\b{name}\b", source), f"{name} isn't in {number}"


def test_the_package_is_listed_in_course_order_and_imports_only_upwards():
    doc = ast.get_docstring(ast.parse(text("minigrpo/__init__.py")))
    order = re.findall(r"\w+", re.search(r"ones\s+before\s+it:([^.]+)\.", doc)[1])
    modules = {path.stem for path in (ROOT / "minigrpo").glob("*.py")} - {"__init__"}
    assert set(order) == modules and len(order) == len(set(order))
    for name in modules:
        taken = imports(ROOT / "minigrpo" / f"{name}.py")
        beside = {path.stem for path in taken if path.parent.name == "minigrpo"} & modules
        later = beside - set(order[: order.index(name)])
        assert not later, f"{name} imports {sorted(later)}, which the course meets later"
