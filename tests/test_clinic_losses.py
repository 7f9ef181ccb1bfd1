"""The judge of losses: what it names, what it passes, and how it ends where it can't judge."""

import inspect
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from minigrpo import objective
from minigrpo.clinic.catalogue import FORMS, MISTAKES, NAMED, NOTES, VARIANTS, Mistake
from minigrpo.clinic.judge import trial
from minigrpo.clinic.judge.command import judge_file, load, main
from minigrpo.clinic.judge.trial import ADVANTAGES
from minigrpo.clinic.judge.trl_answers import Answers
from minigrpo.clinic.judge.verdict import CAUTIONS, judge_loss
from minigrpo.clinic.mistakes import sick_sources

SOURCE = inspect.getsource(objective)
NO_METRICS = "\n\n_ratio_metrics = lambda *_: {}\n"  # which take a while, and aren't judged


def copy_with(*mistakes: Mistake) -> str:
    """The source of the course's objective with these mistakes."""
    source = SOURCE + NO_METRICS
    for function, sick in sick_sources(sum((m.lines for m in mistakes), ())).items():
        source = source.replace(inspect.getsource(function), sick)
    return source


class EveryFourth(Answers):
    """TRL's answers to ten of its 40 batches, with every setting."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = self.cases[::4]

    def losses(self, variant: str) -> Iterator:
        return islice(super().losses(variant), 0, None, 4)


@pytest.fixture
def fewer_answers(monkeypatch):
    """A mistake shows in the probes, and TRL's 440 answers take longer than all of these."""
    monkeypatch.setattr(trial, "Answers", EveryFourth)


@pytest.fixture
def judged(tmp_path):
    """Judge the source of a file, as the command does but in this process."""

    def judge(source: str, function: str = "loss", **given):
        path = tmp_path / "mine.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return judge_loss(load(f"{path}:{function}"), **given)

    return judge


def test_they_have_names_of_their_own_and_sentences():
    assert len(MISTAKES) == len({mistake.name for mistake in MISTAKES}) == 46
    assert len(NAMED) > 45 and all(m.sentence.endswith(".") for m in MISTAKES)


@pytest.mark.parametrize("mistake", FORMS, ids=lambda m: m.name)
def test_every_mistake_is_found_by_name_in_a_copy_of_our_objective(judged, fewer_answers, mistake):
    about_advantages = mistake.lines[0][0] in ADVANTAGES
    function = "group_advantages" if about_advantages else "grpo_loss"
    report = judged(copy_with(mistake), function)
    cautions = report.cautions if mistake in MISTAKES else []  # other forms may earn one besides
    assert [*report.mistakes, *report.notes, *cautions] == [mistake.name]
    assert report.passed == (mistake.name in {*CAUTIONS, *NOTES})
    told = " ".join(report.more.split())
    assert NOTES.get(mistake.name, mistake.sentence) in told


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda m: m.name)
def test_every_variant_is_a_note_in_a_copy_of_our_objective(judged, fewer_answers, variant):
    function = "group_advantages" if variant.lines[0][0] in ADVANTAGES else "grpo_loss"
    report = judged(copy_with(variant), function)
    told = {"token_sum": "sum_over_the_rows"}.get(variant.name)  # beside an option max_length
    assert report.notes == [variant.name] * (not told), report.text
    assert report.mistakes == [told] * bool(told)


def test_several_mistakes_at_once_are_all_named(judged):
    names = ["max_for_min", "mean_over_the_padding", "kl_subtracted_from_the_loss"]
    assert set(judged(copy_with(*map(NAMED.get, names)), "grpo_loss").mistakes) == set(names)


def test_what_has_no_name_is_shown_where_no_name_explains_it(judged):
    twice = "loss + 2 * kl_weight"
    source = copy_with(NAMED["max_for_min"]).replace("loss + kl_weight", twice)
    report = judged(source, "grpo_loss")
    assert report.mistakes == ["max_for_min"] and twice in source
    assert "under the reference" in report.details["unknown"]["case"]
    assert "reference" not in report.details["mistakes"]["max_for_min"]["case"]


@pytest.mark.parametrize("function", ["grpo_loss", "group_advantages"])
def test_the_courses_own_functions_pass(function):
    report = judge_loss(getattr(objective, function))
    assert report.passed and not report.mistakes and not report.cautions
    assert str(report).startswith("Nothing wrong was found.")
    assert ("440 of 440" if function == "grpo_loss" else "30 of 30") in report.text
    assert report.text == judge_loss(getattr(objective, function)).text


