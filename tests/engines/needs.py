"""What does an installed package require, but for pictures and sound? One requirement a line.

vLLM asks for torchvision, torchaudio and torchcodec, which bring CUDA with them, and serves text without them.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}


def needs(package: str) -> list[str]:
    found = [Requirement(one) for one in metadata.requires(package) or ()]
    return [
        f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}"
        for one in found
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


if __name__ == "__main__":
    print("\n".join(needs(sys.argv[1])))
