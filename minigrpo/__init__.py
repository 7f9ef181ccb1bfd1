"""minigrpo: the small helper module that the notebooks of the course import.

What the course teaches is here, one file per concept; each imports only the ones before it:
checks, files, gpt, corpus, pretrain, logprobs, sampling, objective, rewards, arithmetic, llama,
parallel, grpo. The rooms import this core, and it imports none of them: study, clinic, text,
scaling, notebook, exercises.
"""

import os
import sys

# Threads of OpenMP that have nothing to do spin by default, and on a busy two-core machine that
# makes small models up to a hundred times slower. Asked to sleep instead, two threads are never
# much worse than one. The request is read when torch loads, so it has to come before.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
