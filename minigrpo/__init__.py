"""minigrpo: the small helper module of the course, one file per concept.

Each imports only the ones before it: checks, files, gpt, corpus, pretrain, logprobs, sampling,
objective, rewards, arithmetic, llama, parallel, parts, grpo. The rooms (study, notebook, clinic,
text, scaling, exercises) import this core, and it imports none of them.
"""

import os
import sys

# OpenMP's idle threads spin by default, which on two busy cores makes small models up to a hundred
# times slower. This asks them to sleep, and has to come before torch, which reads it when it loads.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
