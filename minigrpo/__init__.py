"""minigrpo: the helper package of a course that teaches GRPO on a laptop.

One file per concept, in the order the course meets them: `runtime`, `corpus`, `gpt`,
`pretrain`, `logprobs`, `sampling`, `objective`, `oracle`, `rewards`, `arithmetic`,
`llama`, `grpo`; beside them `plots` and `exercises`.
"""

import os
import sys

# Threads of OpenMP that have nothing to do spin by default, and on a busy two-core machine that
# makes small models up to a hundred times slower. Asked to sleep instead, two threads are never
# much worse than one. The request is read when torch loads, so it has to come before.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
