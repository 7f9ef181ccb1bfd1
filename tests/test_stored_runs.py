"""Every stored run is of today's settings, and a command measures what is missing and no more."""

import shutil
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ppo
import pytest
import real_run
import results
import reuse
import scaling_runs
import store
import text_runs
import thinking
import turns
from store import Store

from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig
from minigrpo.study.experiments import SUMMIT, WARMUP
from minigrpo.text.shots import rows

VARIANTS = [(family, name) for family, some in thinking.FAMILIES.items() for name in some]
STORES = [
    *results.STORES.values(),
    *(thinking.store_of(*variant) for variant in VARIANTS),
    *(ppo.SEARCHED, ppo.COMPARED, reuse.STORE),
    *map(turns.store_of, turns.ARMS),
    *(text_runs.STORE, text_runs.NIGHT_STORE, scaling_runs.STORE, real_run.STORE),
]


def place(one: Store) -> str:
    return ", ".join([one.file, *one.at, one.key])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of results for the length of a test, empty at first."""
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("one", STORES, ids=place)
def test_every_run_is_stored_with_todays_settings(one):
    """A changed setting, other code or another base model asks for `make results`."""
    assert [one.name(run) for run in one.stored()] == [*one.wanted]


@pytest.mark.parametrize("file", sorted({one.file for one in STORES}))
def test_nothing_else_is_stored_and_a_file_is_as_it_would_be_written(file):
    """Neither parts that are gone, nor runs that nobody asked for."""
    found, runs = store.load(file), 0
    for one in (one for one in STORES if one.file == file):
        runs += len(one.part()[one.key])
        assert one.part()[one.key] == one.stored()
    text = store.lines(found) + "\n"
    assert text == (store.FOLDER / file).read_text("utf-8")
    assert text.count("\n  {") == runs + len(found.get("questions", ()))


def test_ppo_is_compared_with_the_best_of_its_search():
    best = ppo.best(ppo.SEARCHED.stored())
    assert {(run["critic_lr"], run["lam"]) for run in ppo.COMPARED.stored()} == {best}


def another(*_, **__):
    return 0.0


@pytest.fixture
def nothing_cached():
    for when in ("before", "after"):
        text_runs.drawn.cache_clear(), scaling_runs.trainers.cache_clear()
        if when == "before":
            yield


TORN, SHIPPED = ("torn pages", "0.1"), ("flipped rewards", "0.3")
UNTRAINED = ("a thought or none", "after a thought, lr 0.001")


@pytest.mark.parametrize(
    ("tool", "one", "name", "value"),
    [
        (results, results.STORES["no baseline"], "base_checksum", lambda: "another"),
        (results, results.STORES["one demonstration in five complete"], "WARMUP_ROWS", 64),
        (thinking, thinking.store_of(*TORN), "SUMMIT", replace(SUMMIT, lr=3e-4)),
        (thinking, thinking.store_of(*TORN), "WARMUP", replace(WARMUP, weight_decay=0.5)),
        (thinking, thinking.store_of(*UNTRAINED), "HABIT_QUESTIONS", 8),
        (thinking, thinking.store_of(*SHIPPED), "base_checksum", lambda: "another"),
        (ppo, ppo.SEARCHED, "SUMMIT", replace(SUMMIT, lr=3e-4)),
        (ppo, ppo.COMPARED, "BATCHES", {10: 64}),
        (reuse, reuse.STORE, "BATCHES", 8),
        (reuse, reuse.STORE, "loss_of", another),
        (reuse, reuse.STORE, "BASE", store.ROOT / "data" / "README.md"),
        (turns, turns.store_of("the run"), "RUN", replace(turns.RUN, lr=1e-4)),
        (turns, turns.store_of("proof"), "SHIPPED", {0.1: data_folder() / "turns_llama"}),
        (turns, turns.store_of("choosing: plain"), "TURNS_ROWS", 64),
        (text_runs, text_runs.STORE, "PROBLEMS_SEED", 2),
        (text_runs, text_runs.STORE, "ARMS", {"llama": text_runs.Arm("llama")}),
        (text_runs, text_runs.STORE, "config", lambda *_: GRPOConfig(lr=2e-4)),
        (text_runs, text_runs.STORE, "soft_reward", another),
        (text_runs, text_runs.NIGHT_STORE, "COARSE", 5),
        (text_runs, text_runs.NIGHT_STORE, "SUMS", text_runs.SUMMIT),
        (text_runs, text_runs.STORE, "draw_rows", lambda *_, **__: [{"prompt": "6 + 3"}]),
        (scaling_runs, scaling_runs.STORE, "TRAINER_STEPS", 10),
        (scaling_runs, scaling_runs.STORE, "BASES", scaling_runs.BASES[:1]),
        (scaling_runs, scaling_runs.STORE, "CODE", scaling_runs.CODE[1:]),
        (scaling_runs, scaling_runs.STORE, "QUIET", {**scaling_runs.QUIET, "bf16": True}),
        (scaling_runs, scaling_runs.STORE, "problem_rows", lambda: []),
        (scaling_runs, scaling_runs.STORE, "problem_config", lambda *_, **__: GRPOConfig(eos_id=0)),
        (real_run, real_run.STORE, "HELD_OUT", 128),
        (real_run, real_run.STORE, "tags_reward", another),
        (real_run, real_run.STORE, "rows", lambda *_, **given: rows(**given)[1:]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_setting_is_noticed(tool, one, name, value, monkeypatch, nothing_cached):
    monkeypatch.setattr(tool, name, value)
    assert one.stored() == []


def test_another_trl_or_chat_template_is_noticed(tmp_path, monkeypatch, nothing_cached):
    text = (store.ROOT / "pyproject.toml").read_text("utf-8")
    assert scaling_runs.trainers()["version"] == [">=1.16,<1.17"]
    scaling_runs.trainers.cache_clear()
    (tmp_path / "pyproject.toml").write_text(text.replace("trl>=1.16,<1.17", "trl>=1.17,<1.18"))
    for name in ("text_gpt2", "text_llama"):
        shutil.copytree(data_folder() / name, tmp_path / "data" / name)
    for tool in (scaling_runs, text_runs):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert scaling_runs.STORE.stored() == [] and text_runs.STORE.stored()
    with (tmp_path / "data" / "text_gpt2" / "chat_template.jinja").open("a") as file:
        file.write("?")
    assert text_runs.STORE.stored() == []


SOURCE = """def f(x):
    y = 0.2 * x
    for _ in range(2):
        y = y + 1
    return y
