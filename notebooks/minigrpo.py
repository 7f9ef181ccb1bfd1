"""Lets the notebooks import the package beside their folder where it is not installed.

A kernel looks for minigrpo in the folder of its notebook before it looks among the installed
packages. It finds this file, which makes way for the package in the folder above.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "minigrpo" / "__init__.py").is_file():
    raise ModuleNotFoundError(f"the package minigrpo is not in {ROOT}, beside the notebooks")
sys.path.insert(0, str(ROOT))
del sys.modules[__name__]
importlib.import_module(__name__)
