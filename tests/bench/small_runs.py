"""The smallest run of each part of each benchmark: its options, its rows and the tier that can start it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SmallRun:
    """One part of a benchmark. Rows whose name has a word of `may_miss` may be without a value."""

    module: str  # in the folder bench
    part: str
    options: str
    rows: int
    tier: str = "process"  # mark of the test; each test has the mark `process`, too
    may_miss: str = "-"

    @property
    def name(self) -> str:
        return f"{self.module}-{self.part}"

    @property
    def words(self) -> list[str]:
        return [f"bench.{self.module}", "--only", self.part, *self.options.split()]


_FRAMEWORKS = "--samples 1 --leisure-s 1 --no-peers"

SMALL_RUNS = (
    # Losses and resizes of worlds.
    SmallRun("world", "worker", "--repeat-losses 1 --repeat 1 --repeat-peers 0", 2),
    SmallRun("world", "control-plane", "--repeat-control 1", 1),
    SmallRun("world", "kubernetes", "--repeat-kube 1", 1, "kube"),
    SmallRun("world", "machine", "--repeat-machines 1 --repeat-peers 0", 2, "netns"),
    SmallRun("world", "coordinator", "--repeat-coordinator 1 --repeat-peers 0", 2, "netns"),
    SmallRun("world", "sixty-four", "--workers 2 --repeat 1", 6),
    SmallRun("world", "thousand", "--agents 20 --repeat-swarm 1", 5),
    SmallRun("world", "ten-thousand", "--agents 20 --repeat-swarm 1", 2),
    SmallRun("world", "crash", "--repeat-torch 1 --repeat-peers 0", 1),
    SmallRun("world", "start", "--repeat-torch 1 --repeat-peers 0", 1),
    SmallRun("world", "ending", "--repeat 1", 1),
    SmallRun("world", "kills", "--kills 1", 1),
    # The control plane.
    SmallRun("control", "waits", "--repeat 1", 1),
    SmallRun("control", "start", "--repeat 1", 2),
    SmallRun("control", "throughput", "--seconds 0.2", 2),
    SmallRun("control", "many", "--trainings 20 --seconds 0.2", 2),
    SmallRun("control", "comeback", "--repeat 1", 1),
    SmallRun("control", "loss", "--repeat-losses 1", 2),
    SmallRun("control", "size", "--repeat 1", 3),
    SmallRun("control", "job", "--repeat-torch 1 --no-peers", 1),
    # Pipelines and trainings that share GPUs.
    SmallRun("sharing", "makespan", "--repeat 0.01", 24),
    SmallRun("sharing", "planner", "--repeat 0.01", 4),
    SmallRun("sharing", "grants", "--repeat 0.01", 2),
    SmallRun("sharing", "ray", "", 2, "ray"),
    SmallRun("sharing", "disorder", "--repeat 0.01", 2),
    SmallRun("pool", "fill", "--repeat 0.01", 32),
    SmallRun("pool", "planner", "--repeat 0.01", 2),
    SmallRun("pool", "handover", "--repeat 0.01", 6),
    # The mesh gate.
    SmallRun("mesh", "wait", "--repeat 1 --repeat-polls 1", 2, may_miss="etcd"),
    SmallRun("mesh", "hostile", "--timeout-s 0.3", 1),
    SmallRun("mesh", "probe", "--members 3 --repeat-probes 1", 2),
    # Kubernetes.
    SmallRun("kube", "apply", "--repeat 1", 1, "kube"),
    SmallRun("kube", "scale", "--scales 1 --repeat 1", 2, "kube"),
    SmallRun("kube", "loss", "--losses 1", 1, "kube"),
    SmallRun("kube", "many", "--trainings 25 --workers 4", 5, "kube"),
    # Attacks and encryption.
    SmallRun("security", "reader", "--gb 0.05 --trainings 1", 3),
    SmallRun("security", "crowd", "--connections 20 --seconds 0.5", 3),
    SmallRun("security", "storm", "--kills 1", 4),
    SmallRun("wire", "heal", "--workers 1 --kills 1", 3, "netns"),
    SmallRun("wire", "frames", "--workers 2 --losses 1", 3),
    SmallRun("wire", "connect", "--connections 1", 3),
    # State in memory.
    SmallRun("state", "kills", "--kills 1 --kills-peers 0 --mb 1 --step-s 0.1 --leisure-s 1", 4, may_miss="weights"),
    SmallRun("state", "copies", "--turns 1 --mb 1 --step-s 0.01 --jobs 1", 2),
    SmallRun("state", "small", "--small-steps 40 --small-step-s 0.01", 3),
    # Code of users.
    SmallRun("code", "send", "--repeat 1 --files 20 --mib 1", 2),
    SmallRun("code", "fetch", "--workers 2 --files 20 --mib 1", 2),
    SmallRun("code", "cluster", "--repeat 1", 1, "kube"),
    # The page, the first steps and false alarms.
    SmallRun("page", "page", "--events 60 --lines 64000 --repeat 1", 4, "pages"),
    SmallRun("newcomer", "newcomer", "--venv .venv --steps 150", 1),
    SmallRun("alarms", "alarms", "--seconds 1 --workers 1", 2),
    # A target of its own is not needed for a simulation.
    SmallRun("large", "world", "100", 9),
    # Scripts of frameworks.
    SmallRun("frameworks", "ddp", _FRAMEWORKS, 2),  # needs torch and no framework
    SmallRun("frameworks", "fsdp2_dcp", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "hf_trainer", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "accelerate_loop", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "lightning_trainer", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "deepspeed_zero", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "trl_grpo", _FRAMEWORKS, 2, "frameworks"),
    SmallRun("frameworks", "trl_sft", _FRAMEWORKS, 2, "frameworks"),
)