"""


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("0.2", "0.3", True),
        ("    return", "        return", True),
        ("+ 1", "- 1", True),
        ("x\n", "x  # a comment\n", False),
        ("    for", "\n    # a line\n    for", False),
        ("0.2 * x", "0.2  *  x", False),
    ],
)
def test_a_change_of_code_counts_and_its_layout_does_not(before, after, counts):
    assert before in SOURCE
    changed = SOURCE.replace(before, after)
    assert (store.of_code(changed) != store.of_code(SOURCE)) == counts


def test_every_python_gives_the_same_checksum_of_code():
    nested = """for a, b in {}.items():\n    print(f"{a['b']:{b}} {'c'}")"""
    assert store.of_code(nested)[:8] == "0a954100"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_every_file_of_a_model_counts(tmp_path, file):
    model = shutil.copytree(data_folder() / "text_gpt2", tmp_path / "model")
    before = store.of_folder(model)
    (model / ".DS_Store").write_text("what a desktop leaves behind")
    assert store.of_folder(model) == before
    (model / file).write_bytes((model / file).read_bytes() + b" ")
    assert store.of_folder(model) != before


class Cell(NamedTuple):
    arm: str
    seed: int


CELLS = [Cell(arm, seed) for arm in "ab" for seed in (0, 1)]


def toy(settings=1, at=()) -> Store:
    return Store("toy.json", CELLS, lambda: {"lr": settings, "clip": (0.2, 0.2)}, at)


def fill(one: Store, stop_at: Cell | None = None, **options) -> list[Cell]:
    """What was measured; KeyboardInterrupt at one of them."""
    measured = []

    def measure(name):
        if name == stop_at:
            raise KeyboardInterrupt
        measured.append(name)
        return {**name._asdict(), "reward": len(measured)}

    try:
        one.fill(measure, **options)
    except KeyboardInterrupt:
        pass
    return measured


def test_a_stopped_command_goes_on_and_again_repeats_all(folder, capsys):
    assert fill(toy(), stop_at=CELLS[2]) == CELLS[:2]
    assert fill(toy()) == CELLS[2:] and fill(toy()) == []
    assert capsys.readouterr().out.splitlines()[-1] == "stored: b 1"
    before = toy().stored()
    assert fill(toy(), again=True, stop_at=CELLS[1]) == CELLS[:1]
    assert toy().stored()[1:] == before[1:]  # which a stopped command leaves as they were
    assert fill(toy(), again=True) == CELLS
    assert fill(toy(), again=True, only=CELLS[1:2]) == CELLS[1:2]


def test_runs_of_other_settings_are_measured_anew_and_replaced(folder):
    fill(toy())
    assert toy(2).stored() == [] and fill(toy(2), only=CELLS[:1]) == CELLS[:1]
    assert len(toy(2).stored()) == 1 and toy().stored() == []


def test_the_order_is_that_of_the_runs_and_not_of_the_measurements(folder):
    backwards = lambda measure, names: map(measure, names[::-1])  # noqa: E731
    assert fill(toy(), over=backwards) == CELLS[::-1]
    assert [Cell(run["arm"], run["seed"]) for run in store.load("toy.json")["runs"]] == CELLS


def test_a_part_leaves_the_others_alone_and_keeps_what_is_beside_its_runs(folder):
    first, second = toy(at=("f", "v")), toy(at=("f", "w"))
    fill(first, questions=["?"])
    fill(second, only=CELLS[:1])
    fill(second)
    assert [*store.load("toy.json")["f"]] == ["v", "w"] and len(second.stored()) == 4
    assert first.part()["questions"] == ["?"] and len(first.stored()) == 4


def test_an_interrupted_write_leaves_what_was_stored(folder, monkeypatch):
    fill(toy(), only=CELLS[:1])
    before = (folder / "toy.json").read_bytes()

    def half(self, *text):
        self.write_bytes(b"{")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    fill(toy())
    assert [path.name for path in folder.iterdir()] == ["toy.json"]
    assert (folder / "toy.json").read_bytes() == before


TOOLS = {  # the file of each
    "results.json": results, "thinking.json": thinking, "ppo.json": ppo, "reuse.json": reuse,
    "text.json": text_runs, "night.json": text_runs, "turns.json": turns,
    "scaling.json": scaling_runs, "real_run.json": real_run,
}  # fmt: skip


@pytest.fixture(scope="module")
def known() -> dict:
    """Of every store the settings of today, which take a while, and its runs by their names."""
    return {
        place(one): (one.settings(), {one.name(run): run for run in one.stored()}) for one in STORES
    }


@pytest.fixture
def asked(folder, known, monkeypatch):
    """The runs that a command asks for; each is given as it is stored."""
    asked, fill = [], Store.fill
    for one in STORES:
        (folder / one.file).write_bytes((store.ROOT / "data/results" / one.file).read_bytes())
        monkeypatch.setattr(one, "settings", lambda one=one: known[place(one)][0])
    for tool in (turns, thinking):
        ours = {one.at: one for one in STORES if TOOLS[one.file] is tool}
        monkeypatch.setattr(tool, "store_of", lambda *name, ours=ours: ours[name])

    def spied(self, measure, *rest, **more):
        def fake(name):
            asked.append((place(self), name))
            return known[place(self)][1][name]

        fill(self, fake, *rest, **more)

    monkeypatch.setattr(Store, "fill", spied)
    here = nullcontext(types.SimpleNamespace(imap_unordered=map))  # what is patched here is there
    pool = types.SimpleNamespace(Pool=lambda processes: here)
    monkeypatch.setattr(store.multiprocessing, "get_context", lambda kind: pool)
    for name in ("time", "memory"):
        value = ppo.SEARCHED.part()[name]
        monkeypatch.setattr(ppo, "timing" if name == "time" else name, lambda *_, v=value: v)
    return asked


@pytest.mark.parametrize("file", TOOLS)
def test_a_command_measures_what_is_missing_and_with_again_all_of_it(file, asked, folder):
    """And the file is as it was, byte for byte, as the runs are."""
    if file == "scaling.json":
        pytest.importorskip("trl")
    before, options = (folder / file).read_bytes(), []
    if TOOLS[file] is real_run:
        options = [str(data_folder() / "text_llama")]
    stores = [one for one in STORES if TOOLS[one.file] is TOOLS[file]]
    some = [stores[0], *stores[1:][-1:]]
    for one in some:
        runs = one.stored()
        one.save(runs[:1] + runs[2:])
    TOOLS[file].main(options)
    assert asked == [(place(one), one.wanted[1]) for one in some]
    assert (folder / file).read_bytes() == before
    asked.clear()
    TOOLS[file].main([*options, "--again"])
    assert asked == [(place(one), name) for one in stores for name in one.wanted]
    assert (folder / file).read_bytes() == before
    assert all((folder / name).is_file() for name in ("summit.png",) if file == "results.json")


@pytest.mark.parametrize(
    ("file", "options", "count"),
    [
        ("results.json", ["--only", "KL weight 1"], 3),
        ("thinking.json", ["--only", "torn pages"], 20),
        ("real_run.json", [str(data_folder() / "text_llama"), "--seed", "1"], 1),
    ],
)
def test_a_part_can_be_measured_alone(file, options, count, asked, folder):
    (folder / file).unlink()
    TOOLS[file].main(options)
    assert len(asked) == count and not list(folder.glob("*.png"))
    assert sum(len(one.stored()) for one in STORES if one.file == file) == count


def test_without_trl_the_other_runs_are_made(asked, folder, monkeypatch, capsys):
    one = scaling_runs.STORE
    one.save([run for run in one.stored() if run["what"] not in scaling_runs.TRAINERS])
    monkeypatch.setattr(scaling_runs, "find_spec", lambda name: None)
    scaling_runs.main([])
    assert [name.what for _, name in asked] == ["ours"] * 3
    assert "TRL is not installed, so its runs are left out." in capsys.readouterr().out
