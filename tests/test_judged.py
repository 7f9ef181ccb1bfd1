"""The public table of verdicts: what is stored, how the page shows it, and the command."""

import json
import re
from pathlib import Path

import judge_field
import pytest
import readme
import store

from minigrpo.clinic.judge.report import unjudged

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "judged.md").read_text("utf-8")
LINK = (
    r"https://github\.com/[\w.-]+/[\w.-]+/blob/(?:[0-9a-f]{7,40}|[\w.-]*v?\d[\w.]*)/[\w./-]+#L\d+"
)
ROWS, SAID = judge_field.runs(), judge_field.SAID
SICK = ["max_for_min"]


def test_each_verdict_has_a_word_and_each_name_is_in_the_catalogue():
    known = {*judge_field.catalogue()}
    for row in ROWS:
        assert row["verdict"] in judge_field.WORDS and {*row["mistakes"], *row["notes"]} <= known
        assert bool(row["mistakes"]) == (row["verdict"] == "mistake"), row["id"]
    assert len({row["id"] for row in ROWS}) == len(ROWS) > 0
    assert len({row["judge"] for row in ROWS}) == 1, "not all by the same judge"


def test_what_is_listed_has_a_place_and_nobody_else_is_named():
    place = {"project", *judge_field.PLACE}
    for row in ROWS:
        if "repo" in row:
            assert place <= row.keys() <= {*judge_field.KNOWN, *judge_field.SHOWN, *SAID}
            assert re.fullmatch(LINK, judge_field.link(row)), judge_field.link(row)
        else:
            assert row.keys() <= {*judge_field.KNOWN, *SAID}
            assert re.fullmatch("[0-9a-f]{12}", row["id"])
        assert "\n" not in "".join(str(value) for value in row.values())  # no code


def test_every_row_of_the_table_links_to_its_line():
    inside = re.search(readme.between("judged table"), PAGE, re.DOTALL)[0].splitlines()[2:]
    assert len(inside) > 30
    for line in inside:
        verdict, functions = line.split(" | ")[3:5]
        assert re.findall(r"\]\(([^)]*)\)", functions) and not re.sub(
            rf"\[`[\w.]+`\]\({LINK}\)( \([^()]*\))?(, )?", "", functions
        )
        assert verdict.partition(":")[0] in judge_field.WORDS.values()
    for row in judge_field.listed():
        assert judge_field.link(row) in PAGE


def test_upstream_is_linked_where_it_is_cited():
    for row in judge_field.listed():
        for one in row.get("upstream", []):
            number = re.search(r"\b(?:PR|issue) (\d+)", one["what"])
            kind = "issues" if "issue" in one["what"] else "pull"
            end = rf"/{kind}/{number[1]}" if number else r"/commit/[0-9a-f]{40}"
            assert re.fullmatch(rf"https://github\.com/[\w.-]+/[\w.-]+{end}", one["url"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three functions with adapters, one of which is not to be named, and a store of its own."""
    monkeypatch.setattr(store, "FOLDER", tmp_path / "results")
    (tmp_path / "results").mkdir()
    at = {"project": "P", "repo": "o/p", "commit": "v1", "path": "a.py", "line": 3}
    common = {"kind": "loss", "which": [], **at}
    lines = [
        {"id": "p_right", "call": "a.py:right", "truth": "right", **common},
        {**common, "id": "p_sick", "call": "a.py:sick", "truth": "mistake", "which": SICK},
        {"id": "p_secret", "call": "a.py:right", "truth": "right", **common, "listed": False},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\n\n"
    (tmp_path / "truth_A.jsonl").write_text(text)
    more = {"id": "p_sick", "upstream": [{"what": "PR 1, merged", "url": "https://x/1"}]}
    (tmp_path / "upstream.jsonl").write_text(json.dumps(more))
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """Which functions the judge was asked about; it answers by their names."""
    asked = []

    def judge_file(target, built_in):
        asked.append(target.rpartition(":")[2])
        wrong = SICK if asked[-1] == "sick" else []
        return unjudged("")._replace(verdict="mistake" if wrong else "right", mistakes=wrong)

    monkeypatch.setattr(judge_field, "judge_file", judge_file)
    return asked


def test_the_command_judges_what_is_missing_and_counts(folder, asked, capsys):
    assert judge_field.main([str(folder)]) == 0
    _, row, _ = rows = judge_field.runs()
    assert row["mistakes"] == ["max_for_min"] and row["upstream"][0]["what"] == "PR 1, merged"
    assert "| right | 2 |  |  |  |  |" in capsys.readouterr().out
    for left in (rows[1:], rows):
        (folder / "results" / "judged.json").write_text(json.dumps({"settings": {}, "runs": left}))
        assert judge_field.main([str(folder)]) == 0 and judge_field.runs() == rows
    assert sorted(asked) == ["right", "right", "right", "sick"]
    assert judge_field.main([str(folder), "--again"]) == 0
    assert len(asked) == 7


def test_nothing_tells_who_is_not_listed(folder, asked):
    judge_field.main([str(folder)])
    text = (folder / "results" / "judged.json").read_text()
    assert "p_right" in text and "secret" not in text
    assert len(judge_field.listed()) == 2 and len(judge_field.runs()) == 3


@pytest.mark.parametrize("truth", ["right", "notes", "variant"])
def test_whatever_is_called_a_mistake_and_is_none_makes_the_exit_code_1(folder, asked, truth):
    line = {"id": "p_sick", "truth": truth}
    (folder / "wrong.jsonl").write_text(json.dumps(line))
    assert judge_field.main([str(folder)]) == 1
    (folder / "wrong.jsonl").write_text(json.dumps(line | {"also_defensible": ["mistake"]}))
    assert judge_field.main([str(folder)]) == 0


def test_another_judge_judges_again(folder, asked, monkeypatch):
    judge_field.main([str(folder)])
    monkeypatch.setattr(judge_field, "judge", lambda: "another")
    judge_field.main([str(folder)])
    assert len(asked) == 6 and {row["judge"] for row in judge_field.runs()} == {"another"}


def test_where_the_judge_is_wrong_the_table_says_so(folder, asked):
    (folder / "wrong.jsonl").write_text(json.dumps({"id": "p_sick", "truth": "variant"}))
    judge_field.main([str(folder)])
    assert "By hand it's a variant, so the judge is wrong |" in judge_field.table()
    (folder / "wrong.jsonl").write_text(json.dumps({"id": "p_sick", "which": ["old_over_new"]}))
    judge_field.main([str(folder)])
    assert "By hand it's `old_over_new` |" in judge_field.table()
    assert judge_field.missed().count("\n") == 1  # the head alone


def test_functions_alike_share_a_row(folder, asked):
    judge_field.main([str(folder)])
    table = judge_field.table()
    assert table.count("\n") == 3  # head, and one row for each verdict
    assert "| right | [" in table and table.count("|  |") == 3  # no dates, no remark
    assert "| mistake: `max_for_min` | [" in table and "| [PR 1, merged](https://x/1) |" in table
    assert "[`loss`](https://github.com/o/p/blob/v1/a.py#L3)" in table
