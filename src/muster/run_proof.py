"""What does a worker show where its run's token must not be seen? Something that follows from it, for one purpose.

The control plane's API may be served in clear. What is shown there lets whoever overhears it fetch the same package,
which was sent beside it, and do nothing else. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac

SCHEME = "Muster-Run"


def of_package(token: str, digest: str) -> str:
    return hmac.new(token.encode(), b"package\0" + digest.encode(), hashlib.sha256).hexdigest()
