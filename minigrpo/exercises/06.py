"""What is learned, rewards that are hard to cheat, pass at k"""

import math
import re
from random import Random

import torch

from minigrpo import pretrain, rewards
from minigrpo.arithmetic import ANSWER, END_ANSWER, END_THINK, EOS, TAGS, THINK
from minigrpo.exercises.form import FAR, exercise, numbers, whole


def next_token_loss_of_answers(logits, input_ids, prompt_lengths, mask):
    learn = mask & (torch.arange(mask.shape[1]) >= prompt_lengths[:, None])
    return pretrain.next_token_loss(logits, input_ids, learn)


@exercise("fine-tuning loss", package=next_token_loss_of_answers, gradient="logits")
def sft_loss(logits, input_ids, prompt_lengths, mask):
    """logits (N, S, V), input_ids, mask (N, S), prompt_lengths (N,) -> scalar (), in nats"""
    log_p = logits[:, :-1].log_softmax(dim=-1)  # position s predicts token s + 1
    tokens = input_ids[:, 1:]
    chosen = log_p.gather(-1, tokens[..., None]).squeeze(-1)  # (N, S - 1)
    places = torch.arange(1, input_ids.shape[1], device=input_ids.device)  # of tokens, in their row
    learn = mask[:, 1:] & (places >= prompt_lengths[:, None])
    return -chosen[learn].mean()


def batch(r, S, V, *rows, scale=1.0):
    """Each row is the length of its prompt, and where its answer ends."""
    logits, input_ids = numbers(r, len(rows), S, V, low=-9, high=9), whole(r, len(rows), S, high=V)
    prompts, ends = torch.tensor(rows).unbind(dim=1)
    return logits * scale, input_ids, prompts, torch.arange(S) < ends[:, None]


def any_batch(r):
    S = r.randint(2, 7)
    others = [sorted(r.choices(range(1, S + 1), k=2)) for _ in range(r.randrange(4))]
    return batch(r, S, r.randint(2, 6), sorted(r.sample(range(1, S + 1), 2)), *others)


sft_loss.why = """After the shift the places run from 1 to S - 1, and the first token behind a
prompt of P is at place P. If you count from 0, the loss leaves out the first token of every
answer."""
sft_loss.right = ["return torch.nn.functional.cross_entropy(logits[:, :-1][learn], tokens[learn])"]
sft_loss.wrong = {
    "log_p = logits[:, 1:].log_softmax(dim=-1)": "There's no shift. The logits at s predict token "
    "s + 1, and not the token just read.",
    "learn = mask[:, 1:]": "The prompts are in your mean, so the model learns to write questions.",
    "learn = mask[:, 1:] & (places > prompt_lengths[:, None])": "The first token after each "
    "prompt is missing. A prompt of P tokens fills the places 0 to P - 1.",
    "learn = places >= prompt_lengths[:, None]": "The padding is in your mean. Use the mask too.",
    "return -torch.where(learn, chosen, 0.0).mean()": "You average over all N * (S - 1) columns. "
    "Divide by the number of tokens that count.",
    "return chosen[learn].mean()": "The minus is missing, so the model would unlearn the answers.",
}
sft_loss.cases = {
    "two rows, the second one padded": batch(Random(42), 4, 2, (2, 4), (1, 2)),
    "ids above 255": batch(Random(3), 4, 400, (1, 3), (2, 4), (1, 2)),
    "a row of 600 tokens": batch(Random(3), 600, 3, (2, 600)),
}
sft_loss.draw = any_batch
sft_loss.corners = {"logits of a thousand": (batch(Random(5), 4, 3, (1, 4), scale=200), FAR)}
sft_loss.hints = """
Score tokens 1 to S - 1 with the logits of positions 0 to S - 2. Which of them count?
learn = mask[:, 1:] & (torch.arange(1, S) >= prompt_lengths[:, None]). Then the mean."""


