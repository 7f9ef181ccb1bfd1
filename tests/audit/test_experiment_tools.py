"""What the stored runs are made with does what its name says."""

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import ppo
import pytest
import real_run
import results
import reuse
import scaling_runs
import store
import text_runs
import thinking
import torch
import turns
from store import Seed
from support import float64, uniform
from thinking import Variant

from minigrpo import arithmetic, grpo
from minigrpo.arithmetic import Arithmetic, is_held_out, read_question, running_totals
from minigrpo.files import data_folder
from minigrpo.grpo import rollout, train_grpo
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.objective import VARIANTS, grpo_loss
from minigrpo.scaling import run as scaling
from minigrpo.study.experiments import EXPERIMENTS, SUMMIT, WARMUP, Point
from minigrpo.study.ppo import at_the_end, gae, whiten
from minigrpo.text.shots import rows

SCORES = dict.fromkeys(results.SCORES, 0.5)


@pytest.fixture(scope="module")
def base():
    return load_policy()


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_experiment_is_measured_with_its_seed(monkeypatch):
    def one(experiment, base, *, seed):
        assert (experiment, seed) == (EXPERIMENTS["dapo"], 2)
        yield Point(0, 0.0, dict.fromkeys(results.SCORES, 0.123456))
        yield Point(10, 1.26, SCORES)

    monkeypatch.setattr(results.experiments, "run", one)
    found = results.measure(EXPERIMENTS["dapo"], Seed(2))
    assert (found["seed"], found["seconds"], found["curve"]["step"]) == (2, 1.3, [0, 10])
    assert found["curve"]["accuracy"] == [0.1235, 0.5]
    assert results.settings(EXPERIMENTS["dapo"])["config"]["clip"] == VARIANTS["dapo"]["clip"]


@pytest.mark.parametrize("kind", reuse.LOSSES)
def test_the_losses_of_the_sweep(kind, monkeypatch):
    """In the first pass, where all ratios are 1, the gradient of each is that of REINFORCE.

    Later, with ratio and clip, it's the package's for one ratio per text; without, a wide clip's.
    """
    old, advantages, mask = uniform(6, 9) - 1, uniform(6, seed=1), torch.ones(6, 9)
    batch = SimpleNamespace(log_probs=old, completion_mask=mask)
    later, new = old + uniform(6, 9, seed=2) / 4, old.clone().requires_grad_()
    monkeypatch.setattr(reuse, "score", lambda log_probs, batch: log_probs)
    reuse.loss_of(new, batch, advantages, kind=kind).backward()
    torch.testing.assert_close(new.grad, -(advantages / 6)[:, None].expand(6, 9))
    if clip := {"clip": (0.2, 0.2), "ratio": (1.0, 1e9)}.get(kind):
        wanted, _ = grpo_loss(later, old, advantages, mask, level="sequence", clip=clip)
        torch.testing.assert_close(reuse.loss_of(later, batch, advantages, kind=kind), wanted)


def test_the_cut_gradient_has_norm_1_and_a_short_one_stays():
    for length in (100.0, 0.5):
        weights = torch.nn.Parameter(torch.zeros(2))
        weights.grad = torch.tensor([0.6, 0.8]) * length
        reuse.CutAdam([weights]).step()
        assert weights.grad.norm().item() == pytest.approx(min(length, 1.0), rel=1e-4)


def test_a_run_is_what_its_name_says():
    assert reuse.passes(reuse.Run("clip", 8, "", 2)) == [[8] * 12]
    assert reuse.passes(reuse.Run("plain", 1, "", 0)) == [[1] * 16]
    assert reuse.passes(reuse.Run("ratio", 4, "same Adam", 0)) == [[4] + [1] * 15]
    assert reuse.passes(reuse.Run("ratio", 4, "new Adam", 0)) == [[4], [1] * 15]
    config = text_runs.config(text_runs.Arm("gpt2", steps=7), 5, (0,), 1)
    assert (config.steps, config.seed) == (7, 5)
    config = real_run.config(real_run.Run("no loss", 2e-5, 3), (0,), 0)
    assert (config.lr, config.seed) == (2e-5, 3)


