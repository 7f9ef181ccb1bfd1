"""The explorer: what it stores is what the loss needs, and what its page computes is autograd's."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
from __future__ import annotations

import copy
import html
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import course
import made_up
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from test_browser import NOTEBOOKS, browser, is_readable, opened  # noqa: F401

from minigrpo import arithmetic
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import load_policy
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook import explorer, interactive
from minigrpo.objective import ADVANTAGE_SETTINGS, VARIANTS, group_advantages, grpo_loss
from minigrpo.study.experiments import SUMMIT

FOLDER = Path(interactive.__file__).parent
PAGE = Path(explorer.__file__).with_name("page.html")
CONFIG = replace(SUMMIT, steps=2, prompts_per_step=6, group_size=4, lr=1e-3)
KEPT = 3  # groups
LOSS_SETTINGS = [name for name in GRPOConfig().loss_settings if name != "max_length"]


@pytest.fixture(scope="module")
def recorded() -> tuple[list, list, list[explorer.Step], torch.nn.Module]:
    """The metrics of two steps, the policies after them, what was recorded, and the base."""
    base = load_policy()
    policy, metrics, policies, steps = copy.deepcopy(base), [], [], []
    for m in train_grpo(policy, arithmetic.Arithmetic(), CONFIG):
        metrics.append(m)
        policies.append(copy.deepcopy(policy))
        token = arithmetic.VOCABULARY.__getitem__
        steps.append(explorer.snapshot(m, policy, base, CONFIG, token, question, groups=KEPT))
    return metrics, policies, steps, base


def question(ids: torch.Tensor) -> str:
    return " + ".join(map(str, arithmetic.read_question(ids)))


def stored(text: str) -> dict:
    """The data in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


# what is recorded ----------------------------------------------------------------------------


def test_what_is_recorded_is_what_scoring_again_finds(recorded):
    """Of the groups that differ most, and of the one that differs least."""
    for m, policy, s in zip(*recorded[:3]):
        asked = zip(m.rollouts.prompt_ids, m.rollouts.prompt_mask)
        prompts = [question(ids[real]) for ids, real in asked]
        rows = [i for prompt in s.prompts for i in range(24) if prompts[i] == prompt]
        assert len(rows) == 12
        r, mask = m.rollouts[torch.tensor(rows)], m.rollouts.completion_mask[rows]
        assert torch.equal(s.rewards, m.rewards[rows]) and torch.equal(s.mask, mask)
        for kept, model in ((s.old, None), (s.new, policy), (s.ref, recorded[3])):
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


def test_the_page_holds_the_numbers_to_the_bit(recorded):
    data = stored(explorer.page(recorded[2]))
    assert data["variants"].keys() == {*explorer.ALGORITHMS.values()} and len(VARIANTS) == 6
    assert data["run"]["max_length"] == CONFIG.max_new_tokens and data["group_size"] == 4
    for s, found in zip(recorded[2], data["steps"], strict=True):
        assert found["rewards"] == s.rewards.tolist() and found["prompts"] == s.prompts
        words = [[data["words"][i] for i in row] for row in found["ids"]]
        assert words == s.tokens
        assert found["mask"] == ["1" * len(row) for row in s.tokens]
        for name in ("old", "new", "ref"):
            numbers = struct.iter_unpack("<f", bytes.fromhex(found[name]))
            assert [x for (x,) in numbers] == getattr(s, name)[s.mask].tolist()


