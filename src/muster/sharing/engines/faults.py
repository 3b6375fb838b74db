"""How do engines fail? Each kind is one thing that an engine said or did and that was not so.

EngineFault              about one engine; the scheduler tries once more, then quarantines its pipeline
├─ MemoryNotFree         it was told to let go, and memory is still in use
├─ StaleWeights          it answered with other weights than those that were published
├─ Unproven              it may be right, but nothing at hand proves it
├─ EngineUnreachable     it does not answer: refused, hung, or gone in the middle
├─ EngineGarbled         its answer is none of the contract: a status, a redirect, garbage, too much
├─ Asleep                a turn was asked for, and there is no lease for it
└─ TurnInterrupted       a turn ended because its lease did: queue it again
"""

from __future__ import annotations

from muster.errors import SharingError


class EngineFault(SharingError):
    code = "engine_fault"


class MemoryNotFree(EngineFault):
    code = "memory_not_free"


class StaleWeights(EngineFault):
    code = "stale_weights"


class Unproven(EngineFault):
    code = "unproven"


class EngineUnreachable(EngineFault):
    code, retryable = "engine_unreachable", True

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # nobody listens there: the process is gone, or was never there


class EngineGarbled(EngineFault):
    code = "engine_garbled"


class Asleep(EngineFault):
    code, retryable = "asleep", True


class TurnInterrupted(EngineFault):
    code, retryable = "turn_interrupted", True
