"""A soft reward, batches in parts, and log-probs in slices"""

import re

import torch

from minigrpo import logprobs
from minigrpo.exercises.form import exercise, mask, numbers, whole
from minigrpo.objective import aggregate


@exercise("a soft reward")
def soft_reward(prompt, completion, answer):
    """three texts -> 0 to 1: an eighth for each tag, and a half for the answer in the full form"""
    form = ["<think>", "</think>", "<answer>", "</answer>"]
    found = re.findall(r"</?think>|</?answer>", completion)
    if found != sorted(found, key=form.index):
        return 0.0  # in another order
    once = [tag for tag in form if found.count(tag) == 1]  # a tag that is repeated earns nothing
    reward = len(once) / 8
    parts = re.fullmatch(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", completion, re.DOTALL)
    if found == form and parts and parts[1].strip() == answer:
        reward += 0.5
    return reward


soft_reward.why = """Each tag earns a little, so a group's completions differ long before one is
right, and each bit is earned at most once. If you pay for every tag that occurs, ten of each earn
ten times as much."""
ORDER = "if found != sorted(found, key=form.index):"
CORRECT = "if found == form and parts and parts[1].strip() == answer:"
soft_reward.wrong = {
    "once = [tag for tag in form if tag in found]": "You ask whether a tag occurs, so one that's "
    "repeated is rewarded too. It has to occur exactly once.",
    ((ORDER, "if False:"),): "You don't look at the order, so </answer><answer> pays.",
    ((CORRECT, "if found == form and parts and answer in parts[1]:"),): "You ask whether the "
    "answer is somewhere between its tags, so writing all candidates there is rewarded.",
    ((CORRECT, "if parts and parts[1].strip() == answer:"),): "You give the half if the pattern "
    "fits, but its dots run over tags. All four have to occur exactly once.",
    'parts = re.search(r"<answer>(.*)</answer>", completion, re.DOTALL)': "You give the half even "
    "if there's text outside the two parts. Use re.fullmatch.",
    "completion = prompt + completion; found = re.findall(r'</?think>|</?answer>', completion)": (
        "You read the prompt too, whose tags the policy didn't write."
    ),
}
FORM = ["<think>", "</think>", "<answer>", "</answer>"]
WHOLE = "<think>9 - 2 = 7</think><answer>7</answer>"
SHOT = "Q: 4 + 2?\nA: <think>4 + 2 = 6</think><answer>6</answer>\nQ: 9 - 2?\nA:"
full = [WHOLE, WHOLE.replace("<answer>", "\n<answer>"), WHOLE.replace("=", "\n=") + "\n"]
some = [WHOLE.replace(tag, "") for tag in FORM] + ["", "7", "<think>is <answer>7"]
again = [WHOLE.replace(tag, f"{tag}{so}{tag}") for tag in FORM for so in ("", " so ")]
again += [10 * "<think>", 2 * WHOLE, WHOLE + "<think>", "<answer>8</answer>" + WHOLE]
turned = ["</answer><answer>", "<think>9<answer>7</answer></think>", "</think>9<think><answer>7"]
outside = ["So: " + WHOLE, WHOLE + " Done.", WHOLE.replace("<answer>", "so<answer>")]
TEXTS = {"the full form": full, "some of the form": some, "a tag repeated": again}
TEXTS |= {"another order": turned, "text outside": outside}
GIVEN = [("8", "7"), ("", "7"), ("6 7 8", "7"), ("7.", "7"), ("17", "7"), ("345", "3.5")]
GIVEN += [("east", "east"), ("b", "B"), ("1,234", "1234"), ("1,234", "1,234"), ("07", "7")]
GIVEN += [("1  2", "1 2"), ("1 2", "1 2"), ("(x + 1)", "(x + 1)"), ("-7", "7")]
soft_reward.cases = {
    f"{name} ({i})": (SHOT if name == "some of the form" else "Q: 9 - 2?", text, "7")
    for name, texts in TEXTS.items()
    for i, text in enumerate(texts, start=1)
}
soft_reward.cases |= {
    f"the answer {given!r} for {answer!r}": ("Q: ?", WHOLE.replace(">7<", f">{given}<"), answer)
    for given, answer in GIVEN
}


def tagged(random):
    pieces = []
    for tag in FORM:
        fill = random.choice(("", "7", " ", "\n", "9 - 2", " 7\n"))
        pieces += random.choice((0, 1, 1, 1, 1, 2)) * [tag, fill]
    if random.random() < 0.2:
        random.shuffle(pieces)
    return "Q: 9 - 2?", "".join(pieces), "7"


soft_reward.draw = tagged
soft_reward.hints = r"""
found = re.findall(r"</?think>|</?answer>", completion). Is it sorted by form.index?
If found == form, use re.fullmatch with \s* outside, (.*) for the answer, and re.DOTALL."""


def package_weights(mask, rows):
    how = {"how": "token_mean", "whole": (len(mask), int(mask.sum()))}
    ones = torch.ones(mask.shape, dtype=torch.double)  # whose mean is the weight itself
    pairs = zip(ones.split(rows), mask.split(rows))
    return torch.stack([aggregate(*pair, **how) for pair in pairs])


@exercise("the weight of a part", package=package_weights, tolerance=1e-9)  # it's for ten digits
def part_weights(mask, rows):
    """completion mask (N, T), rows per part -> (parts,), float64, what each part's mean counts"""
    tokens = torch.stack([part.sum() for part in mask.split(rows)])  # of each part
    return tokens.double() / mask.sum()


def some_part_empty(random):
    """N, T and the number of parts are powers of two: 1 / parts is then the same in float32."""
    N, rows = random.choice([(4, 1), (4, 3), (4, 9), (8, 2), (8, 5), (8, 7), (16, 5), (2, 1)])
    found = mask(random, N, random.choice((1, 2, 4)))
    if rows < N and random.random() < 0.4:
        start = random.randrange(0, N, rows)
        found[start : start + rows] = 0
    return found, rows


part_weights.why = """A part's own mean has already divided by the tokens of the part; its fraction
of all tokens takes that back. If you average the parts' means, the gradient changes with `rows`."""
part_weights.right = ["return [float(x) / float(mask.sum()) for x in tokens]"]
part_weights.wrong = {
    "return torch.ones(len(tokens)).double() / len(tokens)": "You give every part the same "
    "weight, so a token in a part of short rows counts more.",
    "return torch.tensor([len(x) for x in mask.split(rows)]).double() / len(mask)": "You weight a "
    "part by its rows, padding included. A part counts by its tokens.",
    "return tokens.double() / mask.numel()": "You divide by all positions of the batch, padding "
    "included, so the weights don't sum to 1.",
    "return tokens / mask.sum()": "Your weights are float32. Seven digits aren't enough for the "
    "same gradient to ten, so make them float64.",
    "tokens = torch.stack([part.sum() for part in mask.chunk(rows)])": "chunk(rows) makes so many "
    "parts. split(rows) makes parts of so many rows.",
}
LENGTHS = torch.tensor([[4], [3], [1], [1], [2], [4], [1], [3]])
part_weights.cases = {
    "long rows and short ones": (1 * (torch.arange(4) < torch.tensor([[4], [4], [1], [0]])), 2),
    "the last part has fewer rows": (1.0 * (torch.arange(4) < LENGTHS), 5),
    "a part without a token": (torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]]), 2),
    "long rows": (torch.arange(1024) < torch.tensor([[601], [257]]), 1),
}
part_weights.draw = some_part_empty
part_weights.hints = """
A part's own mean counts by (the part's tokens / all tokens).
mask.split(rows) gives the parts. Stack their sums, .double(), and divide by mask.sum()."""


