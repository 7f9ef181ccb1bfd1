"""GRPO over several turns, with TRL and a tool: find the commit that broke the build.

    python recipes/tools_trl.py --smoke                            # seconds, no network
    python recipes/tools_trl.py                                    # minutes, on a CPU too
    python recipes/tools_trl.py --model Qwen/Qwen2.5-1.5B-Instruct --tokens 1024      # one GPU

That's the task of notebook 12, with its small Llama unless you name a model. TRL plays the turns.
It generates up to an end of text, reads the call, runs the tool, appends the result as ids, and
generates again. The tool must know which repository it's asked about, which a plain function
(`tools=[...]`) doesn't. So it's a method of an environment. TRL makes one for each row, and hands
its `reset` the row's columns. The run itself is that of `gsm8k_trl.py` beside this file.

A model of yours needs a chat template for tools that TRL knows, such as Qwen's. That way was run
without real weights. A tool that hangs stops the run, since TRL sets it no time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from gsm8k_trl import run_options, train
from running import folder_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigrpo.arithmetic import BOS, EOS
from minigrpo.files import data_folder
from minigrpo.turns.commits import COMMITS, END_CALL, RUN, draw_prompts, first_bad, is_bad

SYSTEM = (  # the small Llama's template leaves it out
    "The commits 0 to 15 of a repository are all bad from one on. Find the first bad one. You may "
    "test four of them, one at a time. Then answer in exactly this form: <answer>5</answer>"
)
# <s> 3 9 12 <call> 7 </call> <result> bad </result>, white space aside. Before the run TRL tries
# it on another tool, whose call it wants to find in the text with all its names.
TEMPLATE = """
{% for m in messages %}
{% if m.role == "user" %} <s> {{ m.content }}
{% elif m.role == "tool" %} <result> {{ "error" if "error" in m.content else m.content }} </result>
{% elif m.role == "assistant" %} {{ m.content }}
{% for call in m.tool_calls %} <call> {{ call.function.arguments.commit | default(call) }} </call>
{% endfor %}{% endif %}{% endfor %}"""
CALL = {"type": "function", "function": {"name": "test", "arguments": {"commit": "{content}"}}}
CALLS = {  # a malformed one is a call as well, of a commit that isn't one
    "open_pattern": "<call>(?=[^<]*</call>)|(?=</call>)", "close": "</call>", "repeats": True,
    "content": "json", "content_args": {"allow_non_json": True}, "transform": CALL,
}  # fmt: skip
PARSER = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": ".*",  # skip all that was there before this turn
    "fields": {"tool_calls": CALLS, "content": {"content": "text"}},
}


def prompt_of(repository: str) -> torch.Tensor:
    """(4,): the prompt of notebook 12 for "3 9 12"."""
    return torch.tensor([BOS, *map(int, repository.split())])


class Repository:
    """TRL's environment of a row. Its public methods are the tools."""

    calls = 4  # at most, in a completion

    def reset(self, repository: str, **columns) -> None:
        self.prompt = prompt_of(repository)

    def test(self, commit: int) -> str:
        """Test a commit of the repository.

        Args:
            commit: The number of the commit, from 0 to 15.

        Returns:
            "good" or "bad".
        """
        if commit not in range(COMMITS):  # what is raised, TRL shows the model as the result
            raise ValueError(f"expected a commit from 0 to {COMMITS - 1}, got {commit!r}")
        return "bad" if is_bad(self.prompt, commit) else "good"


def answer(completion: Sequence[dict]) -> int | None:
    """The answer at the end of the last message, if the model gives no other one."""
    said = "".join(m["content"] for m in completion if m["role"] == "assistant")
    found = re.search(r"<answer>\s*(\d+)\s*</answer>\s*$", completion[-1]["content"])
    return int(found[1]) if found and said.count("<answer>") == 1 else None


def answered(completions: Sequence, **columns) -> list[float]:
    """1 for an answer. It turns calls into text, too, for the files in completions/.

    There an argument has one type for all rows, and a model that errs has two.
    """
    for message in (m for completion in completions for m in completion):
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return [float(answer(completion) is not None) for completion in completions]


def right(completions: Sequence, repository: Sequence[str], **columns) -> list[float]:
    """1 for the right answer."""
    pairs = zip(completions, repository, strict=True)
    return [float(answer(completion) == first_bad(prompt_of(name))) for completion, name in pairs]


def rows(n: int, *, held_out: bool) -> list[dict]:
    """n repositories of one side of notebook 12's split."""
    prompts = draw_prompts(n, torch.Generator().manual_seed(0), held_out=held_out)
    names = [" ".join(map(str, prompt.tolist()[1:])) for prompt in prompts]
    system = {"role": "system", "content": SYSTEM}
    return [{"prompt": [system, {"role": "user", "content": x}], "repository": x} for x in names]


def small_model(folder: str | Path) -> str:
    """The small Llama's folder, with what TRL asks for: a template, a parser, where a turn ends."""
    base, target = data_folder() / "turns_llama", Path(folder) / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.generation_config.eos_token_id = [EOS, END_CALL]
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, PARSER
    tokenizer.backend_tokenizer.model.unk_token = "_"  # a spare word, for those of TRL's trial
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def main(arguments: list[str] | None = None) -> None:
    parser = run_options(__doc__.partition("\n")[0])
    parser.set_defaults(model=None, data="", ask=False)
    o = parser.parse_args(arguments)
    with folder_of(o, "tools_trl") as folder:
        if not o.model:
            parser.set_defaults(model=small_model(folder), rows_per_pass=128, questions=256)
            parser.set_defaults(steps=RUN.steps, tokens=RUN.max_new_tokens, lr=RUN.lr)
        if o.smoke:
            parser.set_defaults(steps=2, prompts=4, group=4, rows_per_pass=8, questions=8)
        o = parser.parse_args(arguments)  # what is given outranks the defaults
        o.out = folder
        learned, test = rows(2000, held_out=False), rows(o.questions, held_out=True)
        bad = first_bad(prompt_of(learned[0]["repository"]))
        graded = learned[0], f"<answer> {bad} </answer>", f"<answer> {bad ^ 1} </answer>"
        train(o, learned, test, right, graded, answered, [0.0, 1.0], Repository)


if __name__ == "__main__":
    main()
