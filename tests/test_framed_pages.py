"""Pages that notebooks show in a frame: their numbers are torch's, and they can be used and read.

The explorer has a file of its own, test_explorer.py.
"""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
import html
import json
import math
import re
from collections.abc import Iterator
from itertools import product
from random import Random
from types import SimpleNamespace

import nbformat
import pytest
import recipe_lines
import torch
from committed import with_predicted
from support import float64
from test_browser import NOTEBOOKS, browser, is_readable, opened  # noqa: F401
from torch import Tensor

from minigrpo.exercises.reader import find
from minigrpo.notebook import interactive
from minigrpo.objective import VARIANTS, group_advantages, grpo_loss, kl_estimate
from minigrpo.turns import commits

pytestmark = pytest.mark.browser
RUN = [
    {"step": 0, "stop": [0.53, 0.45, 0.38, 0.24], "correct": [0.1, 0.09, 0.08, 0.1, 1.0]},
    {"step": 10, "stop": [0.2, 0.14, 0.08, 0.03], "correct": [0.1, 0.1, 0.09, 0.1, 1.0]},
]
WORDS = "<call> 7 </call> <result> good </result> <call> </call> <result> error </result> "
WORDS += "<call> 9 </call> <result> bad </result> <answer> 9 </answer> </s>"
IDS = torch.tensor([commits.VOCABULARY.index(word) for word in WORDS.split()])  # (T,)
OWN = torch.tensor([*map(int, "111000110001110001111")]).bool()
LOGITS = 3 * torch.randn(16, len(IDS), 32, generator=torch.Generator().manual_seed(0)).double()
LOG_PROBS = LOGITS.log_softmax(-1)[:, range(len(IDS)), IDS]  # (16, T): for each first bad commit
EPISODE = {"step": 0, "prompt": "1 2 3", "first": 9, "words": WORDS.split()}
EPISODE |= {"own": OWN.int().tolist(), "log_probs": LOG_PROBS.tolist()}
BUTTONS = {  # after each of them everything can be read
    "group_sandbox": ".bar button, #tries button",
    "episode": "#episodes button, #tries button",
    "ladder": "#rungs button, #names button",
    "kl": "button",
    "stop_tree": "#tries button",
    "calculator": "#tries button",
}


@pytest.fixture
def page_of(opened, tmp_path):
    def shown(name: str, run: list | None = RUN, **context) -> object:
        run = [EPISODE] if name == "episode" else run
        path = tmp_path / f"{name}.html"
        path.write_text(interactive.page(name, run), encoding="utf-8")
        return opened(path, **context)

    return shown


