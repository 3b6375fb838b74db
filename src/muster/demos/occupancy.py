"""Who held which GPU, and when? A book kept by those who use the GPUs, not by the scheduler that it checks.

A row per GPU, a column per slice of time. A slice shows a training stage (a capital) if there was one, for those are
short; otherwise whoever held the GPU for most of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

IDLE = "."


@dataclass(frozen=True)
class Spell:
    """A GPU was used from then to then."""

    gpu: int
    letter: str
    begin: float
    end: float


@dataclass
class Occupancy:
    gpus: int
    clock: Callable[[], float]
    spells: list[Spell] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)  # two users of one GPU at a time; there must be none
    _open: dict[int, tuple[str, float]] = field(default_factory=dict)

    def take(self, gpus: Sequence[int], letter: str) -> None:
        """From now on these GPUs are used by that one."""
        for gpu in gpus:
            holder = self._open.get(gpu)
            if holder is not None and holder[0] != letter:
                self.clashes.append(f"GPU {gpu} was taken by {letter} while {holder[0]} had it")
            if holder is None or holder[0] != letter:
                self._open[gpu] = (letter, self.clock())

    def give(self, gpus: Sequence[int], letter: str) -> None:
        """That one has given these GPUs back; those that it does not have are left alone."""
        for gpu in gpus:
            holder = self._open.get(gpu)
            if holder is not None and holder[0] == letter:
                del self._open[gpu]
                self.spells.append(Spell(gpu, letter, holder[1], self.clock()))

    def enter(self, spells: Sequence[Spell]) -> None:
        """What another book says. A GPU that is in use in both at the same moment is a clash."""
        for one in spells:
            for other in self._all(self.clock()):
                if one.gpu == other.gpu and one.begin < other.end and one.end > other.begin:
                    self.clashes.append(f"GPU {one.gpu} was used by {one.letter} while {other.letter} had it")
        self.spells += spells

    def held_by(self, letter: str) -> list[int]:
        return sorted(gpu for gpu, (holder, _) in self._open.items() if holder == letter)

    def busy_share(self, begin: float, end: float, letter: str | None = None) -> float:
        """The share of the GPUs' time in which they were used, by anybody or by that one."""
        chosen = [spell for spell in self._all(end) if letter in (None, spell.letter)]
        used = sum(max(0.0, min(spell.end, end) - max(spell.begin, begin)) for spell in chosen)
        return used / (self.gpus * (end - begin)) if end > begin else 0.0

    def handed_over(self, letter: str) -> tuple[int, int]:
        """How often a GPU went from that one to somebody else, and how often one came back."""
        lent = back = 0
        for gpu in range(self.gpus):
            users = [spell.letter for spell in sorted(self.spells, key=lambda one: one.begin) if spell.gpu == gpu]
            pairs = list(itertools.pairwise(users))
            lent += sum(before == letter != after for before, after in pairs)
            back += sum(before != letter == after for before, after in pairs)
        return lent, back

    def draw(self, begin: float, end: float, columns: int) -> list[str]:
        spells, width = self._all(end), (end - begin) / columns
        return [
            f"GPU {gpu} " + "".join(_letter(spells, gpu, begin + at * width, width) for at in range(columns))
            for gpu in range(self.gpus)
        ]

    def _all(self, now: float) -> list[Spell]:
        return self.spells + [Spell(gpu, letter, since, now) for gpu, (letter, since) in self._open.items()]


def _letter(spells: Sequence[Spell], gpu: int, begin: float, width: float) -> str:
    shares: dict[str, float] = {IDLE: width}
    for spell in spells:
        inside = min(spell.end, begin + width) - max(spell.begin, begin)
        if spell.gpu == gpu and inside > 0:
            shares[spell.letter] = shares.get(spell.letter, 0.0) + inside
            shares[IDLE] -= inside
    return max(shares, key=lambda letter: (letter.isupper(), shares[letter], letter))
