"""`muster.State`: three lines with which a training goes on where it was, whatever died.

    state = muster.State(model=model, optimizer=optimizer)
    step = state.restore()
    … state.commit(step + 1)

Under muster state lives in memory that the worker's agent keeps, with copies on other workers. Elsewhere it lives on
disk, if `durable` names a folder, or nowhere.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import operator
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from muster.errors import InvalidRequest, StateUnusable
from muster.node import word
from muster.node.fencing import check_lease
from muster.node.progress import progress
from muster.state import alone, copying, disk, keeper, layout, leaves, randomness, shards
from muster.state.copying import Copier, Keeping
from muster.state.keeper import AgentGone, Damaged, Line, Offer, Part, Saved
from muster.state.layout import Manifest, Piece
from muster.state.loading import Loader
from muster.state.pace import Pace, scheduler_delay_s
from muster.state.subjects import Subjects, names_of
from muster.state.talk import SOCKET_VARIABLE
from muster.types.state import EXIT_UNUSABLE

if TYPE_CHECKING:
    import torch

TRIES = 3  # places that a state is looked for in
END_S = 10.0  # for what is under way when the script ends
MOST_TOLD = 20
MOST_WAIT_S = 1.0  # limit for the reply to a preview
_ALL, _RANDOM = "subjects", "random"


class State:
    """Whatever has `state_dict` and `load_state_dict`, dictionaries, tensors, and plain values, by name."""

    def __init__(
        self,
        *,
        durable: str | os.PathLike[str] | None = None,
        durable_every: timedelta = timedelta(minutes=10),
        overhead: float = 0.03,
        start_over: bool = False,
        random: bool = True,
        **named: Any,
    ) -> None:
        if not 0 < overhead <= 1:
            raise InvalidRequest(f"overhead is a share of the time, between 0 and 1, not {overhead}")
        self._subjects = Subjects(named)
        self._random = random
        self._durable = Path(durable).absolute() if durable is not None else None
        self._durable_every = durable_every.total_seconds()
        self._start_over = start_over
        self._rank = int(os.environ.get("RANK", "0"))
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._round = int(os.environ.get("MUSTER_ROUND", "0"))
        self._told: set[str] = set()
        self._line = self._connected()
        self._pace = Pace(overhead)
        self._copier: Copier | None = None
        self._kept_by: Keeping | None = None
        self._committed: tuple[int, float] | None = None
        self._attempt = disk.attempt_here()
        self._laid_out: tuple[list[leaves.Place], tuple[Piece, ...]] = ([], ())
        self._restored_from = Saved()

    def __getitem__(self, name: str) -> Any:
        return self._subjects[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._subjects.set(name, value)

    @property
    def saved(self) -> Saved:
        """The newest step that is safe, as far as it is known here, and where it is."""
        step = self._kept_by.safe if self._kept_by is not None else None
        if step is None or step <= (self._restored_from.step or 0):
            return self._restored_from
        where = "memory" if isinstance(self._kept_by, keeper.AgentKeeping) else f"disk, {self._durable}"
        return Saved(step, where)

    def _connected(self) -> Line | None:
        path = os.environ.get(SOCKET_VARIABLE)
        if not path:
            return None
        try:
            return Line(path, self._rank, self._round)
        except OSError as error:
            self._tell(f"state is not kept in memory: {error}")
            return None

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            warnings.warn(f"muster.State: {text}", stacklevel=3)

    # Restoring

    def restore(self) -> int:
        """Give everything its newest state that all ranks can have; returns how many steps were done by then."""
        check_lease()
        offer = self._line.offer(self._durable, self._durable_every) if self._line is not None else None
        if offer is not None and offer.step is not None and offer.ranks:
            return self._from_memory(offer)
        return self._from_disk(offer or Offer(None))

    def _from_memory(self, offer: Offer) -> int:
        assert self._line is not None and offer.step is not None
        why = ""
        for _ in range(TRIES):
            try:
                self._load(self._line.part, offer.ranks, careful=False)
                return self._restored(offer.step, offer.where)
            except Damaged as error:
                why = str(error)
                if not self._line.damaged(error):
                    break
            except AgentGone as error:
                why = str(error)
                break
        self._give_up(why)

    def _from_disk(self, offer: Offer) -> int:
        """Restore the step of the offer, or the newest step if the offer has none. Step 0 is the beginning."""
        wanted = offer.step
        if wanted == 0 or (wanted is None and self._durable is None):
            return self._restored(0, "")
        if self._durable is None:
            self._give_up(f"this round goes on from step {wanted} on disk, but this rank has no durable folder")
        folder = self._durable
        step = alone.read_patiently(folder, lambda: self._read_folder(folder, offer), self._tell)
        if self._line is not None and wanted is None and self._ranks > 1:
            alone.check_same_step(step, self._ranks, folder, self._tell)
        return self._restored(step, f"disk, {folder}" if step else "")

    def _read_folder(self, folder: Path, offer: Offer) -> int:
        required = offer.step
        listing = disk.look(folder)
        unusable = dict(listing.unusable)
        for step, paths in listing.usable.items():
            if required is not None and step != required:
                continue
            where = paths[0].parent
            try:
                self._load(alone.Parts(paths), len(paths), careful=True)
            except Damaged as error:
                self._set_aside(where, error, goes_on=required is None and self._ranks == 1)
                unusable[where] = str(error)
                continue
            except (ValueError, pickle.UnpicklingError, disk.OtherFormat) as error:
                raise StateUnusable(
                    f"{where} is whole, but this program cannot use it: {error}. Start a program that can, or move the "
                    f"step elsewhere to go on without it. Nothing in the folder was changed"
                ) from error
            if self._rank == 0:
                self._tell_of_newer(step, unusable)
            return step
        if required is not None:
            raise FileNotFoundError(
                errno.ENOENT, f"Step {required} is missing, or its files are not complete", str(folder)
            )
        alone.check_beginning(folder, unusable, self._start_over, offer.durable_step or 0)
        if unusable or offer.durable_step:
            self._tell(f"no step in {folder} can be used, and starting over is allowed: training begins at step 0")
        return 0

    def _set_aside(self, where: Path, error: Damaged, *, goes_on: bool) -> None:
        """Mark a damaged step. A single rank then takes the step before; other ranks may have used this one already."""
        marked = alone.set_aside(where, error)
        with contextlib.suppress(AgentGone):
            if self._line is not None:
                self._line.damaged(Damaged(f"{where} on disk cannot be used: {error}"))
        if not goes_on:
            raise StateUnusable(
                f"{where} is damaged. Start all ranks again: they go on from the step before. {marked}: {error}"
            ) from error
        self._tell(f"{where} cannot be used: {error}. {marked}")

    def _tell_of_newer(self, step: int, unusable: Mapping[Path, str]) -> None:
        for where, why in unusable.items():
            if disk.step_of(where) > step:
                self._tell(f"training goes on from step {step}, because {where} cannot be used: {why}")

    def _restored(self, step: int, where: str) -> int:
        if self._line is not None:
            self._line.ask(do="restored", step=step)
        self._restored_from = Saved(step or None, where)
        return step

    def _give_up(self, why: str) -> NoReturn:
        """Not from there: a new round begins, and the coordinator finds another place."""
        print(f"muster.State: {why}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_UNUSABLE)

    def _load(self, part_of: Callable[[int], Part], ranks: int, *, careful: bool) -> None:
        """From the parts that a world of so many ranks has kept."""
        loader = Loader(part_of, ranks, self._rank, self._subjects, self._ranks)
        kept = leaves.put_together(loader.rest(), loader.tensor, careful=careful)
        if not isinstance(kept, dict) or not isinstance(kept.get(_ALL), dict):
            raise ValueError("it is no state")
        for told in self._subjects.put(kept[_ALL]):
            self._tell(told)
        if self._random and _RANDOM in kept and self._rank < ranks:
            randomness.put(kept[_RANDOM])
        loader.finish()

    # Committing

    def commit(self, step: int) -> None:
        """So many steps are done. A copy is taken if it is time for one; the training does not wait for it."""
        if isinstance(step, bool) or not isinstance(step, SupportsIndex) or (step := operator.index(step)) < 0:
            raise InvalidRequest(f"commit says how many steps are done, not {step!r}")
        # If the round is about to end, all ranks keep this step, and wait for the end at the next.
        planned = isinstance(self._keeping(), keeper.AgentKeeping) and word.asked_by_state()
        now, delayed_s = time.monotonic(), scheduler_delay_s()
        progress(step)
        if self._committed is not None:
            before, at = self._committed
            self._pace.stepped(now - at, step - before)
        if (self._keeping().wants(step) or planned) and self._copy(step):
            took_s = time.monotonic() - now - (scheduler_delay_s() - delayed_s)
            self._pace.copied(max(0.0, took_s) + self._copier_().taken_wait())
            self._keeping().told_pace(self._pace)
            with contextlib.suppress(OSError, ValueError):  # the copy itself reports that the agent has gone
                self._copier_().wait_for_preview(min(self._pace.left_s, MOST_WAIT_S))
        if planned:
            self.wait()
        check_lease()
        self._committed = step, time.monotonic()

    def _copy(self, step: int) -> bool:
        """Whether there was memory for it."""
        whole = {_ALL: self._subjects.take()} | ({_RANDOM: randomness.take()} if self._random else {})
        rest, tensors, places = leaves.take_apart(whole)
        pieces = self._pieces(names_of(whole[_ALL], places), tensors, places)
        last = layout.rest_behind(pieces, len(rest))
        manifest = Manifest(self._rank, self._ranks, self._round, step, pieces, last, self._attempt)
        copier = self._copier_()
        copier.finish()
        if not copier.prepare(manifest.room):
            self._pace.skipped()
            self._keeping().skipped()
            self._refused()
            return False
        known = {leaves.place_of(one) for one in self._subjects.steady()}
        steady = [place in known for place in places]
        copier.copy(manifest, rest, [shards.local(one) for one in tensors], steady)
        return True

    def _pieces(
        self, names: list[str], tensors: Sequence[torch.Tensor], places: list[leaves.Place]
    ) -> tuple[Piece, ...]:
        """Return the place of each tensor in memory. Reuse the places of the last commit if the tensors are alike."""
        kinds = [(name, place[0], *place[2:]) for name, place in zip(names, places, strict=True)]  # without addresses
        if self._laid_out[0] != kinds:
            pieces, _ = layout.placed([copying.piece_of(*pair) for pair in zip(names, tensors, strict=True)], 0)
            self._laid_out = kinds, pieces
        return self._laid_out[1]

    def _refused(self) -> None:
        """There is no memory for it: what is left is the disk."""
        why = self._keeping().refused
        if not why or self._line is None:
            return
        if self._durable is None:
            self._tell(f"{why}. Nothing is kept: give the worker more (--state-memory), or name a folder (durable=…)")
            return
        self._tell(f"{why}. State is kept in {self._durable} alone; --state-memory gives the worker more")
        if self._copier is not None:
            self._copier.close()
        self._copier, self._kept_by = None, self._alone()

    def wait(self) -> None:
        """Until what was committed is sealed, and others have it. Nobody has to: it is for ends of scripts."""
        check_lease()
        if self._copier is not None:
            self._copier.finish()
        if isinstance(self._kept_by, keeper.AgentKeeping):
            with contextlib.suppress(AgentGone):
                self._kept_by.wait()

    def _keeping(self) -> Keeping:
        if self._kept_by is None:
            self._kept_by = keeper.AgentKeeping(self._line) if self._line is not None else self._alone()
        return self._kept_by

    def _alone(self) -> Keeping:
        base = self._restored_from.step or 0
        return alone.Keeping(self._durable, self._durable_every, self._rank, self._ranks, base, self._tell)

    def _copier_(self) -> Copier:
        if self._copier is None:
            self._copier = Copier(self._keeping(), self._subjects.optimizers(), self._failed)
            # An exception right after a commit does not cost it, and no thread is inside torch when Python ends.
            atexit.register(self._copier.close, END_S)
        return self._copier

    def _failed(self, error: BaseException) -> None:
        self._tell(f"a copy failed: {error}")
