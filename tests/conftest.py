"""What every unit test starts from: one thread, seed 0, and the same hypothesis examples."""

import pytest
import torch
from hypothesis import Phase, settings

settings.register_profile(
    "course",
    max_examples=25,
    deadline=None,
    derandomize=True,  # the same examples on every machine
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,  # one AssertionError instead of an ExceptionGroup
)
settings.load_profile("course")


@pytest.fixture(autouse=True)
def same_start():
    """Undo what an earlier test did to torch's threads and random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
