"""What every pytest run of this repository needs, the strict notebook run included.

pytest finds this file from any working directory. A kernel started by nbval inherits the
environment of pytest but not its `sys.path`, hence environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent

_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(p for p in _paths if p)])

# An outer MPLBACKEND=Agg would leave the notebooks without figures. The inline backend needs no
# screen, so unit tests that draw are served as well.
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give notebook cells a minute instead of 5 seconds to hand over their output.

    nbval starts this clock when a cell has finished, and stops it when the output is complete: on
    a busy machine a figure can take longer, and a quick cell loses nothing.
    """
    if hasattr(item, "output_timeout"):
        item.output_timeout = 60
