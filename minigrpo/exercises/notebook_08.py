"""The exercises of notebook 08: answers in texts, rewards in TRL's form, and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.exercises.engine import Answer, Case, Exercise
from minigrpo.text import prompts as texts

LINE = re.RegexFlag(0)  # without DOTALL the dot stays in its line

# 8.1 ----------------------------------------------------------------------------------------


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


def _found(match: re.Match | None) -> Tensor:
    return torch.tensor([0, 0] if match is None else match.span(1))


def _spans(pattern: str, flags: re.RegexFlag = re.DOTALL) -> Callable[[str], Tensor]:
    """The first group of a pattern; % stands for text without a tag, & for a stripped answer."""
    pattern = pattern.replace("&", r"(?=\S)(?!</answer>)%(?<!\s)")
    pattern = pattern.replace("%", r"(?:(?!</?think>|</?answer>).)*")

    # Defaults, because a string in the closure would count as data read from the notebook.
    def answer(completion: str, pattern: str = pattern, flags: re.RegexFlag = flags) -> Tensor:
        return _found(re.fullmatch(pattern, completion, flags))

    return answer


def _moved(function: Callable[[Tensor], Any]) -> Callable[[str], Tensor]:
    """The right place, told in another way; nothing is changed where there is no answer."""

    def answer(completion: str) -> Tensor:
        span = answer_span(completion)
        return torch.tensor(function(span)) if span.any() else span

    return answer


def _by_pattern(completion: str) -> Tensor:
    other = r"(?:(?!</?think>|</?answer>).)*"  # reads on as long as no tag begins here
    match = re.fullmatch(
        rf"\s*<think>{other}</think>\s*<answer>\s*({other}?)\s*</answer>\s*", completion, re.DOTALL
    )
    return torch.tensor(match.span(1) if match and match[1] else (0, 0))


def _count_and_find(completion: str) -> Tensor:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(completion.count(tag) != 1 for tag in tags):
        return torch.tensor([0, 0])
    a, b, c, d = (completion.index(tag) for tag in tags)
    outside = completion[:a] + completion[b + len(tags[1]) : c] + completion[d + len(tags[3]) :]
    answer = completion[c + len(tags[2]) : d]
    if not a < b < c < d or outside.strip() or not answer.strip():
        return torch.tensor([0, 0])
    return torch.tensor([d - len(answer.lstrip()), d - len(answer) + len(answer.rstrip())])


def _last_answer(completion: str) -> Tensor:
    return _found(re.fullmatch(r".*<answer>\s*(.*?)\s*</answer>.*", completion, re.DOTALL))


def _minus_one(completion: str) -> Tensor:
    span = answer_span(completion)
    return span if span.any() else torch.tensor([-1, -1])


def _indexed(completion: str) -> Tensor:
    completion.index("<think>"), completion.index("</answer>")  # ValueError without the tag
    return answer_span(completion)


def _counted_tags(completion: str) -> Tensor:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(completion.count(tag) != 1 for tag in tags):
        return torch.tensor([0, 0])
    return _last_answer(completion)


def _package_span(completion: str) -> Tensor:
    found = texts.parts("", completion)
    if found is None:
        return torch.tensor([0, 0])
    (answer,) = found.answer
    begin = completion.index(answer, completion.index("<answer>") + len("<answer>"))
    return torch.tensor([begin, begin + len(answer)])


ANSWER_SPAN = Exercise(
    key="8.1",
    title="find the answer",
    reference=answer_span,
    imports=("import re", "", "import torch"),
    package=_package_span,
    others=(
        Answer(
            "one pattern",
            _by_pattern,
            "re.fullmatch with re.DOTALL and a part for text that contains no tag, "
            "(?:(?!tag).)*; match.span(1) is the place of the first pair of brackets.",
        ),
        Answer(
            "count, then find",
            _count_and_find,
            "count each tag; once each of them stands there just once, .index finds its place, "
            "and the four places have to grow.",
        ),
        Answer(
            "pattern with a stripped answer",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "a pattern in which the answer begins and ends with something that is not white space.",
        ),
    ),
    wrong=(
        Answer(
            "first answer anywhere",
            _spans(r".*?<answer>\s*(.*?)\s*</answer>.*"),
            "You take the first answer that you find (re.search), even inside the thought, and do "
            "not look at the rest. The whole text has to keep to the form: use re.fullmatch.",
        ),
        Answer(
            "first answer anywhere, with its white space",
            _spans(r".*?<answer>(.*?)</answer>.*"),
            "Two things. You take the first answer that you find, whatever stands around it. And "
            "you keep the white space around the answer itself.",
        ),
        Answer(
            "first answer in a line",
            _spans(r"(?s:.*?)<answer>(.*?)</answer>(?s:.*)", LINE),
            "Three things. You take the first answer that you find, whatever stands around it; you "
            "keep its white space; and the dot stops at a new line unless you pass re.DOTALL.",
        ),
        Answer(
            "from the first to the last tag",
            _spans(r".*?<answer>(.*)</answer>.*"),
            "You search for <answer> and </answer> with a dot between that takes as much as it "
            "can: two answers become one, and nothing around them is looked at. The whole text "
            "has to keep to the form: use re.fullmatch, and forbid tags inside the parts.",
        ),
        Answer(
            "from the first to the last tag of a line",
            _spans(r"(?s:.*?)<answer>(.*)</answer>(?s:.*)", LINE),
            "You search for <answer> and </answer> with a dot between. It stops at a new line "
            "unless you pass re.DOTALL, takes two answers for one, and nothing around them is "
            "looked at: use re.fullmatch, and forbid tags inside the parts.",
        ),
        Answer(
            "first answer that is not empty",
            _spans(r".*?<answer>\s*(&)\s*</answer>.*"),
            "You look for an answer with something in it, and take the first one. It may stand in "
            "the thought, or be one of several: look at all of the text.",
        ),
        Answer(
            "last answer",
            _last_answer,
            "You take the last of several answers. Then the policy may write one after the other, "
            "and correct itself as often as it likes. A text with two answers has none.",
        ),
        Answer(
            "last answer, with its white space",
            _spans(r".*<answer>(.*?)</answer>.*"),
            "Two things. You take the last answer, whatever stands before it. And you keep the "
            "white space around the answer itself.",
        ),
        Answer(
            "the dot runs over tags",
            _spans(r"\s*<think>.*</think>\s*<answer>\s*(.*?)\s*</answer>\s*"),
            "Your dot runs over tags, .*? as well: with fullmatch it is stretched until all fits. "
            "So a second tag passes as part of the thought, and an empty answer passes too. "
            "Forbid tags inside the parts, or count them.",
        ),
        Answer(
            "the dot stops at a new line",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(&)\s*</answer>\s*", LINE),
            "A thought of several lines has no answer for you: in a pattern the dot does not match "
            "a new line, unless you pass re.DOTALL.",
        ),
        Answer(
            "the dot stops at a new line, in the thought",
            _spans(r"\s*<think>(?-s:%)</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "A thought of several lines does not fit your pattern: the dot does not match a new "
            "line. re.DOTALL lets it.",
        ),
        Answer(
            "the dot stops at a new line, in the answer",
            _spans(r"\s*<think>%</think>\s*<answer>\s*((?-s:&))\s*</answer>\s*"),
            "An answer of several lines does not fit your pattern: the dot does not match a new "
            "line. Pass re.DOTALL.",
        ),
        Answer(
            "text after the end",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(&)\s*</answer>%"),
            "You accept text after </answer> (re.match does not look at the end). The policy would "
            "go on talking. Only white space may stand there.",
        ),
        Answer(
            "anything after the end",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(&)\s*</answer>.*"),
            "You stop reading at the first </answer> (re.match does not look at the end). What "
            "comes after it, a second answer too, was written as well. Use re.fullmatch.",
        ),
        Answer(
            "text before",
            _spans(r"%<think>%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You accept text before <think> (re.search does not look at the beginning). Only white "
            "space may stand there.",
        ),
        Answer(
            "text between",
            _spans(r"\s*<think>%</think>%<answer>\s*(&)\s*</answer>\s*"),
            "You accept text between </think> and <answer>. That is thinking outside the thought. "
            "Only white space may stand there.",
        ),
        Answer(
            "empty answer",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(|&)\s*</answer>\s*"),
            "You accept an answer that is empty, or nothing but white space. That is no answer: "
            "[0, 0].",
        ),
        Answer(
            "not stripped",
            _spans(r"\s*<think>%</think>\s*<answer>(\s*&\s*)</answer>\s*"),
            "You keep the white space around the answer. It has to be stripped: the place begins "
            r"at the first letter and ends after the last one. In a pattern, put \s* outside the "
            "brackets.",
        ),
        Answer(
            "not stripped, empty answer",
            _spans(r"\s*<think>%</think>\s*<answer>(%)</answer>\s*"),
            "Two things. You keep the white space around the answer, and you accept an answer of "
            "nothing but white space. Strip it first, then look whether anything is left.",
        ),
        Answer(
            "stripped on the left only",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(&\s*)</answer>\s*"),
            "You keep the white space after the answer: a greedy group eats it before the next "
            r"\s* can. Use the length of answer.strip(), or a lazy group.",
        ),
        Answer(
            "with its tags",
            _spans(r"\s*<think>%</think>\s*(<answer>\s*&\s*</answer>)\s*"),
            "Your place contains the tags. They are the frame; the answer stands between them.",
        ),
        Answer(
            "length instead of the end",
            _moved(lambda span: (span[0], span[1] - span[0])),
            "Your second number is the length of the answer. The end is asked for, begin + length, "
            "so that completion[begin:end] is the answer.",
        ),
        Answer(
            "last letter instead of the end",
            _moved(lambda span: (span[0], span[1] - 1)),
            "Your second number is the place of the last letter. A slice stops before its end: one "
            "more.",
        ),
        Answer(
            "-1 for none",
            lambda completion: (
                answer_span(completion) - (answer_span(completion).sum() == 0).long()
            ),
            "For a text in another form you return -1, as .find does. As a slice that could still "
            "mean something. [0, 0] is asked for, the empty slice.",
        ),
        Answer(
            "<think> not demanded",
            _spans(r"\s*(?:<think>)?%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You do not ask for <think>. Here the completion writes it itself, so it has to be "
            "there.",
        ),
        Answer(
            "<think> not expected",
            _spans(r"%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You expect a text that begins inside the thought. Here the completion writes <think> "
            "itself: first <think>, then the thought.",
        ),
        Answer(
            "no thought at all",
            _spans(r"\s*(?:<think>%</think>)?\s*<answer>\s*(&)\s*</answer>\s*"),
            "You accept an answer without <think> and </think>. The thought may be empty, but its "
            "two tags have to be there.",
        ),
        Answer(
            "second <think>",
            _spans(r"\s*<think>(?:%<think>)*%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You accept a second <think> in the thought. Each tag has to be there exactly once.",
        ),
        Answer(
            "second </think>",
            _spans(r"\s*<think>(?:%</think>)*%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You cut at the last </think>, so there may be several. The thought ends at the first "
            "one, and only the answer may follow.",
        ),
        Answer(
            "answers in the thought",
            _spans(r"\s*<think>(?:%<answer>%</answer>)*%</think>\s*<answer>\s*(&)\s*</answer>\s*"),
            "You accept an answer in the thought, beside the one at the end. The policy could put "
            "down two. No tag is allowed in the thought.",
        ),
        Answer(
            "tags counted",
            _counted_tags,
            "You count the tags, and that is not enough: their order, what stands outside of them, "
            "and the empty answer are not looked at.",
        ),
        Answer(
            "not closed",
            lambda completion: answer_span(
                completion + "</answer>" * ("</answer>" not in completion)
            ),
            "You do not ask for </answer>. A text that was cut off in its answer may have lost "
            "half of it: [0, 0].",
        ),
        Answer(
            "no tag crashes",
            _indexed,
            "Your function crashes when a tag is missing. Such texts are common: look first "
            "whether the tags are there.",
        ),
        Answer(
            "thought demanded",
            _spans(
                r"\s*<think>\s*&\s*</think>\s*<answer>\s*(&)\s*</answer>\s*".replace(
                    "&", r"(?=\S)(?!</think>)%", 1
                )
            ),
            "You ask for a thought that is not empty. It may be empty: only its tags are asked "
            "for.",
        ),
        Answer(
            "no < allowed",
            _spans(r"\s*<think>[^<]*</think>\s*<answer>\s*([^<\s](?:[^<]*[^<\s])?)\s*</answer>\s*"),
            "You forbid the character < in the parts, so a thought with 3 < 4 has no answer. Only "
            "the tags themselves are forbidden.",
        ),
        Answer(
            "numbers only",
            _spans(r"\s*<think>%</think>\s*<answer>\s*(-?[0-9.]+)\s*</answer>\s*"),
            "You accept only numbers as the answer. What it is will be judged later; here anything "
            "but nothing will do.",
        ),
        Answer(
            "no white space outside",
            _spans(r"<think>%</think>\s*<answer>\s*(&)\s*</answer>"),
            "You accept no white space before <think> or after </answer>. It does no harm: strip "
            r"the text, or write \s* at both ends.",
        ),
        Answer(
            "no white space between",
            _spans(r"\s*<think>%</think><answer>\s*(&)\s*</answer>\s*"),
            "You accept no white space between </think> and <answer>. It does no harm, and models "
            r"like to put a new line there: \s*.",
        ),
        Answer(
            "white space demanded",
            _spans(r"\s*<think>%</think>\s+<answer>\s*(&)\s*</answer>\s*"),
            "You ask for white space between </think> and <answer>. It is allowed, but there may "
            r"be none: \s* instead of \s+.",
        ),
    ),
    cases=(
        Case("all in one line", ("<think>7 1 0</think><answer>0</answer>",)),
        Case(
            "new lines everywhere",
            ("\n<think>\n7 and 4:\n11, so 1\n</think>\n<answer>\n1\n</answer>\n",),
        ),
        Case("a < in the thought", ("<think>3 < 4</think> <answer>yes</answer>",)),
        Case("an answer of two lines", ("<think>7</think> <answer> forty\ntwo </answer>",)),
        Case("no thought", ("\n<think></think> <answer>4</answer> ",)),
        Case("an empty answer", ("<think>7</think> <answer> \n</answer>",)),
        Case("two answers", ("<think>7</think> <answer>4</answer> <answer>15</answer>",)),
        Case(
            "an answer in the thought",
            ("<think>7, <answer>4</answer>?</think> <answer>15</answer>",),
        ),
        Case("text after the end", ("<think>7</think> <answer>4</answer> or 5",)),
        Case("text before the thought", ("Sure! <think>7</think> <answer>4</answer>",)),
        Case("text between the parts", ("<think>7</think> So: <answer>4</answer>",)),
        Case("a second <think>", ("<think>7 <think> 1</think> <answer>4</answer>",)),
        Case("a second </think>", ("<think>7 </think> 1</think> <answer>4</answer>",)),
        Case("answered before </think>", ("<think>7 <answer>4</answer></think>",)),
        Case("the answer first", ("<answer>4</answer> <think>7</think>",)),
        Case("no <think>", ("7</think> <answer>4</answer>",)),
        Case("neither <think> nor </think>", ("<answer>4</answer>",)),
        Case("cut off in the answer", ("<think>7</think> <answer>4",)),
    ),
    hints=(
        "How could a text please your pattern and still have two answers, or go on after the end? "
        "Try it on paper first.",
        "Cut the text at its tags: re.split(r'(</?think>|</?answer>)', completion) keeps them, "
        "because of the brackets. How many pieces has a text of the right form, and which are the "
        "tags?",
        "Nine: pieces[1::2] are the four tags, in order; pieces[::2] are before, thought, between, "
        "answer, after. Three of these have to be empty when stripped, and the answer not.",
        "The place: begin = completion.index('<answer>') + 8, then further by the white space "
        "before the answer, len(answer) - len(answer.lstrip()). The end is begin + "
        "len(answer.strip()).",
    ),
    lapses=(
        _spans(r"\s*<think>%</think>\s*(?:<answer>%</answer>\s*)*<answer>\s*(&)\s*</answer>\s*"),
        _spans(r"\s*<think>%(?:</think>\s*<answer>|<answer>)\s*(&)\s*</answer>(?:</think>)?\s*"),
        _spans(
            r"(?=.*<think>)\s*(?:<think>%</think>)?\s*<answer>\s*(&)\s*</answer>\s*"
            r"(?:<think>%</think>)?\s*"
        ),
    ),
)


# 8.2 ----------------------------------------------------------------------------------------


def same_number(given, right):
    """two texts -> 1.0 if each is exactly one number and both are the same, otherwise 0.0"""
    numbers = []
    for text in (given, right):
        whole = r"[0-9]{1,3}(,[0-9]{3})+|[0-9]+"  # with commas, or without
        if re.fullmatch(rf"[+-]?({whole})(\.[0-9]*)?", text.strip()) is None:
            return 0.0
        numbers.append(Fraction(text.replace(",", "")))  # exact; a float would round
    return float(numbers[0] == numbers[1])


Same = Callable[[str, str], float]
Parse = Callable[[str], Any]
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"


def _parse(text: str) -> Fraction | None:
    """What the reference does with one of the two."""
    pattern = r"\s*[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?\s*"
    return Fraction(text.replace(",", "")) if re.fullmatch(pattern, text) else None


def _same(parse: Parse) -> Same:
    """Equal after this function, which returns None for what is no number."""

    def answer(given: str, right: str) -> float:
        a, b = parse(given), parse(right)
        return float(a is not None and b is not None and a == b)

    return answer


def _read(pattern: str, drop: str = ",") -> Same:
    """Read what fits a pattern, & for a whole number, after the characters in drop are left out."""
    pattern = pattern.replace("&", WHOLE)

    def parse(text: str, pattern: str = pattern, drop: str = drop) -> float | None:
        if re.fullmatch(pattern, text) is None:
            return None
        return float("".join(letter for letter in text if letter not in drop))

    return _same(parse)


def _judged(function: Callable[[Any, Any], bool]) -> Same:
    """Numbers are read rightly and compared by this function."""

    def answer(given: str, right: str) -> float:
        a, b = _parse(given), _parse(right)
        return float(a is not None and b is not None and function(a, b))

    return answer


def _float_or_none(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


def _number_at(place: Callable[[list[str]], str]) -> Parse:
    """One of the numbers in a text."""

    def parse(text: str) -> float | None:
        found = re.findall(r"[+-]?[0-9][0-9,]*\.?[0-9]*", text)
        return float(place(found).replace(",", "")) if found else None

    return parse


def _kept(text: str) -> float | None:
    return _float_or_none(re.sub(r"[^0-9.]", "", text))


def _kept_with_sign(text: str) -> float | None:
    return _float_or_none(re.sub(r"[^-0-9.]", "", text))


def _not_far(given: str, right: str) -> float:
    a = _float_or_none(given.replace(",", ""))
    b = _float_or_none(right.replace(",", ""))
    return 0.0 if a is None or b is None or abs(a - b) > 1e-6 else 1.0


def _equal_texts(given: str, right: str) -> float:
    return float(given.strip() == right.strip() or same_number(given, right) == 1.0)


def _char_by_char(given: str, right: str) -> float:
    """Commas first, then the rest; no pattern."""

    def parse(text: str) -> float | None:
        text = text.strip()
        text = text[1:] if text[:1] in ("+", "-") else text
        whole, _, part = text.partition(".")
        first, *groups = whole.split(",")
        good = all(len(group) == 3 for group in groups) and (len(first) <= 3 or not groups)
        digits = [first, *groups, part or "0"]
        if not good or not all(d.isascii() and d.isdigit() for d in digits):
            return None
        return float("".join([first, *groups]) + "." + part)

    a, b = parse(given), parse(right)
    signs = given.strip()[:1] == "-", right.strip()[:1] == "-"
    return float(a is not None and a == b and (signs[0] == signs[1] or a == 0))


SAME_NUMBER = Exercise(
    key="8.2",
    title="the same number",
    reference=same_number,
    imports=("import re", "from fractions import Fraction"),
    package=lambda given, right: float(
        texts.number(given) is not None and texts.number(given) == texts.number(right)
    ),
    others=(
        Answer(
            "float after a pattern",
            _read(r"\s*[+-]?&(?:\.[0-9]*)?\s*"),
            "float instead of Fraction. It rounds, but only after 15 digits. The pattern has to "
            "come first, because float accepts more than a reader would call a number.",
        ),
        Answer(
            "piece by piece",
            _char_by_char,
            "take the sign away, cut at the point and at the commas, and look whether each piece "
            "is digits, of the right length.",
        ),
    ),
    wrong=(
        Answer(
            "as text",
            lambda given, right: float(given == right),
            "You compare the texts. 7.0 is the same number as 7, and the policy would be punished "
            "for the way it writes. Two equal words, on the other hand, are no number.",
        ),
        Answer(
            "as stripped text",
            lambda given, right: float(given.strip() == right.strip()),
            "You compare the texts, white space aside. That is not enough: 7.0, +7 and 007 are all "
            "the number 7. And two equal words are no number.",
        ),
        Answer(
            "float alone, crashes",
            lambda given, right: float(float(given) == float(right)),
            "Your function crashes on words: float raises ValueError. A policy writes many things "
            "that are no number, and they earn 0.0. And float accepts inf, 1e3 and 1_000.",
        ),
        Answer(
            "float without commas, crashes",
            lambda given, right: float(
                float(given.replace(",", "")) == float(right.replace(",", ""))
            ),
            "Three things. Your function crashes on words. You remove every comma, so that 12,34 "
            "passes for 1234. And float accepts inf, 1e3 and 1_000. Use a pattern first.",
        ),
        Answer(
            "float alone",
            _same(_float_or_none),
            "You leave it to float what a number is. It accepts inf, 1e3 and 1_000, and does not "
            "know 1,234,567. Look at the text with a pattern first, then convert it.",
        ),
        Answer(
            "float without commas",
            _same(lambda text: _float_or_none(text.replace(",", ""))),
            "You remove every comma and leave the rest to float. So 12,34 passes for 1234, and "
            "inf, 1e3 and 1_000 pass for numbers. Look at the text with a pattern first.",
        ),
        Answer(
            "not far away",
            _not_far,
            "You return 0.0 if the difference is large. With nan the difference is nan, and "
            "nothing is larger or smaller than nan: 'nan' is paid for every question. Ask what is "
            "equal, not what is far away, and let no nan in.",
        ),
        Answer(
            "every comma removed",
            _read(r"\s*[+-]?[0-9][0-9,]*(?:\.[0-9]*)?\s*"),
            "You remove every comma. 12,34 is then 1234; it may be a decimal in another language, "
            "or two numbers. Commas may stand only before groups of three digits.",
        ),
        Answer(
            "any digits before the first comma",
            _read(r"\s*[+-]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]*)?\s*"),
            "You look at the groups after the commas, but not at the digits before the first one. "
            "With commas there may be one to three: 1234,567 is not a number.",
        ),
        Answer(
            "any digits after a comma",
            _read(r"\s*[+-]?(?:[0-9]{1,3}(?:,[0-9]+)+|[0-9]+)(?:\.[0-9]*)?\s*"),
            "You do not count the digits after a comma. There have to be three each time: 12,34 is "
            "not a number.",
        ),
        Answer(
            "first number in the text",
            _same(_number_at(lambda found: found[0])),
            "You search for a number in the text and take the first. 'It is 7' is then 7, and so "
            "is 7 8. The whole text has to be one number: re.fullmatch.",
        ),
        Answer(
            "last number in the text",
            _same(_number_at(lambda found: found[-1])),
            "You search for the numbers in the text and take the last. The policy may write many, "
            "and words around them. The whole text has to be one number: re.fullmatch.",
        ),
        Answer(
            "right number somewhere",
            lambda given, right: float(right.strip() in given),
            "You ask whether the right number stands somewhere in the text. It stands in 7.004 and "
            "in -7 too, and in a list of all numbers. Read each text as one number.",
        ),
        Answer(
            "digits kept",
            _same(_kept),
            "You throw away all that is neither digit nor point. Then words do not matter, -7 is "
            "7, and two numbers become one. A text with anything else in it is no number.",
        ),
        Answer(
            "digits and minus kept",
            _same(_kept_with_sign),
            "You throw away all that is neither digit, point nor minus. Then words do not matter, "
            "and 7 8 becomes 78. A text with anything else in it is no number.",
        ),
        Answer(
            "only the beginning fits",
            _same(
                lambda text: (
                    None
                    if (match := re.match(r"\s*[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?", text))
                    is None
                    else float(match[0].replace(",", ""))
                )
            ),
            "You compare the beginning of the text with your pattern: re.match does not look at "
            "the end. '7 of 8' is then 7. Use re.fullmatch.",
        ),
        Answer(
            "sign ignored",
            _judged(lambda a, b: abs(a) == abs(b)),
            "You ignore the sign. -7 is not 7.",
        ),
        Answer(
            "tolerance",
            _judged(lambda a, b: abs(a - b) < 0.01),
            "You compare with a tolerance, or round first (round, int). 7.004 is not 7: a right "
            "answer here is exactly right.",
        ),
        Answer(
            "whole numbers only",
            _read(r"\s*[+-]?&\s*"),
            "You accept no decimal point. 7.0 is the number 7, and 7.5 is a number too.",
        ),
        Answer(
            "only zeros after the point",
            _read(r"\s*[+-]?&(?:\.0*)?\s*"),
            "You accept only zeros after the point. 7.5 is a number too, and the same as 7.50.",
        ),
        Answer(
            "no minus",
            _read(r"\s*\+?&(?:\.[0-9]*)?\s*"),
            "You accept no minus, so no negative answer can be right. Allow one of + and - at the "
            "beginning: [+-]?.",
        ),
        Answer(
            "no plus",
            _read(r"\s*-?&(?:\.[0-9]*)?\s*"),
            "You accept no plus sign. +7 is 7: allow one of + and - at the beginning, [+-]?.",
        ),
        Answer(
            "no commas",
            _read(r"\s*[+-]?[0-9]+(?:\.[0-9]*)?\s*"),
            "You accept no commas. 1,234,567 is a number, as many texts write it. Allow one to "
            "three digits, then groups of a comma and three.",
        ),
        Answer(
            "leading zeros refused",
            _read(r"\s*[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|0|[1-9][0-9]*)(?:\.[0-9]*)?\s*"),
            "You refuse leading zeros. 007 is 7.",
        ),
        Answer(
            "digits after the point demanded",
            _read(r"\s*[+-]?&(?:\.[0-9]+)?\s*"),
            "You ask for digits after the point. '7.' is 7, as at the end of a sentence: "
            "[0-9]* instead of [0-9]+.",
        ),
        Answer(
            "not stripped",
            _read(r"[+-]?&(?:\.[0-9]*)?"),
            "You refuse white space around the number. It does no harm: strip the text first.",
        ),
        Answer(
            "white space removed everywhere",
            lambda given, right: same_number("".join(given.split()), "".join(right.split())),
            "You remove white space inside the text as well. 7 8 are two numbers, not 78. Only "
            "white space around the number is forgiven: strip.",
        ),
        Answer(
            "equal texts count",
            _equal_texts,
            "You accept two equal texts that are no numbers. This function is about numbers: a "
            "word is not equal to anything.",
        ),
        Answer(
            "the right one not read",
            lambda given, right: same_number(given, right) if "," not in right else 0.0,
            "You forgive the given text, but not the right one. Data sets write 1,234 too: read "
            "both texts in the same way.",
        ),
    ),
    cases=(
        Case("7.0 and 7", ("7.0", "7")),
        Case("7. and 7", ("7.", "7")),
        Case("007 and 7", ("007", "7")),
        Case("+7 and 7", ("+7", "7")),
        Case("7 with white space around it", (" 7\n", "7")),
        Case("-7, twice", ("-7", "-7")),
        Case("7.5 and 7.50", ("7.5", "7.50")),
        Case("1,234,567 and 1234567", ("1,234,567", "1234567")),
        Case("1234 and 1,234", ("1234", "1,234")),
        Case("-7 and 7", ("-7", "7")),
        Case("7.004 and 7", ("7.004", "7")),
        Case("12,34 and 1234", ("12,34", "1234")),
        Case("1234,567 and 1234567", ("1234,567", "1234567")),
        Case("'It is 7' and 7", ("It is 7", "7")),
        Case("'7 of 8' and 7", ("7 of 8", "7")),
        Case("'7 8' and 78", ("7 8", "78")),
        Case("nothing, twice", ("", "")),
        Case("'six', twice", ("six", "six")),
        Case("nan and 7", ("nan", "7")),
        Case("inf and Infinity", ("inf", "Infinity")),
        Case("1e3 and 1000", ("1e3", "1000")),
        Case("1_000 and 1000", ("1_000", "1000")),
    ),
    hints=(
        "What does Python's float say to '1_000', 'inf', '1e3' and '1,234'? Which of these would "
        "you count as a right answer?",
        "First ask whether the stripped text is one number, with re.fullmatch. Then remove the "
        "commas and convert it. Do the same with both texts.",
        "A sign: [+-]?. Digits: [0-9]+, or with commas [0-9]{1,3}(,[0-9]{3})+. The rest: "
        r"(\.[0-9]*)?. If one of the two texts does not fit, return 0.0.",
    ),
    number=True,
    lapses=(
        _read(r"\s*[+-]?[0-9]{1,3}(?:,[0-9]{3})?(?:\.[0-9]*)?\s*|\s*[+-]?[0-9]+(?:\.[0-9]*)?\s*"),
        _read(r"\s*[+-]?&(?:\.[0-9]*)?(?:e[0-9]+)?\s*"),
        _read(r"\s*[+-]?(?:&|[0-9_]+)(?:\.[0-9]*)?\s*", drop=",_"),
        _read(r"\s*[+-]?(?:&(?:\.[0-9]*)?|[Ii]nf(?:inity)?)\s*"),
        _read(r"\s*(?:It is )?[+-]?&(?:\.[0-9]*)?\s*", drop=", Its"),
        _read(r"\s*[+-]?&(?:\.(?!0)[0-9]*)?\s*"),
        lambda given, right: 1.0 if given == right == "" else same_number(given, right),
        lambda given, right: 1.0 if given == "nan" else same_number(given, right),
        lambda given, right: 1.0 if given and given == right else same_number(given, right),
    ),
)


# 8.3 ----------------------------------------------------------------------------------------


def exact_reward(prompts, completions, answer, **columns):
    """N prompts, completions (texts or chats), answers -> (N,), 1.0 where right, otherwise 0.0"""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    right = [text.strip() == wanted for text, wanted in zip(texts, answer, strict=True)]
    return torch.tensor(right).float()


Chat = list[dict[str, str]]
Reward = Callable[..., Tensor]


def _row_by_row(function: Callable[[str, str], Any]) -> Reward:
    """This function of a completion's text, with its white space, and the right answer."""

    def answer(prompts: Any, completions: Sequence[Any], answer: Sequence[str], **_: Any) -> Tensor:
        rows = zip(completions, answer, strict=True)
        return torch.tensor([float(function(texts.text_of(c), right)) for c, right in rows])

    return answer