def package_log_probs(logits, tokens, temperature, rows):
    pairs = zip(logits.split(rows), tokens.split(rows))
    return torch.cat([logprobs._score(x, y, temperature, False)[0] for x, y in pairs])


@exercise(
    "log-probs without a second tensor of logits", package=package_log_probs, gradient="logits"
)
def sliced_log_probs(logits, tokens, temperature, rows):
    """logits (N, T, V), tokens (N, T) -> (N, T), in slices of so many rows"""
    found = []
    for part, ids in zip(logits.split(rows), tokens.split(rows)):
        part = part / temperature  # (rows, T, V), the only copy, and small
        chosen = part.gather(-1, ids[..., None]).squeeze(-1)
        found.append(chosen - part.logsumexp(dim=-1))
    return torch.cat(found)


class Watched(torch.Tensor):
    """Logits that notice when a tensor larger than a slice, here 2 * 3 * 4, is made from them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if name in ("grad", "clone", "requires_grad_"):  # as the judge does
                return result if name == "grad" else result.as_subclass(cls)
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            several = result if isinstance(result, list | tuple) else [result]
            made = [x for x in several if isinstance(x, torch.Tensor) and x.is_floating_point()]
            here = {x.untyped_storage().data_ptr() for x in given}
            if not name.endswith("_") or name.startswith("__get"):  # in place is as bad
                made = [x for x in made if x.untyped_storage().data_ptr() not in here]
            made += given if "logsumexp" in name or "entropy" in name else []  # a copy inside
            if (size := max([x.numel() for x in made], default=0)) > 24:
                told = f"a tensor of {size} numbers is made beside the logits"
                raise MemoryError(f"{told}, and a slice has 24")
        return torch._tensor._convert(result, cls)


def spread(N, T, V):
    return (torch.arange(N * T * V) * 7 % 11 * 0.4 - 2).view(N, T, V)


sliced_log_probs.why = """The log-softmax of one token is its logit minus the logsumexp of all. What
logsumexp copies on its way is as large as what it's given, so give it a slice."""
sliced_log_probs.right = [
    "found.append(torch.distributions.Categorical(logits=part).log_prob(ids))"
]
sliced_log_probs.wrong = {
    "for part, ids in zip(logits.split(len(logits)), tokens.split(len(logits))):": "You compute "
    "with all rows at once, so next to the logits there's a second tensor of their size.",
    "found.append(part.softmax(dim=-1).log().gather(-1, ids[..., None]).squeeze(-1))": "You take "
    "the log of a softmax. A probability of e^-1000 underflows to 0, and its log is -inf.",
    "found.append(chosen - part.exp().sum(dim=-1).log())": "exp overflows from 89 on. Use "
    "logsumexp.",
    "part = part + 0": "Your function doesn't use the temperature. Divide the logits by it.",
    "found.append(chosen - part.logsumexp(dim=-1).detach())": "The value is correct, but you "
    "detach the logsumexp, which pushes the other tokens down.",
    ("part = part + 0", "found.append((chosen - part.logsumexp(dim=-1)) / temperature)"): "You "
    "divide the log-probs, so they don't sum to 1. Divide the logits.",
}
IDS = torch.tensor([[0, 1, 2], [3, 2, 1], [1, 1, 0], [2, 3, 0], [0, 2, 3]])
LARGE = torch.tensor([[[1000.0, 999.0, -1000.0]], [[-3000.0, -3000.5, -3001.0]]])
sliced_log_probs.cases = {
    "a slice that is not full": (spread(3, 2, 4), IDS[:3, :2], 0.5, 2),
    "logits of 1000 and more": (LARGE, torch.tensor([[2], [1]]), 2.0, 1),
    "the largest tensor that is made": (spread(5, 3, 4).as_subclass(Watched), IDS, 1.25, 2),
}
sliced_log_probs.draw = lambda r: (
    numbers(r, (N := r.randint(1, 4)), (T := r.randint(1, 3)), (V := r.randint(2, 5))),
    whole(r, N, T, high=V),
    r.choice((0.25, 0.5, 0.7, 1.0, 1.5, 5.0)),
    r.randint(1, 5),
)
sliced_log_probs.hints = """
You need one log-prob per position, the token's logit minus the logsumexp of all of them.
Loop over zip(logits.split(rows), tokens.split(rows)), then torch.cat."""
