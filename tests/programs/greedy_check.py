"""The check of a package that takes more than it may: `LANG` says of what."""

import os
import sys
from pathlib import Path

from muster import package, package_check


def be_greedy(packed: Path, digest: str) -> int:
    taken = []
    while os.environ["LANG"] != "crash":
        if os.environ["LANG"] == "memory":
            taken.append(bytes(1 << 20))
    sys.exit(3)


package.check = be_greedy
package_check.CPU_S = 1
package_check.main()
