"""What does a policy cost in a scenario, over several seeds? Sums and ratios of outcomes, and how they are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from muster.sim.policies import Policy, SimulationResult, simulate
from muster.sim.recording import Use
from muster.sim.scenarios import Scenario


@dataclass(frozen=True)
class Summary:
    """Means over the seeds. GPU-seconds are of the whole run."""

    scenario: str
    policy: str
    seeds: int
    makespan_s: float
    lower_bound_s: float
    resizes: float
    vain_shrinks: float  # after which nobody else got the GPU
    idle_wanted_gpu_s: float  # vacant although somebody could have used it
    training_gpu_s: float
    serving_gpu_s: float
    switching_gpu_s: float
    idle_gpu_s: float
    busy_share: float  # of the slots of serving GPUs
    lost_gpu_s: float  # work that was aborted and done again
    training_wait_s: float
    generation_wait_s: float

    @property
    def ratio(self) -> float:
        """The result: mean makespan ÷ mean lower bound."""
        return self.makespan_s / self.lower_bound_s

    def as_data(self) -> dict[str, object]:
        return {"ratio": round(self.ratio, 4)} | {
            name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()
        }


def summarise(outcomes: Sequence[SimulationResult], slots: int) -> Summary:
    """One scenario under one policy."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(outcomes)

    recordings = [outcome.recording for outcome in outcomes]
    uses = {use: mean(recording.gpu_seconds()[use] for recording in recordings) for use in Use}
    makespan = mean(outcome.makespan for outcome in outcomes)
    busy = mean(recording.busy_slot_s for recording in recordings) / slots
    return Summary(
        scenario=outcomes[0].scenario,
        policy=outcomes[0].policy,
        seeds=len(outcomes),
        makespan_s=makespan,
        lower_bound_s=mean(outcome.lower_bound for outcome in outcomes),
        resizes=mean(recording.resizes for recording in recordings),
        vain_shrinks=mean(recording.vain_shrinks for recording in recordings),
        idle_wanted_gpu_s=mean(recording.idle_wanted_gpu_s for recording in recordings),
        training_gpu_s=uses[Use.TRAIN],
        serving_gpu_s=uses[Use.SERVE],
        switching_gpu_s=uses[Use.EXPAND] + uses[Use.SHRINK],
        idle_gpu_s=max(0.0, makespan * recordings[0].gpus - sum(uses.values())),
        busy_share=busy / uses[Use.SERVE] if uses[Use.SERVE] else 0.0,
        lost_gpu_s=mean(recording.lost_slot_s for recording in recordings) / slots,
        training_wait_s=mean(recording.waited_s("actor_train") for recording in recordings),
        generation_wait_s=mean(recording.waited_s("actor_infer") for recording in recordings),
    )


def compare(scenario: Scenario, policies: Iterable[Policy], seeds: Sequence[int]) -> Iterator[Summary]:
    """The same trajectories under each policy."""
    for policy in policies:
        yield summarise([simulate(scenario, policy, seed) for seed in seeds], scenario.slots)


TITLES = (
    "SCENARIO",
    "POLICY",
    "MAKESPAN",
    "BOUND",
    "RATIO",
    "RESIZES",
    "IN VAIN",
    "IDLE WANTED",
    "SWITCHING",
    "SLOTS BUSY",
    "REDONE",
)


def row(one: Summary) -> tuple[str, ...]:
    return (
        one.scenario,
        one.policy,
        f"{one.makespan_s:.0f} s",
        f"{one.lower_bound_s:.0f} s",
        f"{one.ratio:.3f}",
        f"{one.resizes:.1f}",
        f"{one.vain_shrinks:.1f}",
        f"{one.idle_wanted_gpu_s:.0f} GPU s",
        f"{one.switching_gpu_s:.0f} GPU s",
        f"{one.busy_share:.0%}",
        f"{one.lost_gpu_s:.0f} GPU s",
    )