@pytest.mark.parametrize("plan", ["", "norm 1", "new Adam"])
def test_a_run_of_the_sweep_is_the_loop_of_the_page(plan, monkeypatch):
    monkeypatch.setattr(reuse, "BATCHES", 2)
    monkeypatch.setattr(reuse, "LENGTH", 4)
    calls, real = [], reuse.page.train

    def noted(policy, *given, passes, **more):
        calls.append((passes, torch.optim.Adam is reuse.CutAdam))
        return real(policy, *given, passes=passes[:2], **more)

    monkeypatch.setattr(reuse.page, "train", noted)
    found = reuse.measure(reuse.Run("ratio", 4, plan, 0))
    wanted = [[4], [1] * 15] if plan == "new Adam" else [[4, 4]]
    assert calls == [(passes, plan == "norm 1") for passes in wanted]
    assert torch.optim.Adam is not reuse.CutAdam
    assert len(found["reward"]) == len(found["nll"]) == len(found["text"])
    assert found["reward"][0] == pytest.approx(0.08, abs=0.05) and 0.5 < found["nll"][0] < 2


def task(seed: int, **settings) -> thinking.Task:
    return thinking.Task(generator=torch.Generator().manual_seed(seed), **settings)


def test_a_noisy_grader_flips_so_many_rewards_and_others_each_time():
    prompts = Arithmetic().prompts(1, torch.Generator().manual_seed(0)) * 4000
    total = running_totals(read_question(prompts[0]))[-1]
    texts = [torch.tensor(arithmetic.completion_ids([], (total + i) % 10)) for i in (0, 1)] * 2000
    for p in (0.0, 0.3, 1.0):
        noisy = task(1, flip=p)
        once, again = (torch.tensor(noisy.reward(prompts, texts)) for _ in range(2))
        right, wrong = (once[i::2].mean() for i in (0, 1))
        assert abs(right - (1 - p)) < 0.04 and abs(wrong - p) < 0.04
        assert once.equal(again) == (p in (0.0, 1.0))


def test_a_run_on_few_questions_asks_the_same_ones_and_none_held_out():
    few, generator = task(3, questions=4), torch.Generator().manual_seed(0)
    asked = {read_question(p) for _ in range(20) for p in few.prompts(16, generator)}
    assert len(asked) == 4 and not any(map(is_held_out, asked))
    assert {read_question(p) for p in task(4, questions=4).prompts(64, generator)} != asked


@pytest.mark.parametrize("thinks", [True, False])
def test_solved_documents_are_right_and_only_the_completion_is_learned(thinks):
    ids, mask = thinking.solved(64, torch.Generator().manual_seed(0), thinking=thinks)
    for row, learn in zip(ids, mask):
        question = read_question(row[: int(learn.int().argmax())])
        totals = running_totals(question)
        wanted = arithmetic.completion_ids(totals if thinks else [], totals[-1])
        assert row[learn].tolist() == wanted and not is_held_out(question)


def test_a_rewarded_variant_is_trained_on_its_task_with_its_settings(monkeypatch):
    seen = []
    monkeypatch.setattr(thinking, "train_grpo", lambda policy, *rest: seen.append(rest) or ())
    for variant in (one for family in thinking.FAMILIES.values() for one in family.values()):
        if variant.imitate is None:
            list(thinking.train(variant, torch.nn.Identity(), 5))
            task, config = seen.pop()
            assert config == replace(SUMMIT, seed=5, **variant.changes)
            assert task == thinking.Task(generator=task.generator, **variant.task)
            assert task.generator.initial_seed() == 5


