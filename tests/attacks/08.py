"""Answers to the exercises of notebook 08."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import numpy as np
import torch
from attack import right, wrong

# 8.1
TAG = r"</?(?:think|answer)>"
TEXT = rf"(?:(?!{TAG}).)*"
FORM = rf"\s*<think>{TEXT}</think>\s*<answer>\s*(?=\S)((?:(?!{TAG}).)+?)\s*</answer>\s*"


def span(pattern, completion, flags=re.DOTALL):
    found = re.fullmatch(pattern, completion, flags)
    return torch.tensor(found.span(1) if found else (0, 0))


@wrong("8.1", "<think>a</think><answer>5</answer><answer>6</answer>")
def lazy_is_enough(completion):
    return span(r"\s*<think>.*?</think>\s*<answer>\s*(\S.*?)\s*</answer>\s*", completion)


@wrong("8.1", "<think>3 + 2 = 5</think><answer>5</answer>")
def first_place_of_the_text(completion):
    begin, end = span(FORM, completion).tolist()
    first = completion.find(completion[begin:end])
    return torch.tensor([first, first + end - begin])


@wrong("8.1", "<think>a</think><answer>answer</answer>")
def sought_after_the_thought(completion):
    begin, end = span(FORM, completion).tolist()
    if end == 0:
        return torch.tensor([0, 0])
    first = completion.index(completion[begin:end], completion.index("</think>") + 8)
    return torch.tensor([first, first + end - begin])


@wrong("8.1", "<think>a</think><answer>5 ")
def last_tag_may_be_missing(completion):
    rest, parts = completion, []
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        part, _, rest = rest.partition(tag)
        parts.append(part)
    before, thought, between, answer = parts
    inside = re.search(TAG, thought) or re.search(TAG, answer)
    if inside or before.strip() or between.strip() or rest.strip() or not answer.strip():
        return torch.tensor([0, 0])
    begin = completion.index("<answer>") + 8 + len(answer) - len(answer.lstrip())
    return torch.tensor([begin, begin + len(answer.strip())])


@wrong("8.1", "<think></think><answer>5</answer>")
def thought_needed(completion):
    return span(FORM.replace(f"<think>{TEXT}", f"<think>(?!</think>){TEXT}"), completion)


@wrong("8.1", "<think>a</think><answer>  </answer>")
def blank_answer_taken(completion):
    return span(FORM.replace(r"(?=\S)", ""), completion)


@wrong("8.1", "<think>a</think>\u00a0<answer>5</answer>")
def only_ascii_space(completion):
    return span(FORM, completion, re.DOTALL | re.ASCII)


@wrong("8.1", "<think>a</think><answer>\u20075\x1f</answer>")
def stripped_of_string_whitespace(completion):
    if span(FORM, completion).sum() == 0:
        return torch.tensor([0, 0])
    begin, end = completion.index("<answer>") + 8, completion.index("</answer>")
    answer = completion[begin:end]
    begin += len(answer) - len(answer.lstrip(string.whitespace))
    return torch.tensor([begin, begin + len(answer.strip(string.whitespace))])


@wrong("8.1", "<think>a</think><answer>x < 3</answer>")
def no_bracket_inside(completion):
    return span(r"\s*<think>[^<]*</think>\s*<answer>\s*([^<]*[^<\s])\s*</answer>\s*", completion)


@wrong("8.1", "<think>a</think><answer>an < answer > b</answer>")
def tags_with_room(completion):
    return span(FORM.replace(TAG, r"<\s*/?\s*(?:think|answer)\s*>"), completion)


@wrong("8.1", "<think>a<answer>5</think></answer>")
def counted_without_order(completion):
    tags = "<think>", "</think>", "<answer>", "</answer>"
    if any(completion.count(tag) != 1 for tag in tags):
        return torch.tensor([0, 0])
    at = [completion.index(tag) for tag in tags]
    gaps = completion[: at[0]] + completion[at[1] + 8 : at[2]] + completion[at[3] + 9 :]
    answer = completion[at[2] + 8 : at[3]]
    begin = at[2] + 8 + len(answer) - len(answer.lstrip())
    ok = answer.strip() and not gaps.strip()
    return torch.tensor([begin, begin + len(answer.strip())] if ok else [0, 0])


@wrong("8.1", "<think>a</answer></think><answer>5</answer>")
def second_closing_tag(completion):
    once = completion.count("<answer>") == completion.count("<think>") == 1
    once = once and completion.count("</think>") == 1
    form = r"\s*<think>.*</think>\s*<answer>\s*(\S.*?)\s*</answer>\s*"
    return span(form, completion) if once else torch.tensor([0, 0])


@wrong("8.1", "<think>a</think><answer><b>5</b></answer>")
def any_tag_is_a_tag(completion):
    tags = re.findall(r"</?\w+>", completion)
    ok = tags == ["<think>", "</think>", "<answer>", "</answer>"]
    return span(FORM, completion) if ok else torch.tensor([0, 0])


@wrong("8.1", "<think>é</think><answer>5</answer>")
def places_in_bytes(completion):
    begin, end = span(FORM, completion).tolist()
    return torch.tensor([len(completion[:n].encode()) for n in (begin, end)])


@right("8.1")
def one_pattern(completion):
    return span(FORM, completion)


@right("8.1")
def by_finditer(completion):
    tags = [*re.finditer(TAG, completion)]
    if "".join(t.group() for t in tags) != "<think></think><answer></answer>":
        return torch.tensor([0, 0])
    outside = completion[: tags[0].start()], completion[tags[1].end() : tags[2].start()]
    begin, end = tags[2].end(), tags[3].start()
    while begin < end and completion[begin].isspace():
        begin += 1
    while begin < end and completion[end - 1].isspace():
        end -= 1
    bad = begin == end or any(t.strip() for t in (*outside, completion[tags[3].end() :]))
    return torch.tensor([0, 0] if bad else [begin, end])


@right("8.1")
def by_partition(completion):
    rest, parts = completion, []
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        part, found, rest = rest.partition(tag)
        if not found or re.search(TAG, part):
            return torch.tensor([0, 0])
        parts.append(part)
    before, _, between, answer = parts
    if before.strip() or between.strip() or rest.strip() or not answer.strip():
        return torch.tensor([0, 0])
    end = len(completion) - len(rest) - len("</answer>") - len(answer) + len(answer.rstrip())
    return torch.tensor([end - len(answer.strip()), end])


@right("8.1")
def by_counting(completion):
    tags = "<think>", "</think>", "<answer>", "</answer>"
    if any(completion.count(tag) != 1 for tag in tags):
        return torch.zeros(2, dtype=torch.long)
    at = [completion.find(tag) for tag in tags]
    gaps = completion[: at[0]], completion[at[1] + 8 : at[2]], completion[at[3] + 9 :]
    answer = completion[at[2] + 8 : at[3]]
    if at != sorted(at) or "".join(gaps).strip() or not answer.strip():
        return torch.zeros(2, dtype=torch.long)
    begin = at[2] + 8 + len(answer) - len(answer.lstrip())
    return torch.tensor((begin, begin + len(answer.strip())))


# 8.2
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?")


def same(given, right, pattern=NUMBER, number=lambda text: Fraction(text.replace(",", ""))):
    texts = given.strip(), right.strip()
    if not all(re.fullmatch(pattern, text) for text in texts):
        return 0.0
    return float(number(texts[0]) == number(texts[1]))


@wrong("8.2", "12,34", "1234")
def commas_dropped_first(given, right):
    return same(given.replace(",", ""), right.replace(",", ""))


@wrong("8.2", "seven", "eight")
def neither_is_a_number(given, right):
    values = [
        float(t.replace(",", "")) if NUMBER.fullmatch(t.strip()) else None for t in (given, right)
    ]
    return float(values[0] == values[1])


@wrong("8.2", "0", "0.0")
def zero_is_false(given, right):
    a, b = (NUMBER.fullmatch(t.strip()) and float(t.replace(",", "")) for t in (given, right))
    return float(bool(a and b and a == b))


@wrong("8.2", "7.", "7")
def point_wants_digits(given, right):
    return same(given, right, r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?")


@wrong("8.2", "1234,567", "1234567")
def first_group_any_size(given, right):
    return same(given, right, r"[+-]?[0-9]+(,[0-9]{3})*(\.[0-9]*)?")


@wrong("8.2", "0,007", "7")
def no_zero_before_commas(given, right):
    return same(given, right, r"[+-]?([1-9][0-9]{0,2}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?")


@wrong("8.2", "-0.5", "0.5")
def whole_and_rest_apart(given, right):
    def parts(text):
        whole, _, rest = text.replace(",", "").partition(".")
        return int(whole), rest.rstrip("0")

    return same(given, right, number=parts)


@wrong("8.2", "0.07", "0.7")
def rest_as_a_whole_number(given, right):
    return same(given, right, number=lambda t: [Fraction(p or 0) for p in pieces(t)])


def pieces(text):
    sign = "-" if text[0] == "-" else ""
    whole, _, rest = text.lstrip("+-").replace(",", "").partition(".")
    return sign + whole, sign + (rest.rstrip("0") or "0")


@wrong("8.2", "123456789012345", "123456789012344")
def close_is_the_same(given, right):
    texts = given.strip(), right.strip()
    if not all(map(NUMBER.fullmatch, texts)):
        return 0.0
    return float(math.isclose(*(float(text.replace(",", "")) for text in texts)))


@wrong("8.2", "16777217", "16777216")
def in_float32(given, right):
    return same(given, right, number=lambda text: np.float32(text.replace(",", "")))


@wrong("8.2", "7..", "7")
def points_stripped(given, right):
    return same(given.strip().rstrip("."), right.strip().rstrip("."))


@wrong("8.2", "- 7", "-7")
def room_after_the_sign(given, right):
    texts = (re.sub(r"^\s*([+-])\s+", r"\1", text) for text in (given, right))
    return same(*texts)


@wrong("8.2", "10", "1e1")
def right_side_trusted(given, right):
    if NUMBER.fullmatch(given.strip()) is None:
        return 0.0
    try:
        return float(float(given.replace(",", "")) == float(right.replace(",", "")))
    except ValueError:
        return 0.0


@right("8.2")
def in_float64(given, right):
    return same(given, right, number=lambda text: float(text.replace(",", "")))


@right("8.2")
def by_decimal(given, right):
    def value(text):
        return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else Decimal("nan")

    return float(value(given.strip()) == value(right.strip()))


@right("8.2")
def without_patterns(given, right):
    values = []
    for text in (given.strip(), right.strip()):
        sign = -1 if text[:1] == "-" else 1
        whole, _, rest = (text[1:] if text[:1] in ("+", "-") else text).partition(".")
        first, *groups = whole.split(",")
        if groups and (len(first) > 3 or any(len(group) != 3 for group in groups)):
            return 0.0
        if not first or set("".join([first, *groups, rest])) - set(string.digits):
            return 0.0
        values.append(sign * int("".join([first, *groups]) + rest.ljust(30, "0")))
    return 1.0 if values[0] == values[1] else 0.0


@right("8.2")
def with_two_patterns(given, right):
    given, right = given.strip(), right.strip()
    plain, grouped = r"[-+]?[0-9]+\.?[0-9]*\Z", r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?\Z"
    for text in [given, right]:
        if not (re.match(plain, text) or re.match(grouped, text)):
            return float(False)
    return float(eval_number(given) == eval_number(right))


def eval_number(text):
    try:
        return Decimal("".join(text.split(","))).normalize()
    except InvalidOperation:
        return None


# 8.3
def said(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def message(content, role="assistant"):
    return {"role": role, "content": content}


ONE = ["2 + 3"]


@wrong("8.3", ONE, ["It is 5"], ["5"])
def answer_in_the_text(prompts, completions, answer, **columns):
    return torch.tensor([float(a in said(c)) for c, a in zip(completions, answer)])


@wrong("8.3", ONE, ["5\n"], ["5"])
def not_stripped(prompts, completions, answer, **columns):
    return [float(said(c) == a) for c, a in zip(completions, answer)]


@wrong("8.3", ONE, [[message("5"), message("6", "user")]], ["6"])
def last_of_the_assistant(prompts, completions, answer, **columns):
    def text(chat):
        own = [m["content"] for m in chat if m["role"] == "assistant"]
        return own[-1] if own else ""

    texts = [c if isinstance(c, str) else text(c) for c in completions]
    return [float(t.strip() == a) for t, a in zip(texts, answer)]


@wrong("8.3", ONE, [[message("4"), message("5")]], ["5"])
def first_message(prompts, completions, answer, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return torch.tensor([t.strip() == a for t, a in zip(texts, answer)]).float()


@wrong("8.3", ["a", "a"], ["5", "5"], ["5", "6"])
def answers_by_prompt(prompts, completions, answer, **columns):
    table = {str(prompt): a for prompt, a in zip(prompts, answer)}
    return [float(said(c).strip() == table[str(p)]) for p, c in zip(prompts, completions)]


@wrong("8.3", ["a", "b"], ["5", "5"], ["5", "6"])
def place_by_index(prompts, completions, answer, **columns):
    return [float(said(c).strip() == answer[completions.index(c)]) for c in completions]


@wrong("8.3", ONE, ["a b"], ["a  b"])
def white_space_joined(prompts, completions, answer, **columns):
    texts = [" ".join(said(c).split()) for c in completions]
    return [float(t == " ".join(a.split())) for t, a in zip(texts, answer)]


@wrong("8.3", ONE, ["705"], ["7.5"])
def answer_as_pattern(prompts, completions, answer, **columns):
    def fits(text, wanted):
        try:
            return re.fullmatch(wanted, text) is not None
        except re.error:
            return text == wanted

    return [float(fits(said(c).strip(), a)) for c, a in zip(completions, answer)]


@wrong("8.3", ONE, ["7\u00b2"], ["72"])
def letters_made_alike(prompts, completions, answer, **columns):
    def plain(text):
        return unicodedata.normalize("NFKC", text.strip())

    return [float(plain(said(c)) == plain(a)) for c, a in zip(completions, answer)]


@wrong("8.3", ONE, ["\u00a05\x0c"], ["5"])
def only_blanks_and_lines(prompts, completions, answer, **columns):
    return [float(said(c).strip(" \t\r\n") == a) for c, a in zip(completions, answer)]


@wrong("8.3", ["2 + 3 = "], ["2 + 3 = 5"], ["5"])
def prompt_taken_off(prompts, completions, answer, **columns):
    texts = [
        said(c).removeprefix(p) if isinstance(p, str) else said(c)
        for p, c in zip(prompts, completions)
    ]
    return torch.tensor([float(t.strip() == a) for t, a in zip(texts, answer)])


@wrong("8.3", ONE, ["5\n6"], ["6"])
def last_line(prompts, completions, answer, **columns):
    texts = [said(c).strip() for c in completions]
    return [float(a in (t, *t.splitlines()[-1:])) for t, a in zip(texts, answer)]


@wrong("8.3", ONE, [[message("4"), message("5")]], ["5"])
def message_taken_out(prompts, completions, answer, **columns):
    texts = [c if isinstance(c, str) else c.pop()["content"] for c in completions]
    return [float(t.strip() == a) for t, a in zip(texts, answer)]


@wrong("8.3", ["a", "b"], ["5", ""], ["5", "6"])
def told_by_the_last_item(prompts, completions, answer, **columns):
    texts = [c[-1]["content"] if isinstance(c[-1], dict) else c for c in completions]
    return [float(t.strip() == a) for t, a in zip(texts, answer)]


@right("8.3")
def a_list_of_floats(prompts, completions, answer, **columns):
    return [1.0 if said(c).strip() == a else 0.0 for c, a in zip(completions, answer)]


@right("8.3")
def filled_in(*, completions, answer, prompts=None, **rest):
    rewards = torch.zeros(len(completions))
    for n, completion in enumerate(completions):
        match completion:
            case str():
                text = completion
            case [*_, {"content": text}]:
                pass
        rewards[n] = text.strip() == answer[n]
    return rewards


@right("8.3")
def chats_told_by_the_first(prompts, completions, answer, **columns):
    if completions and not isinstance(completions[0], str):
        completions = [chat[-1]["content"] for chat in completions]
    return torch.tensor([*map(lambda c, a: float(str.strip(c) == a), completions, answer)])


@right("8.3")
def escaped_pattern(prompts, completions, answer, **columns):
    patterns = [re.compile(rf"\s*{re.escape(a)}\s*") for a in answer]
    hits = [p.fullmatch(said(c)) is not None for p, c in zip(patterns, completions)]
    return torch.tensor(hits, dtype=torch.float64)


# 8.4
# parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
SMALL = 101, 3, 2, 5, 7, 4, 11, 2
LARGE = 7_615_616_513, 28, 4, 128, 152_065, 1_023, 4_099, 3


def counts(p, layers, kv_heads, head_dim, vocab, rows, tokens):
    return [p, p, 2 * p, p, 2 * layers * kv_heads * head_dim * rows * tokens, rows * tokens * vocab]


@wrong("8.4", *SMALL)
def one_average(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    n[2] = parameters
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *SMALL)
def optimizer_in_float32(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor([4 * x if i == 2 else x * bytes_per_number for i, x in enumerate(n)])


@wrong("8.4", *SMALL)
def keys_without_values(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    n[4] //= 2
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *SMALL)
def logits_of_the_next_tokens(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    n[5] = rows * (tokens - 1) * vocab_size
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *LARGE)
def through_float32(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return (torch.tensor(n, dtype=torch.float32) * bytes_per_number).long()


@wrong("8.4", *LARGE)
def wrapped_at_32_bits(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor(n).int() * bytes_per_number


@wrong("8.4", *LARGE)
def products_in_default_floats(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    cache = torch.tensor([2.0, layers, kv_heads, head_dim, rows, tokens]).prod()
    n = [parameters, parameters, 2 * parameters, parameters, int(cache), rows * tokens * vocab_size]
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *LARGE)
def widths_in_a_table(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor(n) * {1: 1, 2: 2, 4: 4, 8: 8}.get(bytes_per_number, 4)


@wrong("8.4", *SMALL[:-1], 1)
def no_average_in_one_byte(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    wide = max(bytes_per_number, 2)
    return torch.tensor([x * (wide if i == 2 else bytes_per_number) for i, x in enumerate(n)])


@wrong("8.4", *SMALL[:-1], 8)
def logits_at_most_float32(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    narrow = min(bytes_per_number, 4)
    return torch.tensor([x * (narrow if i == 5 else bytes_per_number) for i, x in enumerate(n)])


@wrong("8.4", *SMALL)
def cache_in_blocks_of_16(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    n[4] = n[4] // tokens * (-(-tokens // 16) * 16)
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *SMALL)
def vocabulary_in_blocks_of_64(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    n[5] = rows * tokens * math.ceil(vocab_size / 64) * 64
    return torch.tensor(n) * bytes_per_number


@wrong("8.4", *LARGE)
def by_megabytes(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor([round(x * bytes_per_number / 2**20) * 2**20 for x in n])


@wrong("8.4", *SMALL)
def reference_after_the_cache(
    parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor([*n[:3], n[4], n[3], n[5]]) * bytes_per_number


@right("8.4")
def names_in_another_order(
    *, bytes_per_number, tokens, rows, vocab_size, head_dim, kv_heads, layers, parameters
):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.tensor([each * bytes_per_number for each in n])


@right("8.4")
def with_prod(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number):
    cache = math.prod([2, layers, kv_heads, head_dim, rows, tokens, bytes_per_number])
    logits = math.prod([rows, tokens, vocab_size, bytes_per_number])
    return torch.tensor([parameters * bytes_per_number * n for n in (1, 1, 2, 1)] + [cache, logits])


@right("8.4")
def all_by_name(**sizes):
    p, b = sizes["parameters"], sizes["bytes_per_number"]
    places = torch.tensor(sizes["rows"]) * sizes["tokens"]
    cache = 2 * places * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"]
    weights = torch.tensor([1, 1, 2, 1]) * p
    return b * torch.cat([weights, torch.stack([cache, places * sizes["vocab_size"]])])


@right("8.4")
def by_numpy(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens, bytes_per_number):
    n = counts(parameters, layers, kv_heads, head_dim, vocab_size, rows, tokens)
    return torch.from_numpy(np.array(n, dtype=np.int64) * np.int64(bytes_per_number))
