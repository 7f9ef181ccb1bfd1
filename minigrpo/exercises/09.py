"""Ragged prompts, answers in texts, what demonstrations teach, and memory"""

import re
from itertools import permutations

import torch
from torch.nn.utils.rnn import pad_sequence

from minigrpo import sampling
from minigrpo.exercises.form import exercise, whole


@exercise("pad on the left", package=lambda *x: torch.stack([*sampling.left_pad(*x)]).long())
def left_pad(rows, pad_id):
    """rows: 1-D ids, not all equally long -> (2, N, S): ids, and mask with 1 = real token"""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        start = width - len(row)  # so many pads come first
        ids[i, start:] = row
        mask[i, start:] = 1
    return torch.stack([ids, mask])


def on_the_right(rows, pad_id):
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return torch.stack([ids, pad_sequence([torch.ones_like(row) for row in rows], True)])


left_pad.why = """The next token is written to the right of the last column, so every prompt has to
end there. A mask made by comparing the ids with `pad_id` hides real tokens with that id."""
left_pad.wrong = {
    on_the_right: "You pad on the right. The next token is written after the last column, so the "
    "model would continue the padding.",
    lambda *given: on_the_right(*given).flip(-1): "You reverse the texts, too.",
    (("mask[i, start:] = 1", "mask[i, : len(row)] = 1"),): "The mask is on the right.",
    "return torch.stack([ids, (ids != pad_id).long()])": "You make the mask with ids != pad_id. A "
    "real token can have that id too.",
    "ids = torch.zeros(len(rows), width, dtype=torch.long)": "Fill with pad_id. 0 is a digit.",
    (("mask = torch.zeros_like(ids)", "mask = torch.ones_like(ids)"), "mask[i, start:] = 0"): (
        "Your mask is the wrong way around: 1 is a real token."
    ),
}
left_pad.cases = {
    "two rows": ([torch.tensor([5, 6, 7]), torch.tensor([8])], 29),
    "text with the id of the padding": ([torch.tensor([9, 3]), torch.tensor([4, 9, 8, 9])], 9),
    "a long row": ([torch.arange(600), torch.tensor([49_151])], 0),
}
left_pad.draw = lambda r: (
    [whole(r, n, high=12).long() for n in r.choice(([4], [1, 3], [3, 1, 3], [2, 5, 1, 4]))],
    r.choice((0, 9, 29)),
)
left_pad.hints = """
Start from pads, torch.full((len(rows), width), pad_id), and a mask of zeros.
Row i goes into ids[i, width - len(row) :]. Put 1 at the same place of the mask."""


@exercise("find the answer", tolerance=0.0)
def answer_span(completion):
    """completion: a text -> (2,), where its answer begins and ends; [0, 0] in another form"""
    # The brackets keep the tags:
    # before, <think>, thought, </think>, between, <answer>, answer, </answer>, after
    pieces = re.split(r"(</?think>|</?answer>)", completion)
    if pieces[1::2] != ["<think>", "</think>", "<answer>", "</answer>"]:
        return torch.tensor([0, 0])  # a tag too many, too few, or in another place
    before, _, between, answer, after = pieces[::2]
    if (before + between + after).strip() or not answer.strip():
        return torch.tensor([0, 0])
    begin = completion.index(answer.strip(), completion.index("<answer>") + len("<answer>"))
    return torch.tensor([begin, begin + len(answer.strip())])


def by(pattern, find=re.fullmatch, flags=re.DOTALL):
    def answer_span(completion):
        match = find(pattern, completion, flags)
        return torch.tensor(match.span(1) if match else [0, 0])

    return answer_span


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PART = r"(?:(?!</?think>|</?answer>).)*"  # reads on as long as no tag begins here
ANSWER = rf"\s*((?=\S)(?!</answer>){PART}(?<!\s))\s*"
FORM = rf"\s*<think>{PART}</think>\s*<answer>{ANSWER}</answer>\s*"
PIECES = ["", "<think>", "7", "</think>", "\n", "<answer>", "4", "</answer>", ""]


def inserted(text, places):
    return ["".join([*PIECES[:i], text, *PIECES[i:]]) for i in places]


answer_span.why = """First the tags must be the right four, then the text around the two parts
blank, and only then do you look for the answer, behind `<answer>`: it may stand in the thought,
too."""
answer_span.right = [by(FORM)]
answer_span.wrong = {
    by(r"<answer>\s*(.*?)\s*</answer>", re.search): "You take the first answer you find, and "
    "don't look at the rest. The whole text has to keep to the form.",
    by(r"\s*<think>.*?</think>\s*<answer>\s*(\S|\S.*?\S)\s*</answer>\s*"): "Your dot runs over "
    "tags, even in .*?, because fullmatch stretches it until everything fits.",
    by(FORM, re.fullmatch, 0): "The dot in your pattern doesn't match a new line. Pass re.DOTALL.",
    by(FORM.replace(ANSWER, f"({ANSWER})")): "You keep the white space around the answer.",
    "begin = completion.index(answer.strip())": "You look for the answer from the beginning of "
    "the text, where it may turn up in the thought first.",
    by(r"<think>.*?</think>\s*<answer>\s*(\S|\S.*?\S)\s*</answer>$", re.match): "That's open-r1's "
    "pattern. Its dots run over tags, and white space at either end is refused.",
}
COMPLETIONS = {
    "an answer": ["<think>3 + 4 = 7</think>\n<answer>7</answer>"],
    "white space": ["\n<think></think> <answer> forty\n two </answer> "],
    "no tags of ours": ["<think>3 < 4, <b>so</b>\nan answer</think><answer>> 3</answer>"],
    "a letter": ["<think>15 is the largest</think>\n<answer>a</answer>"],
    "an answer in the thought": ["<think><answer>4</answer></think> <answer>5</answer>"],
    "text outside": inserted("So 7\n", (0, 4, 9)) + inserted(".", (0, 5, 8)),
    "an empty answer": [f"<think>7</think> <answer>{x}</answer>" for x in ("", " \n ")],
    "a tag too many": [text for tag in TAGS for text in inserted(tag, range(9))],
    "a tag missing": ["".join(PIECES).replace(tag, "") for tag in TAGS],
    "another order": ["{}7{} {}4{}".format(*tags) for tags in permutations(TAGS)][1:],
    "no tags": ["The answer is 7.", "7", ""],
}
answer_span.cases = {
    f"{name}, {i}": (text,) for name, of in COMPLETIONS.items() for i, text in enumerate(of, 1)
}
answer_span.hints = r"""
re.split(r"(</?think>|</?answer>)", completion) cuts the text into nine pieces, tags at [1::2].
The span begins at completion.index("<answer>") + 8, plus the white space before the answer."""


