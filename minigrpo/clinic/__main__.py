"""python -m minigrpo.clinic judge file.py:function. Says whether a loss is right."""

import sys

from minigrpo.clinic.judge.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:] if sys.argv[1:2] == ["judge"] else ["--help"]))
