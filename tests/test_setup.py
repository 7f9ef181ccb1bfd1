"""What a notebook starts from, and files that exist only when they are whole."""

from __future__ import annotations

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


# ---------------------------------------------------------------------------------------------
# setup


def test_the_seed_decides_the_random_numbers():
    draws = []
    for seed in (3, 3, 4):
        setup(seed)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"MINIGRPO_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"MINIGRPO_THREADS": " 2 ", "OMP_NUM_THREADS": "1"}, 2),
        ({"MINIGRPO_THREADS": " ", "OMP_NUM_THREADS": "1"}, 1),
    ],
    ids=str,
)
def test_the_environment_decides_the_threads(monkeypatch, variables, threads):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    setup()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (64, 2), (None, 1)])
def test_threads_that_sleep_are_one_per_core_up_to_two(monkeypatch, cores, threads):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    setup()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("policy", ["", "ACTIVE"])
def test_threads_that_would_spin_are_avoided(monkeypatch, policy):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    setup()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("before", "given", "policy"),
    [
        ("", None, "PASSIVE"),
        ("", "ACTIVE", "ACTIVE"),
        ("import sys; sys.modules['torch'] = None; ", None, "None"),
    ],
    ids=["asked to sleep", "the reader's wish stands", "too late after torch"],
)
def test_the_package_asks_threads_to_sleep_before_torch_loads(monkeypatch, before, given, policy):
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    script = f"{before}import os, minigrpo; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == policy


def test_the_device_is_the_cpu_unless_named(monkeypatch):
    assert setup() == torch.device("cpu")
    monkeypatch.setenv("MINIGRPO_DEVICE", "meta")
    assert setup() == torch.device("meta")


def test_setup_silences_the_libraries_and_sets_the_style():
    transformers.logging.set_verbosity_warning()
    plt.rcParams["axes.spines.top"] = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setup()
        warnings.warn("another default from the next version on", FutureWarning, stacklevel=1)
        warnings.warn("this is odd", UserWarning, stacklevel=1)
    assert UserWarning in (categories := [w.category for w in told])
    assert FutureWarning not in categories
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    assert not transformers.logging.is_progress_bar_enabled()
    assert plt.rcParams["axes.spines.top"] is False


@pytest.mark.parametrize(("kernel", "formats"), [(True, {"retina"}), (False, {"png"})])
def test_figures_are_sharp_in_a_kernel(monkeypatch, kernel, formats):
    InlineBackend.clear_instance()
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", object())
    setup()
    assert InlineBackend.instance().figure_formats == formats
    InlineBackend.clear_instance()


# ---------------------------------------------------------------------------------------------
# files


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file_takes_its_name_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as unfinished:
        unfinished.write_text("whole")
        assert unfinished.parent == path.parent  # os.replace works within one file system
        assert not path.exists()
    assert path.read_text() == "whole"
    assert names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_path(path) as unfinished:
        unfinished.write_text("ha")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "file.txt"
    with atomic_path(path) as first, atomic_path(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the outer block ends last
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_whole_file_is_as_readable_as_any_other(tmp_path):
    (tmp_path / "ordinary").write_text("")
    with atomic_path(tmp_path / "atomic") as unfinished:
        unfinished.write_text("")
    modes = [(tmp_path / name).stat().st_mode for name in ("ordinary", "atomic")]
    assert modes[0] == modes[1]


def test_the_data_folder_is_the_one_of_the_checkout():
    assert (data_folder() / "offline_corpus.txt").is_file()
    assert data_folder().name == "data"


def test_the_data_folder_of_a_wheel_lies_in_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "minigrpo"
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    (tmp_path / "site-packages" / "data").mkdir(parents=True)  # somebody else's
    assert data_folder() == package / "data"
