"""`python -m muster.daemon`."""

import sys

from muster.daemon import options, plane

sys.exit(plane.run(options.read()))
