"""How much is an amount that Kubernetes shows: `500m`, `2k`, `1.5Gi`, `1e3`? Pure."""

from __future__ import annotations

import re
from decimal import Decimal

_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(?:[eE]([0-9]{1,2})|(m|[kMGTPE]|[KMGTPE]i))?")
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3)}
_UNITS |= {unit: Decimal(10 ** (3 * at)) for at, unit in enumerate("MGTPE", 2)}
_UNITS |= {f"{unit}i": Decimal(1024**at) for at, unit in enumerate("KMGTPE", 1)}


def read(text: object) -> Decimal | None:
    """None for what is no amount."""
    shown = _AMOUNT.fullmatch(str(text))
    if shown is None:
        return None
    number, exponent, unit = shown.groups()
    return Decimal(number) * Decimal(10) ** int(exponent or 0) * _UNITS[unit or ""]