@pytest.mark.parametrize("name", ["shown right answers, lr 0.001", "rejection sampling"])
def test_equal_terms_are_equal(name, base, monkeypatch):
    """The optimizer, its learning rate and clipping, the updates and the rows are those of GRPO."""
    made, real = [], torch.optim.AdamW

    class Spy(real):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.norms, self.rates = [], []
            made.append(self)

        def step(self, *args):
            (group,) = self.param_groups
            self.norms.append(torch.stack([p.grad.norm() for p in group["params"]]).norm().item())
            self.rates.append(group["lr"])
            super().step(*args)

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    monkeypatch.setattr(grpo, "AdamW", Spy)
    monkeypatch.setattr(thinking, "SUMMIT", replace(SUMMIT, steps=3, max_grad_norm=0.1))
    variant = thinking.FAMILIES["equal terms"][name]
    assert variant.config.lr == (1e-3 if "0.001" in name else SUMMIT.lr)
    list(thinking.train(variant, copy.deepcopy(base), 0))
    list(train_grpo(copy.deepcopy(base), Arithmetic(), variant.config))
    mine, theirs = made
    for setting in ("betas", "weight_decay", "lr", "eps"):
        assert mine.param_groups[0][setting] == theirs.param_groups[0][setting]
    assert mine.rates == theirs.rates == [variant.config.lr] * 6  # three steps, two updates each
    assert max(mine.norms) == pytest.approx(0.1, rel=1e-3) == max(theirs.norms)


def test_imitation_sees_new_rows_each_step_and_none_of_the_shipped_warm_up(base, monkeypatch):
    monkeypatch.setattr(thinking, "SUMMIT", replace(SUMMIT, steps=2))
    seen, real = [], thinking.DOCUMENTS["right answers"]
    spy = lambda generator: seen.append(real(generator)) or seen[-1]  # noqa: E731
    monkeypatch.setitem(thinking.DOCUMENTS, "right answers", spy)
    shown = thinking.FAMILIES["equal terms"]["shown right answers, lr 0.0001"]
    list(thinking.train(shown, copy.deepcopy(base), 0))
    (first, _), (second, _), (at_0, _) = *seen, real(torch.Generator().manual_seed(0))
    assert len(first) == len(second) == 128
    assert not first.equal(second) and not first.equal(at_0)


def test_the_control_has_the_schedule_of_the_warm_up(monkeypatch):
    seen = []
    monkeypatch.setattr(thinking, "pretrain", lambda *rest: seen.append(rest) or ())
    for name, variant in thinking.FAMILIES["a thought or none"].items():
        list(thinking.train(variant, torch.nn.Identity(), 2))
        _, documents, config = seen.pop()
        steps = 400 if name.startswith("after") else 2000
        assert config == replace(WARMUP, steps=steps, lr=float(name.split()[-1]), seed=3)
        ids, mask = documents(torch.Generator().manual_seed(0))
        shortest = 3 + 5 if name.startswith("after") else 5
        assert len(ids) == 128 and mask.sum(dim=1).min().item() == shortest


def test_rejection_sampling_imitates_the_right_ones(base, monkeypatch):
    """The loss is the mean over the tokens of the right ones; without any nothing moves."""
    seen, rewards = [], torch.zeros(thinking.ROWS, dtype=torch.float64)

    def sampled(policy, task, prompts, *rest):
        assert not any(is_held_out(read_question(prompt)) for prompt in prompts)
        seen.append(rollout(policy, task, prompts, *rest)[0])
        return seen[-1], rewards

    monkeypatch.setattr(thinking, "rollout", sampled)
    policy = copy.deepcopy(base)
    rejection = thinking.FAMILIES["equal terms"]["rejection sampling"]
    next(thinking.train(rejection, policy, 3))
    first = next(train_grpo(copy.deepcopy(base), Arithmetic(), replace(SUMMIT, seed=3)))
    assert seen[0].completions.equal(first.rollouts.completions) and same(policy, base)
    rewards[[4, 9]] = 1.0
    ids, mask = next(thinking.own_right(policy, SUMMIT))
    right, rows = seen[1][torch.tensor([4, 9])], torch.tensor([4, 9])
    log_probs = grpo.score(base, right, SUMMIT)[0][right.completion_mask]
    loss = thinking.next_token_loss(base(ids).logits, ids, mask)
    torch.testing.assert_close(loss, -log_probs.mean())
    assert mask.any(dim=1).nonzero().flatten().equal(rows)
    next(thinking.train(rejection, policy, 3))
    assert not same(policy, base)


