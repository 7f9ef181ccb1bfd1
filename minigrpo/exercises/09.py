"""Ragged prompts, answers in texts, rewards in TRL's form, and memory"""

import re
from fractions import Fraction
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
    "an empty row": ([torch.tensor([5, 6, 7]), torch.tensor([]).long()], 29),
    "a long row": ([torch.arange(600), torch.tensor([49_151])], -100),
}
left_pad.draw = lambda r: (
    [whole(r, n, high=12).long() for n in r.choice(([4], [1, 3], [3, 1, 3], [2, 0, 0, 5]))],
    r.choice((0, 9, 29, -100)),
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
    "no tags of ours": ["<think>3 < 4, <b>so</b>\n<THINK>, answer</think><answer>> 3</answer>"],
    "other answers": [f"<think>7</think><answer>{x}</answer>" for x in ("sand", ">", "a < </b>")],
    "an answer in the thought": ["<think><answer>4</answer></think> <answer>5</answer>"],
    "text outside": inserted("So 7\n", (0, 4, 9)) + inserted(".", (0, 5, 8)),
    "an empty answer": [f"<think>7</think> <answer>{x}</answer>" for x in ("", " \n ")],
    "a tag too many": [text for tag in TAGS for text in inserted(tag, range(9))],
    "a tag missing": ["".join(PIECES).replace(tag, "") for tag in TAGS],
    "another order": ["{}7{} {}4{}".format(*tags) for tags in permutations(TAGS)][1:],
    "another spelling": ["".join(PIECES).upper(), "".join(PIECES).replace("<", "< "), ""],
}
answer_span.cases = {
    f"{name}, {i}": (text,) for name, of in COMPLETIONS.items() for i, text in enumerate(of, 1)
}
answer_span.hints = r"""
re.split(r"(</?think>|</?answer>)", completion) cuts the text into nine pieces, tags at [1::2].
The span begins at completion.index("<answer>") + 8, plus the white space before the answer."""


@exercise("the same number")
def same_number(given, right):
    """two texts -> 1.0 if each is exactly one number and both are the same, otherwise 0.0"""
    numbers = []
    for text in (given, right):
        whole = r"([0-9]{1,3}(,[0-9]{3})+|[0-9]+)"  # with commas, or without
        pattern = rf"[+-]?{whole}(\.[0-9]*)?"
        if re.fullmatch(pattern, text.strip()) is None:
            return 0.0
        numbers.append(Fraction(text.replace(",", "")))  # exact, however long
    return float(numbers[0] == numbers[1])


def converted(read):
    def same_number(given, right):
        try:
            return float(read(given) == read(right))
        except ValueError:
            return 0.0

    return same_number


same_number.why = """A pattern that must match the whole text decides what a number is, and only
then are the two compared. `float` accepts `1e3`, `1_000` and `inf`, and refuses `1,234`."""
same_number.right = ['numbers.append(float(text.replace(",", "")))']
same_number.wrong = {
    converted(str.strip): "You compare texts. But 7.0 is 7, and two equal words are no number.",
    converted(float): "float accepts inf, 1e3 and 1_000, and refuses 1,234,567.",
    converted(lambda text: float(text.replace(",", ""))): "You remove every comma and leave the "
    "rest to float. So 12,34 passes for 1234, and inf for a number.",
    (
        "if (match := re.search(pattern, text)) is None:",
        'numbers.append(Fraction(match[0].replace(",", "")))',
    ): "You take the first number you find. The whole text has to be one number.",
    "return float(abs(numbers[0] - numbers[1]) < 0.01)": "7.004 isn't 7.",
    (("return 0.0", "numbers.append(None); continue"),): "Two texts that are no numbers are the "
    "same number for you (None == None).",
}
TEXTS = """7 7.0|7 7.|7 007|7 +7|-7 -7|7  7\n|7.5 7.50|1234567 1,234,567|1,234 1234|0 -0|7 7 7|
    123456789012345 123,456,789,012,345|7 -7|7 7.004|1000 1.000|1.234 1,234|12 21|1234 12,34|
    1234567 1234,567|123 ,123|123 123,|1234 1,,234|7.5 7,5|0 -|1234 1 234|0.5 .5|0 .|7 7..|-7 - 7|
    7 --7|7 7+|7 $7|7 7%|7 \\boxed{7}|7 7!|7 7 apples|7 It is 7|78 7 8|7 7 or 7|1000 1e3|7 14/2|
    1000 1_000|1 True|7 seven|0 |7 3 + 4|inf inf|nan nan|six six|12,34 12,34|1e3 1e3|100 100|
    12345 12346|123456789 123456788|
    12345 1,2345|1234567 1.234.567|-012345.5 -12,345.50|10 1e1|7 "7"|7 x = 7|7 0x7|-7 \u22127"""
PAIRS = [text.lstrip().partition(" ")[::-2] for text in TEXTS.split("|")]
PAIRS += [pair[::-1] for pair in PAIRS[::2]]
same_number.cases = {f"texts {i}": pair for i, pair in enumerate(PAIRS, start=1)}
same_number.hints = r"""
Python's float takes "1_000", "inf" and "1e3", and refuses "1,234". So ask a pattern first.
[+-]?, then [0-9]+ or [0-9]{1,3}(,[0-9]{3})+, then (\.[0-9]*)?. Then remove the commas."""


