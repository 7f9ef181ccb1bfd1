"""The course and the judge as pip gets them, where neither a checkout nor a network is."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

import doors
import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from test_doors import ROOT, TRIED, steps
from test_project import text

from minigrpo import __version__


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
    original = TRIED.location
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
