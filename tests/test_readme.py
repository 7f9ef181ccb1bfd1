"""README.md and the pages around it: what they show, count and name is there."""

import re
from pathlib import Path

import nbformat
import pytest
import readme
from make_trl_answers import LOSS_CASES, REWARD_CASES
from safetensors.torch import load_file
from test_project import project, targets, text

from minigrpo import __version__
from minigrpo.clinic.catalogue import MISTAKES
from minigrpo.clinic.judge.trl_answers import VARIANTS
from minigrpo.exercises import judge
from minigrpo.exercises.reader import find
from minigrpo.study.oracle import list_world

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "GLOSSARY.md", *DOCS]
PAGES += ["data/README.md", "recipes/README.md"]
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


def page(name: str) -> str:
    """The prose of a page on one line."""
    return " ".join(text(name).split())


def test_the_transcripts_are_those_of_the_notebook():
    path = ROOT / "notebooks" / "07_grpo.ipynb"
    (cell,) = [c for c in nbformat.read(path, as_version=4).cells if c.get("id") == "follow"]
    shown = [line for line in cell.outputs[0].text.splitlines() if line.startswith("step ")]
    before, after = (
        re.split(r"  +", line)[1]
        for line in text("README.md").splitlines()
        if line.startswith(("before  ", "after 100 steps  "))
    )
    assert before in shown[0] and shown[0].startswith("step   0 ")
    assert after in shown[-1] and shown[-1].startswith("step 100 ")
    assert "(6, 9, 1, 2, 3)" in cell.source and "For 6 9 1 2 3 that's 1." in text("README.md")


def test_the_message_in_the_readme_is_what_a_reader_sees():
    sentence, unshifted = find("1.4").slips[0]
    assert "no shift" in sentence and "forget to shift the targets" in text("README.md")
    assert f"```text\n{judge('1.4', unshifted)[1]}\n```" in text("README.md")


def test_the_documents_count_what_the_objective_is_compared_with():
    assert f"{len(MISTAKES)} classic mistakes" in page("CONTRIBUTING.md")
    assert f"A world of {len(list_world().completions)} texts" in page("CONTRIBUTING.md")
    assert f"a world of {len(list_world().completions)} texts" in page("README.md")
    assert f"{LOSS_CASES} ragged batches under {len(VARIANTS)} settings" in page("CONTRIBUTING.md")
    assert f"{REWARD_CASES} sets of rewards" in page("CONTRIBUTING.md")


def test_figures_of_the_pages_are_those_of_the_notebooks():
    found = readme.figures()
    assert found, "no page shows a figure of a notebook"
    for path, png in found.items():
        assert path.read_bytes() == png, f"{path.name} is stale: run make execute"


@pytest.mark.parametrize("cell", ["setup", "nowhere"])
@pytest.mark.parametrize("name", ["README.md", "docs/page.md"])
def test_a_figure_that_its_notebook_does_not_have_is_an_error(tmp_path, cell, name):
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").touch()
    up = "../" * name.count("/")
    (tmp_path / name).write_text(f"![x]({up}figures/01_char_gpt.{cell}.png)")
    with pytest.raises(ValueError, match=f"cell '{cell}' of 01_char_gpt has 0 figures"):
        readme.figures(tmp_path)


def anchors(name: str) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    prose = re.sub(r"```.*?```", "", text(name), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "code", text(name), flags=re.DOTALL)
    for link in LINK.findall(prose):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        place = ((ROOT / name).parent / path if path else ROOT / name).resolve()
        assert place.exists(), link
        assert not anchor or anchor in anchors(place.relative_to(ROOT).as_posix()), link


@pytest.mark.parametrize("name", PAGES)
def test_every_target_and_file_that_a_page_calls_exists(name):
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text(name), re.MULTILINE))
    assert named <= targets(), f"{name} names {sorted(named - targets())}, which do not exist"
    called = r"python[^`\n]*? ((?:tools|tests|recipes)[/\\][\w/\\]+\.py)"
    scripts = re.findall(called, text(name)) + re.findall(r"`(tools/[\w/.]+)`", text(name))
    for script in scripts:
        assert (ROOT / script.replace("\\", "/")).exists(), f"{name} names {script}"
    for module in re.findall(r"python -m (minigrpo[\w.]*)", text(name)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_citation_and_the_changelog_agree_with_the_project():
    cited = dict(re.findall(r"^([\w-]+): \"?([^\">]+?)\"?$", text("CITATION.cff"), re.MULTILINE))
    about = project()["project"]
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert (cited["license"], cited["version"]) == (about["license"], __version__)
    assert (address := cited["repository-code"]) == about["urls"]["Repository"]
    assert about["urls"]["Changelog"] == f"{address}/blob/main/CHANGELOG.md"
    newest = re.search(r"^## \[(\d.*)\] - (20\d\d-\d\d-\d\d)$", text("CHANGELOG.md"), re.MULTILINE)
    assert newest.groups() == (cited["version"], cited["date-released"])
    assert f"\n[{newest[1]}]: {address}/releases/tag/v{newest[1]}\n" in text("CHANGELOG.md")
    assert cited["title"].startswith(about["name"])


@pytest.mark.parametrize(
    "card, files",
    [
        ("The char GPT", ["char_gpt.safetensors"]),
        ("The tiny Llama", ["tiny_llama"]),
        ("The two that call a tool", ["turns_llama", "turns_forger"]),
        ("The two text models", ["text_gpt2", "text_llama"]),
    ],
)
def test_the_cards_of_the_models_tell_their_sizes(card, files):
    said = text("data/README.md").partition(f"## {card}\n")[2].partition("\n## ")[0]
    for path in (ROOT / "data" / name for name in files):
        weights = path / "model.safetensors" if path.is_dir() else path
        count = sum(tensor.numel() for tensor in load_file(weights).values())
        assert f"{count:,}" in said and f"{weights.stat().st_size / 1e6:.1f}" in said, path
