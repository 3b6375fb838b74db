"""What a rank is told about its place: the variables that torch and users read. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from muster.types.world import Place


def environment(place: Place, local_rank: int, run_id: str) -> dict[str, str]:
    rank = place.ranks[local_rank]
    world = place.rank_count
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(place.seat.procs),
        "GROUP_RANK": str(place.seat.rank),
        "GROUP_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": place.round.store_addr,
        "MASTER_PORT": str(place.round.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.number),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MUSTER_ROUND": str(place.number),
        "MUSTER_RUN_ID": run_id,
        "MUSTER_WORKER": place.seat.name,
    }


def tracking(place: Place, local_rank: int, run_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which W&B continues one run over all rounds of a training, for rank 0 only.

    A user's own choice stands, and so does a sweep's. Without a control plane a run id may be used again for another
    run, so nothing is set.
    """
    if place.ranks[local_rank] != 0 or "MUSTER_TRAINING" not in inherited or inherited.get("WANDB_SWEEP_ID"):
        return {}
    if "WANDB_RUN_ID" in inherited:
        return {} if "WANDB_RESUME" in inherited else {"WANDB_RESUME": "allow"}
    return {} if "WANDB_RESUME" in inherited else {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
