"""docs/cheatsheet.md: its settings, formulas, names and numbers are those of the course."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from committed import with_predicted

from minigrpo.objective import VARIANTS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "cheatsheet.md").read_text("utf-8")
NAMES = {"GRPO": "grpo", "Dr. GRPO": "dr_grpo", "DAPO": "dapo", "GSPO": "gspo"}
NAMES |= {"CISPO": "cispo", "RLOO": "rloo"}


def rows(section: str) -> list[list[str]]:
    """The cells of each row of the table in a section, without its head."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


VARIANT_ROWS = {NAMES[row[0]]: row[1:] for row in rows("The loss")}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_settings_are_those_of_the_package(name):
    call = ast.parse(f"dict({VARIANT_ROWS[name][3].strip('`')})", mode="eval").body
    told = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert told == VARIANTS[name]


# What each formula of the table says, as settings. A formula that changes has to change here too.
ADVANTAGES = {
    r"$(r_i - \bar r) / \sigma$": ("group", "mean"),
    r"$r_i - \bar r$": ("none", "mean"),
    r"$r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j$": ("none", "leave_one_out"),
}
TERMS = {
    r"$\min(\rho_{i,t} \hat A_i, C(\rho_{i,t}) \hat A_i)$": ("token", "clip"),
    r"$\min(g_i \hat A_i, C(g_i) \hat A_i)$, "
    r"$g_i = (\prod_t \rho_{i,t})^{1 / \lvert o_i \rvert}$": ("geometric", "clip"),
    r"$\mathrm{sg}[\min(\rho_{i,t}, 1 + \varepsilon_{high})]\, \hat A_i \log\pi_\theta(o_{i,t})$": (
        ("token", "cispo")
    ),
    r"$\min(p_i \hat A_i, C(p_i) \hat A_i)$, $p_i = \prod_t \rho_{i,t}$": ("sequence", "clip"),
}
AVERAGES = {
    r"$\frac1N \sum_i \frac{1}{\lvert o_i \rvert} \sum_t$": "sequence_mean",
    r"$\frac{1}{\sum_j \lvert o_j \rvert} \sum_i \sum_t$": "token_mean",
    r"$\frac{1}{N L} \sum_i \sum_t$": "constant",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_formulas_are_those_of_the_settings(name):
    """What a setting computes, test_objective.py proves."""
    settings = {"baseline": "mean", "level": "token", "surrogate": "clip", **VARIANTS[name]}
    advantage, term, average, _ = VARIANT_ROWS[name]
    assert ADVANTAGES[advantage] == (settings["scale"], settings["baseline"])
    assert TERMS[term] == (settings["level"], settings["surrogate"])
    assert AVERAGES[average] == settings["how"]


def test_the_names_of_trl_are_those_of_the_installed_one():
    pytest.importorskip("trl", reason="the extra `scale` is not installed")
    from test_knobs import differing

    section = TEXT[TEXT.index("## The same setting") : TEXT.index("## What to watch")]
    assert differing(section.replace("| here | TRL |", "| here | |")) == {}
    assert len(re.findall(r"^\| [^|]*\| `\w+", section, re.MULTILINE)) >= 9


def source(stem: str) -> str:
    """Texts, code, descriptions and stored outputs of a notebook."""
    path = ROOT / "notebooks" / f"{stem}.ipynb"
    nb = with_predicted(nbformat.read(path, as_version=4), path)
    told = [[cell.source, str(cell.metadata.get("alt", ""))] for cell in nb.cells]
    told += [[output.get("text", "")] for cell in nb.cells for output in cell.get("outputs", [])]
    return "\n".join(part for parts in told for part in parts)


def test_the_names_of_verl_are_those_of_the_long_table():
    known = (ROOT / "docs" / "knobs.md").read_text("utf-8")
    for _, _, cell in rows("The same setting elsewhere"):
        for name, default in re.findall(r"`([a-z_]+\.[\w.]+)`(?: \(([^)]*)\))?", cell):
            assert f"`{name}`" in known, name
            assert f"`{name}` ({default}" in known or not default, name
        for value in re.findall(r'`"([^"]+)"`', cell):
            assert f'"{value}"' in known, value
    assert "`actor.clip_ratio_high=4`" in TEXT and "`clip_ratio_high=4`" in known


def test_the_numbers_are_those_that_were_measured():
    watched = {row[0].split(",")[0].strip("`"): row[2] for row in rows("What to watch")}
    runs = json.loads((ROOT / "data" / "results" / "real_run.json").read_text("utf-8"))["runs"]
    steps = next(r["steps"] for r in runs if (r["shots"], r["lr"]) == ("one loss", 1e-5))
    for name in ("reward", "frac_reward_zero_std", "truncated", "entropy", "grad_norm"):
        assert watched[name] == ", ".join(f"{steps[at][name]:.2f}" for at in (0, 4, 19)), name
    family = source("05_kl_and_family")
    healthy, fast, loose = re.findall(r"\d\.\d\d", watched["kl"])
    for run, kl in (("healthy  ", healthy), ("too fast ", fast), ("no anchor", loose)):
        assert re.search(rf"^{run} reward \d\.\d\d, KL {kl},", family, re.MULTILINE), run