@exercise("a reward function for TRL", keywords="prompts completions answer completion_ids")
def exact_reward(prompts, completions, answer, **columns):
    """N prompts, completions (texts or chats), answers -> (N,), 1.0 where right, otherwise 0.0"""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    right = [text.strip() == wanted for text, wanted in zip(texts, answer, strict=True)]
    return torch.tensor(right).float()


def chat(*contents):  # the assistant, a tool, the assistant, ...
    roles = ("assistant", "tool") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


exact_reward.why = """TRL calls you by keyword, with one list per column of the data. If you only
ask whether the answer occurs in the text, a completion that lists every candidate earns 1.0 each
time."""
exact_reward.right = [
    'texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]'
]
exact_reward.wrong = {
    "def exact_reward(prompts, completions, answer):": "Your function takes no further columns, "
    "but TRL passes all it has. Keep **columns at the end.",
    "right = [wanted in text for text, wanted in zip(texts, answer)]": "You ask whether the "
    "answer is somewhere in the text. 4 is in 45 and in a list of all numbers.",
    "right = [text == wanted for text, wanted in zip(texts, answer)]": "You don't strip the text, "
    "so ' 4' earns nothing where 4 is the answer.",
    'texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]': "You read the "
    "first message of a chat. If a tool was called there are several: take the last.",
    "right = [text.strip() == answer[0] for text in texts]": "zip gives each its own answer.",
    "texts = [str(c) for c in completions]": "In a chat, take the last message's content.",
}
exact_reward.cases = {
    "texts": (["2 + 2 =", "40 + 5 =", "9 - 5 ="], [" 4\n", "4", "45"], ["4", "45", "4"]),
    "chats": (["2 + 2?", "3 + 3?"], [chat("4", "5"), chat("2 * 3", "6", " 6")], ["4", "6"]),
    "another order of keys": (["?"], [[{"content": "4", "role": "assistant"}]], ["4"]),
    "equal prompts": (["Say 4.", "Say 4.", "Say 4."], ["4", "4", "5"], ["4", "5", "5"]),
    "an empty message": (["2 + 2?"], [chat("4", "")], ["4"]),
    "letters": (["?"] * 5, ["B", "1,234", "abc", "5.", "4  5"], ["b", "1234", "a.c", "5", "4 5"]),
}
WORDS = ("4", "45", "4 5", "4  5", "", "B", "b", "1,234", "1234", "a.c", "abc", "1+2", "$5", "5.")


def called(r):
    answer = r.choices(WORDS, k=r.randint(1, 5))
    texts = [r.choice((a, a, r.choice(WORDS))) for a in answer]
    texts = [r.choice(("", " ", "\n", "\t")) + t + r.choice(("", " ", "\n")) for t in texts]
    earlier = [r.choices(WORDS, k=r.randrange(3)) for _ in answer]
    chats = [chat(*contents, t) for contents, t in zip(earlier, texts)]
    return r.choices(("Say 4.", "4 + 0 ="), k=len(answer)), r.choice((texts, chats)), answer


exact_reward.draw = called
exact_reward.hints = """
isinstance(c, str) tells a text from a chat. In a chat, c[-1]["content"] is what counts.
zip(completions, answer) gives you each completion with its own answer. Strip, and compare."""

SIZES = "parameters layers kv_heads head_dim vocab_size rows tokens slice_rows read_bytes"


@exercise("what training needs", keywords=SIZES, tolerance=0.0)
def training_bytes(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, slice_rows, read_bytes
):
    """-> (6,) bytes: weights, gradients, optimizer, reference, cache of keys and values, logits"""
    weights = gradients = 4 * parameters  # float32
    optimizer = 2 * 4 * parameters  # AdamW: an average of the gradient and one of its square
    reference = parameters * read_bytes  # weights alone
    cache = 2 * layers * kv_heads * head_dim * rows * tokens * read_bytes  # a key and a value
    logits = 4 * slice_rows * tokens * vocab_size  # float32, of one slice
    return torch.tensor([weights, gradients, optimizer, reference, cache, logits])


training_bytes.why = """What is trained takes 16 bytes per parameter: weight, gradient and AdamW's
two averages. The reference and the cache are only read, so they can be bfloat16."""
training_bytes.right = ["optimizer = 2 * weights"]
training_bytes.wrong = {
    "optimizer = 4 * parameters": "Your optimizer keeps one number per parameter. AdamW keeps two.",
    "weights = gradients = parameters * read_bytes": "You keep the trained weights in read_bytes. "
    "Small steps would get lost in the rounding, so they're float32.",
    "cache = layers * kv_heads * head_dim * rows * tokens * read_bytes": "You count the keys or "
    "the values, but the cache holds one of each for every token.",
    "logits = 4 * rows * tokens * vocab_size": "Only slice_rows of the rows are there at a time.",
    "logits = read_bytes * slice_rows * tokens * vocab_size": "Logits are float32, 4 bytes each.",
}
training_bytes.cases = {
    "half a billion parameters": (494_032_768, 24, 2, 64, 151_936, 64, 512, 8, 2),
    "7 billion, all in float32": (7_615_616_513, 28, 4, 128, 152_064, 128, 4096, 4, 4),
}
training_bytes.draw = lambda r: (
    *(r.randint(1, 30) for _ in range(5)),
    *(r.randint(20, 40), r.randint(1, 30), r.randint(1, 20), r.randint(1, 8)),
)
training_bytes.hints = """
Which of the six are trained, and so float32? Which depend on all rows, which on one slice?
One layer keeps a key and a value of head_dim numbers for each token and each of kv_heads."""
