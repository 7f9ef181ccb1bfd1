"""Prompts and rewards over a real tokenizer, in the form in which TRL wants them too.

A reward function gets keywords and lists of N: `prompts`, `completions`, and the other columns of
the data, and returns N numbers. TRL's GRPOTrainer calls it so, and so does `TextProblems`, the task
for `train_grpo`: one function serves both. Prompts are plain texts or chats, lists of messages; the
completions of a chat are lists of messages as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from minigrpo.logprobs import is_whole_number
from minigrpo.rewards import TEXT_TAGS, Parts, split_parts
from minigrpo.sampling import Rollouts, completion_mask, left_pad, sample

Message = Mapping[str, str]
"""{"role": "user", "content": "How many?"}"""
Text = str | Sequence[Message]
"""A plain text, or a chat."""
RewardFunction = Callable[..., Sequence[float | None]]
"""Keywords prompts, completions and further columns, lists of N -> N numbers (None: no opinion)."""


# --------------------------------------------------------------------------------------------
# text to ids and back


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> Tensor:
    """(P,) ids of a prompt, ready to be continued.

    A chat is written out by the tokenizer's own template, up to where the assistant's turn begins.

    Raises:
        ValueError: a chat for a tokenizer without a chat template; a prompt without any token.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError(
            "prompt: expected a plain text, because the tokenizer has no chat template, got a chat"
        )
    else:
        written = tokenizer.apply_chat_template(
            [dict(message) for message in prompt], add_generation_prompt=True, tokenize=False
        )
        # The template writes special tokens itself; a second BOS would be another text.
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    if len(ids) == 0:
        raise ValueError(f"prompt: expected at least one token, got {prompt!r}")
    return torch.tensor(ids, dtype=torch.long)


