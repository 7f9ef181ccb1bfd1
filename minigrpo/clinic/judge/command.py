"""grpo-judge file.py:function says whether a loss is right (python -m minigrpo.clinic judge)."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from minigrpo.clinic.judge import adapters
from minigrpo.clinic.judge.asking import Unjudged, judge_file, unjudged
from minigrpo.clinic.judge.verdict import judge_loss
from minigrpo.files import atomic_path

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


def load(target: str | list[str]) -> Any:
    """The function of file.py:function, or what the words after --from name."""
    if isinstance(target, list):
        return adapters.ready(*target, load=load, settings=settings)
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
    target, built_in = json.loads(words)
    built_in = {k: tuple(v) if isinstance(v, list) else v for k, v in built_in.items()}
    try:
        report = judge_loss(load(target), **built_in)
    except Unjudged as error:
        report = unjudged(error)
    with atomic_path(path) as unfinished:
        unfinished.write_text(json.dumps(report), "utf-8")
    os._exit(0)


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
    parser.add_argument("target", metavar="file.py:function", nargs="?")
    of = f"a loss of {', '.join(adapters.LIBRARIES)}, and its settings"
    parser.add_argument("--from", dest="library", nargs="+", metavar="word", help=of)
    parser.add_argument("--set", nargs="+", default=[], metavar="name=value", help="built in")
    parser.add_argument("--seconds", type=float, default=60, help="how long it may take (60)")
    chosen = parser.parse_args(arguments)
    if (chosen.target is None) == (chosen.library is None):
        parser.error("expected file.py:function, or --from and a library")
    try:
        report = judge_file(chosen.library or chosen.target, settings(chosen.set), chosen.seconds)
    except Unjudged as error:
        report = unjudged(error)
    print(report)
    return {"right": 0, "notes": 0, "mistake": 1, "not judged": 2, "unknown": 3}[report.verdict]
