"""`python -m muster.sharing.demo`: the demo without the command line's other parts."""

from __future__ import annotations

import sys

from muster.sharing import demo

if __name__ == "__main__":
    sys.exit(demo.run())
