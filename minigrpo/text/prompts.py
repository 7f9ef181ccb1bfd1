"""Prompts and rewards over a real tokenizer, in the form in which TRL wants them too.

A reward function gets lists of N by keyword, `prompts`, `completions` and the other columns of the
data, and returns N numbers: so TRL's GRPOTrainer calls it, and so does `TextProblems`, the task for
`train_grpo`. Prompts are texts or chats, lists of messages, and so are the completions of a chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.rewards import TEXT_TAGS, Parts, split_parts
from minigrpo.sampling import Rollouts, completion_mask, left_pad, sample

Text = str | Sequence[Mapping[str, str]]  # plain, or a chat: {"role": "user", "content": "How?"}
RewardFunction = Callable[..., Sequence[float | None]]  # None: it does not apply


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> Tensor:
    """(P,) ids of a prompt, ready to be continued.

    A chat is written out by the tokenizer's own template, up to where the assistant's turn begins.
    """
    special = {}
    if not isinstance(prompt, str):
        chat, options = [*map(dict, prompt)], {"add_generation_prompt": True, "tokenize": False}
        prompt = tokenizer.apply_chat_template(chat, **options)
        special["add_special_tokens"] = False  # the template writes them; two BOS are another text
    return torch.tensor(tokenizer(prompt, **special)["input_ids"], dtype=torch.long)


def decode_completion(
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,  # (T,)
    stops: Sequence[int] = (),  # ids that end a completion, and are no part of its text
) -> str:
    """The text of one completion, with special tokens: in some tokenizers tags are special."""
    real = ids[completion_mask(ids[None], tuple(stops))[0]].tolist()
    real = real[:-1] if real and real[-1] in stops else real
    return tokenizer.decode(real, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> tuple[int, ...]:
    """All ids that end a completion: the tokenizer's EOS, and those of the model's own settings.

    Chat models often have two, for the end of a turn and of a text. ValueError: there is none.
    """
    every: list[int | None] = []
    for source in (tokenizer, getattr(policy, "generation_config", None), policy.config):
        ids = getattr(source, "eos_token_id", None)
        every += ids if isinstance(ids, list | tuple) else [ids]
    stops = tuple(dict.fromkeys(i for i in every if i is not None))
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
    seed: int = 0,
    **settings: Any,  # of `sample`, such as temperature; at most 40 new tokens by default
) -> tuple[Rollouts, list[str]]:
    """Let the policy continue prompts of any lengths, plain texts or chats, all at once."""
    device, pad_id = next(policy.parameters()).device, tokenizer.pad_token_id
    stops = stop_tokens(tokenizer, policy)
    ids, mask = left_pad([encode_prompt(tokenizer, prompt) for prompt in prompts], pad_id)
    settings = {"max_new_tokens": 40, "eos_id": stops, "pad_id": pad_id, **settings}
    generator = torch.Generator(device).manual_seed(seed)
    rollouts = sample(policy, ids.to(device), mask.to(device), generator=generator, **settings)
    written = rollouts.unpadded(rollouts.completions)
    return rollouts, [decode_completion(tokenizer, ids, stops) for ids in written]


def thought_and_answer(prompt: Text, completion: Text) -> Parts | None:
    """Thought and answer of `<think> ... </think> <answer> ... </answer>`; None in another form.

    Each tag once, in this order, nothing outside of them but white space, an answer that is not
    empty. Of the prompt only a `<think>` at its end counts, so no example in it can be rewarded.
    """
    # A chat's last message is the user's, and closed: the assistant's turn begins behind it.
    opened = isinstance(prompt, str) and prompt.rstrip().endswith(TEXT_TAGS.think)
    parts = split_parts(text_of(completion), given=int(opened))
    return parts if parts is not None and parts.answer else None


def format_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """1 for each completion that keeps to the form, otherwise 0; see `thought_and_answer`."""
    pairs = zip(prompts, completions, strict=True)
    return [float(thought_and_answer(*pair) is not None) for pair in pairs]


def answer_reward(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    answer: Sequence[str],  # a column of the data: the right answers
    **columns: Any,
) -> list[float]:
    """1 for each completion in the right form whose answer is the right one, otherwise 0.

    Numbers are compared as numbers (see `number`), other answers as texts, white space aside.
    """

    rewards = []
    for prompt, completion, right in zip(prompts, completions, map(str, answer), strict=True):
        parts, wanted = thought_and_answer(prompt, completion), number(right)
        written = parts.answer[0] if parts else ""
        same = written.split() == right.split() if wanted is None else number(written) == wanted
        rewards.append(float(parts is not None and same))
    return rewards


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


@dataclass(frozen=True)
class TextProblems:
    """A task for `train_grpo` made of rows of data and reward functions."""

    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Mapping[str, Any]]  # each a "prompt" (text or chat) and columns for the rewards
    reward_functions: Sequence[RewardFunction] = (format_reward, answer_reward)
    weights: Sequence[float] | None = None  # of the rewards; None = all 1 (TRL: reward_weights)
    stops: Sequence[int] | None = None  # ids that end a completion, see `stop_tokens`; None = EOS

    def __post_init__(self) -> None:
        by_ids: dict[tuple[int, ...], Mapping[str, Any]] = {}
        for row in self.rows:
            key = tuple(encode_prompt(self.tokenizer, row["prompt"]).tolist())
            if by_ids.setdefault(key, row) != row:
                raise ValueError(f"rows: two rows with the prompt {row['prompt']!r} differ")
        if not by_ids:
            raise ValueError("rows: expected at least one, got none")
        object.__setattr__(self, "_by_ids", by_ids)
        if self.stops is None:
            eos = self.tokenizer.eos_token_id
            object.__setattr__(self, "stops", () if eos is None else (eos,))

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
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        kinds = zip(asked, texts, chats)
        written = [text if isinstance(prompt, str) else chat for prompt, text, chat in kinds]
        total = [0.0] * len(rows)
        weights = self.weights or [1.0] * len(self.reward_functions)
        for function, weight in zip(self.reward_functions, weights, strict=True):
            rewards = function(prompts=asked, completions=written, **columns)
            for i, (_, reward) in enumerate(zip(rows, rewards, strict=True)):
                total[i] += weight * float(reward or 0)  # None is TRL's "does not apply"
        return total
