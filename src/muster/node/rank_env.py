"""What a rank is told about its place: the variables that torch and users read. Pure."""

from __future__ import annotations

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