@exercise("what a demonstration teaches", tolerance=0.0)
def training_labels(ids, mask, prompt_lengths):
    """ids, mask (N, S), padded on the left, prompt_lengths (N,) -> (N, S), -100: not learned"""
    place = mask.cumsum(dim=1)  # 1 for the first real token, 0 in the padding
    completion = place > prompt_lengths[:, None]
    return torch.where(completion, ids, -100)


training_labels.why = """A row has its padding first, then the prompt, then what is learned. So
count tokens, not columns. The EOS is learned like any other token, and the model shifts."""
training_labels.wrong = {
    "return torch.where(completion, ids, -100).roll(-1, dims=1)": "You shift the labels. The model "
    "does that itself, so they'd be shifted twice.",
    "completion = mask.bool()": "The prompt is learned, too. Only the completion should be.",
    "place = torch.arange(1, ids.shape[1] + 1).expand_as(ids)": "You count columns. Padding comes "
    "first, so count the real tokens, with mask.cumsum(dim=1).",
    "completion = (place > prompt_lengths[:, None]) & (ids != ids[:, -1:])": "The last token is "
    "missing. Without the EOS, the model never learns to stop.",
    "completion = place >= prompt_lengths[:, None]": "You're off by one: the prompt's last token "
    "is learned.",
    "return torch.where(completion, ids, 0)": "0 is a token. What's not learned is -100.",
}
training_labels.cases = {
    "two rows": (
        torch.tensor([[5, 6, 7, 8, 0], [1, 1, 9, 4, 0]]),
        torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
        torch.tensor([2, 1]),
    ),
    "a long row": (torch.arange(600)[None], torch.ones(1, 600).long(), torch.tensor([300])),
}


def demonstrations(r):
    asked = [r.randint(1, 3) for _ in range(r.randint(1, 4))]
    rows = [whole(r, n + r.randint(1, 3), high=12) for n in asked]
    rows = [torch.cat([row, torch.tensor([0])]) for row in rows]  # an EOS
    return *left_pad(rows, r.choice((0, 1))), torch.tensor(asked)


training_labels.draw = demonstrations
training_labels.hints = """
mask.cumsum(dim=1) numbers the real tokens of a row from 1 on, and is 0 in the padding before them.
A token belongs to the completion if its number is larger than prompt_lengths[:, None]."""

SIZES = "parameters adapters rows tokens vocab_size"


@exercise("what training needs", keywords=SIZES, tolerance=0.0)
def training_bytes(parameters, adapters, rows, tokens, vocab_size):
    """-> (3,) bytes: weights; gradients and averages; logits. adapters 0: all weights learn"""
    learned = adapters or parameters
    weights = 2 * parameters + 4 * adapters if adapters else 4 * parameters
    states = 12 * learned  # gradient, average of it, average of its square
    logits = 3 * 4 * rows * tokens * vocab_size
    return torch.tensor([weights, states, logits])


training_bytes.why = """What learns takes 16 bytes, weight, gradient and AdamW's two averages, 4
each. What's frozen is only read, so it can be bfloat16, 2 bytes."""
training_bytes.right = ["learned = parameters if adapters == 0 else adapters"]
training_bytes.wrong = {
    "states = 8 * learned": "You count one average. AdamW keeps two, of the gradient and of its "
    "square.",
    "learned = parameters": "With LoRA only the adapters have gradients and averages.",
    "weights = 2 * parameters + 4 * adapters": "Weights that learn are float32, or small steps "
    "would get lost in the rounding. They're bfloat16 only where they're frozen.",
    "weights = 4 * parameters + 4 * adapters": "Frozen weights are bfloat16, 2 bytes each.",
    "logits = 4 * rows * tokens * vocab_size": "Logits come three times: with their gradient, and "
    "with what both need on the way.",
    "weights = 2 * parameters if adapters else 4 * parameters": "The adapters are weights, too.",
}
training_bytes.cases = {
    "7 billion, all weights": (7_615_616_512, 0, 8, 1024, 152_064),
    "7 billion, LoRA": (7_615_616_512, 80_740_352, 8, 1024, 152_064),
}
training_bytes.draw = lambda r: (
    r.randint(50, 90),
    r.choice((0, r.randint(1, 9))),
    *(r.randint(1, 9) for _ in range(3)),
)
training_bytes.hints = """
How many weights learn? All of them, or only the adapters.
12 bytes for each that learns, beside the weight itself: 4, or 2 where it's frozen."""
