"""One exception tree. What a caller can do about an error decides where it stands.

MusterError                     message, code, retryable, hint
├── Unavailable                 no control plane answered: try again                      unavailable
│   └── TooManyRequests         too much at once with this token: try again               too_many_requests
├── NotFound                    no such object                                            not_found
├── AlreadyExists               the name is taken                                         already_exists
├── Conflict                    somebody else wrote first: read again, then decide        conflict
├── InvalidRequest              fix the input; `problems` lists every bad field           invalid
├── TooLarge                    fix the input: the body is beyond the limit               too_large
├── Unauthenticated             no token, or one that nobody knows                        unauthenticated
├── Forbidden                   the token may not do that                                 forbidden
├── Compacted                   the history asked for is gone: list, then watch again     compacted
├── InternalError               a fault of muster's own                                   internal
├── SharingError                about GPUs that several pipelines share                   sharing
│   ├── SchedulerStopped        the scheduler does not run: start it, then ask again      scheduler_stopped
│   ├── PipelineQuarantined     its hooks failed: register it again with working ones     pipeline_quarantined
│   │   └── PipelineKilled      somebody has ended it: end, or begin anew in another process  pipeline_killed
│   ├── RequestRefused          it could never be met, or contradicts what is held        request_refused
│   │   └── WouldDeadlock       it would close a cycle of hold-and-wait; names the cycle  would_deadlock
│   ├── GrantTimeout            also a TimeoutError: not granted or vacated in time       grant_timeout
│   └── JournalUnusable         newer than this version, of another pool, or in use       journal_unusable
└── DistributedError            about one training
    ├── BelowMinimumWorld       the world asked for did not come; ready, required_min, timeout
    │   ├── TrainingFailed      it ended instead                                          failed
    │   ├── TrainingCancelled   it was cancelled instead                                  cancelled
    │   ├── ScaleSuperseded     another writer moved the target; requested, target        scale_superseded
    │   ├── ResizeTakenBack     it cannot train with that many; requested, target         resize_taken_back
    │   └── WaitTimeout         also a TimeoutError                                       timeout
    ├── UDTerminalState         it has ended and takes no orders; phase, requested_target terminal_state
    ├── WorldSizeOutOfBounds    requested, min, max                                       world_size_out_of_bounds
    ├── RendezvousUnavailable   its workers cannot reach the coordinator                  rendezvous_unavailable
    └── QuotaExceeded           more than the namespace may have; current, requested, limit quota_exceeded
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from muster.types.codec import Problem

if TYPE_CHECKING:
    from muster.types.training import RankExit


def how_to_install(extra: str) -> str:
    """For hints about something that is not there. muster is on no index: whoever uses it has a clone."""
    return f"pip install '.[{extra}]' in the clone of muster"


class MusterError(Exception):
    """The root: one `except` catches all."""

    code: str = "error"
    status: ClassVar[int] = 500
    retryable: bool = False

    def __init__(
        self,
        message: str,
        code: str | None = None,
        retryable: bool | None = None,
        hint: str = "",
        *,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.retryable = type(self).retryable if retryable is None else retryable
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # an uncaught error prints its notes behind its message
        self.request_id = request_id

    def details(self) -> dict[str, Any]:
        """What travels beside the message."""
        return {}


class Unavailable(MusterError):
    code, status, retryable = "unavailable", 503, True


class TooManyRequests(Unavailable):
    code, status = "too_many_requests", 429


class NotFound(MusterError):
    code, status = "not_found", 404


class AlreadyExists(MusterError):
    code, status = "already_exists", 409


class Conflict(MusterError):
    code, status, retryable = "conflict", 409, True


class InvalidRequest(MusterError):
    code, status = "invalid", 422

    def __init__(self, message: str, *, problems: tuple[Problem, ...] = (), **more: Any) -> None:
        super().__init__(message, **more)
        self.problems = problems

    def details(self) -> dict[str, Any]:
        return {"fields": [{"field": problem.field, "message": problem.message} for problem in self.problems]}


class TooLarge(MusterError):
    code, status = "too_large", 413


class Unauthenticated(MusterError):
    code, status = "unauthenticated", 401


class Forbidden(MusterError):
    code, status = "forbidden", 403


class Compacted(MusterError):
    code, status = "compacted", 410


class InternalError(MusterError):
    code, status = "internal", 500


class StateUnusable(MusterError):
    """The steps in a durable folder cannot be read or used. muster changed no file of a step."""

    code = "state_unusable"


class SharingError(MusterError):
    """About GPUs that several pipelines share."""

    code, status = "sharing", 409


class SchedulerStopped(SharingError):
    code, status, retryable = "scheduler_stopped", 503, True


class PipelineQuarantined(SharingError):
    """Its hooks failed, it fell silent or it did not come back: nothing of it moves before it registers anew."""

    code = "pipeline_quarantined"


class PipelineKilled(PipelineQuarantined):
    """Somebody has ended it: its process is not served any more, and does not come back."""

    code = "pipeline_killed"


class RequestRefused(SharingError):
    code = "request_refused"


class WouldDeadlock(RequestRefused):
    code = "would_deadlock"


class GrantTimeout(SharingError, TimeoutError):
    code, status, retryable = "grant_timeout", 408, True


class JournalUnusable(SharingError):
    code, status = "journal_unusable", 500


class DistributedError(MusterError):
    """About one training."""

    code = "distributed"


class BelowMinimumWorld(DistributedError):
    """The world that was waited for did not come."""

    code = "below_minimum_world"

    def __init__(
        self, message: str, *, ready: int = 0, required_min: int = 0, timeout: float | None = None, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.ready = ready
        self.required_min = required_min
        self.timeout = timeout


class TrainingFailed(BelowMinimumWorld):
    """It ended, and not well. `rank_exits` has each rank's end."""

    code = "failed"

    def __init__(self, message: str, *, rank_exits: tuple[RankExit, ...] = (), **more: Any) -> None:
        super().__init__(message, **more)
        self.rank_exits = rank_exits


