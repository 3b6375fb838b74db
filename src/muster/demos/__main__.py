"""`python -m muster.demos`: the demo without the command line's other parts."""

from __future__ import annotations

import sys

from muster import demos

if __name__ == "__main__":
    sys.exit(demos.run())
