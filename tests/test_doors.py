"""The ways in: one address in every file, and a notebook that installs what it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path
from xml.etree import ElementTree

import doors
import nbformat
import pytest
import yaml
from listing import notebooks
from packaging.requirements import Requirement
from test_drawings import BADGES, self_contained
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
SETUP = """\
# @title Setup
import subprocess
import sys
from importlib.util import find_spec

if not find_spec("minigrpo"):  # on Colab, on Kaggle, or in a folder of its own
    course = "minigrpo[{extra}] @ git+https://github.com/{name}"
    print("Installing the course, which takes about a minute ...")
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", course], check=True)

from minigrpo.notebook.setup import drawing, setup

device = setup(seed=0)"""


def named(text: str) -> set[str]:
    """The repositories that a text takes for this one."""
    return {name for found in OURS.findall(text) for name in found if name}


# ---------------------------------------------------------------------------------------------
# one address


def test_every_file_names_the_repository_of_pyproject():
    name = doors.repository()
    tests = ROOT / "tests"
    found = {path: named(path.read_text(encoding="utf-8")) for path in doors.files()}
    found = {path: names for path, names in found.items() if names and tests not in path.parents}
    assert {*(notebook.location for notebook in COURSE), ROOT / "pyproject.toml"} <= {*found}
    assert {path.name for path, names in found.items() if names != {name}} == set()


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_a_notebook_opens_elsewhere_and_installs_the_course_there(notebook):
    name, cells = doors.repository(), nbformat.read(notebook.location, as_version=4).cells
    links = TITLE.format(name=name, file=notebook.file, page=f"{doors.site()}{notebook.stem}.html")
    assert cells[0].source.split("\n\n")[1] == links
    extra = "scale" if notebook.needs else "course"
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert first.source.startswith(SETUP.format(extra=extra, name=name))


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


# ---------------------------------------------------------------------------------------------
# badges, workflows and the container


def pythons() -> list[str]:
    """The versions that pyproject.toml allows."""
    low, end = re.findall(r"3\.(\d+)", project()["project"]["requires-python"])
    return [f"3.{minor}" for minor in range(int(low), int(end))]


@pytest.mark.parametrize("path", BADGES, ids=lambda path: path.stem)
def test_a_badge_says_what_is_true_and_loads_nothing(path):
    text = path.read_text(encoding="utf-8")
    assert self_contained(text) == []
    shown = [" ".join(e.itertext()) for e in ElementTree.fromstring(text) if not e.get("d")]
    true = {
        "badge-python": f"Python {pythons()[0]} to {pythons()[-1]}",
        "badge-read": "read it online",
        "badge-license": f"license {project()['project']['license']}",
    }
    said = true.get(path.stem, f"open in {path.stem.removeprefix('badge-').capitalize()}")
    assert " ".join(shown[-2:]) == said
    assert {*said.lower().split()} <= {*re.findall(r"[\w.]+", shown[0].lower())}  # the title


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


def test_the_pages_are_published_from_where_make_course_writes_them():
    build = WORKFLOWS["pages"]["jobs"]["build"]
    assert "make course SCALE=1" in steps(build, "run")
    assert {"path": "build/course"} in steps(build, "with")
    assert 'root / "build" / "course"' in text("tools/course/course.py")


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


def test_the_container_makes_the_environment_and_opens_the_first_notebook():
    told = re.sub(r"^\s*//.*$", "", text(".devcontainer/devcontainer.json"), flags=re.MULTILINE)
    container = json.loads(told)
    assert container["image"].removeprefix("python:") in pythons()
    make, stamp = container["postCreateCommand"].split()
    assert make == "make" and f"\n{stamp.replace('.venv', '$(VENV)')}:" in text("Makefile")
    (opened,) = container["customizations"]["codespaces"]["openFiles"]
    assert opened == f"notebooks/{COURSE[0].file}"


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


# ---------------------------------------------------------------------------------------------
# a notebook alone


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The course as pip gets it; `make release` names the one that will be published."""
    if "WHEEL" in os.environ:
        return Path(os.environ["WHEEL"])
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, isn't installed")
    out = tmp_path_factory.mktemp("wheel")
    code = "import sys, hatchling.build as build; build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, check=True)
    return out / f"minigrpo-{__version__}-py3-none-any.whl"