def test_the_page_loads_nothing_and_no_token_can_end_its_script(recorded):
    page = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|\b(?:src|href|srcset)\s*=|url\(|@import|fetch\(|XMLHttp", page)
    s = recorded[2][0]
    nasty = ["</script><script>alert(1)</script>", "<!--", "'&\"", "\n", "\u2028", "@DATA@"]
    text = explorer.page([replace(s, tokens=[nasty[: len(row)] for row in s.tokens])])
    assert text.count("</script>") == page.count("</script>") == 2
    assert "<!--" not in text
    assert {*nasty[:5]} <= {*stored(text)["words"]}


def test_the_picture_says_where_a_row_goes_on():
    zeros = torch.zeros(2, 8)
    tokens, mask = [["a"] * 7, ["b"] * 8], torch.ones(2, 8).bool()
    step = explorer.Step(1, ["q"], tokens, mask, zeros[:, 0], zeros, zeros, zeros, CONFIG)
    for ax in explorer.picture(step).axes:
        (mark,) = (text for text in ax.texts if text.get_text() == "…")
        assert mark.get_position()[0] > 7 and 1 < mark.get_position()[1] < 2  # behind the second


@pytest.fixture
def shown(monkeypatch) -> list:
    """What a cell shows: a figure, or an output as it is stored."""
    outputs = []

    def display(data: dict, raw: bool) -> None:
        outputs.append(nbformat.v4.new_output("display_data", data))

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: outputs.append(plt.gcf()))
    yield outputs
    plt.close("all")


def framed(output: nbformat.NotebookNode) -> str:
    """The page in an output."""
    return html.unescape(re.search(r"srcdoc='([^']*)'></iframe>$", output.data["text/html"])[1])


def test_show_gives_a_picture_and_the_page(recorded, shown):
    explorer.show(recorded[2])
    picture, frame = shown
    assert len(picture.axes) == 2 and framed(frame) == explorer.page(recorded[2])
    assert frame.data["text/plain"].startswith("The explorer: ")
    explorer.show(recorded[2], about="It's <b>.")
    assert stored(framed(shown[3]))["about"] == "It's <b>."


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.html")), ids=lambda path: path.stem)
def test_a_page_of_the_folder_is_shown_whole(path, shown):
    interactive.show(path.stem)
    (frame,) = shown
    text = interactive.page(path.stem)
    assert framed(frame) == text and f'<iframe class="{path.stem}"' in frame.data["text/html"]
    assert not re.search(r"(?:src|href)=|fetch\(|@import|https?:", text)  # it loads nothing


def test_the_folder_of_pages_gets_what_is_shown_in_a_frame(recorded, shown, tmp_path):
    explorer.show(recorded[2])
    cells = [nbformat.v4.new_markdown_cell("Text."), nbformat.v4.new_code_cell(outputs=shown[1:])]
    nb = made_up.notebook("1")
    nb.cells += cells
    root, out = made_up.course(tmp_path, {"01_one": nb}), tmp_path / "out"
    course.begin(root, out)
    text = (out / "explorer.html").read_text("utf-8")
    links = re.search(r"(<body>)\n(<nav.*?</nav>)", text, re.DOTALL)
    assert {*re.findall('href="([^"]*)"', links[2])} == {"index.html", "01_one.html"}
    assert text.replace(links[0], links[1]) == explorer.page(recorded[2])
    assert 'href="explorer.html"' in (out / "index.html").read_text("utf-8")


# what the page computes, in a browser --------------------------------------------------------

G = 6
SETTINGS = GRPOConfig(group_size=G, max_new_tokens=9, kl_weight=0.1)


@pytest.fixture(scope="module")
def batch() -> explorer.Step:
    """Three groups of six: ragged, with holes, an empty row, equal rewards, ratios far from 1."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 7, 1, 0, 3, 4, 7, 2, 6, 6, 7, 1, 3, 5, 7, 7, 2, 4])
    mask = torch.arange(7) < lengths[:, None]
    mask[1, 2:4] = mask[10, 0] = False
    old = -3 * torch.rand(18, 7, generator=generator)
    new = old + 0.25 * torch.randn(18, 7, generator=generator)
    ref = old + 0.8 * torch.randn(18, 7, generator=generator)
    old[1, 2], new[10, 0], ref[1, 3] = float("nan"), float("inf"), -float("inf")  # masked
    rewards = [1, 0, 0.5, -2, 1, 1, *[0.1] * 6, 0, 1, 1, 1, 0, 3]  # six times 0.1 isn't 0.6
    rewards = torch.tensor(rewards, dtype=torch.float64)
    tokens = [[f"t{t}" for t in range(n)] for n in lengths.tolist()]
    prompts = ["one", "equal", "three"]
    return explorer.Step(1, prompts, tokens, mask, rewards, old, new, ref, SETTINGS)


def autograd(s: explorer.Step, settings: Mapping, state: str) -> torch.Tensor:
    """d loss / d log-prob (N, T), in float64."""
    own = {k: settings[k] for k in ADVANTAGE_SETTINGS if k in settings}
    terms = {k: v for k, v in settings.items() if k in LOSS_SETTINGS}
    terms |= {"ref_log_probs": s.ref.double(), "max_length": s.config.max_new_tokens}
    log_probs = (s.old if state == "first" else s.new).double().requires_grad_()
    advantages = group_advantages(s.rewards, s.config.group_size, **own)
    grpo_loss(log_probs, s.old.double(), advantages, s.mask, **terms)[0].backward()
    return log_probs.grad


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

    def shown(steps: list[explorer.Step], **context) -> object:
        path = tmp_path / "explorer.html"
        path.write_text(explorer.page(steps), encoding="utf-8")
        return opened(path, **context)

    return shown


@pytest.mark.browser
def test_the_gradients_of_the_page_are_those_of_autograd(page_of, batch):
    """What is 0 has to be 0."""
    every = [{**settings, "state": state} for settings, state in every_setting()]
    assert len(every) == 6 * 4 * 13 * 2 + 7 * 3 * 2 * 3
    weights = "all => JSON.stringify(JSON.parse(all).map(s => explorer.weights(s, 0)))"
    found = json.loads(page_of([batch]).evaluate(weights, json.dumps(every)))
    zeros = 0
    for rows, settings in zip(found, every, strict=True):
        exact = autograd(batch, settings, settings["state"])
        assert [len(row) for row in rows] == [len(row) for row in batch.tokens]
        padded = [row + [0.0] * (exact.shape[1] - len(row)) for row in rows]
        mine = torch.tensor(padded, dtype=torch.float64)
        assert torch.equal(mine == 0, exact == 0) and (mine - exact).abs().max() < 1e-12, settings
        zeros += (exact == 0).sum().item() * (not settings["kl_weight"])
    assert zeros > 1000  # where the clip or the mask stops a gradient


# the page in use -----------------------------------------------------------------------------


@pytest.mark.browser
def test_the_controls_lead_to_the_published_algorithms(page_of, batch):
    page = page_of([batch, replace(batch, step=5)])

    def off(settings: Mapping, state: str) -> float:
        rows = page.evaluate("explorer.weights()")
        pairs = zip(rows, autograd(batch, settings, state))
        return max((torch.tensor(r) - g[: len(r)]).abs().max().item() for r, g in pairs if r)

    run = complete({"kl_weight": 0.1})
    assert off(run, "after") < 1e-7
    page.check("#state input[value=first]", force=True)
    assert off(run, "first") < 1e-7
    page.check("#state input[value=after]", force=True)
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


@pytest.mark.browser
def test_the_page_opens_where_something_is_clipped(page_of, batch):
    batch = replace(batch, rewards=-batch.rewards)  # so that the largest push is a negative one
    calm = replace(batch, step=1, new=batch.old)
    page = page_of([calm, replace(batch, step=2)])
    assert page.inner_text("#step-name") == "step 2"
    assert page.is_checked("#state input[value=after]")
    held = page.locator(".token.stopped").count()
    assert held and f"{held} clipped" in page.locator("#group :checked + span").inner_text()
    # The token that is pushed most is open, and the panel says what happens to it.
    pushes = [abs(x) for row in page.evaluate("explorer.weights()")[:G] for x in row]
    row, at = map(int, page.get_attribute(".token[aria-selected=true]", "data-place").split(","))
    assert abs(page.evaluate(f"explorer.weights()[{row}][{at}]")) == max(pushes)
    page.locator(".token.stopped").first.click()
    assert "It's clipped, so only the KL is left." in page.inner_text("#formula")
    page.fill("#kl", "0")
    assert "there's no KL. Nothing pushes this token." in page.inner_text("#formula")
    page.focus("#group :checked")
    page.keyboard.press("ArrowRight")  # the pills stay, and so does the focus
    assert page.evaluate("document.activeElement.value") == "1"
    page.locator(".token").first.click()
    assert "The advantage is 0" in page.inner_text("#formula")


@pytest.mark.browser
def test_keys_are_enough(page_of, recorded):
    page = page_of(recorded[2])
    page.focus("#step")
    page.keyboard.press("End")
    assert page.inner_text("#step-name") == "step 2"
    for name, value in {"view": "push", "state": "first", "group": "0"}.items():
        page.check(f"#{name} input[value='{value}']", force=True)
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
    push = -page.evaluate("explorer.weights()[1][1]") * int(recorded[2][1].mask.sum())
    written = page.locator("#formula .pushed strong").inner_text().replace("−", "-")
    assert float(written) == pytest.approx(push, rel=1e-3)
    assert focused.inner_text().split()[-1].replace("−", "-") == f"{push:+.2f}"
    said = focused.get_attribute("aria-label")
    assert said == f"{token}, push {push:+.2f}".replace("-", "−")


CUT = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 864, 1280])
def test_everything_can_be_read_at_every_width(page_of, recorded, width, scheme):
    size = {"width": width, "height": 800}
    page = page_of(recorded[2], viewport=size, color_scheme=scheme, reduced_motion="reduce")
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
        for view in ("prob", "ratio", "advantage", "push", "clip", "kl"):
            page.check(f"#view input[value={view}]", force=True)
            is_readable(page, f"explorer-{width}-{scheme}-{algorithm}-{view}")
            assert page.locator(".token b").evaluate_all(CUT) == []


SEEN = """() => {
    const frame = document.querySelector("iframe.explorer");
    const picture = document.querySelector("img[alt^='Eight completions of the question']");
    return [frame, picture].map(element => element.getBoundingClientRect().height);
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scripts", [True, False])
def test_a_notebook_shows_the_explorer_or_its_picture(opened, tmp_path, scripts):
    path = NOTEBOOKS / "07_grpo.ipynb"
    course.write_page(nbformat.read(path, as_version=4), path, tmp_path, 0)
    (tmp_path / "course.js").touch()  # the search
    options = {"java_script_enabled": scripts, "viewport": {"width": 1280, "height": 800}}
    page = opened(tmp_path / "07_grpo.html", **options)
    page.locator("iframe.explorer").evaluate("frame => frame.scrollIntoView()")
    if scripts:
        inside = page.frame_locator("iframe.explorer")
        inside.locator(".token").first.click()
        assert "Advantage" in inside.locator("#formula").inner_text()
        high = inside.locator("html").evaluate("e => [e.scrollHeight, innerHeight]")
        assert high[0] <= high[1]  # nothing scrolls inside
        for width, nth in product((1280, 360), (0, -1)):  # the push is beside its token, or below
            page.set_viewport_size({"width": width, "height": 800})
            inside.locator(".row").nth(nth).locator(".token").first.click()
            token = inside.locator(".token[aria-selected=true]").bounding_box()
            push = inside.locator("#formula .pushed").bounding_box()
            assert abs(push["y"] - token["y"]) < 250, (width, nth)
    frame, picture = page.evaluate(SEEN)
    assert (frame > 500, picture > 100) == (scripts, not scripts)