def decode_completion(
    tokenizer: PreTrainedTokenizerBase, ids: Tensor, stops: Sequence[int] = ()
) -> str:
    """The text of one completion, up to the token that ended it.

    Special tokens are kept: tags such as `<think>` are special in some tokenizers, and without them
    there would be nothing to reward.

    Args:
        tokenizer: the policy's.
        ids: (T,); what stands behind the first stop token is not read.
        stops: ids that end a completion; they are not part of the text.
    """
    ids = ids[completion_mask(ids[None], tuple(stops))[0]]
    if len(ids) and ids[-1].item() in stops:
        ids = ids[:-1]
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def stop_tokens(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> tuple[int, ...]:
    """All ids that end a completion: the tokenizer's EOS, and those of the model's own settings.

    Chat models often have two, one for the end of a turn and one for the end of a text.

    Raises:
        ValueError: there is none, so that nothing could ever end.
    """
    found = [tokenizer.eos_token_id]
    settings = getattr(policy, "generation_config", None)
    for source in (settings, policy.config):
        more = getattr(source, "eos_token_id", None)
        found += [more] if is_whole_number(more) else (more or [])
    stops = tuple(dict.fromkeys(i for i in found if i is not None))
    if not stops:
        raise ValueError("tokenizer: expected an EOS token, in it or in the model's config")
    return stops


def text_of(completion: Text) -> str:
    """The text of a completion, plain or a chat, of which it is the assistant's last message."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else ""


def write(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Text],
    *,
    max_new_tokens: int = 40,
    seed: int = 0,
    **settings: Any,
) -> tuple[Rollouts, list[str]]:
    """Let the policy continue prompts of any lengths, plain texts or chats, all at once.

    settings: of `sample`, such as temperature.

    Returns:
        the rollouts, and the completions as texts.
    """
    device = next(policy.parameters()).device
    stops = stop_tokens(tokenizer, policy)
    ids, mask = left_pad([encode_prompt(tokenizer, p) for p in prompts], tokenizer.pad_token_id)
    rollouts = sample(
        policy,
        ids.to(device),
        mask.to(device),
        max_new_tokens=max_new_tokens,
        eos_id=stops,
        pad_id=tokenizer.pad_token_id,
        generator=torch.Generator(device).manual_seed(seed),
        **settings,
    )
    completions = rollouts.completions.cpu()
    return rollouts, [decode_completion(tokenizer, row, stops) for row in completions]


# --------------------------------------------------------------------------------------------
# rewards


def parts(prompt: Text, completion: Text) -> Parts | None:
    """Thought and answer of `<think> ... </think> <answer> ... </answer>`; None in another form.

    Each tag once, in this order, nothing outside of them but white space, an answer that is not
    empty. If a plain prompt ends with `<think>`, the completion goes on behind it. Nothing else of
    the prompt is looked at, so no example in it can be rewarded.
    """
    # A chat's last message is the user's, and closed: the assistant's turn begins behind it.
    opened = isinstance(prompt, str) and prompt.rstrip().endswith(TEXT_TAGS.think)
    found = split_parts(text_of(completion), given=int(opened))
    return found if found is not None and found.answer else None


def format_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """1 for each completion that keeps to the form, otherwise 0; see `parts`."""
    return [float(parts(p, c) is not None) for p, c in zip(prompts, completions, strict=True)]


def answer_reward(
    prompts: Sequence[Text], completions: Sequence[Text], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 for each completion in the right form whose answer is the right one, otherwise 0.

    Numbers are compared as numbers (see `number`), other answers as texts, white space aside.

    Args:
        prompts, completions: N of them.
        answer: a column of the data: the right answers, texts.

    Raises:
        ValueError: a right answer that is empty.
    """
    if not all(str(right).strip() for right in answer):
        raise ValueError("answer: expected right answers that are not empty")
    rewards = []
    for prompt, completion, right in zip(prompts, completions, answer, strict=True):
        found = parts(prompt, completion)
        given = "" if found is None else str(found.answer[0])
        rewards.append(float(found is not None and _same(given, str(right))))
    return rewards


def _same(given: str, right: str) -> bool:
    wanted = number(right)
    if wanted is not None:
        return number(given) == wanted
    return given.split() == right.split()


NUMBER = re.compile(
    r"(?P<sign>[+-]?)\$?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:/(?P<below>[0-9]+))?"
)
LONGEST_NUMBER = 40  # characters; a policy may write digits without end


def number(text: str) -> Fraction | None:
    """The number that a text is, exactly, or None if it is anything else or anything more.

    `7`, ` 7 `, `+7`, `007`, `7.0`, `7.`, `$7`, `14/2` are the same; so are `1,234` and `1234`.
    Words around it, a second number, a comma in another place or a unit make it no number.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    match = NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or not (match["whole"] or match["part"]):
        return None
    if match["below"] and (match["part"] is not None or int(match["below"]) == 0):
        return None
    value = Fraction(f"{match['whole'].replace(',', '') or 0}.{match['part'] or 0}")
    value /= int(match["below"] or 1)
    return -value if match["sign"] == "-" else value


# --------------------------------------------------------------------------------------------
# the task


@dataclass(frozen=True)
class TextProblems:
    """A task for `train_grpo` made of rows of data and reward functions.

    Attributes:
        tokenizer: the policy's.
        rows: each with a "prompt", a text or a chat, and further columns for the reward functions.
        reward_functions: one or more.
        weights: of their rewards in the sum; None = all 1. TRL calls them `reward_weights`.
        stops: ids that end a completion, see `stop_tokens`.

    Raises:
        ValueError: no rows, rows with different columns, two rows that look the same to the policy
            and are not, no reward functions, or weights that do not fit.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Mapping[str, Any]]
    reward_functions: Sequence[RewardFunction] = (format_reward, answer_reward)
    weights: Sequence[float] | None = None
    stops: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.rows or any("prompt" not in row for row in self.rows):
            raise ValueError("rows: expected one or more, each with a 'prompt'")
        if any(row.keys() != self.rows[0].keys() for row in self.rows):
            raise ValueError("rows: expected the same columns in all, got different ones")
        if not self.reward_functions:
            raise ValueError("reward_functions: expected one or more, got none")
        if self.weights is not None and len(self.weights) != len(self.reward_functions):
            raise ValueError(
                f"weights: expected one for each of {len(self.reward_functions)} reward functions, "
                f"got {len(self.weights)}"
            )
        by_ids: dict[tuple[int, ...], Mapping[str, Any]] = {}
        for row in self.rows:
            key = tuple(encode_prompt(self.tokenizer, row["prompt"]).tolist())
            if by_ids.setdefault(key, row) != row:
                raise ValueError(f"rows: two rows with the prompt {row['prompt']!r} differ")
        object.__setattr__(self, "_by_ids", by_ids)

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Draw n prompts, each once before any comes twice."""
        ids = list(self._by_ids)
        rounds = -(-n // len(ids))
        order = [torch.randperm(len(ids), generator=generator) for _ in range(rounds)]
        return [torch.tensor(ids[i]) for i in torch.cat(order)[:n].tolist()]

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[float]:
        """The weighted sum of all reward functions for each completion."""
        rows = [self._by_ids[tuple(prompt.tolist())] for prompt in prompts]
        texts = [decode_completion(self.tokenizer, ids, self.stops) for ids in completions]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        asked = [row["prompt"] for row in rows]
        written: list[Text] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(asked, texts)
        ]
        total = [0.0] * len(rows)
        weights = self.weights or [1.0] * len(self.reward_functions)
        for function, weight in zip(self.reward_functions, weights):
            rewards = function(prompts=asked, completions=written, **columns)
            for i, reward in enumerate(_checked(function, rewards, len(rows))):
                total[i] += weight * reward
        return total


def _checked(function: RewardFunction, rewards: Sequence[float | None], n: int) -> list[float]:
    """One finite number per completion; None, TRL's word for "does not apply", counts as 0."""
    name = getattr(function, "__name__", repr(function))
    if len(rewards) != n:
        raise ValueError(f"{name}: expected {n} rewards, got {len(rewards)}")
    numbers = [0.0 if reward is None else float(reward) for reward in rewards]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name}: expected finite numbers, got {numbers}")
    return numbers
