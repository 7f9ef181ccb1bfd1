"""Checksums of what decides how a stored run went."""

from __future__ import annotations

import linecache
import shutil
import types
from pathlib import Path

import fingerprints
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """def f(x):
    y = 0.2 * x
    for _ in range(2):
        y = y + 1
    return y
"""


def code(source: str, name: str = "f") -> str:
    """The checksum of a function with this source."""
    file = f"<{source}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType("made_up")
    exec(compile(source, file, "exec"), module.__dict__)
    return fingerprints.of_code(module.__dict__[name])[name]


@pytest.mark.parametrize(
    ("before", "after"),
    [("0.2", "0.3"), ("range(2)", "range(3)"), ("    return", "        return"), ("+ 1", "- 1")],
)
def test_a_change_of_code_is_noticed(before, after):
    assert before in SOURCE
    assert code(SOURCE.replace(before, after)) != code(SOURCE)


@pytest.mark.parametrize(
    ("before", "after"),
    [("x\n", "x  # a comment\n"), ("    for", "\n    # a line\n    for"), ("0.2 * x", "0.2  *  x")],
)
def test_a_comment_and_the_layout_are_not(before, after):
    assert before in SOURCE
    assert code(SOURCE.replace(before, after)) == code(SOURCE)


@pytest.mark.parametrize("text", ['f"{x}"', "rf'{x}'", 'F"""{x}"""'])
def test_an_f_string_is_refused_since_its_pieces_depend_on_the_python(text):
    with pytest.raises(ValueError, match="f-string"):
        code(SOURCE.replace("0.2", text))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_every_file_of_a_model_counts(tmp_path, file):
    folder = shutil.copytree(ROOT / "data" / "text_gpt2", tmp_path / "model")
    before = fingerprints.of_folder(folder)
    (folder / ".DS_Store").write_text("what a desktop leaves behind")
    assert fingerprints.of_folder(folder) == before
    (folder / file).write_bytes((folder / file).read_bytes() + b" ")
    assert fingerprints.of_folder(folder) != before
