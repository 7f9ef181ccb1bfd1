"""The explorer: what it stores is what the loss needs, and what its page computes is autograd's."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
import copy
import html
import json
import re
import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import course
import made_up
import nbformat
import pytest
import torch
from test_browser import NOTEBOOKS, browser, is_readable, opened  # noqa: F401
from test_framed_pages import LABELS
from torch import Tensor

from minigrpo import arithmetic
from minigrpo.grpo import GRPOConfig, rollout, train_grpo
from minigrpo.llama import load_policy
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook import explorer, interactive
from minigrpo.objective import ADVANTAGE_SETTINGS, VARIANTS, group_advantages, grpo_loss
from minigrpo.study.experiments import SUMMIT

FOLDER = Path(interactive.__file__).parent
RESULTS, REAL = course.ROOT / "data" / "results", ("real_steps", "real_run")
CONFIG = replace(SUMMIT, steps=2, prompts_per_step=6, group_size=4, lr=1e-3)
KEPT, FIXED = 3, (7, 4, 9, 5)  # groups, and a question of its own
LOSS_SETTINGS = [name for name in GRPOConfig().loss_settings if name != "max_length"]


@pytest.fixture(scope="module")
def recorded() -> tuple[list, list, list[explorer.Step], torch.nn.Module]:
    """The metrics of two steps, the policies around them, what was recorded, and the base."""
    base, task = load_policy(), arithmetic.Arithmetic()
    policy, metrics, policies, steps = copy.deepcopy(base), [], [base], []
    for m in train_grpo(policy, task, CONFIG):
        own = torch.Generator().manual_seed(0)
        asked = rollout(policies[-1], task, [arithmetic.prompt_ids(FIXED)], CONFIG, own)
        metrics.append(m)
        policies.append(copy.deepcopy(policy))
        token = arithmetic.VOCABULARY.__getitem__
        steps.append(explorer.snapshot(m, policy, base, CONFIG, token, question, asked, KEPT))
    return metrics, policies, steps, base


def question(ids: torch.Tensor) -> str:
    return " + ".join(map(str, arithmetic.read_question(ids)))


def page_text(steps: list[explorer.Step], *more: object) -> str:
    return explorer.page(explorer.data(steps, *more))


def stored(text: str) -> dict:
    """The data in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_what_is_recorded_is_what_scoring_again_finds(recorded):
    """Of the groups that differ most, and of the one that differs least; and the fixed one."""
    metrics, policies, steps, base = recorded
    for m, policy, s in zip(metrics, policies[1:], steps):
        asked = zip(m.rollouts.prompt_ids, m.rollouts.prompt_mask)
        prompts = [question(ids[real]) for ids, real in asked]
        rows = [i for prompt in s.prompts for i in range(24) if prompts[i] == prompt]
        assert len(rows) == 12
        r, mask = m.rollouts[torch.tensor(rows)], m.rollouts.completion_mask[rows]
        assert torch.equal(s.rewards, m.rewards[rows]) and torch.equal(s.mask, mask)
        for kept, model in ((s.old, None), (s.new, policy), (s.ref, base)):
            expected = r.log_probs
            if model:
                scored = token_log_probs(model, r.input_ids, r.attention_mask).detach()
                expected = scored[:, -mask.shape[1] :]
            torch.testing.assert_close(kept[mask], expected[mask], atol=2e-5, rtol=0)
        for row, ids, real in zip(s.tokens, r.completions, mask):
            assert " ".join(row) == arithmetic.to_text(ids[real])
        assert (s.new - s.old)[mask].abs().max() > 0.05  # the step has moved something
        every = sorted(m.rewards.view(-1, 4).std(dim=1).tolist(), reverse=True)
        stds = s.rewards.view(-1, 4).std(dim=1).tolist()
        assert stds == pytest.approx([*every[:2], every[-1]])