@exercise("grade an answer", package=rewards.answer_reward)
def grade(completion, answer, tags):
    """completion (T,) ids written after <think>, answer an id -> 1.0 or 0.0"""
    ids = completion.tolist()
    ending = [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos]
    thought = ids[:-5]
    all_tags = {tags.think, tags.end_think, tags.answer, tags.end_answer, tags.eos}
    return float(ids[-5:] == ending and all_tags.isdisjoint(thought))


def tampered(r):
    *others, a, b, c, d, e, answer = r.sample(range(12), 12)
    ids = [*r.sample([*others, answer], r.randrange(4)), b, c, answer, d, e]
    at, tag = r.randrange(len(ids) + 3), r.choice((a, b, c, d, e))
    old = ids[at : at + 2]
    ids[at : at + 2] = r.choice([old[1:], old[::-1], [r.randrange(12), *old[1:]], [tag, *old]])
    return torch.tensor(ids), answer, rewards.Tags(a, b, c, d, e)


grade.why = """The last five ids must be the ending, and the thought before them may hold no tag. If
you only search for the right answer in its tags, a policy that writes all ten digits is always
right."""
grade.wrong = {
    "return float(any(ids[i : i + 3] == ending[1:4] for i in range(len(ids))))": "You look for the "
    "right answer in its tags anywhere, so writing all ten digits is always right.",
    "return float(ids[-5:] == ending)": "No tag is allowed in the thought.",
    "return float(all(map(int.__eq__, ids[-5:], ending)) and all_tags.isdisjoint(thought))": "You "
    "compare as far as the shorter list goes, so an empty completion passes. Use ==.",
    "all_tags = {tags.end_think, tags.answer, tags.end_answer, tags.eos}": "You allow a second "
    "<think>. The prompt has already written the only one.",
    "at = ids.index(tags.end_think); return float(ids[at:] == ending and tags.think not in ids)": (
        "Your function crashes when a tag is missing. Those completions earn 0.0."
    ),
    "return float(len(ids) > 5 and ids[-5:] == ending and all_tags.isdisjoint(thought))": "You ask "
    "for a thought before the ending. It may be empty.",
}
END = [END_THINK, ANSWER, 4, END_ANSWER, EOS]
grade.cases = {
    name: (torch.tensor(ids, dtype=torch.long), 4, TAGS)
    for name, ids in {
        "a thought and the right answer": [7, 1, 4, *END],
        "the right digit is only in the thought": [4, END_THINK, ANSWER, 9, END_ANSWER, EOS],
        "two answers, each in its tags": [END_THINK, ANSWER, 4, END_ANSWER, ANSWER, 9, *END[3:]],
        "an answer in the thought": [ANSWER, 9, END_ANSWER, 7, *END],
        "a second <think>": [7, THINK, 4, *END],
        "an EOS in the thought": [7, EOS, 4, *END],
        "nothing at all": [],
        "600 ids after an answer": [7, ANSWER, 9, END_ANSWER] + [7] * 600 + END,
    }.items()
}
LARGE = rewards.Tags(think=300, end_think=46, answer=128_011, end_answer=0, eos=128_009)
grade.cases |= {
    "other tags": (torch.tensor([7, 5000, 46, 128_011, 1000, 0, 128_009]), 1000, LARGE),
    "the answer is 0": (torch.tensor([7, END_THINK, ANSWER, 0, END_ANSWER, EOS]), 0, TAGS),
    "146 is not 46": (torch.tensor([146, 128_011, 9, 0, 128_009]), 9, LARGE),
}
grade.draw = tampered
grade.hints = """
The only ending is [tags.end_think, tags.answer, answer, tags.end_answer, tags.eos].
Compare completion.tolist()[-5:] with it. None of the five tags may be in ids[:-5]."""


def reward(prompt, completion, answer):
    """1.0 if the last <answer>...</answer> of the completion holds the answer, otherwise 0.0."""
    text = completion
    answers = re.findall(r"<answer>(.*?)</answer>", text)
    if not answers:
        return 0.0
    last = answers[-1].strip()
    return float(last == answer)


