"""minigrpo: the small helper module of the course, one file per concept.

Each imports only the ones before it: checks, files, corpus, logprobs, gpt, pretrain, sampling,
objective, rewards, arithmetic, llama, config, grpo. The rooms import the core, and it no room.
"""

import os
import sys

# OpenMP's idle threads spin by default, which on two busy cores makes small models up to a hundred
# times slower. This asks them to sleep, and has to come before torch, which reads it when it loads.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "1.0.0"
