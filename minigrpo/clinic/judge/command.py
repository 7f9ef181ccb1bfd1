"""grpo-judge file.py:function says whether a loss is right (python -m minigrpo.clinic judge)."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from minigrpo.clinic.judge.asking import THEIRS, Report, Unjudged, judge_file, too_slow, unjudged
from minigrpo.clinic.judge.verdict import judge_loss
from minigrpo.files import atomic_path
from minigrpo.objective import VARIANTS

HELP = """\
Your function gets (log_probs, old_log_probs, advantages, completion_mask), and those options of
minigrpo.objective.grpo_loss that it has. It returns the loss, or a tuple that begins with it. With
(rewards, group_size) it's judged as a function that makes advantages, and with rewards and
group_size in place of advantages as a loss from rewards. Wrap anything else in a file of its own:

    from my_trainer import loss as mine

    def loss(log_probs, old_log_probs, advantages, completion_mask, clip=(0.2, 0.2)):
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        return mine(log_probs, old, advantages[:, None], completion_mask.float(), *clip)

A method like TRL's, which asks a model, gets one that answers with the given log-probs:

    def loss(log_probs, old_log_probs, advantages, completion_mask):
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (log_probs, None, None)
        ids = completion_mask.long()
        return trainer._compute_loss(None, dict(
            prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=ids,
            advantages=advantages, old_per_token_logps=old_log_probs, num_items_in_batch=ids.sum()))

With logits and input_ids (or labels, completion_ids, ...) in place of log_probs, it's given logits
in which the tokens have these log-probs, and the shift by one and a temperature are judged, too.
A num_items_in_batch, a global_batch_size and the like get the count of the whole batch, and two
parts of it have to add up.

What your function has built in is found out from its answers, or you say it:
--set how=token_mean clip=0.2,0.28
"""


def settings(words: list[str]) -> dict[str, Any]:
    """name=value, where a value is a word, a number, or numbers with commas."""
    chosen = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            chosen[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            chosen[name] = text
    return chosen


def load(target: str) -> Any:
    """The function of file.py:function."""
    name, _, function = target.rpartition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise Unjudged(f"expected file.py:function, and there is no file {name or target!r}")
    sys.path.insert(0, str(path.resolve().parent))
    loader = importlib.machinery.SourceFileLoader("judged", str(path))
    spec = importlib.util.spec_from_loader("judged", loader)
    module = sys.modules["judged"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise Unjudged(f"{path.name} can't be loaded: {type(error).__name__}: {error}") from None
    if not hasattr(module, function):
        defined = (k for k, v in vars(module).items() if getattr(v, "__module__", "") == "judged")
        there = ", ".join(k for k in defined if callable(getattr(module, k))) or "none"
        raise Unjudged(f"{path.name} has no {function!r}; its functions are {there}")
    return getattr(module, function)


def child(path: str, words: str) -> None:
    target, built_in, seconds, names, like = json.loads(words)
    built_in = {k: tuple(v) if isinstance(v, list) else v for k, v in built_in.items()}

    def end(report: Report) -> None:
        with atomic_path(path) as unfinished:
            unfinished.write_text(json.dumps(report, default=str), "utf-8")
        os._exit(0)

    def watch() -> None:
        while THEIRS.seconds() < seconds:
            time.sleep(min(0.1, seconds))
        end(unjudged(too_slow(seconds)))

    threading.Thread(target=watch, daemon=True).start()
    try:
        with THEIRS:
            function = load(target)
        report = judge_loss(function, names, like, **built_in)
    except Unjudged as error:
        report = unjudged(error)
    end(report)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["child"]:
        child(*arguments[1:])
    parser = argparse.ArgumentParser(
        "grpo-judge",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pairs: dict[str, Any] = dict(nargs="+", default=[])
    parser.add_argument("target", metavar="file.py:function")
    parser.add_argument("--map", metavar="theirs=ours", help="what its parameters are", **pairs)
    parser.add_argument("--as", dest="like", choices=[*VARIANTS], help="what it has to be")
    parser.add_argument("--set", metavar="name=value", help="what it has built in", **pairs)
    parser.add_argument("--notes", action="store_true", help="a longer report")
    parser.add_argument("--json", action="store_true", help="the longer report as JSON")
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long your code may take (60)"
    )
    chosen = parser.parse_args(arguments)
    names = dict(word.split("=", 1) for word in chosen.map if "=" in word)
    if len(names) < len(chosen.map):
        parser.error("expected --map theirs=ours")
    built_in = settings(chosen.set)
    report = judge_file(chosen.target, built_in, chosen.seconds, names, chosen.like)
    print(json.dumps(report.details) if chosen.json else report.more if chosen.notes else report)
    return {"right": 0, "notes": 0, "mistake": 1, "not judged": 2, "unknown": 3}[report.verdict]