def files_of(*names: str) -> set[str]:
    """What these packages, and all that they need, have put beside one another."""
    wanted, files = [*names], set()
    for name in wanted:  # which grows
        package = distribution(name)
        files |= {path.parts[0] for path in package.files}
        needed = map(Requirement, package.requires or [])
        asked = [r.name for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
        wanted += {*asked} - {*wanted}
    return files


@pytest.fixture
def elsewhere(tmp_path, request) -> tuple[Path, dict[str, str]]:
    """A Python with all packages but the course, and an environment where it reaches no network.

    A test that names packages gets those and what they need, and no others.
    """
    pytest.importorskip("pip", reason="there is no pip in this environment")
    if os.name != "posix":
        pytest.skip("links to packages, which Windows allows to few")
    wanted = files_of("pip", *request.param) if hasattr(request, "param") else None
    (tmp_path / "packages").mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for package in Path(place).iterdir():
            if re.match(r"_*(?:editable__*)?minigrpo|.*\.pth$", package.name):
                continue
            if wanted is None or package.name in wanted:
                (tmp_path / "packages" / package.name).symlink_to(package)
    venv.create(tmp_path / "python", symlinks=True)
    (site,) = (tmp_path / "python" / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(str(tmp_path / "packages"))
    own = ("PIP_", "PYTHON", "PYTEST_", "JUPYTER", "MINIGRPO_", "XDG_")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    environment |= {
        "HOME": str(tmp_path),  # no kernels and no settings of the person who tests
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT / "tests" / "offline"),
        "MINIGRPO_TEST_CONNECTIONS": str(tmp_path / "connections"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    return tmp_path / "python" / "bin" / "python", environment


@pytest.mark.kernel
def test_a_notebook_alone_in_a_folder_installs_the_wheel_and_runs(elsewhere, wheel, tmp_path):
    python, environment = elsewhere
    folder = tmp_path / "alone"
    folder.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [str(python), *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )

    where = "import importlib.util as u; print(u.find_spec('minigrpo').origin)"
    assert "NoneType" in run("-c", where).stderr  # it isn't there
    original = COURSE[3].location
    text = original.read_text(encoding="utf-8")
    address = f"git+https://github.com/{doors.repository()}"
    assert text.count(address) == 1
    nb = nbformat.reads(text.replace(address, wheel.as_uri()), as_version=4)
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    said = "Installing the course, which takes about a minute ...\n"
    first.outputs = [nbformat.v4.new_output("stream", text=said)]
    nbformat.write(nb, folder / original.name)
    shutil.copy(ROOT / "conftest.py", folder)  # for its patience on a busy machine
    shutil.copytree(ROOT / "tests" / "predicted", folder / "tests" / "predicted")
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env", ".")
    assert ran.returncode == 0, ran.stdout  # the outputs are those of the checkout
    assert Path(run("-c", where).stdout).is_relative_to(tmp_path / "python")
    assert {path.name for path in folder.iterdir()} == {"conftest.py", "tests", original.name}
    assert not (tmp_path / "connections").exists()


# ---------------------------------------------------------------------------------------------
# the judge alone


def blocks(kind: str) -> list[str]:
    """The blocks of code of one kind in the page of the judge."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text("docs/judge.md"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("elsewhere", [("torch", "safetensors")], indirect=True, ids=["light"])
def test_the_page_of_the_judge_is_true_where_nothing_but_torch_and_safetensors_is(
    elsewhere, wheel, tmp_path
):
    python, environment = elsewhere
    folder = tmp_path / "mine"
    folder.mkdir()
    environment["PATH"] = os.pathsep.join([str(python.parent), environment["PATH"]])
    address = f"git+https://github.com/{doors.repository()}"
    install, judge = blocks("sh")[0].splitlines()
    (workflow,) = map(yaml.safe_load, blocks("yaml"))
    my_loss = folder / "my_loss.py"
    my_loss.write_text(blocks("python")[0], encoding="utf-8")

    def run(command: str, code: int = 0) -> str:
        command = command.replace(address, wheel.as_uri()).replace("pip ", "python -m pip ", 1)
        ran = subprocess.run(
            command, shell=True, cwd=folder, env=environment,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (code, ""), ran.stdout + ran.stderr
        return ran.stdout

    assert workflow["permissions"] == {"contents": "read"}
    *_, install_there, judge_there = steps(workflow["jobs"]["judge"], "run")
    assert address in install and address in install_there
    run(install)
    assert run(judge).startswith("Nothing wrong was found.\n")
    assert run(judge_there).startswith("Nothing wrong was found.\n")
    my_loss.write_text(blocks("python")[0].replace("torch.min", "torch.max"), encoding="utf-8")
    assert blocks("text")[0] in run(judge, code=1)
    assert {path.name for path in folder.iterdir()} == {"my_loss.py"}  # nothing is left behind
    assert not (tmp_path / "connections").exists()
