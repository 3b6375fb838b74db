"""What can a participant order? Its driver carries each out, in the order in which they are given."""

from __future__ import annotations

from muster.types.frames import Frame, RunRecord
from muster.types.records import record
from muster.types.world import Elector, Electorate


@record()
class Tell:
    elector: Elector
    frame: Frame


@record()
class Remember:
    record: RunRecord


@record()
class Lead:
    """Go on with the run from this record."""

    record: RunRecord


@record()
class StepDown:
    why: str


@record()
class NotElected:
    """There are not enough voices, told once until somebody leads."""

    why: str


@record()
class Announce:
    """All members have to know of it."""

    electorate: Electorate


SuccessionOrder = Tell | Remember | Lead | StepDown | NotElected | Announce
