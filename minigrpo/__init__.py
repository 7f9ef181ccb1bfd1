"""minigrpo: the helper package of a course that teaches GRPO on a laptop.

One file per concept, in the order the course meets them: `runtime`, `corpus`, `gpt`,
`pretrain`, `logprobs`, `sampling`, `objective`; beside them `plots` and `exercises`.
"""

import os

# Read once, when torch loads, so it has to stand here: an OpenMP thread that has nothing to do
# shall sleep. Spinning threads make a busy two-core machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