LOOPS = """
import torch

def loss(logps, old_logps, adv, mask, *, ref_log_probs=None, how="sequence_mean", max_length=None,
         clip=(0.2, 0.2), level="token", surrogate="clip", kl_weight=0.0, entropy=None,
         entropy_weight=0.0):
    low, high = clip
    rows, counts, entropies = [], [], []
    for i in range(len(adv)):
        total, count = 0.0 * logps[i, 0].detach(), 0
        a = adv[i].item()
        n = max(int(mask[i].sum()), 1)
        drift = sum(logps[i, t] - (logps if old_logps is None else old_logps)[i, t].detach()
                    for t in range(mask.shape[1]) if mask[i, t])
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            new = logps[i, t]
            old = (new if old_logps is None else old_logps[i, t]).detach()
            ratio = torch.exp(new - old)
            if level == "geometric":
                ratio = torch.exp(drift / n)
            if level == "sequence":
                ratio = torch.exp(drift)
            if surrogate == "cispo":
                gain = torch.clamp(ratio.detach(), max=1 + high) * a * new
            else:
                gain = torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)
            term = -gain
            if kl_weight:
                d = new - ref_log_probs[i, t]
                kl = torch.exp(-d) - 1 + d
                term = term + kl_weight * kl
            if entropy is not None:
                entropies.append(entropy[i, t])
            total = total + term
            count += 1
        rows.append(total)
        counts.append(count)
    if how == "sequence_mean":
        value = sum(r / max(c, 1) for r, c in zip(rows, counts)) / len(rows)
    elif how == "token_mean":
        value = sum(rows) / max(sum(counts), 1)
    else:
        value = sum(rows) / (len(rows) * max_length)
    if entropy_weight and entropies:
        value = value - entropy_weight * sum(entropies) / len(entropies)
    return value
"""


def test_a_plain_rewrite_in_another_style_passes(judged):
    report = judged(LOOPS)
    assert report.passed and not report.mistakes and not report.cautions, report.text
    assert report.details["not_shown"] == ["kl_correction_without_the_gradient_of_the_ratio"]
    assert "the shift by one" in report.more and "Logits" not in report.text


BUILT_IN = """
import torch

def loss(logps, old, adv, mask):
    mask = mask.float()
    ratio = torch.exp(logps - old)
    a = adv[:, None]
    gain = torch.min(ratio * a, ratio.clamp(1 - 0.2, 1 + HIGH) * a) * mask
    return -AVERAGE
"""
AVERAGES = {
    "sequence_mean": "(gain.sum(1) / mask.sum(1).clamp(min=1)).mean()",
    "token_mean": "gain.sum() / mask.sum()",
    "constant": "gain.sum() / (len(adv) * 32)",
}


def test_what_was_meant_is_set(judged):
    source = BUILT_IN.replace("AVERAGE", AVERAGES["sequence_mean"]).replace("HIGH", "0.2")
    report = judged(source, how="token_mean")
    assert report.mistakes == ["row_mean_for_token_mean"], report.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 3}, "expected one of how, surrogate"),
        ({"clip": 0.2}, "clip: expected something like (0.2, 0.2), got 0.2"),
        ({"how": "mean"}, "how: expected"),
        ({"how": "constant", "max_length": 0}, "max_length: expected"),
    ],
)
def test_what_is_set_has_to_make_sense(given, words):
    report = judge_loss(objective.grpo_loss, **given)
    assert report.verdict == "not judged" and words in report.text and "\n" not in report.text


FROM_REWARDS = """

def loss(log_probs, old_log_probs, rewards, group_size, completion_mask, clip=(0.2, 0.2),
         how="sequence_mean", max_length=None):
    advantages = group_advantages(rewards, group_size)
    return grpo_loss(log_probs, old_log_probs, advantages, completion_mask, clip=clip, how=how,
                     max_length=max_length)[0]
"""


@pytest.mark.parametrize(
    "names", [[], ["population_std"], ["groups_mix_prompts"], ["max_for_min"],
              ["equal_rewards_not_exactly_zero"]]
)  # fmt: skip
def test_a_loss_from_rewards(judged, names):
    report = judged(copy_with(*map(NAMED.get, names)) + FROM_REWARDS)
    assert [*report.mistakes, *report.notes, *report.cautions] == names, report.text