class TrainingCancelled(BelowMinimumWorld):
    code = "cancelled"

    def __init__(self, message: str, *, rank_exits: tuple[RankExit, ...] = (), **more: Any) -> None:
        super().__init__(message, **more)
        self.rank_exits = rank_exits


class WaitTimeout(BelowMinimumWorld, TimeoutError):
    code, retryable = "timeout", True


class UDTerminalState(DistributedError):
    """The training has ended: it takes no further orders."""

    code, status = "terminal_state", 409

    def __init__(self, message: str, *, phase: str = "", requested_target: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.phase = phase
        self.requested_target = requested_target

    def details(self) -> dict[str, Any]:
        return {"phase": self.phase, "requestedTarget": self.requested_target}


class ScaleSuperseded(BelowMinimumWorld):
    """Another writer has moved the target since this handle's `scale`. A handle raises it once for each `scale`."""

    code, status = "scale_superseded", 409

    def __init__(self, message: str, *, requested: int, target: int, **more: Any) -> None:
        super().__init__(message, **more)
        self.requested = requested
        self.target = target


class ResizeTakenBack(BelowMinimumWorld):
    """The size that was asked for was tried and does not work: `target` workers train, as before."""

    code, status = "resize_taken_back", 409

    def __init__(self, message: str, *, requested: int, target: int, **more: Any) -> None:
        super().__init__(message, **more)
        self.requested = requested
        self.target = target


class WorldSizeOutOfBounds(DistributedError):
    code, status = "world_size_out_of_bounds", 422

    def __init__(self, message: str, *, requested: int = 0, min: int = 0, max: int = 0, **more: Any) -> None:
        super().__init__(message, **more)
        self.requested = requested
        self.min = min
        self.max = max

    def details(self) -> dict[str, Any]:
        return {"requested": self.requested, "min": self.min, "max": self.max}


class RendezvousUnavailable(DistributedError):
    code, status, retryable = "rendezvous_unavailable", 503, True


class QuotaExceeded(DistributedError):
    """More than the namespace may have: `requested` more of a `resource` of which it has `current`, with that `limit`.

    They are None where the server does not say, as older ones do not.
    """

    code, status = "quota_exceeded", 403

    def __init__(
        self,
        message: str,
        *,
        resource: str = "",
        current: int | None = None,
        requested: int | None = None,
        limit: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message, **more)
        self.resource = resource
        self.current = current
        self.requested = requested
        self.limit = limit

    def details(self) -> dict[str, Any]:
        numbers = {"current": self.current, "requested": self.requested, "limit": self.limit}
        return {"resource": self.resource, **numbers}


def to_wire(error: MusterError, request_id: str) -> dict[str, Any]:
    """The body of an error's answer."""
    shown = {"code": error.code, "message": error.message, "hint": error.hint, "details": error.details()}
    return {"error": {**shown, "requestId": request_id}}


def from_wire(status: int, body: object) -> MusterError:
    """The exception that an answer stands for; an answer that is not ours becomes the nearest one."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        kind = _BY_STATUS.get(status, Unavailable if status >= 500 else MusterError)
        if kind is NotFound:
            return Unavailable(
                "what answers there is not a muster control plane", retryable=False, hint="check the URL"
            )
        return kind(f"the server answered {status}")
    found = _BY_CODE.get(str(error.get("code")), _BY_STATUS.get(status, MusterError))
    raw = error.get("details")
    details: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    more: dict[str, Any] = {"hint": str(error.get("hint") or ""), "request_id": str(error.get("requestId") or "")}
    if found is UDTerminalState:
        more |= {"phase": str(details.get("phase") or ""), "requested_target": details.get("requestedTarget")}
    elif found is WorldSizeOutOfBounds:
        more |= {name: int(details.get(name) or 0) for name in ("requested", "min", "max")}
    elif found is ScaleSuperseded:
        more |= {name: int(details.get(name) or 0) for name in ("requested", "target")}
    elif found is QuotaExceeded:
        numbers = {name: details.get(name) for name in ("current", "requested", "limit")}
        more |= {name: value if isinstance(value, int) else None for name, value in numbers.items()}
        more["resource"] = str(details.get("resource") or "")
    elif found is InvalidRequest:
        fields = details.get("fields") or ()
        more["problems"] = tuple(Problem(str(one.get("field")), str(one.get("message"))) for one in fields)
    return found(str(error.get("message") or f"the server answered {status}"), **more)


_WIRE: tuple[type[MusterError], ...] = (
    Unavailable,
    TooManyRequests,
    NotFound,
    AlreadyExists,
    Conflict,
    InvalidRequest,
    TooLarge,
    Unauthenticated,
    Forbidden,
    Compacted,
    InternalError,
    SharingError,
    SchedulerStopped,
    PipelineQuarantined,
    PipelineKilled,
    RequestRefused,
    WouldDeadlock,
    GrantTimeout,
    JournalUnusable,
    UDTerminalState,
    ScaleSuperseded,
    WorldSizeOutOfBounds,
    RendezvousUnavailable,
    QuotaExceeded,
)
_BY_CODE = {kind.code: kind for kind in _WIRE}
_BY_STATUS: dict[int, type[MusterError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Compacted,
    413: TooLarge,
    422: InvalidRequest,
    429: TooManyRequests,
    500: InternalError,
    503: Unavailable,
}
