"""What can go wrong, or merely happen, in the middle of a run: each fault picks its victim and says what it did.

A fault that finds nobody to befall does nothing and returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from muster.types.frames import AskFrame
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.network import BOTH, DOWN, UP
from tests.simulator.worker import SimulatedWorker

Fault = Callable[[SimulatedFleet, Random], str | None]


def _someone(fleet: SimulatedFleet, rng: Random) -> SimulatedWorker | None:
    """Mostly one that has a place in the round, where it matters, and often the same again: troubles come together."""
    people = [agent for agent in fleet.present if not agent.process.stopped]
    busy = [agent for agent in people if agent.round is not None and agent.round.running]
    stopping = [agent for agent in busy if agent.round is not None and agent.round.stopping]
    pool = busy if busy and rng.random() < 0.75 else people
    if stopping and rng.random() < 0.5:
        return rng.choice(stopping)
    if fleet.last_hit in people and rng.random() < 0.5:
        return fleet.last_hit
    fleet.last_hit = rng.choice(pool) if pool else None
    return fleet.last_hit


# Processes and machines


def kill_agent(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    agent.kill()
    return f"SIGKILL to {agent.name}"


def kill_guard(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    fleet.excuse(agent)
    agent.kill_guard()
    return f"SIGKILL to the guard of {agent.name}"


def kill_both(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    agent.kill_both()
    return f"SIGKILL to {agent.name} and its guard"


def kill_worker(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    agent.kill_worker()
    return f"SIGKILL to everything of {agent.name}"


def power_off(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    agent.power_off()
    return f"{agent.name} loses its power"


def stop_agent(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    for_s = fleet.lease_s * rng.uniform(0.2, 2.0)
    fleet.stop(agent, for_s)
    return f"SIGSTOP to {agent.name} for {for_s:.2f} s"


def leave(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    agent.leave()
    return f"SIGTERM to {agent.name}"


# The network


def cut_off(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None:
        return None
    for_s = fleet.lease_s * rng.uniform(0.1, 2.5)
    directions = rng.choice((BOTH, BOTH, frozenset({UP}), frozenset({DOWN})))
    fleet.cut(agent, for_s, directions)
    return f"{agent.name} is cut off ({'+'.join(sorted(directions))}) for {for_s:.2f} s"


def cut_off_and_stop(fleet: SimulatedFleet, rng: Random) -> str | None:
    """Neither the agent's own rule nor the coordinator can then end its ranks."""
    if (agent := _someone(fleet, rng)) is None:
        return None
    fleet.cut(agent, fleet.lease_s * 2.5)
    for_s = fleet.lease_s * rng.uniform(0.5, 2.0)
    fleet.clock.after(fleet.lease_s * rng.uniform(0.2, 0.8), fleet.stop, agent, for_s)
    return f"{agent.name} is cut off, then stopped"


def mute_spare(fleet: SimulatedFleet, rng: Random) -> str | None:
    """It is given a place while nobody hears it, and reads of it when its lease may be over."""
    spares = [agent for agent in fleet.present if agent.round is None and not agent.process.stopped]
    if not spares:
        return None
    spare = rng.choice(spares)
    fleet.cut(spare, fleet.lease_s * 2.5, frozenset({UP}))
    fleet.clock.after(fleet.lease_s * rng.uniform(0.2, 0.8), _stop_and_need, fleet, rng, spare)
    return f"{spare.name} is not heard any more, and then needed"


def _stop_and_need(fleet: SimulatedFleet, rng: Random, spare: SimulatedWorker) -> None:
    fleet.stop(spare, fleet.lease_s * rng.uniform(0.3, 1.0))
    if busy := [agent for agent in fleet.present if agent.round is not None and agent is not spare]:
        rng.choice(busy).kill()


def reset_and_cut_off(fleet: SimulatedFleet, rng: Random) -> str | None:
    """The end of its connection looks like a dead coordinator, and nobody can tell it otherwise."""
    agent = _someone(fleet, rng)
    if agent is None or not fleet.network.reaches(agent.machine.name):
        return None
    agent.reset(guard=False, half=False)
    fleet.clock.after(rng.choice((0.0, 0.002, 0.02)), fleet.cut, agent, fleet.lease_s * 2)
    return f"the connection of {agent.name} is reset, then it is cut off"


def reset(fleet: SimulatedFleet, rng: Random) -> str | None:
    agent = _someone(fleet, rng)
    if agent is None or not fleet.network.reaches(agent.machine.name):
        return None  # no reset gets through a cut
    whose = rng.choice(("agent", "guard"))
    half = rng.random() < 0.5
    agent.reset(guard=whose == "guard", half=half)
    return f"the {whose} connection of {agent.name} is reset{' on its side only' if half else ''}"


def reset_lifeline(fleet: SimulatedFleet, rng: Random) -> str | None:
    agent = _someone(fleet, rng)
    if agent is None or not fleet.network.reaches(agent.machine.name):
        return None
    agent.lifeline.reset()
    return f"the lifeline of {agent.name} is {'closed by a relay' if agent.lifeline.relayed else 'reset'}"


# Ranks


def fail_rank(fleet: SimulatedFleet, rng: Random) -> str | None:
    ranks = sorted((rank for alive in fleet.census.alive.values() for rank in alive), key=lambda one: one.rank)
    if not ranks:
        return None
    victim = rng.choice(ranks)
    fleet.fail_rank(victim, rng.choice((1, 3, -9)))
    return f"rank {victim.rank} of round {victim.round} fails"


def fail_often(fleet: SimulatedFleet, rng: Random) -> str | None:
    """The same worker again in the next rounds."""
    if (agent := _someone(fleet, rng)) is None or agent.round is None:
        return None
    for turn in range(3):
        fleet.clock.after(turn * 0.8, _fail_one_of, fleet, agent)
    return f"ranks of {agent.name} fail again and again"


