"""What can a member order? Its driver carries each out, in the order in which they are given."""

from __future__ import annotations

from muster.types.frames import Frame
from muster.types.records import record
from muster.types.world import MemberId, Path, Place


@record()
class Send:
    """Say this to the coordinator. A `StoppedFrame` is completed with the port on which the driver listens."""

    frame: Frame


@record()
class Renew:
    """Ask for another lease, and tell the steps that ranks have made since the last time."""

    round: int | None


@record()
class Drop:
    """Give up on a connection that is open but silent, and make another."""

    why: str


@record()
class Listen:
    """Say where peers can probe us, once."""


@record()
class ReachPeers:
    """Probe these peers from now on: only these, or with `gone` these too and no longer those."""

    peers: tuple[tuple[MemberId, tuple[Path, ...]], ...]
    gone: tuple[MemberId, ...] | None


@record()
class Beat:
    """Tell the guard that we live, and until when ranks may run.

    `fence` is the moment from which the coordinator may give the places of these ranks to others.
    """

    until: float
    lease_s: float
    round: int | None
    fence: float


@record()
class StartRanks:
    """Answered with `up` when all of them run, or with `cannot_start`."""

    place: Place


@record()
class Notify:
    """Hold ranks that ask whether to save; with `call`, tell them to from that call on; or that they need not.

    Answered with `noticed`, whenever there is more to say.
    """

    round: int
    call: int | None
    for_s: float
    withdrawn: bool = False


@record()
class AwaitSaves:
    """Answered with `saves_over`, when no rank saves any more or the time for it is up."""

    round: int
    writing_s: float  # for ranks that have files open for writing
    saving_s: float  # for ranks inside `muster.saving()`


@record()
class StopRanks:
    """Answered with `cleared`, when nothing is left of them."""

    round: int
    grace_s: float
    dump: bool = False  # hung: leave their stacks in the log


@record()
class Hasten:
    """A stop that is under way gets no more than this much time."""

    grace_s: float


@record()
class KillRanks:
    """At once."""


@record()
class RestartProcesses:
    """Start again what runs ranks, and end what is left of the old. Answered with `restarted`."""


@record()
class Hurry:
    """Whether ranks are waited for: a spare warms up behind everyone else."""

    now: bool


@record()
class CheckOwnHealth:
    """Answered with `checked`."""

    after_s: float


@record()
class Say:
    """To whoever watches this worker."""

    text: str


@record()
class Exit:
    """This member is done: exit like that."""

    code: int
    why: str


Order = (
    Send
    | Renew
    | Drop
    | Listen
    | ReachPeers
    | Beat
    | StartRanks
    | Notify
    | AwaitSaves
    | StopRanks
    | Hasten
    | KillRanks
    | RestartProcesses
    | Hurry
    | CheckOwnHealth
    | Say
    | Exit
)
