"""The recipe with a tool: TRL's loop of turns beside ours, on the same model."""

import csv
import re

import pytest
import recipe_lines
import torch
from transformers import AutoTokenizer

from minigrpo.llama import load_policy
from minigrpo.turns.commits import VOCABULARY, Bisect, play, read_episode, to_text


@pytest.fixture
def recipe(monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return recipe_lines.load("tools_trl")


def played(recipe, folder, rows, noise=0.0, turns=None):
    """The policy, its greedy episodes by TRL (of `turns`, if given), and TRL's trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    base = recipe.small_model(folder)
    policy, tokenizer = load_policy(base), AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        for p in policy.parameters():
            p += noise * p.std() * torch.randn_like(p)
    settings = dict(max_completion_length=28, max_tool_calling_iterations=4, top_k=1)
    settings |= dict(per_device_train_batch_size=len(rows), num_generations=2, report_to="none")
    trainer = GRPOTrainer(
        policy, [recipe.answered, recipe.right], processing_class=tokenizer,
        args=GRPOConfig(folder, use_cpu=True, bf16=False, **settings),
        train_dataset=Dataset.from_list(rows), environment_factory=recipe.Repository,
    )  # fmt: skip
    if turns:  # instead of those that the policy would write
        trainer._generate_single_turn = lambda *_, **__: (turns.pop(0), None)
    return policy, trainer._generate_and_score_completions([dict(row) for row in rows]), trainer


@pytest.mark.parametrize("noise", [0.0, 0.3])  # with noise it errs, and it calls once too often
def test_trl_plays_our_episodes_and_learns_from_our_tokens(recipe, tmp_path, noise):
    rows = recipe.rows(48, held_out=True)
    policy, out, trainer = played(recipe, tmp_path, rows, noise)
    prompts = [recipe.prompt_of(row["repository"]) for row in rows]
    r = play(policy, Bisect(), prompts, top_k=1)
    learned = (out["completion_mask"] * out["tool_mask"]).bool()
    calls, cut, errors = set(), 0, 0
    for row, (ids, own) in enumerate(zip(r.unpadded(r.completions), r.unpadded(r.own))):
        last = int(own.nonzero()[-1]) + 1  # TRL drops a reply that doesn't fit, and we cut it off
        real = out["completion_mask"][row].bool()
        assert torch.equal(out["completion_ids"][row][real], ids[:last])
        assert torch.equal(learned[row][real], own[:last]) and not learned[row][~real].any()
        calls.add(len(read_episode(ids, own).calls))
        cut += last < len(ids)
        errors += "error" in to_text(ids)
    assert calls >= {1, 2, 3, 4} and cut and (errors > 0) == (noise > 0)
    assert out["prompt_ids"].tolist() == [prompt.tolist() for prompt in prompts]
    paid = Bisect().reward(prompts, r.unpadded(r.completions), r.unpadded(r.own))
    assert [*trainer._logs["rewards"]["right"]] == paid and 0 < sum(paid) < 48


def test_a_malformed_call_gets_our_answer_and_a_sentence(recipe, tmp_path):
    said = ("<call> 7 </call>", "<call> 3 <call> 7 </call>", "7 </call>", "<call> good </call>")
    said += ("<call> </call>", "<call> 3 4 </call>", "<call> 3 <result> bad </call>", "</call>")
    said += ("<answer> 5 </answer> </s>",)
    *texts, end = ([VOCABULARY.index(word) for word in text.split()] for text in said)
    rows = recipe.rows(8, held_out=True)
    _, out, trainer = played(recipe, tmp_path, rows, turns=[[*texts], [end] * 8])
    for row, ids, real, text in zip(rows, out["completion_ids"], out["completion_mask"], texts):
        reply = Bisect().reply(recipe.prompt_of(row["repository"]), torch.tensor(text))
        assert ids[real.bool()].tolist() == [*text, *reply, *end]
    pandas = pytest.importorskip("pandas")  # as TRL writes them
    pandas.DataFrame({"all": [*trainer._logs["completion"]]}).to_parquet(tmp_path / "all.parquet")
    told = [messages[1]["content"] for messages in trainer._logs["completion"]]
    assert {*told[:2]} <= {"good", "bad"}
    assert told[3] == """{'error': "expected a commit from 0 to 15, got 'good'"}"""
    assert all("expected a commit from 0 to 15, got" in text for text in told[2:])


def test_the_template_writes_the_courses_words_and_only_one_answer_counts(recipe, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(recipe.small_model(tmp_path))
    call = {"function": {"name": "test", "arguments": {"commit": 0}}}
    chat = [*recipe.rows(1, held_out=False)[0]["prompt"]]
    chat += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    chat += [{"role": "tool", "name": "test", "content": "good"}]
    chat += [{"role": "assistant", "content": "<answer> 5 </answer> </s>"}]
    ids = torch.tensor(tokenizer.apply_chat_template(chat, return_dict=False))
    said = "<call> 0 </call> <result> good </result> <answer> 5 </answer> </s>"
    assert to_text(ids) == f"{to_text(recipe.prompt_of(chat[1]['content']))} {said}"
    for answer in ("<answer>5</answer>", "So, <answer> 5 </answer> "):
        assert recipe.answer([{"role": "assistant", "content": answer}]) == 5
        for text in (f"{answer} or so", 2 * answer, answer.replace("5", "good"), "5"):
            assert recipe.answer([{"role": "assistant", "content": text}]) is None


def test_two_steps_of_the_smoke_run(recipe, tmp_path, capsys):
    recipe.main(["--smoke", "--eval-every", "1", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "a right completion earns 1, a wrong one 0" in said
    for when in ("before", "after 1 steps", "after 2 steps"):
        assert f"{when}: 0." in said and (tmp_path / f"{when.replace(' ', '_')}.json").exists()
    step = "step 1  reward 0.1  frac_reward_zero_std 0.1  truncated 0.0  entropy 0.9  grad_norm 1.0"
    assert re.search(re.sub(r"\d\.\d", r"\\d\\.\\d+", step) + r"  calls \d\.\d+\n", said)
    log = [*csv.DictReader((tmp_path / "log.csv").open())]
    assert [row["step"] for row in log] == ["1", "2"]
    for row in log:
        assert row["reward"] == row["rewards/right/mean"] and float(row["grad_norm"]) > 0
        assert float(row["tools/call_frequency"]) > 0 and float(row["held_out"]) * 8 % 1 == 0
    assert len([*(tmp_path / "completions").iterdir()]) == 3  # 0 are those of before
    weights = [load_policy(tmp_path / name).lm_head.weight for name in ("base", "model")]
    assert not torch.equal(*weights)