def test_a_start_is_random_shipped_or_warmed_up_with_its_own_pages(base, monkeypatch):
    asked = []

    def warm_up(policy, config, **own):
        return iter([asked.append((config.seed, own))])

    monkeypatch.setattr(thinking, "warm_up", warm_up)
    one = Variant(torn=0.03)
    assert same(thinking.start(one, 4), tiny_llama(4))
    assert same(thinking.start(replace(one, torn_seed=7), 4), tiny_llama(7))
    assert asked == [(4, {"torn": 0.03}), (7, {"torn": 0.03})]
    assert same(thinking.start(Variant(), 4), base)
    untrained = thinking.start(thinking.imitating("right answers", 1e-3, 20), 4)
    assert same(untrained, tiny_llama(4)) and len(asked) == 2


def test_habits_agree_with_a_count_by_hand(base, monkeypatch):
    monkeypatch.setattr(thinking, "HABIT_QUESTIONS", 200)
    seen, real = [], thinking.ask

    def spy(policy, asked, **settings):
        assert all(map(is_held_out, asked))
        seen.append(real(policy, asked, **settings))
        return seen[-1]

    monkeypatch.setattr(thinking, "ask", spy)
    found = thinking.habits(base)
    (r,) = seen
    assert sorted(r.lengths.tolist()) == [n for n in (3, 4, 5, 6) for _ in range(50)]
    whole = [thought == terms for thought, terms in zip(r.thinking.tolist(), r.lengths.tolist())]
    assert found["whole"] == round(sum(whole) / 200, 4)
    assert found["correct"] == round(sum(r.correct.tolist()) / 200, 4)


def test_a_measurement_keeps_the_scores_where_it_looks(monkeypatch):
    monkeypatch.setattr(thinking, "train", lambda *given: iter((5, 10, 15, 20)))
    monkeypatch.setattr(thinking, "scores", lambda policy: SCORES)
    monkeypatch.setattr(thinking, "habits", lambda policy: {"whole": 0.25})
    found = thinking.measure(Variant(imitate="right answers"), Seed(1))
    curve = {name: [0.5] * 3 for name in SCORES} | {"step": [0, 10, 20]}
    assert found == {"seed": 1, "base": {"whole": 0.25}, "curve": curve}
    found = thinking.measure(thinking.imitating("right answers", 1e-3, 200), Seed(1))
    assert found == {"seed": 1, "curve": curve}


def test_three_runs_are_compared_with_one_seed_and_each_with_its_own_settings(monkeypatch):
    given = []

    def noted(module, name):
        real = getattr(module, name)

        def train(*args, **own):
            given.append((args[-1].seed, own))
            return real(*args, **own)

        monkeypatch.setattr(module, name, train)

    noted(ppo, "train_grpo"), noted(ppo.study, "train_ppo")
    few = replace(SUMMIT, steps=1, prompts_per_step=2, group_size=2, check=False)
    for name, value in {"SUMMIT": few, "EVERY": 1, "BATCHES": {1: 2}}.items():
        monkeypatch.setattr(ppo, name, value)
    monkeypatch.setattr(ppo, "scores", lambda policy: SCORES)
    own = ppo.Own(1e-3, 0.95)
    found = ppo.compared(own, Seed(3))
    assert given == [(3, {}), (3, own._asdict()), (3, ppo.ASLEEP._asdict())]
    assert own._asdict().items() <= found.items() and found["seed"] == 3
    for name in ("grpo", "ppo", "asleep"):
        assert found[name]["curve"] == {"step": [0, 1], **dict.fromkeys(SCORES, [0.5, 0.5])}
    assert [*found["noise"]["1"]["gradients"]] == ["group", "no critic", "critic, lam 1.0"]
    given.clear()
    accuracies = iter([0.1, 0.7])
    monkeypatch.setattr(ppo, "scores", lambda policy: SCORES | {"accuracy": next(accuracies)})
    found = ppo.searched(own)  # which is scored over its whole run
    assert given == [(ppo.SEARCH_SEED, own._asdict())] and found["mean_accuracy"] == 0.4
    assert Seed(ppo.SEARCH_SEED) not in ppo.SEEDS