def _fail_one_of(fleet: SimulatedFleet, agent: SimulatedWorker) -> None:
    if agent.machine.ranks:
        fleet.fail_rank(agent.machine.ranks[0])


def hang(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None or not agent.machine.ranks:
        return None
    fleet.hang(agent.name)
    return f"a rank of {agent.name} hangs"


def finish_early(fleet: SimulatedFleet, rng: Random) -> str | None:
    if (agent := _someone(fleet, rng)) is None or agent.round is None:
        return None
    fleet.finish(agent)
    return f"the ranks of {agent.name} are done"


# The coordinator


def crash(fleet: SimulatedFleet, rng: Random) -> str | None:
    if not fleet.coordinator.alive:
        return None
    back_s = rng.choice((0.0, 0.3, 1.0, 4.0))
    fleet.crash(lose_sent=rng.random() < 0.3, back_after_s=back_s)
    return f"the coordinator dies, for {back_s:g} s"


def crash_mid_send(fleet: SimulatedFleet, rng: Random) -> str | None:
    """It dies after it kept a record and told only some members."""
    fleet.coordinator.crash_mid_send = rng.randrange(4)
    fleet.clock.after(1.0, _restart_if_dead, fleet)
    fleet.clock.after(3.0, _restart_if_dead, fleet)
    return "the coordinator will die while it tells members of the next record"


def _restart_if_dead(fleet: SimulatedFleet) -> None:
    fleet.restart()


def crash_with_record(fleet: SimulatedFleet, rng: Random) -> str | None:
    """Its record is lost with it; what members present is all that is left."""
    if not fleet.coordinator.alive or fleet.outcome is not None or fleet.expected or not fleet.can_present():
        return None
    fleet.crash(keep_record=False, lose_sent=rng.random() < 0.3, back_after_s=rng.choice((0.0, 0.5)))
    fleet.leave_alone(1.0)
    return "the coordinator dies and its record is lost"


def pause(fleet: SimulatedFleet, rng: Random) -> str | None:
    if not fleet.coordinator.alive:
        return None
    for_s = fleet.lease_s * rng.uniform(0.1, 2.0)
    fleet.pause(for_s)
    return f"SIGSTOP to the coordinator for {for_s:.2f} s"


# Orders and newcomers


def set_target(fleet: SimulatedFleet, rng: Random) -> str | None:
    if not _answers(fleet):
        return None
    run = fleet.run
    step = run.settings.segment or 1
    target = rng.randrange(run.settings.min, run.settings.max + 1, step)
    names = sorted(member.name for member in run.members.values())
    remove = rng.sample(names, min(len(names), 1)) if rng.random() < 0.3 else []
    answer = fleet.set_target(target, *remove)
    return f"set-target {target} {' '.join(remove)}: {answer.type}"


def cancel(fleet: SimulatedFleet, rng: Random) -> str | None:
    if not _answers(fleet):
        return None
    fleet.cancel()
    return "cancel"


def show(fleet: SimulatedFleet, rng: Random) -> str | None:
    if not _answers(fleet):
        return None
    fleet.coordinator.ask(AskFrame(ask="show"))
    return "show"


def _answers(fleet: SimulatedFleet) -> bool:
    one = fleet.coordinator
    return one.alive and not one.process.stopped and one.leading is not None and one.leading.run is not None


def newcomer(fleet: SimulatedFleet, rng: Random) -> str | None:
    like = fleet.agents[rng.randrange(len(fleet.agents))].config
    name = f"n{len(fleet.agents)}"
    infra = None if like.infra_rank is None else 100 + len(fleet.agents)
    fleet.join(
        name,
        settings=like.settings,
        procs=like.procs,
        infra_rank=infra,
        domain=like.domain,
        checks_health=like.checks_health,
    )
    return f"{name} arrives"


def namesake(fleet: SimulatedFleet, rng: Random) -> str | None:
    """A worker is started again elsewhere; the old one may be dead, silent or well."""
    old = rng.choice(fleet.agents)
    if old.alive and rng.random() < 0.7:
        (old.power_off if rng.random() < 0.5 else old.kill)()
    config = old.config
    fleet.join(config.name, settings=config.settings, procs=config.procs, infra_rank=None, domain=config.domain)
    return f"another {config.name} arrives"


def sicken(fleet: SimulatedFleet, rng: Random) -> str | None:
    checked = [agent for agent in fleet.present if agent.config.checks_health]
    if not checked:
        return None
    agent = rng.choice(checked)
    agent.healthy = not agent.healthy
    return f"{agent.name} is {'well' if agent.healthy else 'ill'}"


WEIGHTS: dict[Fault, int] = {
    kill_agent: 10,
    kill_guard: 4,
    kill_both: 5,
    power_off: 6,
    stop_agent: 8,
    leave: 6,
    cut_off: 12,
    cut_off_and_stop: 3,
    reset: 7,
    reset_and_cut_off: 4,
    mute_spare: 5,
    fail_rank: 12,
    fail_often: 4,
    hang: 2,
    finish_early: 6,
    crash: 9,
    crash_mid_send: 6,
    crash_with_record: 5,
    pause: 4,
    set_target: 10,
    cancel: 1,
    show: 1,
    newcomer: 9,
    namesake: 5,
    sicken: 4,
}


# Drawn beside the others, so that what they draw does not change.
OF_LIFELINES: tuple[Fault, ...] = (kill_worker, kill_worker, reset_lifeline)


def draw(rng: Random, count: int) -> list[Fault]:
    return rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=count)
