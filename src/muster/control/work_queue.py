"""In which order are trainings handled, and when again?

A training is never handled twice at once, and whatever happens to it meanwhile makes it be handled once more. Failures
back off per training and never block the others. Of a namespace only so many are handled at once: however many it has,
those of others have their turn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from muster import errors
from muster.backoff import Backoff
from muster.types.training import Key

log = logging.getLogger("muster.control")

RETRY = Backoff(0.1, 30.0)
SOON_S = 2.0
STOP_S = 5.0
AT_ONCE = 256  # of a namespace; many, because one that waits for a disk or an API keeps its place
SLICE = 50  # that are begun before whatever else the process does has its turn


class WorkQueue:
    def __init__(
        self, handle: Callable[[Key], Awaitable[None]], failed: Callable[[Key, str], None], *, delay_s: float = 0.0
    ) -> None:
        """`failed` is told why, when that is new."""
        self._work, self._failed = handle, failed
        self._delay_s = delay_s
        self._due: dict[Key, None] = {}
        self._busy: dict[Key, asyncio.Task[None]] = {}
        self._held: dict[str, dict[Key, None]] = {}  # namespace → those for which there is no room yet
        self._room: Counter[str] = Counter()  # namespace → how many are being handled
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, tuple[int, str]] = {}
        self._pump_due = False
        self._stopping = False

    def wake(self, key: Key) -> None:
        self._due[key] = None
        if not self._pump_due and not self._stopping:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def wake_in(self, key: Key, seconds: float) -> None:
        self._cancel_timer(key)
        if not self._stopping:
            self._timers[key] = asyncio.get_running_loop().call_later(max(0.0, seconds), self.wake, key)

    def forget(self, key: Key) -> None:
        self._failures.pop(key, None)

    async def idle(self) -> None:
        """Until nothing is due and nothing is being handled."""
        while self._due or self._busy or self._held or self._pump_due:
            await asyncio.sleep(0)
            if self._busy:
                await asyncio.wait(self._busy.values())

    async def stop(self) -> None:
        """Finish what is being handled, unless it waits for a disk that takes nothing."""
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        if self._busy:
            await asyncio.wait(self._busy.values(), timeout=STOP_S)

    def _cancel_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _pump(self) -> None:
        self._pump_due = False
        due = [key for key in itertools.islice(self._due, SLICE + len(self._busy)) if key not in self._busy]
        for key in due[:SLICE]:  # of those that are busy, once more when they are done
            del self._due[key]
            if self._room[key.namespace] < AT_ONCE:
                self._begin(key)
            else:
                self._held.setdefault(key.namespace, {})[key] = None
        if due and not self._stopping:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _begin(self, key: Key) -> None:
        self._cancel_timer(key)
        self._held.get(key.namespace, {}).pop(key, None)
        self._room[key.namespace] += 1
        task = asyncio.get_running_loop().create_task(self._handle(key))
        self._busy[key] = task
        task.add_done_callback(lambda _, key=key: self._done(key))  # type: ignore[misc]

    def _done(self, key: Key) -> None:
        del self._busy[key]
        self._room[key.namespace] -= 1
        held = self._held.get(key.namespace, {})
        if held and not self._stopping:
            self._begin(next(iter(held)))
        if not held:
            self._held.pop(key.namespace, None)
        if key in self._due:
            self.wake(key)

    async def _handle(self, key: Key) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        try:
            await self._work(key)
        except errors.Conflict:
            self.wake_in(key, RETRY.first_s)  # somebody wrote in between: at the latest then, it is looked at again
        except Exception as error:  # noqa: BLE001 - top of the control loop: one training's trouble is its own
            self._back_off(key, error)
        else:
            self.forget(key)

    def _back_off(self, key: Key, error: Exception) -> None:
        count, told = self._failures.get(key, (0, ""))
        text = sentence(error)
        if isinstance(error, errors.MusterError):
            log.warning("%s: %s", key, text)
        else:
            log.error("%s: %s", key, text, exc_info=error)
        if text != told:
            self._failed(key, text)
        self._failures[key] = (count + 1, text)
        after = RETRY.after(count + 1)
        # What cannot be written now can be soon: nobody tells us when.
        self.wake_in(key, min(after, SOON_S) if isinstance(error, errors.Unavailable) else after)


def sentence(error: Exception) -> str:
    """What went wrong, in the words of whoever noticed, and what can be done about it."""
    if not isinstance(error, errors.MusterError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.hint})" if error.hint else error.message
