"""Runs the command line as ``python -m funcollect``."""

import sys

from funcollect.cli import main

if __name__ == "__main__":
    sys.exit(main())
