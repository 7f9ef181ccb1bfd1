"""minigrpo: the helper package of a course that teaches GRPO on a laptop.

One file per concept, in the order the course meets them; each imports only what stands above it
(but `plots`, the house style, is loaded by `runtime` when a notebook begins).

    runtime         seed, threads, device, figures            01
    corpus          tinyshakespeare, characters as tokens     01
    gpt             the character-level GPT                   01
    pretrain        next-token training                       01 05
    logprobs        log-probs of tokens and of sequences      02
    sampling        sample() -> Rollouts                      02
    objective       advantages, ratio, KL, grpo_loss          03 04
    oracle          exact answers by enumeration              04
    rewards         rewards by rule                           03 05
    arithmetic      the task in which thinking pays           05
    llama           the tiny Llama                            05
    parallel        several processes                         09
    grpo            train_grpo(), the loop                    03 06
    experiments     what matters in it and what does not      06
    bugs            22 bugs as switches                       07
    smallest_tests  the tests that find them                  07
    clinic          sick runs, their charts and cures         07
    text            prompts and rewards over a tokenizer      08
    problems        word problems                             08
    text_models     small GPT-2 and Llama shapes              08
    scaling         TRL, torchrun                             09
    plots           the house style and recurring figures     all
    exercises       check, hint, solution                     all
"""

import os
import sys

# Threads of OpenMP that have nothing to do spin by default, and on a busy two-core machine that
# makes small models up to a hundred times slower. Asked to sleep instead, two threads are never
# much worse than one. The request is read when torch loads, so it has to come before.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
