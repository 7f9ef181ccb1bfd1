"""Runs on several processes, with our loop or with TRL. As a command:

torchrun --nproc_per_node 2 -m minigrpo.scaling.run ours --out run.pt    (or trl)
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minigrpo.files import atomic_path, data_folder
from minigrpo.scaling import trl
from minigrpo.scaling.processes import train_shared
from minigrpo.scaling.trl import problem_config, problem_rows
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import TextProblems


def torchrun(processes: int, *arguments: str) -> list[dict[str, Any]]:
    """Run the command below under torchrun, ten minutes at most; what each process has written.

    RuntimeError: one failed, and what it wrote last.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINIGRPO_THREADS": "1"}
    if sys.platform == "win32":  # torch asks for libuv there too, and is built without it
        environment.setdefault("USE_LIBUV", "0")
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.pt"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc_per_node={processes}", "-m", "minigrpo.scaling.run"]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        text = {"encoding": "utf-8", "errors": "replace"}
        command = [*launch, *arguments, f"--out={out}"]
        with subprocess.Popen(command, env=environment, **pipes, **text) as running:
            try:
                _, wrote = running.communicate(timeout=600)
            except BaseException:
                running.terminate()  # not kill(), which would leave torchrun's workers behind
                raise
        if running.returncode:
            said = wrote.partition("failed (exitcode:")[0]  # what torchrun adds says nothing more
            raise RuntimeError(f"torchrun: failed, and wrote last:\n{said[-2000:]}")
        files = [out.with_suffix(f".{rank}.pt") for rank in range(processes)]
        return [torch.load(file, weights_only=True) for file in files]


def train_ours(steps: int, *, exact: bool = False, **settings: Any) -> dict[str, Any]:
    """Train the shipped Llama shape on all processes (exact: in float64, the same on any number).

    Returns "rewards" and "tokens" of each step, of this process's share, and the "parameters".
    """
    dtype = torch.float64 if exact else torch.float32
    policy, tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu", dtype=dtype)
    config = problem_config(policy, tokenizer, steps=steps, **settings)
    task = TextProblems(tokenizer, problem_rows(), trl.REWARD_FUNCTIONS, trl.WEIGHTS, config.eos_id)
    run = list(train_shared(policy, task, config, exact=exact))
    return {
        "rewards": [metrics.reward for metrics in run],
        "tokens": [int(metrics.rollouts.own.sum()) for metrics in run],
        "parameters": policy.state_dict(),
    }


def train_trl(steps: int, **settings: Any) -> dict[str, Any]:
    """Train the shipped Llama shape with TRL, on all processes there are; see `train_ours`."""
    policy, tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu")
    config = problem_config(policy, tokenizer, steps=steps, **settings)
    trainer = trl.trl_trainer(policy, tokenizer, problem_rows(), config)
    result = {"rewards": trl.trl_rewards(trainer), "parameters": policy.state_dict()}
    # Its DistributedDataParallel has to be gone before the group of processes is.
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    return result


def main(arguments: list[str] | None = None) -> None:
    """Train, and write rewards and parameters to a file; of several processes each to its own."""
    parser = argparse.ArgumentParser("python -m minigrpo.scaling.run", description=main.__doc__)
    parser.add_argument("trainer", choices=("ours", "trl"))
    parser.add_argument("--out", required=True, type=Path, help="such as run.pt (run.0.pt, ...)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="ours: in float64, see train_ours")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # for so small a model a second one costs more than it brings
    rank = os.environ.get("RANK")  # None: not under torchrun
    if options.trainer == "trl":
        result = train_trl(options.steps, seed=options.seed)  # TRL joins the group by itself
    else:
        if rank is not None:
            dist.init_process_group("gloo")
        result = train_ours(options.steps, exact=options.exact, seed=options.seed)
    out = options.out if rank is None else options.out.with_suffix(f".{rank}.pt")
    with atomic_path(out) as unfinished:
        torch.save(result, unfinished)
    if rank is not None:  # leave together: one that went first would break the group
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:  # threads of the libraries can abort a process that winds up
        os._exit(0)
