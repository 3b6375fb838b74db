"""What does a worker find out about its ranks while they run, besides how they end, and who is told?

What they import by themselves, what they log and use, how fast they reach each other, and whether the program expects
to be started by somebody else.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.background import Tasks
from muster.core.member.held_round import InRound
from muster.node import remarks
from muster.node.lessons import Lessons
from muster.node.measured import Measured
from muster.node.measuring import Measuring
from muster.node.program import Program
from muster.node.rank_files import RankFiles
from muster.node.saves import WatchedRank
from muster.types.frames import Frame
from muster.types.world import Place


class Findings:
    def __init__(
        self,
        program: Program,
        send: Callable[[Frame], bool],
        say: Callable[[str], None],
        learned: Callable[[tuple[str, ...]], None],
        tasks: Tasks,
    ) -> None:
        self._program = program
        self._send = send
        self._say = say
        self._tasks = tasks
        self._lessons = Lessons(send, learned)
        self._measured = Measured(send)
        self._measuring = Measuring(send)

    def start(self) -> None:
        self._tasks.start(self._measuring.run())

    def begin(self, place: Place, files: RankFiles) -> None:
        """The ranks of another round are about to start."""
        self._measuring.begin(place.number, files.numbers, place.world_size)

    def follow(
        self,
        current: InRound,
        files: RankFiles,
        runs: Callable[[int], object],
        ranks: Callable[[int], list[WatchedRank]],
    ) -> None:
        """The ranks of a round are up; `runs` answers None when they are gone, or somebody ends them."""
        number, first_here = current.number, 0 in current.place.ranks
        if number == 0 and first_here:
            said = (self._say, lambda line: files.say_to(0, line))
            at = remarks.Where(lambda: ranks(number), current.place.round.store_port)
            self._tasks.start(remarks.tell(self._program, at, *said, send=self._send))

        def imported() -> tuple[str, ...] | None:
            return files.imported() if runs(number) else None

        self._tasks.start(self._lessons.follow(imported, tells=first_here))
        if within_s := files.measures_s:
            self._tasks.start(self._measured.follow(files.bench, number, within_s, lambda: runs(number)))

    def hear(self, frame: Frame) -> None:
        self._lessons.hear(frame)
        self._measured.hear(frame)
        self._measuring.hear(frame)

    def tell(self) -> None:
        """A rank has ended: before that is told, for nobody may be left to hear it afterwards."""
        self._measured.look()
        self._measuring.tell()
