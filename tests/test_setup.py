"""What a notebook starts from, and files that exist only when they are whole."""

import os
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import pytest
import torch
import transformers
from matplotlib_inline.config import InlineBackend

from minigrpo import files
from minigrpo.files import atomic_path, data_folder
from minigrpo.notebook.setup import setup


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the person who runs the tests reaches `setup`, and no figure style stays."""
    for name in ("MINIGRPO_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MINIGRPO_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    with plt.rc_context():
        yield


def test_the_seed_decides_the_random_numbers_and_a_variable_the_device(monkeypatch):
    draws = []
    for seed in (3, 3, 4):
        assert setup(seed) == torch.device("cpu")
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1] != draws[2]
    monkeypatch.setenv("MINIGRPO_DEVICE", "meta")
    assert setup() == torch.device("meta")


@pytest.mark.parametrize(
    ("variables", "cores", "threads"),
    [
        ({"MINIGRPO_THREADS": " 3 ", "OMP_NUM_THREADS": "2"}, 2, 3),
        ({"MINIGRPO_THREADS": " ", "OMP_NUM_THREADS": "3"}, 2, 3),
        ({"OMP_WAIT_POLICY": "passive"}, 1, 1),
        ({"OMP_WAIT_POLICY": "passive"}, 64, 2),
        ({"OMP_WAIT_POLICY": "passive"}, None, 1),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 64, 1),  # they would spin
        ({}, 64, 1),
    ],
    ids=str,
)
def test_the_environment_decides_the_threads(monkeypatch, variables, cores, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    setup()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("before", "policy"),
    {
        "": "PASSIVE",
        "os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'; ": "ACTIVE",  # the reader's wish
        "sys.modules['torch'] = None; ": "None",  # too late
    }.items(),
)
def test_the_package_asks_threads_to_sleep_before_torch_loads(before, policy):
    script = f"import os, sys; {before}import minigrpo; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == policy


def test_setup_silences_the_libraries_and_sets_the_style():
    transformers.logging.set_verbosity_warning()
    plt.rcParams["axes.spines.top"] = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setup()
        warnings.warn("another default from the next version on", FutureWarning, stacklevel=1)
        warnings.warn("this is odd", UserWarning, stacklevel=1)
    categories = [w.category for w in told]
    assert UserWarning in categories and FutureWarning not in categories
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    assert not transformers.logging.is_progress_bar_enabled()
    assert plt.rcParams["axes.spines.top"] is False
    width, height = plt.rcParams["figure.figsize"]
    assert width <= 7 and height <= 3.5  # it fits a page


@pytest.mark.parametrize(("kernel", "formats"), [(True, {"retina"}), (False, {"png"})])
def test_figures_are_sharp_in_a_kernel(monkeypatch, kernel, formats):
    InlineBackend.clear_instance()
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", object())
    setup()
    assert InlineBackend.instance().figure_formats == formats
    InlineBackend.clear_instance()


def test_a_whole_file_takes_its_name_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as first, atomic_path(path) as second:
        assert first.parent == path.parent  # os.replace works within one file system
        first.write_text("first")
        second.write_text("second")
        assert not path.exists()
    assert path.read_text() == "first"  # the outer block ends last
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_path(path) as unfinished:
        unfinished.write_text("ha")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_whole_file_is_as_readable_as_any_other(tmp_path):
    (tmp_path / "ordinary").write_text("")
    with atomic_path(tmp_path / "atomic") as unfinished:
        unfinished.write_text("")
    modes = [(tmp_path / name).stat().st_mode for name in ("ordinary", "atomic")]
    assert modes[0] == modes[1]


def test_the_data_folder_is_the_one_of_the_checkout_and_in_a_wheel_that_of_the_package(
    tmp_path, monkeypatch
):
    assert (data_folder() / "offline_corpus.txt").is_file() and data_folder().name == "data"
    package = tmp_path / "site-packages" / "minigrpo"
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    (tmp_path / "site-packages" / "data").mkdir(parents=True)  # somebody else's
    assert data_folder() == package / "data"