# How high the letters of each label of a drawing are on the screen.
LABELS = """() => [...document.querySelectorAll("svg text")].map(
    text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 760, 1280])
@pytest.mark.parametrize("name", BUTTONS)
def test_everything_can_be_read_at_every_width(page_of, name, width, scheme):
    page = page_of(name, viewport={"width": width, "height": 800}, color_scheme=scheme)
    buttons = page.locator(BUTTONS[name])
    assert buttons.count() > 2
    for i in range(buttons.count()):
        buttons.nth(i).click()
        is_readable(page, f"{name}-{width}-{scheme}-{i}")
        assert all(size >= 9 for size in page.evaluate(LABELS)), (name, width, i)
        if page.locator("#tries :focus").count():  # what it says is on the screen
            box = page.locator("#said").bounding_box()
            assert 0 <= box["y"] and box["y"] + box["height"] <= 800, (name, width, i)
    if name == "ladder" and width > 360:
        assert page.evaluate("document.body.scrollHeight") <= 720


CONTROLS = '[...document.querySelectorAll("button, input, select, [tabindex]")]'
NAMELESS = f"""() => {CONTROLS}.filter(e => {{
    const named = [e, ...(e.labels || [])].map(n => n.getAttribute("aria-label") || n.innerText);
    return !(e.localName === "select" ? named.slice(1) : named).some(name => name?.trim());
}}).map(e => e.outerHTML)"""
# What Tab has to reach: all that is shown, but of a set of radio buttons only the one that is on.
REACHED = f"""{CONTROLS}.filter(e => e.tabIndex >= 0 && !e.disabled && e.checkVisibility()
    && !(e.type === "radio" && !e.checked))"""


@pytest.mark.parametrize("name", BUTTONS)
def test_keys_reach_all_that_can_be_changed_and_everything_has_a_name(page_of, name):
    page = page_of(name)
    assert page.evaluate(NAMELESS) == []
    many = page.evaluate(f"{REACHED}.length")
    assert many >= 8
    for i in range(many):  # from the top to the bottom
        page.keyboard.press("Tab")
        assert page.evaluate(f"{REACHED}.indexOf(document.activeElement)") == i


AROUND = "<body><iframe srcdoc='{}' style='width: 100%; height: 90px'></iframe></body>"
HIGHER = "() => innerHeight - document.body.scrollHeight === 4"  # nothing scrolls inside
GROUND = "getComputedStyle(document.body).backgroundColor"
DARK, LIGHT = "rgb(21, 25, 30)", "rgb(255, 255, 255)"


def test_a_frame_has_the_theme_of_the_page_around_it_and_its_own_height(opened, tmp_path):
    path = tmp_path / "around.html"
    page = html.escape(interactive.page("ladder"), quote=False).replace("'", "&#39;")
    path.write_text(AROUND.format(page), encoding="utf-8")
    for scheme, ground in (("light", LIGHT), ("dark", DARK)):
        around = opened(path, color_scheme=scheme)
        frame = around.frames[1]
        assert frame.evaluate(GROUND) == ground
        for change, shown in (
            ("document.body.dataset.jpThemeLight = 'false'", DARK),  # as JupyterLab does it
            ("document.body.dataset.jpThemeLight = 'true'", LIGHT),
            ("delete document.body.dataset.jpThemeLight", ground),
            ("document.documentElement.dataset.theme = 'dark'", DARK),  # as the site does it
            ("document.documentElement.dataset.theme = 'light'", LIGHT),
            ("document.documentElement.dataset.theme = 'auto'", ground),
        ):
            around.evaluate(change)
            assert frame.evaluate(GROUND) == shown, change
        for width in (1280, 360):
            around.set_viewport_size({"width": width, "height": 800})
            frame.wait_for_function(HIGHER)


def test_a_page_by_itself_keeps_the_theme_that_was_chosen(page_of):
    page = page_of("kl", color_scheme="light")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert page.evaluate(GROUND) == DARK
    page.evaluate("localStorage.theme = 'dark'; delete document.documentElement.dataset.theme")
    page.reload()
    assert page.evaluate(GROUND) == DARK


def test_advantages_and_gradient_of_the_sandbox_are_those_of_the_package(page_of):
    """Of random states, where the clip stops some draws, and of a group that is all alike."""
    page, random = page_of("group_sandbox"), Random(0)
    stopped = 0
    for i in range(100):
        group = [random.randrange(4) for _ in range(8)]
        logits, old = ([random.gauss(0, 1) for _ in range(4)] for _ in range(2))
        near = [o + random.gauss(0, 0.3) for o in old]
        s = {"logits": near if i % 2 else logits, "old": float64(*old).softmax(0).tolist()}
        s |= {"group": group, "rewards": [random.uniform(-1, 1) for _ in range(4)]}
        s |= {"eps": random.choice([0.05, 0.2, 1]), "std": i % 3 > 0}
        s["rewards"] = s["rewards"] if i % 7 else [0.1] * 4
        z = float64(*s["logits"]).requires_grad_()
        rewards, scale = float64(*s["rewards"])[group], "group" if s["std"] else "none"
        A = group_advantages(rewards, 8, scale=scale)
        new, before = (p[group][:, None] for p in (z.log_softmax(0), float64(*s["old"]).log()))
        mask, clip = torch.ones(8, 1), (s["eps"], s["eps"])
        loss, metrics = grpo_loss(new, before, A, mask, clip=clip)
        loss.backward()
        given = json.dumps(s)
        terms = page.evaluate(f"sandbox.terms({given})")
        torch.testing.assert_close(float64(*(t["A"] for t in terms)), A, atol=1e-12, rtol=0)
        found = float64(*page.evaluate(f"sandbox.gradient({given})"))
        torch.testing.assert_close(found, -z.grad, atol=1e-12, rtol=0)
        here = sum(t["stopped"] for t in terms)
        assert here / 8 == pytest.approx(metrics["clip_ratio/region_mean"])
        stopped += here
    assert stopped > 100


def test_the_sandbox_in_use(page_of):
    page = page_of("group_sandbox")
    before = page.locator("#rows td:nth-child(4)").all_inner_texts()
    assert [text.strip() for text in before] == ["0.00", "+1.22", "−1.22", "0.00"]  # Figure 3.1
    page.click("#update")
    assert "see thee gained most" in page.inner_text("#said")
    page.click("#update")
    assert page.locator(".stop").count() == 2 and "stops them all" in page.inner_text("#said")
    page.get_by_role("button", name="A better exam").click()
    assert page.locator("#rows td:nth-child(4)").all_inner_texts() == before
    page.focus(".reward >> nth=0")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("sandbox.state.rewards[0]") == pytest.approx(10.3)
    assert "+0.18" in page.inner_text("#rows td:nth-child(4) >> nth=0")
    page.get_by_role("button", name="The group is all alike").click()
    assert "nothing moved" in page.inner_text("#said")
    page.get_by_role("button", name="Two good answers").click()
    assert "luck did" in page.inner_text("#said")


LENGTHS = (4, 2, 3, 1)
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
REWARDS = ([1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0])
BOUNDS = {"none": {"clip": (1.0, 1e9)}, "clip": {}, "cispo": {"surrogate": "cispo"}}


def every_setting() -> Iterator[dict]:
    """All that can be switched on together: no std without a mean, no bound without a ratio."""
    usual = {"low": 0.2, "high": 0.2, "cap": 1.2}
    for baseline, divide, average, (ratio, bound) in product(
        ("none", "mean", "leave_one_out"),
        ("no", "std"),
        ("sum", "sequence_mean", "token_mean", "constant"),
        (("no", "none"), ("token", "none"), ("token", "clip"), ("token", "cispo")),
    ):
        if baseline != "none" or divide == "no":
            own = dict(baseline=baseline, divide=divide, average=average, ratio=ratio, bound=bound)
            yield {**usual, **own}
            if bound != "none":
                yield {**own, "low": 0.3, "high": 0.5, "cap": 5}


def autograd(s: dict, rewards: list[int], ratios: list[list[float]]) -> list[list[float]]:
    """Minus the gradient of the loss with respect to each log-prob."""
    old = torch.full((4, 4), -1.0).double()
    table = [row + [1.0] * (4 - len(row)) for row in ratios]
    log_probs = (old + torch.tensor(table, dtype=torch.float64).log()).requires_grad_()
    scale = {"no": "none", "std": "group"}[s["divide"]]
    given = torch.tensor(rewards).double()
    A = group_advantages(given, 4, scale=scale, baseline=s["baseline"])
    how = "constant" if s["average"] == "sum" else s["average"]  # the sum over rows alone
    terms = {"how": how, "max_length": 1 if s["average"] == "sum" else 4}
    terms |= {"clip": (s["low"], s["cap"] - 1 if s["bound"] == "cispo" else s["high"])}
    terms |= BOUNDS[s["bound"]]
    grpo_loss(log_probs, old if s["ratio"] == "token" else None, A, MASK, **terms)[0].backward()
    return [row[:n].tolist() for row, n in zip(-log_probs.grad, LENGTHS)]


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def test_the_pushes_of_the_ladder_are_those_of_autograd(page_of):
    """What is 0 has to be 0."""
    page = page_of("ladder")
    every, ratios = [*every_setting()], page.evaluate("ladder.RATIOS")
    assert len(every) == 5 * 4 * 6
    swapped = [[1 / x for x in row] for row in ratios]
    zeros = 0
    for s, rewards, table in product(every, REWARDS, (ratios, swapped)):
        given = json.dumps([s, rewards, table])
        found = flat(page.evaluate(f"ladder.pushes(...{given})"))
        exact = flat(autograd(s, rewards, table))
        assert torch.equal(found == 0, exact == 0) and (found - exact).abs().max() < 1e-12, given
        zeros += (exact == 0).sum().item()
    assert zeros > 1000


def test_the_rungs_are_those_of_the_notebook(page_of):
    """Its ratios and its pushes, as it prints them; and the names are the published algorithms."""
    page = page_of("ladder")
    path = NOTEBOOKS / "04_policy_gradient.ipynb"
    cells = with_predicted(nbformat.read(path, as_version=4), path).cells
    printed = "\n".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))
    shown = {name: settings for name, settings in page.evaluate("ladder.RUNGS")}
    for name, rows in {"ratios": page.evaluate("ladder.RATIOS"), **shown}.items():
        line = re.search(rf"^{name} +(.*)$", printed, re.MULTILINE)[1]
        if name != "ratios":
            rows = page.evaluate(f"ladder.pushes({json.dumps(rows)})")
        there = torch.tensor([float(x) for x in line.replace("|", "").split()]).double()
        assert (flat(rows) - there).abs().max() < 0.00501, name
    for name, s in page.evaluate("ladder.NAMES"):
        published = VARIANTS[name.lower().replace(". ", "_")]
        assert s["divide"] == {"none": "no", "group": "std"}[published["scale"]]
        assert s["average"] == published["how"] and s["baseline"] == "mean"
        upper = s["cap"] - 1 if s["bound"] == "cispo" else s["high"]
        assert (s["low"], upper) == published["clip"]
        assert s["bound"] == published.get("surrogate", "clip")


def test_the_switches_lead_up_the_ladder(page_of):
    """Rung 6 is shown at first; each switch moves what it says, and none leads to nonsense."""
    page = page_of("ladder")
    pressed = page.locator("button[aria-pressed=true]")
    assert pressed.all_inner_texts() == ["6 clip"]
    assert page.locator(".token.stopped").count() == 4
    page.click(".token >> nth=0")
    assert "far enough" in page.inner_text("#formula")
    page.click(".token >> nth=6")
    assert "against its advantage" in page.inner_text("#formula")
    for name in page.locator("#rungs button").all_inner_texts():
        page.get_by_role("button", name=name, exact=True).click()
        assert pressed.all_inner_texts() == [name]
    page.check("input[name=ratio][value=no]")
    assert page.is_disabled("input[name=bound][value=clip]")
    assert page.locator(".stopped").count() == 0
    assert pressed.all_inner_texts() == ["4 average"]
    page.check("input[name=baseline][value=none]")
    assert page.is_checked("input[name=divide][value=no]")
    page.click(".reward >> nth=1")
    assert page.inner_text(".reward >> nth=1").startswith("reward 1")
    page.focus(".token[tabindex='0']")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    chosen = page.get_attribute("[aria-selected=true]", "data-place")
    assert page.get_attribute(":focus", "data-place") == chosen


X = torch.linspace(-6, 6, 121, dtype=torch.float64)
PLACES = [(0.0, 1.0), (-2.0, 0.7), (2.4, 0.4), (-0.3, 2.3), (4.5, 3.5)]  # middle and width


def hump(middle: float | Tensor, width: float | Tensor) -> Tensor:
    return (-((X - middle) ** 2) / (2 * width**2)).log_softmax(0)


def push(value: Tensor, *leaves: Tensor) -> list[float]:
    return [-slope.item() for slope in torch.autograd.grad(value, leaves, retain_graph=True)]


@pytest.mark.parametrize(("middle", "width"), PLACES)
def test_the_two_kls_and_their_pushes_are_those_of_torch(page_of, middle, width):
    page = page_of("kl")
    m, log_s = float64(middle, math.log(width)).requires_grad_().unbind()
    leaves, log_p = (m, log_s), hump(m, log_s.exp())
    ref = (0.6 * hump(-2.0, 0.7).exp() + 0.4 * hump(2.2, 0.8).exp()).log()
    kls = {"reverse": (log_p.exp() * (log_p - ref)).sum()}
    kls["forward"] = (ref.exp() * (ref - log_p)).sum()
    found = page.evaluate("([m, s]) => kl.divergences(m, s)", [middle, width])
    assert found == {name: pytest.approx(kl.item(), rel=1e-9) for name, kl in kls.items()}

    def pushes(name: str, draws: list[int] | None) -> list[float]:
        return page.evaluate("given => kl.pushes(...given)", [name, middle, width, draws])

    draws = [60, 61, 55, 70, 40, 60, 82, 12]
    for name in ("k1", "k2", "k3"):
        values = kl_estimate(log_p, ref, estimator=name)
        assert pushes(name, draws) == pytest.approx(push(values[draws].mean(), *leaves), rel=1e-9)
    # On average k1 pulls nowhere, k2 goes down the reverse KL, and k3 the forward KL.
    assert pushes("k1", None) == pytest.approx([0, 0], abs=1e-12)
    for name, which in (("k2", "reverse"), ("k3", "forward")):
        wanted = push(kls[which], *leaves)
        assert pushes(name, None) == pytest.approx(wanted, rel=1e-7, abs=1e-9), name


def test_the_two_kls_in_use(page_of):
    page = page_of("kl")
    page.get_by_role("button", name="Smallest reverse KL").click()
    assert page.evaluate("kl.state.m") == pytest.approx(-2, abs=0.11)
    assert "mode-seeking" in page.inner_text("#said")
    page.get_by_role("button", name="Smallest forward KL").click()
    assert page.evaluate("kl.state.s") > 2
    page.focus("#plot")
    middle, width = page.evaluate("[kl.state.m, kl.state.s]")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("[kl.state.m, kl.state.s]") == pytest.approx([middle + 0.2, width + 0.1])
    box = page.locator("#plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 2 / 3, box["y"] + 60)
    page.mouse.up()
    assert page.evaluate("kl.state.m") == pytest.approx(2, abs=0.2)
    before = float(page.inner_text("#reverse"))
    page.locator("[data-follow=k2]").click()
    assert float(page.inner_text("#reverse")) < before
    page.get_by_role("button", name="Two starts").click()
    assert "ended at 2.3, from the left at -1.9" in page.inner_text("#said")
    page.get_by_role("button", name="A draw that was given up").click()
    assert page.inner_text("#said").startswith("One draw of 16")
    slopes = [page.evaluate(f"kl.pushes('{name}', -2, 1.4, [82])[0]") for name in ("k2", "k3")]
    assert abs(slopes[1]) > 2 * abs(slopes[0])


NUMBERS = """all => all.map(([stop, rewards]) =>
    ["goingOn", "gradient", "ends", "uphill"].reduce(
        (found, name) => [...found, ...tree[name](stop, rewards)], [tree.worth(stop, rewards)]))"""


def test_the_numbers_of_the_tree_are_those_of_exercise_7_1_and_of_autograd(page_of):
    generator, worth = torch.Generator().manual_seed(0), find("7.1").reference
    drawn = torch.rand(200, 11, generator=generator, dtype=torch.float64)
    trees = [(row[:D], row[D : 2 * D + 1]) for row, D in zip(drawn, 40 * [1, 2, 3, 4, 5])]
    page = page_of("stop_tree")
    found = page.evaluate(NUMBERS, [[t.tolist() for t in tree] for tree in trees])
    for (stop, rewards), mine in zip(trees, found, strict=True):
        logits = stop.logit().requires_grad_()
        worth(logits.sigmoid(), rewards).backward()
        rest = [worth(stop[d:], rewards[d:]) for d in range(1, len(stop))] + [rewards[-1]]
        ends = [worth(stop, end) for end in torch.eye(len(rewards), dtype=stop.dtype)]
        higher = (logits + 4 * logits.grad).sigmoid()
        exact = torch.stack([worth(stop, rewards), *rest, *logits.grad, *ends, *higher])
        torch.testing.assert_close(torch.tensor(mine, dtype=exact.dtype), exact, atol=1e-12, rtol=0)


def test_keys_move_through_the_run_and_the_tree_works_without_one(page_of):
    page = page_of("stop_tree")
    assert page.inner_text("#worth") == "worth 0.21" and page.inner_text("#step-o") == "0"
    page.focus("#step")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#step-o") == "10" and page.inner_text("#worth") == "worth 0.65"
    page.focus("#tree input >> nth=0")
    page.keyboard.press("Home")
    assert page.evaluate("tree.state.stop[0]") == 0 and "changed" in page.inner_text("#step-o")
    page = page_of("stop_tree", None)
    page.click("#more")
    assert float(page.inner_text("#worth").split()[1]) > 0.9


def test_the_pushes_of_an_episode_are_those_of_autograd_and_0_at_the_tools_tokens(page_of):
    page = page_of("episode")
    for first, A, every in product((0, 7, 15), (1.5, -0.7), (False, True)):
        logits = LOGITS[first].clone().requires_grad_()
        log_probs = logits.log_softmax(-1)[range(len(IDS)), IDS][None]
        own = torch.ones_like(OWN) if every else OWN
        given = log_probs, log_probs.detach(), float64(A), own[None]
        grpo_loss(*given, how="token_mean")[0].backward()
        found = page.evaluate(f"episode.pushes(episode.EPISODES[0], {first}, {A}, {int(every)})")
        exact = -logits.grad[range(len(IDS)), IDS]
        torch.testing.assert_close(float64(*found), exact, atol=1e-12, rtol=0)
        assert every or not any(push for push, mine in zip(found, OWN) if not mine)


def test_with_a_different_first_bad_commit_the_tool_says_what_it_would(page_of):
    page = page_of("episode")
    for first in range(16):
        tool, ids = lambda prompt, commit, first=first: commit >= first, IDS.clone()
        for t in (3, 8, 14):
            ids[t : t + 3] = torch.tensor(commits.Bisect(tool=tool).reply(IDS, IDS[:t]))
        found = page.evaluate(f"episode.words(episode.EPISODES[0], {first}).join(' ')")
        assert found == commits.to_text(ids)
    page.focus("#first")
    page.keyboard.press("End")
    assert "1 of 2 replies would be different" in page.inner_text("#said")
    assert page.inner_text("[data-t='15'] .was") == "was bad"
    page.focus(".token[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.check("#all")
    assert "token 2 of 21" in page.inner_text("#formula") and "/ 21" in page.inner_text("#formula")


def test_the_calculator_counts_what_the_recipes_count(page_of):
    memory = recipe_lines.load("memory")
    page, random = page_of("calculator"), Random(0)
    usual, start = vars(memory.options().parse_args([])), page.evaluate("calculator.START")
    draws = {"rows": (1, 8, 64), "prompt": (0, 200), "tokens": (40, 512, 4000), "cards": (1, 3, 8)}
    draws |= {"vllm": (0, 0.3, 0.5), "stage": (0, 1, 2, 3)}
    draws |= {"sampled": (0, 900), "trained": (0, 5e4)}
    draws |= dict.fromkeys(("lora", "kl", "checkpointing", "tiles"), (False, True))
    for i in range(200):
        drawn = {**start, **{name: random.choice(values) for name, values in draws.items()}}
        name, config = [*memory.SHAPES.items()][i % 5]
        o = {**usual, **drawn, "whole_logits": not drawn["tiles"]}
        o["no_checkpointing"] = not drawn["checkpointing"]
        plan = memory.plan(config, SimpleNamespace(**o))
        found = page.evaluate("g => calculator.plan(calculator.SHAPES[g[0]], g[1])", [name, drawn])
        assert {key: found[key] for key in plan} == pytest.approx(plan, rel=1e-12), drawn
    for name in usual.keys() & start.keys() - {"card", "tflops", "sampled", "trained"}:
        assert start[name] == usual[name], name


def test_the_calculator_in_use(page_of):
    page = page_of("calculator")
    for name, verdict in (("7B on one", "No."), ("7B with LoRA", "Yes"), ("7B, four", "Yes")):
        page.get_by_role("button", name=name).first.click()
        assert page.inner_text("#said").startswith(verdict)
    page.get_by_role("button", name="7B with LoRA and vLLM on 40").click()
    assert "a copy of the weights of its own, 14.2 GiB" in page.inner_text("#said")
    page.fill("#vllm", "0.4")
    assert page.inner_text("#said").startswith("Yes")
    page.fill("#vllm", "7")  # is no share
    assert page.evaluate("calculator.state.vllm") == 0.4
    assert "Not measured yet on your card" in page.inner_text("#source")
    for field, value in {"sampled": "1000", "trained": "4000", "price": "2"}.items():
        page.fill(f"#{field}", value)
    assert "the rates that you put in" in page.inner_text("#source")
    seconds = 200 * 128 * (250 / 1000 + 450 / 4000)
    plan = "calculator.plan(calculator.SHAPES['Qwen2.5-7B'], calculator.state)"
    assert page.evaluate(f"{plan}.price") == pytest.approx(2 * seconds / 3600)
    assert "At your price that's 5.16" in page.inner_text("#time")
    page.select_option("#kind", "H100, 80 GB")
    assert page.evaluate("[calculator.state.card, calculator.state.tflops]") == [79.1, 989]


def test_back_brings_no_old_values_without_what_they_mean(page_of, tmp_path):
    page = page_of("calculator")
    fresh = page.inner_text("#said")
    page.fill("#card", "300")
    assert page.inner_text("#said") != fresh
    (tmp_path / "elsewhere.html").write_text("<p>elsewhere</p>")
    page.goto((tmp_path / "elsewhere.html").as_uri())
    page.go_back()
    page.wait_for_timeout(300)
    assert (page.input_value("#card"), page.inner_text("#said")) == ("23.5", fresh)
