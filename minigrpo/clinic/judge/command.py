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

from minigrpo.clinic.judge.report import Report, Unjudged, judge_file, too_slow, unjudged
from minigrpo.files import atomic_path

HELP = """\
Your function gets log_probs, old_log_probs (perhaps None), advantages and completion_mask, by these
names or usual ones (per_token_logps, adv, response_mask), and those options of
minigrpo.objective.grpo_loss that it has. With (rewards, group_size) it's judged as one that makes
advantages, and with both in place of advantages as a loss from rewards.

  lines in a loop        copy those between the log-probs and backward() into a function
  other names            --map theirs=ours
  advantages per token   (N, T) is tried where (N,) doesn't do
  what it returns        the loss, a tuple that begins with it, or a dict or dataclass with `loss`
  a module               an instance: my_loss = MyLoss() and file.py:my_loss
  what it has built in   is found out from its answers, or --set how=token_mean clip=0.2,0.28
  what it has to be      --as dapo

    grpo-judge my_trainer.py:my_loss --map pi=log_probs mu=old_log_probs

The loss of an installed library, by the library's own settings, or what you wrote for it: a
subclass of GRPOTrainer (add name=value for what its __init__ sets), a policy loss in verl's form, a
class like PolicyLoss, GRPOLoss or ClippedPGLossFn. TRL and verl have "advantages", too:

    grpo-judge --from trl loss_type=dapo beta=0.04
    grpo-judge --from trl advantages scale_rewards=none
    grpo-judge --from trl my_trainer.py:MyTrainer my_weight=0.5
    grpo-judge --from verl loss_mode=vanilla loss_agg_mode=token-mean kl_loss_type=low_var_kl
    grpo-judge --from openrlhf policy_loss_type=gspo
    grpo-judge --from torchtune loss=GRPOLoss
    grpo-judge --from nemo_rl token_level_loss=True

Anything else is wrapped in a file of its own:

    from my_trainer import policy_loss

    def loss(log_probs, old_log_probs, advantages, completion_mask, clip=(0.2, 0.2)):
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        return policy_loss(log_probs, old, advantages[:, None], completion_mask.float(), *clip)

Where it asks a model, something is put in the model's place that answers with the log-probs:

    import my_trainer

    def loss(log_probs, old_log_probs, advantages, completion_mask):
        my_trainer.score = lambda *args, **options: log_probs
        batch = {"old": old_log_probs, "advantages": advantages, "mask": completion_mask}
        return my_trainer.training_step(None, batch)

With logits and input_ids (or labels, completion_ids, ...) in place of log_probs, it's given logits
in which the tokens have these log-probs, and the shift by one and a temperature are judged, too. A
num_items_in_batch, a global_batch_size and the like get the count of the whole batch, and two parts
of it have to add up.
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
        from minigrpo.clinic.judge import adapters  # which loads torch

        return adapters.ready(*target, load=load, settings=settings)
    name, _, function = target.rpartition(":")
    path = Path(name)
    if Path(target).is_file():
        raise Unjudged(f"expected {target}:function, the function's name after a colon")
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

    try:
        from minigrpo.clinic.judge.asking import CLOCK  # here: they load torch
        from minigrpo.clinic.judge.verdict import judge_loss
    except (ImportError, OSError) as error:
        end(unjudged(f"the judge itself can't be loaded: {error}"))

    def watch() -> None:
        while CLOCK.seconds() < seconds:
            time.sleep(min(0.1, seconds))
        end(unjudged(too_slow(seconds)))

    threading.Thread(target=watch, daemon=True).start()
    try:
        with CLOCK:
            function = load(target)
        report = judge_loss(function, names, like, **built_in)
    except Unjudged as error:
        report = unjudged(error)
    end(report)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["child"]:
        child(*arguments[1:])
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("grpo-judge", None, __doc__, HELP, formatter_class=form)
    pairs: dict[str, Any] = dict(nargs="+", default=[])
    parser.add_argument("target", metavar="file.py:function", nargs="?")
    of = "trl, verl, openrlhf, torchtune or nemo_rl, then its settings"
    parser.add_argument("--from", dest="library", metavar="word", help=of, **pairs)
    parser.add_argument("--map", metavar="theirs=ours", help="what its parameters are", **pairs)
    algorithms = "grpo, dr_grpo, dapo, gspo, cispo or rloo: what it has to be"
    parser.add_argument("--as", dest="like", metavar="dapo", help=algorithms)
    parser.add_argument("--set", metavar="name=value", help="what it has built in", **pairs)
    parser.add_argument("--notes", action="store_true", help="a longer report")
    parser.add_argument("--json", action="store_true", help="the longer report as JSON")
    time_out = "how long your code may take (60)"
    parser.add_argument("--seconds", type=float, default=60, help=time_out)
    chosen = parser.parse_args(arguments)
    words, first = [*chosen.library, *filter(None, [chosen.target])], "file.py:function comes first"
    if odd := [word for word in chosen.map + chosen.set if "=" not in word]:
        parser.error(f"expected name=value after --map and --set, got {odd[0]!r}; {first}")
    if not words:
        parser.error("expected file.py:function, or --from and a library")
    names = dict(word.split("=", 1) for word in chosen.map)
    built_in, target = settings(chosen.set), words if chosen.library else chosen.target
    report = judge_file(target, built_in, chosen.seconds, names, chosen.like)
    plain = json.loads(json.dumps(report.details), parse_constant=lambda _: None)  # no Infinity
    text = json.dumps(plain) if chosen.json else report.more if chosen.notes else report
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of head, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return {"right": 0, "notes": 0, "mistake": 1, "not judged": 2, "unknown": 3}[report.verdict]
