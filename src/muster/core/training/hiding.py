"""What of a training's words may everybody read who may read it? All but the values of its secret variables.

A program can say them: the last line of an exception becomes the outcome and an entry of the journal, which outlives
the training and its log. Whatever was made of them by then, as by cutting a line, is not found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.types.event import Event
from muster.types.training import MASK, RankExit, Spec, Status

_SHORTEST = 6  # a shorter value is no secret, and may be in any word


class Hiding:
    def __init__(self, spec: Spec) -> None:
        values = [spec.env.get(name, "") for name in spec.secret_env]
        # One of several lines is told line by line, and one with spaces with single ones.
        parts = {part for value in values for part in (value, *value.split()) if len(part) >= _SHORTEST}
        longest_first = sorted(parts, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if parts else None

    def text(self, told: str) -> str:
        return told if self._found is None else self._found.sub(MASK, told)

    def event(self, event: Event) -> Event:
        if self._found is None:
            return event
        return replace(event, message=self.text(event.message), data=self._value(event.data))

    def status(self, status: Status) -> Status:
        """The same where there is nothing to hide: ranks and workers are named by us."""
        if self._found is None:
            return status
        outcome, exits, resize = status.outcome, status.rank_exits, status.last_resize
        if outcome is not None:
            first = outcome.first_failure and self._exit(outcome.first_failure)
            outcome = replace(outcome, message=self.text(outcome.message), first_failure=first)
        return replace(
            status,
            outcome=outcome,
            rank_exits=None if exits is None else tuple(map(self._exit, exits)),
            last_resize=resize and replace(resize, reason=self.text(resize.reason)),
            conditions=tuple(replace(one, message=self.text(one.message)) for one in status.conditions),
        )

    def _exit(self, end: RankExit) -> RankExit:
        tail = tuple(map(self.text, end.stderr_tail))
        return replace(end, stderr_tail=tail, exception=self.text(end.exception), place=self.text(end.place))

    def _value(self, told: Any) -> Any:
        match told:
            case str():
                return self.text(told)
            case list() | tuple():
                return [self._value(one) for one in told]
            case Mapping():
                return {name: self._value(one) for name, one in told.items()}
        return told