def test_seconds_are_compared_step_by_step_in_turn(monkeypatch):
    """Medians 3 and 12, but the median of 3 / 1, 20 / 10 and 12 / 3 is 3."""
    took, turns = {"grpo": [1, 10, 3], "ppo": [3, 20, 12]}, []

    class Run:
        def __init__(self, seed, own, look):
            self.name, self.seconds = "ppo" if own else "grpo", []
            assert seed == ppo.SEARCH_SEED and not look

        def step(self):
            turns.append(self.name)
            self.seconds.append(took[self.name][len(self.seconds)])

    monkeypatch.setattr(ppo, "Run", Run)
    monkeypatch.setattr(ppo, "TIMED", 3)
    assert ppo.timing() == {"grpo": 3, "ppo": 12, "ratio": 3}
    assert turns == ["grpo", "ppo"] * 3


def test_the_bytes_are_counted(base):
    policy, critic = 4 * 135_488, 4 * (135_488 - 31 * 64)
    kept = {"kept": {"grpo": 5 * policy, "ppo": 5 * policy + 4 * critic}}
    assert ppo.memory(base) == kept == ppo.SEARCHED.part()["memory"]


def test_advantages_with_and_without_a_critic(base, monkeypatch):
    monkeypatch.setattr(ppo, "SUMMIT", replace(SUMMIT, group_size=4, prompts_per_step=2))
    seen, generators = [], []

    def rolled(policy, task, prompts, config, generator):
        generators.append(generator.initial_seed())
        seen.append(rollout(policy, task, prompts, config, generator))
        return seen[-1]

    monkeypatch.setattr(ppo, "rollout", rolled)
    silent = lambda critic, r: torch.zeros(r.completion_mask.shape)  # noqa: E731
    monkeypatch.setattr(ppo.study, "state_values", silent)
    run = SimpleNamespace(policy=base, critic=None)
    found = ppo.noise_of_the_gradient(run, 4, 3)
    noise = found["gradients"]
    assert len(seen) == 4
    assert noise["critic, lam 1.0"] == noise["no critic"] != noise["group"]
    seeds = {3, ppo.SEARCH_SEED, *(one.seed for one in ppo.SEEDS)}
    assert len({*generators}) == 1 and not seeds & {*generators}
    r, rewards = seen[0]
    mask, values = r.completion_mask, uniform(*r.completion_mask.shape)
    advantages, _ = gae(at_the_end(rewards.to(values), r), values, mask, lam=1.0)
    found = ppo.advantages_of(values, r, rewards)["critic, lam 1.0"]
    torch.testing.assert_close(found, whiten(advantages, mask))


def test_noise_and_signal_by_hand_and_the_noise_does_not_count_as_signal():
    """Mean (1, 1), deviations (0, -1) and (0, 1): noise 2, and the product of the rows is 1.

    And 2,000 gradients of length 1 and noise 10 in 100 dimensions.
    """
    assert ppo.noise_to_signal(float64([1, 0], [1, 2])) == pytest.approx(math.sqrt(2), abs=1e-4)
    assert ppo.noise_to_signal(float64([1, 0], [-1, 0])) is None
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2000, 100, dtype=torch.float64, generator=generator)
    assert ppo.noise_to_signal(noise + 0.1) == pytest.approx(10, rel=0.1)