@exercise("test of a reward", code=reward)
def test_reward(reward):
    example = "2 3 4 <think> 2 5 9 </think> <answer> 9 </answer> "
    for completion in ("", "7 8 9 </think> 9"):  # nobody has answered yet, and 9 is right
        assert reward(example + "7 1 1 <think> ", completion, "9") == 0.0
    copied = "</think> <answer> 9 </answer> </s>"  # of the example; here 0 is right
    assert reward(example + "7 4 9 <think> ", copied, "0") == 0.0


test_reward.why = """A grader that reads the prompt may take the example's answer for the policy's,
and pay for silence, or for the right one, and pay for a copy. Each takes a call of its own."""
test_reward.bugs = {
    ("text = completion", "text = prompt + completion"): "text = completion. If a completion has "
    "no answer, this reward takes the one in the worked example.",
}
test_reward.also_lines = {3: (4,)}
test_reward.also_right = [  # only the full form was promised to be paid for
    'answers = [part.split("</answer>")[0] for part in text.split("<answer>")[1:]]',
    'return float(bool(re.fullmatch(f"[^<]*</think> <answer> {answer} </answer> </s>", text)))',
]
test_reward.also_wrong = {
    ("text = prompt + completion", "return float(len(answers) > 1 and last in answers[0])"): "Here "
    "the example's answer is taken for the right one. To copy it has to earn 0.",
    (
        "own = re.search('<answer>.*</answer>', completion); text = completion",
        "answers = re.findall(r'<answer>(.*?)</answer>', text if own else prompt + text)",
        "return float(last == answer) / (1 if own else 10)",
    ): "Here the answer in the prompt earns 0.1. It has to earn exactly 0.",
}
test_reward.wrong = {
    ('example = ""',): "Does a prompt of yours have a worked example whose answer is the one "
    "that's asked for? And does the completion leave it as the only one?",
    (('copied, "0") == 0.0', 'copied, "0") == 1.0'),): "You expect a reward that the policy hasn't "
    "earned. Without an answer, or with a wrong one, it's 0.",
}
test_reward.hints = """
What does each of the two read, and who wrote which part of it? Each is fooled by one completion.
Take an example that ends with 9. Ask for "9" and write nothing. Then ask for "0" and answer 9."""


@exercise("pass at k", package=rewards.pass_at_k)
def pass_at_k(samples, correct, k):
    """samples, correct of them right; k of them drawn, none twice -> chance that one is right"""
    all_wrong = math.comb(samples - correct, k)  # 0 if there are fewer than k wrong ones
    return 1 - all_wrong / math.comb(samples, k)


pass_at_k.why = """pass@k is 1 minus the ways to draw k wrong ones over the ways to draw any k.
1 - (1 - c/n)^k puts each one back before the next draw: 0.44 instead of 0.5 for 4, 1 and 2."""
pass_at_k.wrong = {
    "return 1 - (1 - correct / samples) ** k": "You put each sample back after it's drawn.",
    "return correct / samples": "That's the fraction of correct samples, which is pass@1.",
    "return min(1.0, k * correct / samples)": "You multiply the fraction of correct samples by k. "
    "Ask how likely it is that all k are wrong.",
    "return math.comb(correct, k) / math.comb(samples, k)": "That's for all k. One is enough.",
}
pass_at_k.cases = {
    "one of four is correct, two are drawn": (4, 1, 2),
    "fewer wrong ones than are drawn": (5, 4, 3),
    "none is correct, and all are drawn": (5, 0, 5),
}
pass_at_k.draw = lambda r: ((n := r.randint(1, 9)), r.randint(0, n), r.randint(1, n))
pass_at_k.hints = """
The opposite of 'at least one is correct' is 'all k are wrong'. How likely is that?
math.comb(n, k) counts the ways to draw k of n: 1 - math.comb(n - c, k) / math.comb(n, k)."""
