"""GRPO on the countdown task with TRL: make 21 from 3, 7 and 25, each used once.

    python recipes/countdown_trl.py --smoke                        # seconds, no network
    python recipes/countdown_trl.py --numbers 3 --largest 20       # easy ones first
    accelerate launch --num_processes 4 recipes/countdown_trl.py --vllm      # four GPUs

The questions are made here, by rule, each with at least one solution, and a set of numbers that is
held out occurs in no training question. The run itself is that of `gsm8k_trl.py` beside this file,
with all its settings (`--help`). Here are the questions and the reward.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import zlib
from collections.abc import Sequence
from fractions import Fraction
from random import Random

from gsm8k_trl import options, smoke, train
from running import count, folder_of, load_rows

from minigrpo.text.prompts import thought_and_answer

SYSTEM = (
    "Think step by step. Answer in exactly this form: "
    "<think>your steps</think><answer>an expression</answer>"
)
ASK = "Make {target} from the numbers {numbers}, each used exactly once, with + - * / and ( )."
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def row(numbers: Sequence[int], target: int) -> dict:
    """A question in TRL's form: a chat, and the columns that the reward reads."""
    asked = ASK.format(numbers=", ".join(map(str, numbers)), target=target)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    kind = f"{len(numbers)} numbers"
    return {"prompt": chat, "numbers": [*numbers], "target": target, "kind": kind}


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether these numbers, in any order, are kept from training: one set in five."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % 5 == 0


def draw(counts: Sequence[int], largest: int, random: Random) -> tuple[list[int], int]:
    """Numbers from 1 to `largest`, and a target that can be made of them."""
    numbers = [random.randint(1, largest) for _ in range(random.choice(counts))]
    left = [*numbers]
    while len(left) > 1:  # two of those left become one, until there's one
        a, b = (left.pop(random.randrange(len(left))) for _ in range(2))
        made = [a + b, a * b]
        made += [a - b] if a > b else []
        made += [a // b] if a % b == 0 else []
        left.append(random.choice(made))
    return numbers, left[0]


def draw_rows(n: int, *, held_out: bool, counts: Sequence[int], largest: int) -> list[dict]:
    """n different questions from one side of the split, with targets from 10 to 99.

    ValueError: there aren't so many.
    """
    random, rows = Random(int(held_out)), {}
    for _ in range(100 * n):
        numbers, target = draw(counts, largest, random)
        if 10 <= target <= 99 and target not in numbers and is_held_out(numbers) == held_out:
            rows.setdefault((*sorted(numbers), target), row(numbers, target))
        if len(rows) == n:
            return [*rows.values()]
    raise ValueError(f"--largest {largest}: expected {n} different questions, found {len(rows)}")


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of an expression of + - * / ( ), or None if it's anything else.

    The text comes from a policy that is paid for it, so it's never given to `eval`: it is parsed,
    and only what is known is computed, exactly.
    """
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        raise ValueError("expected numbers and + - * /")

    if not re.fullmatch(r"[0-9+\-*/() ]{1,100}", text):  # no letters, no dots, no deep nesting
        return None
    try:
        return value(ast.parse(text.strip(), mode="eval").body), sorted(used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def equation_reward(
    prompts: Sequence,
    completions: Sequence,
    numbers: Sequence[Sequence[int]],  # columns of the data
    target: Sequence[int],
    **columns,
) -> list[float]:
    """1 for the right form and an answer that makes the target of each number once, otherwise 0.

    `(25 - 7) + 3` is an answer, and so is `(25 - 7) + 3 = 21` if the right side is the target.
    """
    rewards = []
    rows = zip(prompts, completions, numbers, target, strict=True)
    for prompt, completion, allowed, goal in rows:
        parts = thought_and_answer(prompt, completion)
        left, *right = parts.answer[0].split("=") if parts else [""]
        made = evaluate(left.translate(str.maketrans("×÷−", "*/-")).strip())
        said = [text.strip() for text in right] in ([], [str(goal)])
        rewards.append(float(said and made == (Fraction(goal), sorted(allowed))))
    return rewards


def rows_from(data: str, held_out: bool) -> list[dict]:
    """Questions of a data set with the columns "nums" and "target", split by the same rule."""
    rows = []
    for question in load_rows(data, "train", ("nums", "target")):
        try:
            nums = question["nums"]
            nums = [*map(int, json.loads(nums) if isinstance(nums, str) else nums)]
            rows.append(row(nums, int(question["target"])))
        except (ValueError, TypeError):
            got = f"{question['nums']!r} and {question['target']!r}"
            raise ValueError(
                f"{data}: expected nums like [3, 7, 25], a target, got {got}"
            ) from None
    rows = [question for question in rows if is_held_out(question["numbers"]) == held_out]
    if not rows:
        side = "held out" if held_out else "trained on"
        raise ValueError(f"{data}: expected more questions, found none to be {side}")
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__.partition("\n")[0], data=None)
    add = parser.add_argument
    add("--numbers", type=count, nargs="+", default=[3, 4], help="how many, each as often")
    add("--largest", type=count, default=99, help="of the numbers")
    add("--rows", type=count, default=8000, help="questions made for training")
    o = parser.parse_args(arguments)
    with folder_of(o, "countdown_trl") as folder:
        if o.smoke:
            smoke(parser, folder)
            parser.set_defaults(rows=40, numbers=[3], largest=9)
            o = parser.parse_args(arguments)  # what is given outranks the defaults
        o.out = folder
        kind = {"counts": o.numbers, "largest": o.largest}
        rows, test = (
            rows_from(o.data, held_out)
            if o.data
            else draw_rows(o.questions if held_out else o.rows, held_out=held_out, **kind)
            for held_out in (False, True)
        )
        form = "<think>so</think><answer>{}</answer>"
        graded = row([3, 7, 25], 21), form.format("(25 - 7) + 3"), form.format("25 - 7")
        train(o, rows, test[: o.questions], equation_reward, graded)


if __name__ == "__main__":
    main()