def test_the_soft_reward_counts_tags_that_occur_once():
    rewards = {name: function.__name__ for name, function in text_runs.REWARDS.items()}
    assert rewards == {"form": "format_reward", "answer": "answer_reward", "tags": "soft_reward"}
    texts = ["<think>6 + 3 = 9</think> <answer>9</answer>", "<answer>9</answer><answer>", "9"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for written in (texts, chats):
        assert text_runs.soft_reward(written, written) == pytest.approx([0.4, 0.1, 0.0])


def test_a_chat_asks_the_same_and_is_almost_never_right():
    policy, tokenizer = text_runs.base("gpt2")
    assert next(policy.parameters()).dtype == torch.float32
    rows, chats = (text_runs.problems(chat, held_out=True) for chat in (False, True))
    right = [text_runs.evaluate(policy, tokenizer, asked)["right"] for asked in (chats, rows)]
    assert right[0] < 0.05 < right[1]
    said = [{"role": "user", "content": rows[0]["prompt"].strip()}]
    assert chats[0] == {**rows[0], "prompt": said} and len(rows) == len(chats) == 128
    assert len(text_runs.problems(True, held_out=False)) == 2000


def losses(behavior, old, new, advantage=1.0):
    """Minus the gradient of one token's log-prob, for each loss."""
    found = {}
    for correction in scaling_runs.CORRECTIONS:
        leaf = float64([new]).log().requires_grad_()
        given = [float64([p]).log() for p in (old, behavior)] + [torch.tensor([[advantage]])]
        mask = torch.ones(1, 1, dtype=torch.bool)
        scaling_runs.SHOWN[correction](leaf, *given, mask).backward()
        found[correction] = round(-leaf.grad.item(), 6)
    return [*found.values()]


def test_where_each_correction_clips():
    """A token at 0.1 when it was written, 0.2 before the update and at it, and other cases.

    The losses are uncorrected, with one ratio, and weighted per token and per completion.
    """
    assert losses(0.1, 0.2, 0.2) == [1.0, 0.0, 2.0, 2.0]  # twice as likely: beyond the clip
    assert losses(0.1, 0.5, 0.5)[2:] == [2.0, 0.0]  # beyond the caps of 2 and 3
    assert losses(0.4, 0.2, 0.2)[2:] == [0.5, 0.5]
    # Another pass over the batch has moved it by half.
    assert losses(0.1, 0.2, 0.3) == [0.0, 0.0, 0.0, 0.0]
    assert losses(0.1, 0.2, 0.3, advantage=-1.0) == [-1.5, -3.0, -3.0, -3.0]


def episode(text: str) -> list[torch.Tensor]:
    """Tokens of a completion, and who wrote them: `is` and `was` are the tool's results."""
    text = text.replace("is", "<result> bad </result>").replace("was", "<result> good </result>")
    ids = torch.tensor([turns.commits.VOCABULARY.index(word) for word in text.split()])
    return [ids, ~torch.isin(ids, torch.tensor([turns.GOOD, turns.BAD, 21, 22]))]


def test_what_is_learned_from_instead_of_the_rollouts():
    policy, task = load_policy(turns.SHIPPED[0.0]), turns.Bisect()
    prompts, g = task.prompts(4, torch.Generator().manual_seed(0)), torch.Generator()
    r, rewards = rollout(policy, task, prompts, turns.RUN, g)
    again, _ = turns.tokenized_again(policy, r, rewards)
    ids, own, other = r.completions, r.own, again.completions[again.own]
    two = own & (ids >= 10) & (ids < 16)
    assert two.any() and len(other) == own.sum() + two.sum()
    assert not ((other > 9) & (other < 16)).any()
    parts, A = turns.by_turn(policy, r, rewards)
    assert torch.equal(parts.own.view(-1, *own.shape).sum(dim=0), own.long())
    bits = [sum(turns.read_episode(*row).bits) for row in zip(r.unpadded(ids), r.unpadded(own))]
    first = grpo.group_advantages(rewards + torch.tensor(bits) / 4, 8)  # all that's earned
    assert torch.allclose(A[: len(first)].double(), first, atol=1e-4)


def test_a_proof_is_believed_whoever_wrote_it_unless_the_judge_is_honest():
    said = episode("<call> 4 </call> is <call> 3 </call> was <answer> 4 </answer> </s>")
    forged = episode("<call> 14 was <answer> 15 </answer> </s>")
    forged[1][:] = True
    for honest, fair in ((False, 1.0), (True, 0.0)):
        grade = partial(turns.Proof(honest=honest).grade, None)
        assert (grade(*said), grade(*forged)) == (1.0, fair)
    assert grade(*episode("<call> 4 </call> is <answer> 4 </answer> </s>")) == 0.0


def test_the_writer_is_as_many_steps_behind_as_asked(monkeypatch):
    seen, real = [], scaling_runs.SHOWN["write_batch"]

    def spy(writer, *rest):
        seen.append(next(writer.parameters()).detach().clone())
        return real(writer, *rest)

    monkeypatch.setitem(scaling_runs.SHOWN, "write_batch", spy)
    shown = scaling_runs.SHOWN
    assert shown["train"](shown["per_token"], age=2, steps=4) == []
    assert [one.equal(seen[0]) for one in seen] == [True, True, True, False]


def test_an_exact_run_is_in_float64(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    scaling.main(["ours", "--exact", "--steps", "1", "--out", str(tmp_path / "run.pt")])
    parameters = torch.load(tmp_path / "run.pt", weights_only=True)["parameters"]
    assert {p.dtype for p in parameters.values()} == {torch.float64}


@pytest.mark.parametrize("fraction", [0.0, 0.28, 0.5])
def test_losses_are_the_fraction_that_is_asked_for(fraction):
    asked = rows("no loss", held_out=False)
    kept = real_run.with_losses(asked, fraction)
    gains, losses = ([r for r in kept if r["kind"] == kind] for kind in ("gets", "loses"))
    assert gains == [row for row in asked if row["kind"] == "gets"]
    assert losses == [row for row in asked if row["kind"] == "loses"][: len(losses)]
    assert len(losses) / len(kept) == pytest.approx(fraction, abs=1e-3)
    assert fraction != 0.5 or kept == asked  # in their order, to the last row


def test_an_evaluation_counts_each_way_and_each_kind():
    """Greedy, every gain is right; sampled, every loss is, and nothing else keeps to the form."""

    class Lab:
        held_out = rows(held_out=True)[:40]

        def write(self, asked, **settings):
            assert settings in ({"top_k": 1}, {})
            kind = "gets" if settings else "loses"
            right = "<think>{thought}</think><answer>{answer}</answer>".format_map
            return [right(row) if row["kind"] == kind else row["answer"] for row in asked]

    kinds = [row["kind"] for row in Lab.held_out[:31]]
    gains, losses = kinds.count("gets"), kinds.count("loses")
    found = real_run.evaluate(Lab(), 31)
    assert found["questions"] == 31 and gains != losses
    for way, n, right in (("greedy", gains, "gets"), ("sampled", losses, "loses")):
        assert found[way]["right"] == found[way]["form"] == pytest.approx(n / 31)
        for kind, count in (("gets", gains), ("loses", losses)):
            assert (found[way][kind], found[way][f"{kind}, questions"]) == (kind == right, count)
        assert len(found[way]["transcripts"]) == real_run.TRANSCRIPTS


def test_a_real_run_is_measured(tmp_path, monkeypatch):
    """Two steps on a model that takes seconds."""
    config = real_run.config

    def briefly(*given, **side):  # the small model has no room for solved problems
        return [{**row, "prompt": f"{row['question']}\n"} for row in rows(*given, **side)[:8]]

    def short(*given):
        return replace(config(*given), steps=2, evaluate_every=1, prompts_per_step=2, check=False)

    sizes = {"HELD_OUT": 5, "MIDWAY": 4, "TRANSCRIPTS": 2, "ASKED": 2, "TOKENS": 4, "WIDTH": 96}
    for name, value in {**sizes, "config": short, "rows": briefly}.items():
        monkeypatch.setattr(real_run, name, value)
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    real_run.main([str(data_folder() / "text_llama"), "--seed", "1"])
    (one,) = real_run.STORE.stored()
    assert (one["shots"], one["lr"], one["seed"]) == ("one loss", 1e-5, 1)
    assert [found["questions"] for found in one["held out"].values()] == [5, 4, 5]
    assert len(one["steps"]) == 2 and len(one["steps"][0]["first group"]) == 8
    assert len(real_run.STORE.part()["questions"]) == 2
    real_run.main([str(data_folder() / "text_llama"), "--record"])
    kept = store.load("real_steps.json")
    assert [s["step"] for s in kept["steps"]] == [1, 2] and len(kept["curve"]["points"]) == 2
    (fixed,) = {tuple(s["fixed"]["prompts"]) for s in kept["steps"]}
    assert rows(held_out=True)[0]["question"].startswith(*fixed)
    paid = dict(zip((f.__name__ for f in real_run.REWARDS), real_run.WEIGHTS, strict=True))
    assert paid == {"tags_reward": 0.4, "format_reward": 0.1, "answer_reward": 1.0}


def test_another_model_is_refused():
    with pytest.raises(SystemExit, match="expected SmolLM2-135M-Instruct"):
        real_run.main([str(data_folder() / "text_llama"), "--again"])
