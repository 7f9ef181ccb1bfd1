"""The page of ratios: what is stored, how it is put together, and that docs/speed.md shows it."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import bench
import pytest
import readme
import torch

ROOT = Path(__file__).resolve().parent.parent
STORED = bench.load()
NUMBERS = {"median", "low", "high"}


def line(section: str = "sampling", what: str = "w", **changes: object) -> dict:
    """A line as it is stored, with numbers that are easy to find again."""
    found = {
        "section": section,
        "command": bench.command(section),
        "what": what,
        "ours": {"median": 7574.0, "low": 7106.0, "high": 7576.0},
        "peer": {
            "name": "row by row",
            "version": "torch 2",
            "median": 230.4,
            "low": 223.0,
            "high": 268.0,
        },
        "ratio": {"median": 31.94, "low": 28.2, "high": 32.9},
        "target": "15 or more",
        "better": "more",
    }
    return found | changes


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("MINIGRPO_THREADS", "1")


# ---------------------------------------------------------------------------------------------
# what is stored


PAGE = "docs/speed.md"
SPEED = (ROOT / PAGE).read_text("utf-8")


@pytest.mark.parametrize("name", bench.TABLES)
def test_the_tables_of_the_page_are_made_of_the_stored_lines(name):
    table = bench.table(STORED, name)
    place = f"<!-- {name}: begin -->\n{table}\n<!-- {name}: end -->"
    assert place in SPEED, f"{PAGE}: python tools/course/readme.py writes the tables again"
    assert readme.with_tables(SPEED, PAGE) == SPEED


@pytest.mark.parametrize("index", [0, -1])
def test_another_ratio_makes_another_table(monkeypatch, index):
    changed = copy.deepcopy(STORED)
    one = changed["lines"][index]
    one["ratio"] |= {"high": 4321.0} if one["better"] == "more" else {"low": 1 / 4321}
    monkeypatch.setattr(bench, "load", lambda: changed)
    assert "to 4,321)" in readme.with_tables(SPEED, PAGE) != SPEED


def test_the_page_needs_one_place_for_each_table():
    with pytest.raises(ValueError, match="docs/speed.md: .* comments `speed`, got 0"):
        readme.with_tables(SPEED.replace("<!-- speed: end -->", ""), PAGE)


def test_every_stored_line_is_on_the_page():
    """Without its target; lines that say the same are one row."""
    assert sum(bench.TABLES.values(), []) == [*bench.SECTIONS]
    rows = [row for row in SPEED.splitlines() if re.match(r"\| (?!what)", row)]
    assert len(rows) == len(STORED["lines"]) - 1
    for stored in STORED["lines"]:
        start = stored["what"].rpartition(", windows")[0] or stored["what"]
        peer = f"({stored['peer']['name']})"
        assert any(row.startswith(f"| {start}") and peer in row for row in rows), stored["what"]


def test_the_page_says_what_its_rows_say():
    """The numbers in its prose."""
    trainer = next(one for one in STORED["lines"] if one["section"] == "trainer")
    assert f"{trainer['ratio']['median']:.1f} times as many completions per second" in SPEED
    of_real_model = (one for one in STORED["lines"] if one["section"] == "real_model")
    faster, *memory = map(bench.over_runs, of_real_model)
    ends = " and ".join(f"{faster['ratio'][end]:.1f}" for end in ("low", "high"))
    assert f"by a factor between {ends}, with less than half the memory" in SPEED
    assert all(one["ratio"]["high"] < 0.5 for one in memory)
    grown = [(one["section"], one["ratio"]["median"]) for one in STORED["lines"]]
    for sections in (("group_size", "length"), ("width",)):
        ratios = [ratio for section, ratio in grown if section in sections]
        assert f"takes {min(ratios):.1f} to {max(ratios):.1f} times as long" in SPEED
    for section, rows in (("generate", "row with `generate` were"), ("trainer", "rows with TRL")):
        lines = [one for one in STORED["lines"] if one["section"] == section]
        runs = [run["ratio"]["median"] for one in lines for run in (one, *one.get("earlier", []))]
        assert f"{rows} between {min(runs):.1f} and {max(runs):.1f}" in SPEED
    peak = {one["section"]: one["ratio"]["median"] for one in STORED["lines"]}
    assert f"reaches {100 * peak['pretraining_peak']:.0f} percent of" in SPEED
    assert f"a step of GRPO {100 * peak['grpo_peak']:.0f} percent" in SPEED


def test_something_is_stored_with_the_machine():
    assert STORED.keys() == {"machine", "lines"} and STORED["lines"]
    assert STORED["machine"].keys() == bench.machine().keys()
    assert all(STORED["machine"].values())


@pytest.mark.parametrize("stored", STORED["lines"], ids=lambda one: one["what"])
def test_a_stored_line_is_complete(stored):
    assert stored.keys() - {"measured", "earlier"} == line().keys()  # what `merged` adds
    assert stored["section"] in bench.SECTIONS, "this section does not exist"
    assert stored["command"] == bench.command(stored["section"])
    assert stored["peer"].keys() == NUMBERS | {"name", "version"}
    assert re.fullmatch(r"(torch|transformers|trl|minigrpo) \d\S+", stored["peer"]["version"])
    assert stored["what"] and stored["peer"]["name"] and isinstance(stored["target"], str)
    assert stored["better"] in ("more", "less")
    for side in ("ours", "peer", "ratio"):
        values = stored[side]
        assert NUMBERS <= values.keys()
        assert 0 < values["low"] <= values["median"] <= values["high"]


def test_the_stored_lines_stand_in_order_and_once():
    order = [list(bench.SECTIONS).index(one["section"]) for one in STORED["lines"]]
    assert order == sorted(order)
    named = [(one["what"], one["peer"]["name"]) for one in STORED["lines"]]
    assert len(set(named)) == len(named)


def test_the_file_is_as_save_writes_it(tmp_path):
    bench.save(STORED, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    written = (tmp_path / "bench.json").read_bytes()
    assert written == (bench.FOLDER / "bench.json").read_bytes()
    assert written.endswith(b"}\n") and not written.endswith(b"\n\n")
    assert bench.load(tmp_path) == STORED and bench.load(tmp_path / "none")["lines"] == []


@pytest.mark.parametrize("section", bench.SECTIONS)
def test_a_section_is_a_function_of_its_file(section):
    found = bench.load_section(section)
    assert found.__name__ == section and found.__doc__


# ---------------------------------------------------------------------------------------------
# how it is put together


def test_a_section_takes_the_place_of_its_old_lines():
    stored = [line("scoring", "a"), line("scoring", "b"), line("step", "c")]
    new = bench.merged(stored, "scoring", [line("scoring", "d")], "day 1, P")
    assert [(one["section"], one["what"]) for one in new] == [("scoring", "d"), ("step", "c")]
    assert new[0]["command"] == "python tools/bench.py --only scoring"
    assert new[1] is stored[2]
    assert new[0]["measured"] == "day 1, P" and "earlier" not in new[0]
    found = [line("sampling", "e"), line("sampling", "f")]
    between = bench.merged(stored, "sampling", found, "day 1, P")
    assert [one["what"] for one in between] == ["a", "b", "e", "f", "c"]


def test_a_section_without_lines_keeps_the_old_ones_and_an_unknown_one_goes():
    stored = [line("scoring", "a"), line("gone", "b")]
    assert bench.merged(stored, "scoring", [], "day 1, P") == stored[:1]


def ratio(median: float, low: float, high: float) -> dict:
    return {"median": median, "low": low, "high": high}


def test_a_line_keeps_the_ratios_of_the_runs_before_it():
    stored = [line("step", "a", ratio=ratio(1, 1, 1)), line("step", "b", ratio=ratio(9, 9, 9))]
    for day in (2, 3, 4):
        found = [line("step", "a", ratio=ratio(day, day, day))]
        stored = bench.merged(stored, "step", found, f"day {day}, P")
        if day == 2:
            (kept,) = stored[0]["earlier"]
            assert kept == {"ratio": ratio(1, 1, 1), "measured": bench.UNKNOWN}
    assert [one["measured"] for one in stored] == ["day 4, P"]
    before = [(one["measured"], one["ratio"]["median"]) for one in stored[0]["earlier"]]
    assert before == [("day 3, P", 3), ("day 2, P", 2)]
    other = line("step", "a") | {"peer": line()["peer"] | {"name": "another"}}
    assert "earlier" not in bench.merged(stored, "step", [other], "day 5, P")[0]


def test_the_brackets_hold_all_runs_of_a_line_around_the_last_median():
    before = [{"ratio": ratio(2, 0.5, 4), "measured": "m"}, {"ratio": ratio(3, 2, 8)}]
    one = line(ratio=ratio(1, 0.8, 1.25), better="less", earlier=before)
    assert bench.over_runs(one)["ratio"] == ratio(1, 0.5, 8)
    assert bench.in_our_favor(bench.over_runs(one))["ratio"] == ratio(1, 0.125, 2)
    assert bench.over_runs(line()) == line()


def test_a_line_says_when_and_on_which_processor(monkeypatch, tmp_path):
    assert bench.processor().strip() and "\n" not in bench.processor()
    monkeypatch.setattr(bench, "processor", lambda: "P (model 1)")
    bench.run(["step"], quick=False, measure=fake, folder=tmp_path)
    (one,) = bench.load(tmp_path)["lines"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d, P \(model 1\)", one["measured"])


def fake(section: str, quick: bool) -> list[dict]:
    """Stands for a measurement."""
    return [line(section, f"new {section}")]


def test_only_leaves_the_other_lines_as_they_are(tmp_path):
    before = [line("sampling", "old"), line("step", "old too")]
    bench.save({"machine": bench.machine(), "lines": before}, tmp_path)
    bench.run(["step"], quick=False, measure=fake, folder=tmp_path)
    after = bench.load(tmp_path)["lines"]
    assert after[0] == before[0]
    assert after[1]["what"] == "new step" and after[1]["measured"].endswith(bench.processor())


def test_a_quick_run_writes_nothing(tmp_path):
    folder = tmp_path / "results"
    found = bench.run(list(bench.SECTIONS), quick=True, measure=fake, folder=folder)
    assert [one["section"] for one in found] == list(bench.SECTIONS)
    assert not folder.exists()


def test_lines_of_two_machines_do_not_mix(tmp_path):
    other = {"machine": bench.machine() | {"cores": 999}, "lines": [line("gone"), line("step")]}
    bench.save(other, tmp_path)
    with pytest.raises(ValueError, match="'cores': 999.* measure all sections"):
        bench.run(["sampling"], quick=False, measure=fake, folder=tmp_path)
    assert bench.load(tmp_path) == other
    bench.run(list(bench.SECTIONS), quick=False, measure=fake, folder=tmp_path)
    after = bench.load(tmp_path)
    assert after["machine"] == bench.machine()
    assert [one["what"] for one in after["lines"]] == [f"new {name}" for name in bench.SECTIONS]


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    def breaks(section: str, quick: bool) -> list[dict]:
        if section == "step":
            raise RuntimeError("broken")
        return fake(section, quick)

    with pytest.raises(RuntimeError, match="broken"):
        bench.run(["scoring", "step"], quick=False, measure=breaks, folder=tmp_path)
    assert [one["what"] for one in bench.load(tmp_path)["lines"]] == ["new scoring"]


def test_a_line_keeps_the_median_and_the_range_of_its_rounds():
    bench.load_section("memory")  # brings the folder of the benchmarks onto the path
    from lines import Line, over

    ours, theirs = [2.0, 1.0, 4.0], [6.0, 4.00004, 6.0]
    one = Line("w", "p", "torch", ours, theirs, over(theirs, ours), less=True).stored()
    assert one["ours"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert one["ratio"] == {"median": 3.0, "low": 1.5, "high": 4.0}
    assert one["better"] == "less" and one["target"] == ""
    assert one["peer"]["version"].startswith("torch 2.")
    assert one.keys() | {"section", "command"} == line().keys()


# ---------------------------------------------------------------------------------------------
# how it is shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(37093.4, "37,093"), (230.4, "230"), (31.94, "31.9"), (1.999, "2.00"), (0.2494, "0.249")],
)
def test_numbers_have_three_digits(value, shown):
    assert bench.number(value) == shown


def test_the_table_by_hand():
    machine = {"cores": 2, "threads": 1, "python": "3.11", "torch": "2", "transformers": "5"}
    once = {"median": 0.4, "low": 0.4, "high": 0.4}
    lines = [line(), line("training", "t", ratio=once, target="", better="less")]
    shown = bench.table({"machine": machine | {"trl": ""}, "lines": lines}, "speed").splitlines()
    assert shown[0] == "| what | minigrpo | peer | ratio |"
    assert shown[2:] == [
        "| w | 7,574 | 230 (row by row) | 31.9 (28.2 to 32.9) |",
        "| t | 7,574 | 230 (row by row) | 2.50 |",
        "",
        "*2 cores, 1 thread unless a row says otherwise; Python 3.11, torch 2, transformers 5.*",
        "",
        "*Earlier run, processor not recorded.*",
    ]
    other = bench.table({"machine": machine | {"threads": 2, "trl": "1"}, "lines": []}, "growth")
    start, _, end = other.splitlines()[-1].partition(" unless a row says otherwise; ")
    assert (start, end) == ("*2 cores, 2 threads", "Python 3.11, torch 2, transformers 5, TRL 1.*")


def test_the_table_says_which_run_a_row_is_of():
    runs = [line(), line("step", "s"), line("memory", "m")]
    for one in runs[1:]:
        one |= {"measured": "2026-11-23, P (family 25)"}
    machine = STORED["machine"]
    rows = bench.table({"machine": machine, "lines": runs}, "speed").splitlines()
    assert rows[0] == "| what | minigrpo | peer | ratio | run |" and rows[1].count("|") == 6
    assert [row[-5:] for row in rows[2:5]] == ["| 1 |", "| 2 |", "| 2 |"]
    first, second = f"Run 1: {bench.UNKNOWN}.", "Run 2: 2026-11-23, P (family 25)."
    assert rows[-1] == f"*{first} {second}*"
    runs[1]["earlier"] = [{"ratio": ratio(31, 1, 99), "measured": bench.UNKNOWN}]
    rows = bench.table({"machine": machine, "lines": runs[1:]}, "speed").splitlines()
    assert rows[0].endswith("| ratio |") and "| 31.9 (1.00 to 99.0) |" in rows[2]
    before = f"The brackets take in the rounds of runs before: {bench.UNKNOWN}."
    assert rows[-1] == f"*2026-11-23, P (family 25). {before}*"


def test_lines_that_say_the_same_are_one_row():
    twins = [line("training", "t, a"), line("training", "t, b"), line("training", "t, c")]
    twins[2]["ratio"] = twins[2]["ratio"] | {"low": 28.1}
    assert [one["what"] for one in bench.distinct(twins)] == ["t, a and b", "t, c"]
    assert len(bench.distinct([line("a", "t, a"), line("b", "t, a")])) == 2


def test_a_ratio_above_1_is_in_our_favor():
    less = line(ratio={"median": 0.5, "low": 0.25, "high": 0.8}, better="less")
    assert bench.in_our_favor(less)["ratio"] == {"median": 2.0, "low": 1.25, "high": 4.0}
    assert bench.cells(bench.in_our_favor(less))[3] == "2.00 (1.25 to 4.00)"
    assert bench.in_our_favor(line()) == line()
    grown = [line("width", ratio={"median": 1.5, "low": 1.5, "high": 1.5}, better="less")]
    shown = bench.table({"machine": STORED["machine"], "lines": grown}, "growth").splitlines()
    assert shown[0] == "| what | this size | half of it | growth |"
    assert shown[2] == "| w | 7,574 | 230 (row by row) | 1.50 |"


def test_a_peer_that_never_got_there_gives_bounds():
    peer = {"name": "p" + bench.STOPPED, "median": 118.8, "low": 118.3, "high": 119.4}
    less = line(peer=peer, ratio={"median": 0.4466, "low": 0.446, "high": 0.4473}, better="less")
    told = f"more than 118 (p{bench.STOPPED})"
    assert bench.cells(less)[2:4] == [told, "less than 0.45, less is better"]
    assert bench.cells(bench.in_our_favor(less))[2:4] == [told, "more than 2.2"]
    names = {one["peer"]["name"] for one in STORED["lines"] if one["section"] == "training"}
    assert all(name.endswith(bench.STOPPED) for name in names), "docs/speed.md says that it stopped"


def test_the_terminal_shows_the_same_cells(capsys):
    bench.show([line()])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["what", "minigrpo", "peer", "ratio", "target"]
    assert re.split(r"  +", row) == bench.cells(line())


def test_a_quick_run_from_the_command_line_leaves_the_file(capsys):
    before = (bench.FOLDER / "bench.json").read_bytes()
    bench.main(["--quick", "--only", "sampling", "step"], measure=fake)
    assert (bench.FOLDER / "bench.json").read_bytes() == before
    told = capsys.readouterr().out
    assert "new step" in told and "nothing is written" in told


def test_make_bench_runs_all_of_it_and_brings_it_onto_its_page():
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\nbench:")[2].partition("\n\n")[0]
    called = re.findall(r"\$\(ACTIVE\) (\S+\.py)", recipe)
    assert called == ["tools/bench.py", "tools/course/readme.py", "tests/benchmarks/letters.py"]


def test_every_section_has_been_measured():
    assert {line["section"] for line in STORED["lines"]} == set(bench.SECTIONS)


# ---------------------------------------------------------------------------------------------
# at the size of real models


def reached(stored: dict) -> bool:
    """Whether a line says what its target asks for."""
    ratio, words = stored["ratio"]["median"], stored["target"]
    if words == "less than 4,096 MiB":
        return stored["ours"]["median"] < 4096
    number = 1 / 3 if words.startswith("a third") else float(words.split()[0])
    return ratio <= number if words.endswith("or less") else ratio >= number


@pytest.mark.parametrize("target, least", [("1 or more", True), ("1 or less", False)])
def test_a_target_can_be_missed(target, least):
    above = {"median": 1.01, "low": 1.0, "high": 1.1}
    assert reached(line(target=target, ratio=above)) == least
    assert not reached(line(target="a third or less", ratio={"median": 0.34}))
    assert not reached(line(target="less than 4,096 MiB"))
    assert reached(line(target="less than 4,096 MiB", ours={"median": 4000.0}))


@pytest.mark.parametrize(
    "stored",
    [one for one in STORED["lines"] if one["section"] in ("vocabulary", "real_model")],
    ids=lambda one: f"{one['what']}, {one['peer']['name']}",
)
def test_the_targets_at_the_size_of_real_models_are_reached(stored):
    """All but one: with all rows at once, the logits and their gradient are two large tensors."""
    at_once = stored["what"].endswith("64 at once") and "log-softmax" in stored["peer"]["name"]
    assert not stored["target"] or reached(stored) != at_once


def test_the_real_sizes_have_their_targets():
    targets = [one["target"] for one in STORED["lines"] if one["section"] == "vocabulary"]
    assert targets == ["a third or less", "1 or less"] * 2 + ["less than 4,096 MiB"]
    targets = [one["target"] for one in STORED["lines"] if one["section"] == "real_model"]
    assert targets == ["1 or more", "", "1 or less"]


def gradient(side: str) -> torch.Tensor:
    """Of one update of a small model, all rows at once."""
    bench.load_section("memory")
    import real_work

    torch.manual_seed(0)
    r, A = real_work.texts(60, 64, prompt=3, completion=4), torch.randn(64)
    model = real_work.llama(vocab_size=60, **real_work.BODY)
    real_work.updater(side, model, r, A, 64)()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_both_sides_of_a_comparison_make_the_same_update():
    ours = gradient("ours")
    assert ours.norm() > 0.01
    sides = ["plain", "trl"] if importlib.util.find_spec("trl") else ["plain"]
    for side in sides:
        torch.testing.assert_close(gradient(side), ours, atol=1e-6, rtol=1e-3)


def test_a_measurement_is_a_process_that_tells_what_it_found():
    bench.load_section("memory")
    import real_size

    assert real_size.measured("score", "ours", 8, quick=True) >= 0
    with pytest.raises(subprocess.CalledProcessError):
        real_size.measured("score")


def test_without_the_model_its_lines_are_left_out(monkeypatch, capsys):
    monkeypatch.delenv("MINIGRPO_BENCH_MODEL", raising=False)
    assert bench.load_section("autocast")(True) == []
    assert "--model FOLDER names the one that tools/smollm2.py makes" in capsys.readouterr().out


def test_the_folder_of_the_model_is_checked_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--quick", "--model", "no/such/folder"], measure=fake)
    assert "no/such/folder: no such folder (tools/smollm2.py makes it)" in capsys.readouterr().err


def test_the_folder_of_the_model_reaches_the_measurement(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MINIGRPO_BENCH_MODEL", "")
    bench.main(["--quick", "--only", "autocast", "--model", str(tmp_path)], measure=fake)
    assert os.environ["MINIGRPO_BENCH_MODEL"] == str(tmp_path.resolve())
    assert bench.command("autocast") == "python tools/bench.py --only autocast --model FOLDER"


def test_make_bench_takes_the_model_if_it_is_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "tools/bench.py $(if $(wildcard $(SMOLLM2)),--model '$(SMOLLM2)')" in makefile