def test_the_fixed_question_is_that_of_each_step_and_leaves_the_run_alone(recorded):
    metrics, policies, steps, base = recorded
    for before, policy, s in zip(policies, policies[1:], steps):
        assert s.fixed.prompts == ["7 + 4 + 9 + 5"] and s.fixed.step == s.step
        for row, words in enumerate(s.fixed.tokens):
            ids = torch.tensor([*map(arithmetic.VOCABULARY.index, words)])
            prompt, n = arithmetic.prompt_ids(FIXED), len(ids)
            assert s.fixed.rewards[row] == arithmetic.Arithmetic().reward([prompt], [ids])[0]
            for kept, model in ((s.fixed.old, before), (s.fixed.new, policy), (s.fixed.ref, base)):
                scored = token_log_probs(model, torch.cat([prompt, ids])[None])[0, -n:].detach()
                torch.testing.assert_close(kept[row, :n], scored, atol=2e-5, rtol=0)
    alone = train_grpo(copy.deepcopy(base), arithmetic.Arithmetic(), CONFIG)
    for m, again in zip(metrics, alone, strict=True):
        assert torch.equal(m.rollouts.completions, again.rollouts.completions)


def test_the_page_holds_the_numbers_to_the_bit(recorded):
    data = stored(page_text(recorded[2]))
    assert data["variants"].keys() == {*explorer.ALGORITHMS.values()} and len(VARIANTS) == 6
    assert data["run"]["max_length"] == CONFIG.max_new_tokens and data["group_size"] == 4
    pairs = [*zip(recorded[2], data["steps"], strict=True)]
    for s, found in pairs + [(s.fixed, found["fixed"]) for s, found in pairs]:
        assert found["rewards"] == s.rewards.tolist() and found["prompts"] == s.prompts
        words = [[data["words"][i] for i in row] for row in found["ids"]]
        assert words == s.tokens
        assert found["mask"] == ["1" * len(row) for row in s.tokens]
        for name in ("old", "new", "ref"):
            numbers = struct.iter_unpack("<f", b64decode(found[name]))
            assert [x for (x,) in numbers] == getattr(s, name)[s.mask].tolist()


def test_the_recorded_run_is_the_stored_one_and_its_question_stays():
    recorded, run = (json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in REAL)
    rewards = [step["reward"] / 1.5 for step in run["runs"][0]["steps"]]
    points = dict(recorded["curve"]["points"])
    assert [*points] == [*range(1, 21)] and [*points.values()] == pytest.approx(rewards, rel=1e-3)
    questions = {(*step["fixed"]["prompts"],) for step in recorded["steps"]}
    assert questions == {("Fred has 5 eggs and loses 2",)} and run["runs"][0]["seed"] == 0
    assert len(explorer.page(recorded)) < 300_000


def test_the_page_loads_nothing_and_no_token_can_end_its_script(recorded):
    page = page_text(recorded[2])
    assert not re.search(r"https?:|\b(?:src|href|srcset)\s*=|url\(|@import|fetch\(|XMLHttp", page)
    s = recorded[2][0]
    nasty = ["</script><script>alert(1)</script>", "<!--", "'&\"", "\n", "\u2028", "@DATA@"]
    text = page_text([replace(s, tokens=[nasty[: len(row)] for row in s.tokens])])
    assert text.count("</script>") == page.count("</script>") == 2
    assert "<!--" not in text
    assert {*nasty[:5]} <= {*stored(text)["words"]}
    assert stored(page_text([s], "It's <b>."))["about"] == "It's <b>."


@pytest.fixture
def shown(monkeypatch) -> list:
    """What a cell shows, as outputs that are stored."""
    outputs = []

    def display(data: dict, raw: bool) -> None:
        outputs.append(nbformat.v4.new_output("display_data", data))

    monkeypatch.setattr("IPython.display.display", display)
    return outputs


def framed(output: nbformat.NotebookNode) -> str:
    """The page in an output."""
    return html.unescape(re.search(r"srcdoc='([^']*)'></iframe>$", output.data["text/html"])[1])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.html")), ids=lambda path: path.stem)
def test_a_page_of_the_folder_is_shown_whole(path, shown):
    interactive.show(path.stem)
    (frame,) = shown
    text = interactive.page(path.stem)
    assert framed(frame) == text and f'<iframe class="{path.stem}"' in frame.data["text/html"]
    assert not re.search(r"(?:src|href)=|fetch\(|@import|https?:", text)  # it loads nothing


G = 6
SETTINGS = GRPOConfig(group_size=G, max_new_tokens=9, kl_weight=0.1)
ANSWERED_AT_2 = ("Find what is clipped", "DAPO or GRPO?", "One ratio per text", "All alike")


