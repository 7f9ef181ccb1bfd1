"""A soft reward, the vote of a group, and the chance that a group is mixed"""

import math
import re

from minigrpo.exercises.form import exercise


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


soft_reward.why = """Each tag earns a little, so a group's rewards differ long before a completion
is right, and each bit is earned at most once. If you pay for every tag that occurs, ten of each
earn ten times as much."""
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
GIVEN += [("1  2", "1 2"), ("1 2", "1 2"), ("(x + 1)", "(x + 1)"), ("-7", "7"), (" 7\n", "7")]
GIVEN += [(" 7", "7"), ("7 ", "7")]
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


soft_reward.cases["a prompt that is a tag"] = ("<think>", WHOLE, "7")
soft_reward.draw = tagged
soft_reward.hints = r"""
found = re.findall(r"</?think>|</?answer>", completion). Is it sorted by form.index?
If found == form, use re.fullmatch with \s* outside, (.*) for the answer, and re.DOTALL."""


@exercise("the vote of a group")
def majority(groups, answers):
    """lists of answers, None where there's none; the right ones -> fraction right by vote"""
    hits = []
    for given, answer in zip(groups, answers):
        votes = [text for text in given if text is not None]
        winner = max(votes, key=votes.count, default=None)  # the earliest of equals
        hits.append(winner == answer)
    return sum(hits) / len(hits)


majority.why = """A completion without an answer has no vote, or "no answer" would win many groups
of a base model. Among equals max takes the first. Any will do that doesn't look at what's right."""
majority.right = [
    "winner = next((t for t, _ in __import__('collections').Counter(votes).most_common(1)), None)"
]
majority.wrong = {
    "votes = given": "You let None vote, so completions without an answer can outvote the others.",
    "hits.append(answer in votes)": "You ask whether the right answer is there. That's pass@k.",
    "hits.append(votes.count(answer) / len(given))": "You count the right answers, which is "
    "pass@1.",
    "winner = max(reversed(votes), key=votes.count, default=None)": "Of equally frequent answers "
    "you take the last one. The earliest wins.",
    "hits.append(votes.count(answer) == max(map(votes.count, votes), default=-1))": "If the right "
    "answer ties, you let it win. A vote can't know what's right, so the earliest wins.",
    "hits.append(2 * votes.count(answer) > len(given))": "You ask for more than half of the "
    "votes. The most frequent answer wins, with however few.",
}
majority.cases = {
    "a clear winner, and a wrong one": ([["7", "7", "3"], ["12", "2", "12"]], ["7", "2"]),
    "most have no answer": ([[None, "4", None, None]], ["4"]),
    "a tie": ([["3", "7", "7", "3"], ["7", "3", "3", "7"]], ["7", "7"]),
    "nobody has an answer": ([[None, None], ["5", None]], ["5", "5"]),
    "fewer than half are enough": ([["1", "6", "2", "6", "3"]], ["6"]),
}


def voted(random):
    given = ("3", "7", "12")
    answers = random.choices(given, k=random.randint(1, 4))
    return [random.choices((None, *given), k=random.randint(1, 8)) for _ in answers], answers


majority.draw = voted
majority.hints = """
Who has a vote? Then max(votes, key=votes.count) finds the most frequent answer.
Of equals max returns the first, and default=None is for a group without a vote."""


@exercise("the chance that a group is mixed")
def chance_mixed(asked, correct, group_size):
    """`correct` of `asked` completions are right -> chance that group_size of them are mixed"""
    all_right = math.comb(correct, group_size)
    all_wrong = math.comb(asked - correct, group_size)
    return 1 - (all_right + all_wrong) / math.comb(asked, group_size)


chance_mixed.why = """Of all ways to draw a group, take away those with right answers only and
those with wrong ones only. With 1 of 16 right and groups of 8 it's 0.5. 1 - p^G - (1 - p)^G, which
puts each completion back before the next draw, says 0.4."""
chance_mixed.wrong = {
    "return 1 - (correct / asked) ** group_size - (1 - correct / asked) ** group_size": "You put "
    "each completion back after it's drawn.",
    "all_right = 0": "That's pass@k. A group in which all are right teaches nothing either.",
    "all_wrong = 0": "A group in which all are wrong teaches nothing either.",
    "return float(0 < correct < asked)": "You say whether the completions you have are mixed. "
    "A smaller group, drawn from them, may not be.",
}
chance_mixed.cases = {
    "one of 16": (16, 1, 8),
    "as many right as wrong": (4, 2, 2),
    "none": (16, 0, 8),
    "all": (16, 16, 8),
    "the group is everything that was asked": (8, 3, 8),
    "too few wrong ones for a group": (16, 12, 8),
}
chance_mixed.draw = lambda r: ((n := r.randint(2, 16)), r.randint(0, n), r.randint(2, n))
chance_mixed.hints = """
In how many ways can you draw a group in which all are right? And one in which all are wrong?
math.comb(n, k) counts the ways to draw k of n, and is 0 if k is larger than n."""
