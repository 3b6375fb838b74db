"""What is known of the state of a training: which worker holds which step of which rank, and where ranks go on.

Records only. Which step a round starts from is decided by `core.world.resuming`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from muster.types.codec import as_list, limited
from muster.types.records import record, replace

EXIT_UNUSABLE = 76  # of a rank that cannot use the state that it was given; its agent knows why
MOST_HELD = 4096  # of one worker: a spare of a large world does not hold everybody's


class Tier(StrEnum):
    """Where the state of a rank comes from, the best first."""

    OWN = "own"  # the memory of the worker that runs it
    REPLICA = "replica"  # another worker, whose own ranks have nearly all of the same content
    BUDDY = "buddy"  # a copy in the memory of another worker
    DISK = "disk"


@as_list
@record()
class Held:
    """The state of one rank at one step, whole, as a worker has it in memory."""

    rank: int = limited(ge=0)
    ranks: int = limited(ge=1)  # of the world that it belongs to
    round: int = limited(ge=0)  # in which it was committed
    step: int = limited(ge=0)
    bytes: int = limited(default=0, ge=0)
    extra: int = 0  # of those, what is kept for this alone: the rest is some other rank's, too


@record()
class Holding:
    """All that one worker holds, and what it can say of it."""

    held: tuple[Held, ...] = ()
    path: tuple[str, int] | None = None  # where its agent gives it to others
    durable: int | None = None  # the newest step that is whole on disk, as it sees it
    write_at: int | None = None  # it is time that everybody writes the first step from this one on to disk
    every: int = 1  # it can take a copy at each step that this divides
    stride: int = 1  # and give away each that this divides
    refused: str = ""  # why it cannot keep state in memory, or cannot read or write the durable folder
    damage: str = ""  # the last piece that could not be used, and why
    commit_s: float = 0.0  # what a commit takes from the training of its slowest rank
    step_s: float = 0.0  # what a step takes there
    taken: int = 0  # bytes of memory that state has here
    limit: int = 0  # and may have


@as_list
@record()
class Source:
    """Who has the state of a rank of the world that it was kept in."""

    rank: int
    member_id: str
    path: tuple[str, int] | None = None
    tier: Tier = Tier.OWN


@record()
class Resume:
    """Where the ranks of a round go on. Without sources: from disk, or at step 0 from the beginning."""

    step: int
    round: int = 0  # in which it was committed
    ranks: int = 0  # of the world at that time
    sources: tuple[Source, ...] = ()
    why: str = ""

    def of_ranks(self, ranks: range) -> Resume:
        """The same for those ranks alone."""
        return replace(self, sources=tuple(one for one in self.sources if one.rank in ranks))


@record()
class KeptState:
    """What of a training's state is safe now, against what, and what it costs. Nothing of it is decided upon.

    `step` is the newest that is still whole in memory after the loss of any one worker; where there is none, the newest
    that is whole at all. `survives` says which: that ranks fail, that a worker is lost, or a whole failure domain.
    """

    step: int | None = None
    round: int | None = None  # in which it was committed
    survives: Literal["nothing", "ranks", "worker", "domain"] = "nothing"
    safe_at: datetime | None = None  # since when it survives that
    newest_step: int | None = None  # that is whole in memory
    durable_step: int | None = None  # that is on disk
    where: str = ""
    copies: int = 0  # of the rank that has fewest
    bytes: int = 0  # of that step, each rank once
    memory_bytes: int = 0  # that state takes on all workers
    worker_memory_bytes: int = 0  # on the one where it takes most
    every: int = 1  # a copy is taken at each step that is a multiple of this
    commit_seconds: float | None = None  # what a copy takes from the training
    step_seconds: float | None = None
    overhead: float | None = None  # what copies take, as a share of the time of steps
    loss: str = ""  # what the loss of a worker would cost now
    loss_steps: int | None = None
    loss_seconds: float | None = None
    resumed: str = ""  # where the ranks of this round went on, and why there
    refused: str = ""  # workers that cannot keep state, and why
    reached: int | None = None  # how many steps the ranks of this round had finished at most
    lost: str = ""  # the steps that this round began without, because no copy of them survived
    lost_steps: int | None = None
