"""python -m minigrpo.clinic.judge file.py:function."""

import sys

from minigrpo.clinic.judge.command import main

sys.exit(main())
