"""The ways in: one address in every file, and a notebook that installs what it needs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doors
import nbformat
import pytest
import yaml
from listing import notebooks
from test_project import project, targets, text

from minigrpo import __version__

ROOT = doors.ROOT
COURSE = notebooks()
NAME = r"([\w.-]+/[\w.-]+?)(?:\.git)?(?![\w.-])"
# Where a file names this repository and no other.
BEFORE = (
    r"colab\.research\.google\.com/github/",
    r"codespaces\.new/",
    r"(?:welcome\?src=|git\+|git clone (?:--\S+ )*)https://github\.com/",
    r"(?:repository-code: \"?|Repository = \")https://github\.com/",
)
OURS = re.compile("|".join(before + NAME for before in BEFORE))
TITLE = (
    "[Read it online]({page}) · "
    "[Open in Colab](https://colab.research.google.com/github/{name}/blob/main/notebooks/{file}) · "
    "[Open in Kaggle](https://kaggle.com/kernels/welcome"
    "?src=https://github.com/{name}/blob/main/notebooks/{file})"
)
TRIED = COURSE[3]  # alone in a folder, in audit/test_wheel.py
END = "device = setup(seed=0)"


def named(text: str) -> set[str]:
    """The repositories that a text takes for this one."""
    return {name for found in OURS.findall(text) for name in found if name}


def test_every_file_names_the_repository_of_pyproject():
    name = doors.repository()
    tests = ROOT / "tests"
    found = {path: named(path.read_text(encoding="utf-8")) for path in doors.files()}
    found = {path: names for path, names in found.items() if names and tests not in path.parents}
    assert {*(notebook.location for notebook in COURSE), ROOT / "pyproject.toml"} <= {*found}
    assert {path.name for path, names in found.items() if names != {name}} == set()


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_a_notebook_opens_elsewhere_and_installs_the_course_there(notebook):
    """All begin like the one that is tried, with an extra of their own."""
    name, cells = doors.repository(), nbformat.read(notebook.location, as_version=4).cells
    links = TITLE.format(name=name, file=notebook.file, page=f"{doors.site()}{notebook.stem}.html")
    assert cells[0].source.split("\n\n")[1] == links
    extra = "scale" if notebook.needs else "course"
    first, tried = (
        next(cell.source for cell in some if cell.cell_type == "code").partition(END)
        for some in (cells, nbformat.read(TRIED.location, as_version=4).cells)
    )
    assert first[:2] == (tried[0].replace("minigrpo[course]", f"minigrpo[{extra}]"), END)


def test_a_new_address_reaches_every_file_and_no_other_repository(tmp_path):
    def links(name: str) -> str:
        owner, short = name.split("/")
        return (
            f'git clone https://github.com/{name}.git\n"minigrpo @ git+https://github.com/{name}"\n'
            f"https://colab.research.google.com/github/{name}/blob/main/x.ipynb\n"
            f"https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/main/x.ipynb\n"
            f"https://codespaces.new/{name} https://{owner}.github.io/{short}/ github.com/{name}.\n"
        )

    old, others = doors.repository(), "github.com/huggingface/trl minigrpo/minigrpo "
    others += f"https://github.com/{old}-else https://mygithub.com/{old}\n"
    for file in ("README.md", "notebooks/x.ipynb", ".github/workflows/course.yml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(links(old) + others)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x.md").write_text(links(old))
    (tmp_path / "pyproject.toml").write_text(f'Repository = "https://github.com/{old}"\n')
    for new in ("somebody/learn-grpo", "a.b/c.d", old):
        assert len(doors.move(new, tmp_path)) == 4
        assert doors.repository(tmp_path) == new
        assert (tmp_path / "notebooks" / "x.ipynb").read_text() == links(new) + others
    assert (tmp_path / ".venv" / "x.md").read_text() == links(old)


@pytest.mark.parametrize("given", [[], ["https://example.org/you/minigrpo"], ["you/minigrpo"]])
def test_an_address_elsewhere_is_refused(given):
    command = [sys.executable, "tools/course/doors.py", *given]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and "make address REPOSITORY=https://github.com/" in ran.stderr


def pythons() -> list[str]:
    """The versions that pyproject.toml allows."""
    low, end = re.findall(r"3\.(\d+)", project()["project"]["requires-python"])
    return [f"3.{minor}" for minor in range(int(low), int(end))]


WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def steps(job: dict, key: str) -> list[str]:
    """What the steps of a job run, or the actions they use."""
    return [step[key] for step in job.get("steps", []) if key in step]


def test_the_course_is_tested_on_every_python_and_on_windows_as_the_help_says():
    jobs = WORKFLOWS["course"]["jobs"]
    matrix, windows = jobs["test"]["strategy"]["matrix"], jobs["windows"]
    assert matrix["python"] == pythons()
    assert matrix["part"] == ["tests", "notebooks"]  # two jobs, which together are all of it
    assert {*windows["strategy"]["matrix"]["python"]} == {pythons()[0], pythons()[-1]}
    told = re.sub(r"\bpy -3\.\d+ -m venv", "python -m venv", text("docs/help.md"))
    lines = [re.sub(r"\s+#.*", "", line) for line in told.splitlines()]
    for command in steps(windows, "run"):
        assert command in lines, f"{command!r} is not among the steps for Windows"


def test_the_audit_runs_on_mondays_and_when_its_data_changes():
    audit = WORKFLOWS["audit"]
    assert audit[True]["schedule"][0]["cron"].endswith("* * 1")
    assert audit[True]["push"]["paths"] == audit[True]["pull_request"]["paths"]
    for pattern in audit[True]["push"]["paths"]:
        assert [*ROOT.glob(pattern.replace("/**", "/*"))], f"{pattern} fits no file"
    assert steps(audit["jobs"]["audit"], "run")[-1] == "make audit"


def test_a_tag_is_tested_and_built_before_the_site_and_the_release_are_published():
    jobs = WORKFLOWS["release"]["jobs"]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    needs = {name: job["needs"] for name, job in jobs.items() if "needs" in job}
    assert needs == {"pages": ["test", "audit", "build"], "publish": "pages"}
    called = [Path(job["uses"]).stem for job in jobs.values() if "uses" in job]
    assert called == ["course", "audit", "pages"]
    assert all("workflow_call" in WORKFLOWS[name][True] for name in called)
    # In a workflow that is called, github.workflow is the caller, and a group for all cancels all.
    groups = [WORKFLOWS[name]["concurrency"]["group"] for name in called]
    assert len({*groups}) == 3 and "github.workflow" not in str(groups)
    assert steps(jobs["build"], "run") == ["make release"]
    assert jobs["build"]["env"]["TAG"] == "${{ github.ref_name }}"
    asked = WORKFLOWS["pages"]["jobs"]["publish"]["permissions"]
    assert jobs["pages"]["permissions"] == {"contents": "read", **asked}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"pages", "publish"}
    (action,) = steps(jobs["publish"], "uses")  # no checkout: nothing of the repository may write
    assert action.startswith("actions/download-artifact@")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_and_calls_targets_that_there_are(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    for job in WORKFLOWS[name]["jobs"].values():
        for command in steps(job, "run"):
            assert "${{" not in command  # a shell would run what stands in the variable
            make, *words = command.partition(" #")[0].split()
            if make == "make":
                assert words[0] in targets()
                for variable in (word.partition("=")[0] for word in words[1:]):
                    assert re.search(rf"^{variable} \?=", text("Makefile"), re.MULTILINE)


# Without the settings of a make that tests.
OUTER = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ONLY", "SCALE", "TAG"}
NO_MAKE = {name: value for name, value in os.environ.items() if name not in OUTER}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"TAG": "v0.1.0"}, f"error: the tag is v0.1.0, but the version is {__version__}"),
        ({"TAG": f"v{__version__}"}, "error: commit first"),
        ({}, "error: commit first"),
    ],
)
def test_no_release_of_a_different_tag_or_of_what_is_not_committed(given, error, tmp_path):
    for file in ("Makefile", "minigrpo/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    command = ["make", "release"]
    ran = subprocess.run(command, cwd=tmp_path, env=NO_MAKE | given, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout.startswith(error), ran.stdout
    assert not (tmp_path / "build").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("given", "number", "stamp"),
    [([], 1, ".installed"), (["ONLY=02"], 2, ".installed"), (["SCALE=1"], 1, "-scale")],
)
def test_lab_opens_the_notebook_asked_for_and_installs_the_extra(given, number, stamp):
    command = ["make", "--dry-run", "--always-make", "lab", *given]
    printed = subprocess.check_output(command, cwd=ROOT, text=True, env=NO_MAKE)
    *installing, opening = printed.split("-m jupyter")
    path = f"notebooks/{COURSE[number - 1].file}"
    assert opening.rstrip().endswith(f"default_url=/lab/tree/{path}")
    assert re.findall(r"touch (\S+)", "".join(installing))[-1].endswith(stamp)
