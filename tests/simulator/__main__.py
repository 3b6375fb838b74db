"""`python -m tests.simulator SEED`: one random history, told line by line."""

from __future__ import annotations

import sys

from tests.simulator import histories


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        print("usage: python -m tests.simulator SEED", file=sys.stderr)
        return 2
    print(histories.story(int(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