HEAD = "import torch\ndef loss(log_probs, old_log_probs, advantages, completion_mask):\n    "
RIGHT = "return (log_probs * completion_mask).sum()"
BAD = [
    ("x = 1", "no 'loss'; its functions are none"),
    ("raise KeyError('gone')", "mine.py can't be loaded: KeyError: 'gone'"),
    ("def loss(:", "mine.py can't be loaded: SyntaxError"),
    ("import sys; sys.exit(3)", "mine.py can't be loaded: SystemExit: 3"),
    ("loss = 3", "expected a function, got int"),
    ("class loss: pass", "loss is a class: name an instance"),
    ("def loss(a, b, c): return a", "found (a, b, c)"),
    ("def loss(log_probs, mask, model, batch, beta): return 0", "found (log_probs, mask, model"),
    (HEAD + "return 1.0", "expected a tensor"),
    (HEAD + "return None", "returns None"),
    (HEAD + "return log_probs", "expected a loss that is one number"),
    (HEAD + "return log_probs.detach().sum()", "the loss has no gradient"),
    (HEAD + "raise RuntimeError('no GPU')", "it raises RuntimeError: no GPU"),
    (HEAD + "import sys; sys.exit(0)", "it raises SystemExit: 0"),
    (HEAD + "advantages -= 1; " + RIGHT, "changes its input advantages in place"),
    (HEAD + "completion_mask[:] = 0; " + RIGHT, "changes its input completion_mask in place"),
    (HEAD + "assert log_probs is None", "it raises AssertionError, at mine.py:3 in loss."),
    ("def loss(old, old_log_prob, adv, mask): return 0", "found (old, old_log_prob, adv, mask)"),
    (HEAD + "return log_probs.sum() * torch.rand(())", "two calls with the same inputs differ"),
    ("n = [0]\n" + HEAD + "n[0] += 1; return log_probs.sum() * n[0]", "keeps something between"),
    ("def loss(rewards, group_size): return rewards.sum()", "expected advantages of shape (N,)"),
]


@pytest.mark.parametrize(("source", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_told_in_one_sentence(judged, source, words):
    try:
        text = judged(source).text
    except Exception as error:
        assert type(error).__name__ == "Unjudged"
        text = str(error)
    assert words in text and "\n" not in text


@pytest.mark.parametrize(
    ("source", "seconds", "words"),
    [
        ("while True: pass", 1, "didn't finish within 1 seconds"),
        ("import os; os._exit(0)", 60, "ended Python with exit code 0"),
    ],
)
def test_what_kills_a_process_kills_only_the_child(tmp_path, source, seconds, words):
    (path := tmp_path / "mine.py").write_text(source)
    report = judge_file(f"{path}:loss", {}, seconds=seconds)
    assert report.verdict == "not judged" and words in report.text and "\n" not in report.text
    assert [*tmp_path.iterdir()] == [path]


def test_nan_on_ordinary_input_is_a_finding_with_its_case(judged):
    report = judged(LOOPS.replace("return value", "return value + (count == 4) * float('nan')"))
    assert report.verdict == "unknown" and "got       nan" in report.text


def test_printing_without_end_and_a_neighbour_file(tmp_path, capsys):
    (tmp_path / "neighbour.py").write_text("from minigrpo.objective import grpo_loss as loss\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour import loss as theirs\nprint('x' * 10_000_000)\n"
        "def loss(log_probs, old_log_probs, advantages, mask):\n"
        "    print('y' * 100_000)\n"
        "    return theirs(log_probs, old_log_probs, advantages, mask)\n"
    )
    start = time.perf_counter()
    assert main([f"{tmp_path / 'mine.py'}:loss"]) == 0
    assert time.perf_counter() - start < 60
    assert "xxx" not in (out := capsys.readouterr().out) and "Nothing wrong" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "neighbour.py"]


def test_what_is_set_and_how_long_it_may_take_reach_the_judge(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(BUILT_IN.replace("AVERAGE", AVERAGES["token_mean"]).replace("HIGH", "0.28"))
    judge = [f"{path}:loss"]
    assert main([*judge, "--set", "how=token_mean", "clip=0.2,0.28"]) == 0
    assert "Nothing wrong was found." in capsys.readouterr().out
    assert main([*judge, "--set", "how=token_mean", "clip=0.2,0.2"]) == 3
    assert main([*judge, "--seconds", "0.01"]) == 2
    assert "didn't finish within 0.01 seconds" in capsys.readouterr().out
    path.write_text(path.read_text().replace("0.28", "1e9"))
    assert main([*judge, "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["built_in"]["clip"] == [0.2, None]


@pytest.mark.parametrize("option", ["--set", "--map"])
def test_a_file_that_an_option_has_swallowed_is_told_of(option, capsys):
    with pytest.raises(SystemExit):
        main([option, "how=token_mean", "mine.py:loss"])
    told = "name=value after --map and --set, got 'mine.py:loss'; file.py:function comes first"
    assert told in capsys.readouterr().err


def test_the_command_ends_with_the_exit_code(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    command = [sys.executable, "-m", "minigrpo.clinic", "judge", "mine.py:grpo"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 2 and "Not judged: mine.py has no 'grpo'" in ran.stdout
    assert not ran.stderr and "aggregate" in ran.stdout
