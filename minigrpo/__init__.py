"""minigrpo: the helper package of a course that teaches GRPO on a laptop.

What the course teaches stands here, one file per concept, in the order the course meets them; each
imports only what stands above it.

    checks          every check of the core                   all
    files           atomic files, the data folder             01
    corpus          tinyshakespeare, characters as tokens     01
    gpt             the character-level GPT                   01
    pretrain        next-token training                       01 05
    logprobs        log-probs of tokens and of sequences      02
    sampling        sample() -> Rollouts                      02
    objective       advantages, ratio, KL, grpo_loss          03 04
    rewards         rewards by rule                           03 05
    arithmetic      the task in which thinking pays           05
    llama           the tiny Llama                            05
    parallel        several processes                         09
    grpo            train_grpo(), the loop                    03 06

Beside this core there are rooms, which import it and are never imported by it:

    study/          exact answers by enumeration; what matters in the loop and what does not
    clinic/         sick runs: bugs, smallest tests, charts, patients, the blind diagnosis
    text/           prompts, rewards and models over a real tokenizer
    scaling/        TRL, torchrun
    notebook/       setup, plots
    exercises/      check, hint, solution
"""

import os
import sys

# Threads of OpenMP that have nothing to do spin by default, and on a busy two-core machine that
# makes small models up to a hundred times slower. Asked to sleep instead, two threads are never
# much worse than one. The request is read when torch loads, so it has to come before.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