@pytest.fixture(scope="module")
def batch() -> explorer.Step:
    """Three groups of six: ragged, with holes, an empty row, equal rewards, ratios far from 1."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 7, 1, 0, 3, 4, 7, 2, 6, 6, 7, 1, 3, 5, 7, 7, 2, 4])
    mask = torch.arange(7) < lengths[:, None]
    mask[1, 2:4] = mask[10, 0] = False
    old = -3 * torch.rand(18, 7, generator=generator)
    new = (old + 0.25 * torch.randn(18, 7, generator=generator)).clamp(max=-0.01)
    ref = old + 0.8 * torch.randn(18, 7, generator=generator)
    old[1, 2], new[10, 0], ref[1, 3] = float("nan"), float("inf"), -float("inf")  # masked
    rewards = [1, 0, 0.5, -2, 1, 1, *[0.1] * 6, 0, 1, 1, 1, 0, 3]  # six times 0.1 isn't 0.6
    rewards = torch.tensor(rewards, dtype=torch.float64)
    tokens = [[f"t{t}" for t in range(n)] for n in lengths.tolist()]
    prompts = ["one", "equal", "three"]
    return explorer.Step(1, prompts, tokens, mask, rewards, old, new, ref, SETTINGS)


def autograd(s: explorer.Step, settings: Mapping, state: str) -> tuple[Tensor, Tensor]:
    """d loss / d log-prob (N, T), and by the logit of the token, each against one other token."""
    own = {k: settings[k] for k in ADVANTAGE_SETTINGS if k in settings}
    terms = {k: v for k, v in settings.items() if k in LOSS_SETTINGS}
    terms |= {"ref_log_probs": s.ref.double(), "max_length": s.config.max_new_tokens}
    now = (s.old if state == "first" else s.new).double()
    real = now.where(s.mask, -1.0)
    logits = torch.stack([real, (-real.expm1()).log()], dim=-1).requires_grad_()
    by_logit = logits.log_softmax(dim=-1)[..., 0]
    log_probs = now + (by_logit - by_logit.detach())  # to the bit, for a clip at a ratio of 1
    log_probs.retain_grad()
    advantages = group_advantages(s.rewards, s.config.group_size, **own)
    grpo_loss(log_probs, s.old.double(), advantages, s.mask, **terms)[0].backward()
    return log_probs.grad, logits.grad[..., 0]


def complete(settings: Mapping) -> dict:
    """With every setting, as the page has them: by default those of GRPOConfig."""
    usual = {name: getattr(GRPOConfig(), name) for name in (*ADVANTAGE_SETTINGS, *LOSS_SETTINGS)}
    return {**usual, **settings}


def every_setting() -> Iterator[tuple[dict, str]]:
    """The six algorithms with several clips, KL weights and estimators; and what they leave out."""
    clips = (None, (0.0, 0.0), (0.1, 0.5), (1.5, 0.02))
    kls = [(0.0, "k3", False), *product((0.04, 1.0), ("k1", "k2", "k3"), (False, True))]
    for name, clip, (weight, estimator, correction) in product(VARIANTS, clips, kls):
        settings = complete(VARIANTS[name])
        settings |= {"clip": clip or settings["clip"], "kl_weight": weight}
        settings |= {"estimator": estimator, "kl_correction": correction}
        yield from ((settings, state) for state in ("first", "after"))
    for scale, baseline, level, surrogate, how in product(
        ("group", "batch", "none"),
        ("mean", "leave_one_out", "none"),
        ("token", "sequence", "geometric"),
        ("clip", "cispo"),
        ("sequence_mean", "token_mean", "constant"),
    ):
        if baseline != "none" or scale == "none":
            other = dict(scale=scale, baseline=baseline, level=level, surrogate=surrogate, how=how)
            yield complete({**other, "kl_weight": 0.3, "kl_correction": how == "constant"}), "after"


@pytest.fixture
def page_of(opened, tmp_path):
    """The page in a browser without a network, where an error is a failure of the test."""

    def shown(steps: list[explorer.Step], curve: tuple | None = None, **context) -> object:
        path = tmp_path / "explorer.html"
        path.write_text(page_text(steps, "", curve), encoding="utf-8")
        return opened(path, **context)

    return shown


@pytest.mark.browser
def test_the_gradients_and_pushes_of_the_page_are_those_of_autograd(page_of, batch):
    """What is 0 has to be 0."""
    every = [{**settings, "state": state} for settings, state in every_setting()]
    assert len(every) == 6 * 4 * 13 * 2 + 7 * 3 * 2 * 3
    page, zeros = page_of([batch]), 0
    both = "([name, all]) => JSON.stringify(JSON.parse(all).map(s => explorer.numbers(name, s, 0)))"
    found = (json.loads(page.evaluate(both, [x, json.dumps(every)])) for x in ("gradient", "logit"))
    for *pair, settings in zip(*found, every, strict=True):
        exact, by_logit = autograd(batch, settings, settings["state"])
        pushes = -by_logit * batch.mask.sum()
        for rows, wanted in zip(pair, (exact, pushes)):
            assert [len(row) for row in rows] == [len(row) for row in batch.tokens]
            padded = [row + [0.0] * (exact.shape[1] - len(row)) for row in rows]
            mine = torch.tensor(padded, dtype=torch.float64)
            assert torch.equal(mine == 0, exact == 0), settings
            assert (mine - wanted).abs().max() < (1e-12 if wanted is exact else 1e-6), settings
        zeros += (exact == 0).sum().item() * (not settings["kl_weight"])
    assert zeros > 1000  # where the clip or the mask stops a gradient


@pytest.mark.browser
def test_the_controls_lead_to_the_published_algorithms(page_of, batch):
    page = page_of([batch, replace(batch, step=5)])
    page.click("#fine summary")

    def off(settings: Mapping, state: str) -> float:
        rows = page.evaluate("explorer.numbers('gradient')")
        pairs = zip(rows, autograd(batch, settings, state)[0])
        return max((torch.tensor(r) - g[: len(r)]).abs().max().item() for r, g in pairs if r)

    run = complete({"kl_weight": 0.1})
    assert off(run, "first") < 1e-7  # it opens like this
    page.check("#state input[value=after]", force=True)
    assert off(run, "after") < 1e-7
    for name, label in explorer.ALGORITHMS.items():
        page.get_by_label(label, exact=True).check(force=True)
        assert off({**run, **VARIANTS[name]}, "after") < 1e-7, label
        assert page.input_value("#low") == str(VARIANTS[name]["clip"][0])
        assert page.is_visible("#low") == (name != "cispo")
    page.get_by_label("GRPO", exact=True).check(force=True)
    for name, number in {"low": "0.05", "high": "0.01", "kl": "1"}.items():
        page.fill(f"#{name}", number)
    page.select_option("#estimator", "k2")
    page.check("#correction")
    mine = {"clip": (0.05, 0.01), "kl_weight": 1.0, "estimator": "k2", "kl_correction": True}
    assert off({**run, **mine}, "after") < 1e-7
    page.fill("#kl", "")  # while somebody types, the last number stays
    assert off({**run, **mine}, "after") < 1e-7
    page.locator("#kl").blur()
    assert page.input_value("#kl") == "1"
    assert page.locator("#algorithm :checked + span").inner_text() == "GRPO, changed"
    for name, settings in (("GRPO", VARIANTS["grpo"]), ("this run", {})):  # all comes back
        page.click(f"#algorithm input[value='{name}']", force=True)
        assert off({**run, **settings}, "after") < 1e-7
        assert page.locator("#algorithm :checked + span").inner_text() == name
        assert page.input_value("#estimator") == "k3" and not page.is_checked("#correction")


def in_float64(page: object, name: str, like: explorer.Step) -> Tensor:
    """A number of each token, as the page has it, 0 where there is no token (N, T)."""
    found = torch.zeros(like.mask.shape, dtype=torch.float64)
    for row, numbers in zip(found, page.evaluate("name => explorer.numbers(name)", name)):
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return found


@pytest.mark.browser
@pytest.mark.parametrize("state", ["first", "after"])
def test_two_algorithms_are_compared_push_by_push(page_of, batch, state):
    page, run = page_of([batch]), complete({"kl_weight": 0.1})
    page.check(f"#state input[value={state}]", force=True)
    counts = set()
    for name, other in (("rloo", "grpo"), ("gspo", "grpo"), ("dr_grpo", "dapo"), ("grpo", "grpo")):
        page.get_by_label(explorer.ALGORITHMS[name], exact=True).check(force=True)
        page.select_option("#against", explorer.ALGORITHMS[other])
        both = (autograd(batch, {**run, **VARIANTS[n]}, state) for n in (name, other))
        (a, a_logit), (b, b_logit) = ([-g * batch.mask.sum() for g in pair] for pair in both)
        count = ((a - b).abs() > 0.1 * torch.maximum(a.abs(), b.abs())).sum().item()
        said = f"{count} of {batch.mask.sum()} pushes differ by more than 10 percent"
        assert page.inner_text("#algorithm-text b") == said
        found = in_float64(page, "difference", batch)
        torch.testing.assert_close(found, a_logit - b_logit, atol=1e-6, rtol=0)
        assert page.is_checked("#view input[value=difference]")
        counts.add(count)
    assert len(counts) >= 2 + (state == "after") and 0 in counts


@pytest.mark.browser
def test_a_reward_that_is_edited_changes_advantages_and_pushes(page_of, batch):
    page, run = page_of([batch]), complete({"kl_weight": 0.1})
    page.check("#group input[value='2']", force=True)
    field = page.get_by_label("reward of completion 2")
    field.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("-2.5")  # the field stays while somebody types
    edited = batch.rewards.clone()
    edited[13] = -2.5
    for rewards in (edited, batch.rewards):
        for name, label in explorer.ALGORITHMS.items():
            page.get_by_label(label, exact=True).check(force=True)
            settings = {**run, **VARIANTS[name]}
            own = {k: settings[k] for k in ADVANTAGE_SETTINGS}
            wanted = group_advantages(rewards, G, **own)[:, None].expand(batch.mask.shape)
            found, real = in_float64(page, "A", batch), batch.mask
            torch.testing.assert_close(found[real], wanted[real], atol=1e-9, rtol=0)
            exact = -autograd(replace(batch, rewards=rewards), settings, "first")[1] * real.sum()
            assert (in_float64(page, "logit", batch) - exact).abs().max() < 1e-6
        if page.is_visible("#own"):
            page.click("#own")
    assert field.input_value() == "1" and not page.is_visible("#own")


@pytest.mark.browser
def test_questions_set_the_page_and_are_answered_by_the_run(page_of, batch):
    calm = replace(batch, step=1, new=batch.old)
    first = replace(batch, prompts=["fixed"], tokens=batch.tokens[:G], rewards=batch.rewards[:G])
    last = replace(first, rewards=torch.ones(G).double())
    page = page_of([replace(calm, fixed=first), replace(batch, step=2, fixed=last)])
    moved = batch.rewards[:G].clone()
    moved[4] = -2  # of those with a 1 the shortest
    sure = (batch.old[:G][batch.mask[:G]].exp() > 0.9).sum()
    pull = -autograd(batch, complete({"kl_weight": 0.1}), "first")[0][G : 2 * G].flatten()
    answers = {
        "Follow one question": "3 of 6 earn 1 at step 1, and 6 at step 2",
        "Certain tokens": f"{sure} of these 18 tokens",
        "Earned or lucky?": f"the same advantage, {group_advantages(batch.rewards[:G], G)[4]:+.2f}",
        "Change a reward": f"to {group_advantages(moved, G)[0]:+.2f}",
        "Find what is clipped": "t6, token 7 of completion 2 on one. Its ratio is 0.733",
        "DAPO or GRPO?": "66 of 74",
        "One ratio per text": "2 texts clipped",
        "All alike": f"push here is {pull[pull.abs().argmax()] * batch.mask.sum():+.4g}",
    }
    for button, (name, answer) in zip(page.locator("#questions button").all(), answers.items()):
        button.click()
        assert page.inner_text("#step-name") == f"step {1 + (name in ANSWERED_AT_2)}", name
        page.click("#asks summary")
        assert button.inner_text() == name and answer in page.inner_text("#asks").replace("−", "-")
    assert page.locator("#questions button").count() == len(answers)


@pytest.mark.browser
def test_keys_are_enough(page_of, recorded):
    page = page_of(recorded[2])
    page.focus("#step")
    page.keyboard.press("End")
    assert page.inner_text("#step-name") == "step 2"
    page.check("#group input[value='0']", force=True)  # whose rewards differ
    page.check("#view input[value='push']", force=True)
    assert page.get_attribute("#step", "aria-valuetext") == "step 2"
    tabbable = page.locator(".token[tabindex='0']")
    assert tabbable.count() == 1
    tabbable.focus()
    for _ in range(4):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    for key in ("ArrowDown", "ArrowRight", "End", "Home", "ArrowRight"):
        page.keyboard.press(key)
    focused = page.locator(":focus")
    assert focused.get_attribute("data-place") == "1,1" and tabbable.count() == 1
    page.keyboard.press("Enter")
    token = recorded[2][1].tokens[1][1]
    assert page.inner_text("#formula").startswith(f"{token}, token 2 of completion 2")
    assert focused.get_attribute("aria-selected") == "true"
    # The number of the formula is that of the strip and of the hook.
    push = -page.evaluate("explorer.numbers('gradient')[1][1]") * int(recorded[2][1].mask.sum())
    written = page.locator("#formula .pushed strong").inner_text().replace("−", "-")
    assert float(written) == pytest.approx(push, rel=1e-3)
    assert focused.inner_text().split()[-1].replace("−", "-") == f"{push:+.2f}"
    said = focused.get_attribute("aria-label")
    page.locator("#questions button").first.focus()
    for key in ("Enter", *["Tab"] * page.locator("#questions button").count(), "Enter"):
        page.keyboard.press(key)
    assert page.locator("#asks details[open]").count() == 1
    assert said == f"{token}, push {push:+.2f}".replace("-", "−")


CUT = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 864, 1280])
def test_everything_can_be_read_at_every_width(page_of, recorded, width, scheme):
    size = {"width": width, "height": 800}
    options = {"viewport": size, "color_scheme": scheme, "reduced_motion": "reduce"}
    page = page_of(recorded[2], ("correct", {0: 0.2, 2: 0.6}), **options)
    assert width < 1280 or page.locator(".token").first.bounding_box()["y"] < 500
    for nth in (0, -1):  # a token and its push are seen together
        page.locator(".token").nth(nth).click()
        for seen in ("#formula .pushed", ".token[aria-selected=true]"):
            box = page.locator(seen).bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 800, (nth, seen)
    if width == 360:
        page.locator(".token").first.click()  # the panel is between its row and the next one
        rows = [page.locator(".row").nth(i).bounding_box()["y"] for i in (0, 1)]
        panel = page.locator("#panel").bounding_box()
        assert panel["height"] <= 0.45 * 800 and rows[0] < panel["y"] < rows[1]
        page.click("#close")
        assert page.locator(".token[aria-selected=true]").count() == 0
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    page.locator(".token").nth(1).click()
    for algorithm, state in (("this run", "first"), ("GSPO", "after"), ("CISPO", "after")):
        page.get_by_label(algorithm, exact=True).check(force=True)
        page.check(f"#state input[value={state}]", force=True)
        for view in ("logit", "push", "prob", "ratio", "advantage", "clip", "kl", "difference"):
            page.check(f"#view input[value={view}]", force=True)
            is_readable(page, f"explorer-{width}-{scheme}-{algorithm}-{view}")
            assert page.locator(".token b").evaluate_all(CUT) == []
    for i, button in enumerate(page.locator("#questions button").all()):
        button.click()
        is_readable(page, f"explorer-{width}-{scheme}-question-{i}")
    sizes = page.evaluate(LABELS)
    assert sizes and min(sizes) >= 9


@pytest.mark.browser
def test_a_page_of_the_course_shows_the_explorer(recorded, shown, opened, tmp_path):
    explorer.show(explorer.data(recorded[2]))
    nb = made_up.notebook("1")
    nb.cells.append(nbformat.v4.new_code_cell(outputs=shown))
    course.begin(made_up.course(tmp_path, {"01_one": nb}), tmp_path / "out")
    page = opened(tmp_path / "out" / "01_one.html", viewport={"width": 1280, "height": 800})
    page.locator("iframe.explorer").evaluate("frame => frame.scrollIntoView()")
    inside = page.frame_locator("iframe.explorer")
    inside.locator(".token").first.click()
    assert "Advantage" in inside.locator("#formula").inner_text()
    for width, nth in product((1280, 360), (0, -1)):  # the push is beside its token, or below
        page.set_viewport_size({"width": width, "height": 800})
        inside.locator(".row").nth(nth).locator(".token").first.click()
        token = inside.locator(".token[aria-selected=true]").bounding_box()
        push = inside.locator("#formula .pushed").bounding_box()
        assert abs(push["y"] - token["y"]) < 250, (width, nth)