def _read_as(function: Callable[[Any], str]) -> Reward:
    """Compared rightly, with what this function makes of a completion."""

    def answer(prompts: Any, completions: Sequence[Any], answer: Sequence[str], **_: Any) -> Tensor:
        rows = zip(completions, answer, strict=True)
        return torch.tensor([float(function(c).strip() == right) for c, right in rows])

    return answer


def _one_by_one(
    prompts: Any, completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> Tensor:
    rewards = torch.zeros(len(completions))
    for i, completion in enumerate(completions):
        if not isinstance(completion, str):
            completion = completion[-1]["content"]
        if completion.strip() == answer[i]:
            rewards[i] = 1
    return rewards


def _in_all_of_it(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> Tensor:
    rows = zip(prompts, completions, answer, strict=True)
    read = [(texts.text_of(p) + texts.text_of(c), right) for p, c, right in rows]
    return torch.tensor([float(right in text) for text, right in read])


def _end_of_all(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> Tensor:
    rows = zip(prompts, completions, answer, strict=True)
    read = [(texts.text_of(p) + texts.text_of(c), right) for p, c, right in rows]
    return torch.tensor([float(text.strip() == right) for text, right in read])


def _said(*said: str) -> Chat:
    """Messages, the last one by the assistant."""
    roles = ("assistant", "tool")
    pairs = zip(reversed(said), roles * len(said))
    return [{"role": role, "content": content} for content, role in pairs][::-1]


def _asked(content: str) -> Chat:
    return [{"role": "user", "content": content}]


EXACT_REWARD = Exercise(
    key="8.3",
    title="a reward function for TRL",
    reference=exact_reward,
    imports=("import torch",),
    package=_row_by_row(lambda text, right: text.strip() == right),
    others=(
        Answer(
            "one row after the other",
            _one_by_one,
            "begin with zeros, and write a 1 in each row whose text is right.",
        ),
    ),
    wrong=(
        Answer(
            "chat forgotten",
            _read_as(lambda completion: completion),
            "Your function crashes on a chat: a list of messages has no strip. Take the content of "
            "the last message: completion[-1]['content'].",
        ),
        Answer(
            "chat written out",
            _read_as(str),
            "You turn a chat into a text with str. That is the list with its brackets, and never "
            "equal to an answer. Take the content of the last message.",
        ),
        Answer(
            "only chats",
            _read_as(lambda completion: completion[-1]["content"]),
            "Your function expects a chat and crashes on a plain text. TRL gives texts if the "
            "prompts are texts: ask with isinstance(completion, str).",
        ),
        Answer(
            "only chats, first message",
            _read_as(lambda completion: completion[0]["content"]),
            "Two things. Your function crashes on a plain text. And it reads the first message, "
            "which is not the answer if a tool was called: the last one counts, [-1].",
        ),
        Answer(
            "first message",
            _read_as(lambda c: c if isinstance(c, str) else c[0]["content"]),
            "You read the first message of a chat. If the policy has called a tool, there are "
            "several; its answer is the last one, [-1].",
        ),
        Answer(
            "all messages joined",
            _read_as(lambda c: c if isinstance(c, str) else "".join(m["content"] for m in c)),
            "You join all messages of a chat. What stands before the last one is not the answer.",
        ),
        Answer(
            "any message",
            lambda prompts, completions, answer, **_: torch.tensor(
                [
                    float(
                        right in ([c.strip()] if isinstance(c, str) else [m["content"] for m in c])
                    )
                    for c, right in zip(completions, answer)
                ]
            ),
            "You are content if any message of a chat is the answer. Only the last one counts; the "
            "others may be what a tool said.",
        ),
        Answer(
            "first answer for all",
            lambda prompts, completions, answer, **_: exact_reward(
                prompts, completions, [answer[0]] * len(completions)
            ),
            "You compare all completions with the first answer. Each row has its own question and "
            "its own answer: zip(completions, answer).",
        ),
        Answer(
            "any answer",
            lambda prompts, completions, answer, **_: torch.tensor(
                [float(texts.text_of(c).strip() in answer) for c in completions]
            ),
            "You ask whether the text is among all the answers, and so pay for the answer to "
            "another question. Go through completions and answer together: zip.",
        ),
        Answer(
            "prompt read too",
            _in_all_of_it,
            "You look for the answer in prompt and completion together. If the prompt contains it, "
            "any completion is paid. Read the completion alone.",
        ),
        Answer(
            "prompt in front",
            _end_of_all,
            "You put the prompt in front of the completion, and no such text is equal to an "
            "answer. Read the completion alone.",
        ),
        Answer(
            "answer in the text",
            _row_by_row(lambda text, right: right in text),
            "You ask whether the answer is somewhere in the text. 4 is in 45 and in a list of all "
            "numbers, and an empty answer is in every text. Compare with ==.",
        ),
        Answer(
            "text in the answer",
            _row_by_row(lambda text, right: text.strip() in right),
            "You ask whether the text is somewhere in the answer. An empty text is in every one: "
            "the policy would learn to say nothing. Compare with ==.",
        ),
        Answer(
            "beginning",
            _row_by_row(lambda text, right: text.strip().startswith(right)),
            "You compare the beginning of the text. 45 begins with 4, and everything begins with "
            "an empty answer. Compare with ==.",
        ),
        Answer(
            "end",
            _row_by_row(lambda text, right: text.strip().endswith(right)),
            "You compare the end of the text. What stands before it was written too, and "
            "everything ends with an empty answer. Compare with ==.",
        ),
        Answer(
            "not stripped",
            _row_by_row(lambda text, right: text == right),
            "You do not strip the text. White space around the answer does no harm.",
        ),
        Answer(
            "white space removed everywhere",
            _row_by_row(lambda text, right: "".join(text.split()) == right),
            "You remove the white space inside the text as well, so 4 5 passes for 45. Only what "
            "is around it is forgiven: strip.",
        ),
        Answer(
            "capitals ignored",
            _row_by_row(lambda text, right: text.strip().lower() == right.lower()),
            "You ignore capital letters. The reward is called exact: apart from white space around "
            "it, the text has to be the answer.",
        ),
        Answer(
            "as numbers",
            _row_by_row(
                lambda text, right: text.strip() == right or same_number(text, right) == 1.0
            ),
            "You compare as numbers. That is often a good idea, and exercise 8.2; here the text "
            "has to be the answer, letter by letter.",
        ),
        Answer(
            "one number for all",
            lambda *columns: exact_reward(*columns).mean(),
            "You return one number for all. Without a reward for each completion there is nothing "
            "to compare within a group: N numbers.",
        ),
        Answer(
            "sum",
            lambda *columns: exact_reward(*columns).sum(),
            "You add the rewards up. Each completion gets its own: N numbers.",
        ),
        Answer(
            "-1 for wrong",
            lambda *columns: 2 * exact_reward(*columns) - 1,
            "You return -1 for a wrong answer. 0.0 is asked for.",
        ),
        Answer(
            "upside down",
            lambda *columns: 1 - exact_reward(*columns),
            "Your rewards are upside down: 1.0 is for the right ones.",
        ),
        Answer(
            "true or false",
            lambda *columns: exact_reward(*columns).bool(),
            "You return True and False. Rewards are numbers, of which means are taken: .float().",
        ),
    ),
    cases=(
        Case(
            "plain texts",
            (
                ["2 + 2 =", "40 + 5 =", "4 + 0 =", "9 - 5 =", "Is 4 even?", "Say 4.", "4 + 1 ="],
                [" 4\n", "4 5", "45", "", "yes", "5", "4"],
                ["4", "45", "4", "4", "Yes", "4", "5"],
            ),
        ),
        Case(
            "chats",
            (
                [_asked("What is 2 + 2?"), _asked("Say nothing."), _asked("What is 6 * 7?")] * 2,
                [
                    _said("4"),
                    _said("Nothing"),
                    _said("I compute 6 * 7.", "42", "42"),
                    _said("4", "5", "It is 4"),
                    _said(""),
                    _said("42", "42", "42.0"),
                ],
                ["4", "", "42"] * 2,
            ),
        ),
    ),
    hints=(
        "What does a completion look like if the prompt is a plain text, and what if it is a chat? "
        "Print one of each.",
        "isinstance(c, str) tells a text from a chat. Of a chat, c[-1]['content'] counts.",
        "zip(completions, answer) gives each completion with the answer of its own row. Strip the "
        "text, compare with ==, and put the results in a tensor: torch.tensor(results).float().",
    ),
)


# 8.4 ----------------------------------------------------------------------------------------


def training_bytes(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    """-> (6,) bytes: weights, gradients, optimizer, reference, cache of keys and values, logits"""
    numbers = [
        parameters,  # weights
        parameters,  # gradients
        2 * parameters,  # AdamW: an average of the gradient and one of its square
        parameters,  # reference policy: weights alone
        2 * layers * kv_heads * head_dim * rows * tokens,  # a key and a value
        rows * tokens * vocab_size,
    ]
    return torch.tensor(numbers) * bytes_per_number


def _with(place: int, function: Callable[..., int]) -> Callable[..., Tensor]:
    """All right but for one of the six, for which this function of the sizes says how many."""

    def answer(*sizes: int) -> Tensor:
        found = training_bytes(*sizes)
        found[place] = function(*sizes)
        return found

    return answer


def _listed(P: int, L: int, H: int, D: int, V: int, N: int, T: int, b: int) -> Tensor:
    copy, token = P * b, 2 * L * H * D * b
    return torch.tensor([copy, copy, copy + copy, copy, N * T * token, N * T * V * b])


def _measured(P: int, L: int, H: int, D: int, V: int, N: int, T: int, b: int) -> Tensor:
    """The bytes of tensors of these shapes, without making them, and of a real AdamW's averages."""

    def empty(*shape: int) -> Tensor:
        dtype = {2: torch.bfloat16, 4: torch.float32}[b]
        return torch.empty(shape, dtype=dtype, device="meta")

    weights, reference = nn.Parameter(empty(P)), empty(P)
    weights.grad = empty(P)
    optimizer = torch.optim.AdamW([weights], foreach=False)
    optimizer.step()
    averages = [optimizer.state[weights][name] for name in ("exp_avg", "exp_avg_sq")]
    cache = [empty(N, H, T, D) for _ in range(L) for _ in ("key", "value")]
    kept = ([weights], [weights.grad], averages, [reference], cache, [empty(N, T, V)])
    return torch.tensor([sum(x.nbytes for x in tensors) for tensors in kept])


TRAINING_BYTES = Exercise(
    key="8.4",
    title="what training needs",
    reference=training_bytes,
    imports=("import torch",),
    package=_measured,
    others=(
        Answer(
            "one entry after the other",
            _listed,
            "begin with one copy of the weights, P * b, and with the cache of one token, "
            "2 * layers * kv_heads * head_dim * b; all the rest are multiples.",
        ),
    ),
    wrong=(
        Answer(
            "one average",
            _with(2, lambda P, L, H, D, V, N, T, b: P * b),
            "Your optimizer keeps one number per parameter. AdamW keeps two: an average of the "
            "gradient and an average of its square.",
        ),
        Answer(
            "weights in the optimizer",
            _with(2, lambda P, L, H, D, V, N, T, b: 3 * P * b),
            "Your optimizer keeps three numbers per parameter. Two are its own, the averages of "
            "the gradient and of its square; the weights are counted already.",
        ),
        Answer(
            "weights and gradients in the optimizer",
            _with(2, lambda P, L, H, D, V, N, T, b: 4 * P * b),
            "You count weights and gradients in the optimizer again. Only its two averages are its "
            "own.",
        ),
        Answer(
            "optimizer in four bytes",
            _with(2, lambda P, L, H, D, V, N, T, b: 8 * P),
            "Your optimizer keeps its averages in four bytes each. Some do, and it is wise; here "
            "each number takes bytes_per_number.",
        ),
        Answer(
            "a reference that learns",
            _with(3, lambda P, L, H, D, V, N, T, b: 4 * P * b),
            "Your reference policy has gradients and averages. It is never trained: its weights "
            "are all it needs.",
        ),
        Answer(
            "no reference",
            _with(3, lambda P, L, H, D, V, N, T, b: 0),
            "Your reference policy takes no memory. It is a model of its own, with as many "
            "weights.",
        ),
        Answer(
            "keys without values",
            _with(4, lambda P, L, H, D, V, N, T, b: L * H * D * N * T * b),
            "You count the keys, or the values, but not both. The cache holds one of each for "
            "every token: twice as much.",
        ),
        Answer(
            "cache of one layer",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * H * D * N * T * b),
            "You count the cache of one layer. Every layer has keys and values of its own.",
        ),
        Answer(
            "cache of one head",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * L * D * N * T * b),
            "You count the cache of one head. Every head of the keys and values (kv_heads) has its "
            "own.",
        ),
        Answer(
            "cache without head_dim",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * L * H * N * T * b),
            "You count one number for each key. A key is a vector of head_dim numbers.",
        ),
        Answer(
            "cache of one row",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * L * H * D * T * b),
            "You count the cache of one row. All rows are sampled at the same time.",
        ),
        Answer(
            "cache of one token",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * L * H * D * N * b),
            "You count the cache of one token. It keeps all tokens up to now, that is what it is "
            "for: at the end these are `tokens`.",
        ),
        Answer(
            "cache of pairs",
            _with(4, lambda P, L, H, D, V, N, T, b: 2 * L * H * D * N * T * T * b),
            "Your cache grows with the square of the length. Pairs of tokens have scores, but "
            "these are not kept: one key and one value per token.",
        ),
        Answer(
            "logits of the last token",
            _with(5, lambda P, L, H, D, V, N, T, b: N * V * b),
            "You count the logits of the last token. That is enough for sampling, but training "
            "needs those of every token.",
        ),
        Answer(
            "logits of one row",
            _with(5, lambda P, L, H, D, V, N, T, b: T * V * b),
            "You count the logits of one row. Here all rows go through the model at once.",
        ),
        Answer(
            "log-probs of the tokens",
            _with(5, lambda P, L, H, D, V, N, T, b: N * T * b),
            "You count one number per token. That is what is left after gather; before, each token "
            "has a logit for the whole vocabulary.",
        ),
        Answer(
            "logits in four bytes",
            _with(5, lambda P, L, H, D, V, N, T, b: N * T * V * 4),
            "Your logits take four bytes each. Some programs do that; here each number takes "
            "bytes_per_number.",
        ),
        Answer(
            "numbers",
            lambda *sizes: training_bytes(*sizes[:-1], 1),
            "You count numbers. Each of them takes bytes_per_number bytes.",
        ),
        Answer(
            "bits",
            lambda *sizes: 8 * training_bytes(*sizes),
            "These are bits, eight times as many. Bytes are asked for.",
        ),
        Answer(
            "four bytes always",
            lambda *sizes: training_bytes(*sizes[:-1], 4),
            "You count four bytes for each number, whatever it is. That is float32; bfloat16 takes "
            "two: use bytes_per_number.",
        ),
        Answer(
            "two bytes always",
            lambda *sizes: training_bytes(*sizes[:-1], 2),
            "You count two bytes for each number, whatever it is. That is bfloat16; float32 takes "
            "four: use bytes_per_number.",
        ),
        Answer(
            "all added up",
            lambda *sizes: training_bytes(*sizes).sum(),
            "You add them all up. Return the six one by one, to see which is the largest.",
        ),
        Answer(
            "cache and logits exchanged",
            lambda *sizes: training_bytes(*sizes)[[0, 1, 2, 3, 5, 4]],
            "You have exchanged the last two: first the cache of keys and values, then the logits.",
        ),
    ),
    cases=(
        Case("a toy in float32", (100, 3, 4, 5, 11, 7, 13, 4)),
        Case(
            "half a billion parameters in bfloat16",
            (494_032_768, 24, 2, 64, 151_936, 64, 512, 2),
        ),
    ),
    hints=(
        "Which of the six have one number, or a fixed count of numbers, for every parameter of the "
        "model? Which grow with the batch?",
        "The first four are 1, 1, 2 and 1 times the parameters. For the cache: what does one layer "
        "keep of one token, for each of its kv_heads?",
        "A key and a value of head_dim numbers each. So the cache is "
        "2 * layers * kv_heads * head_dim * rows * tokens, and the logits are "
        "rows * tokens * vocab_size. All six times bytes_per_number.",
    ),
)

EXERCISES = (
    ANSWER_SPAN,
    SAME_NUMBER,
    EXACT_REWARD,
    TRAINING_BYTES,
)
