"""How is the same job started by muster-node and by each peer? Commands and variables only; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(sys.executable).parents[1] / "peers"
FT_LAUNCHER, TORCHFT = FOLDER / "ft_launcher", FOLDER / "torchft"
# As early as torchrun can notice a death: three keep-alives of a second, and a store that no rank holds on to.
KEEP_ALIVE = "read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Variables = dict[str, str]


@dataclass(frozen=True)
class Spot:
    """One worker of a job: who it is, where, and with whom it meets."""

    name: str
    address: str
    meet: str  # HOST:PORT, on the machine of the first worker
    first: bool
    active: int  # workers that train together; whoever comes later is a spare
    nproc: int = 1
    spares: int = 1


@dataclass(frozen=True)
class Launcher:
    name: str
    command: Callable[[Spot, tuple[str, ...]], tuple[str, ...]]
    env: Callable[[Spot], Variables]
    program: str = "group"  # in bench.programs
    needs: Path | None = None  # installed apart from us, for the benchmark only

    @property
    def missing(self) -> str:
        return f"did not run: not in {self.needs}" if self.needs is not None and not self.needs.exists() else ""


def _muster(spot: Spot, program: tuple[str, ...]) -> tuple[str, ...]:
    place = ("--standalone", "--listen") if spot.first else ("--coordinator",)
    world = (
        "--nnodes",
        str(spot.active),
        "--spares",
        str(spot.spares),
        "--max-restarts",
        "100",
        "--nproc",
        str(spot.nproc),
    )
    about = ("--run-id", "run", "--name", spot.name, "--local-addr", spot.address, "--log-dir", f"logs-{spot.name}")
    return (sys.executable, "-m", "muster.node.cli", *place, spot.meet, *about, *world, *program)


def _elastic(module: str, *more: str, conf: str = "") -> Callable[[Spot, tuple[str, ...]], tuple[str, ...]]:
    def command(spot: Spot, program: tuple[str, ...]) -> tuple[str, ...]:
        world = (f"--nnodes={spot.active}:{spot.active}", f"--nproc-per-node={spot.nproc}", "--max-restarts=100")
        place = ("--rdzv-backend=c10d", "--rdzv-id=bench", f"--rdzv-endpoint={spot.meet}")
        settings = ",".join(part for part in (conf, f"is_host={int(spot.first)}") if part)
        own = (f"--local-addr={spot.address}", f"--rdzv-conf={settings}")
        return (sys.executable, "-m", module, *more, *world, *place, *own, *program)

    return command


def _nothing(spot: Spot) -> Variables:
    return {}


def _own_store(spot: Spot) -> Variables:
    return OWN_STORE


def _ft_env(spot: Spot) -> Variables:
    return OWN_STORE | {"PYTHONPATH": str(FT_LAUNCHER), "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}


def _bare(spot: Spot, program: tuple[str, ...]) -> tuple[str, ...]:
    return (sys.executable, *program)


def _torchft_env(tuned: bool) -> Callable[[Spot], Variables]:
    """A replica is one process here, without a launcher; the first starts the lighthouse."""

    def env(spot: Spot) -> Variables:
        told = {"PYTHONPATH": str(TORCHFT), "RANK": "0", "REPLICA": spot.name, "OWN_ADDRESS": spot.address}
        told |= {"RUST_LOG": "warn"}  # else it tells of every step
        told |= {"ACTIVE": str(spot.active), "TUNED": str(int(tuned)), "LIGHTHOUSE": spot.meet}
        return told | {"HOSTS_LIGHTHOUSE": str(int(spot.first))}

    return env


TORCHRUN = "torch.distributed.run"
FT = ("nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-ignore-missing-cfg", "--ft-max-no-progress-cycles=0")

muster = Launcher("muster-node", _muster, _nothing)
torchrun = Launcher("torchrun", _elastic(TORCHRUN), _nothing)
torchrun_tuned = Launcher("torchrun tuned", _elastic(TORCHRUN, conf=KEEP_ALIVE), _own_store)
ft_launcher = Launcher("ft_launcher 0.7.0", _elastic(*FT, conf=KEEP_ALIVE), _ft_env, needs=FT_LAUNCHER)
torchft = Launcher("torchft 0.2.0", _bare, _torchft_env(False), "replica", TORCHFT)
torchft_tuned = Launcher("torchft 0.2.0 tuned", _bare, _torchft_env(True), "replica", TORCHFT)

PEERS = (torchrun, torchrun_tuned, ft_launcher, torchft, torchft_tuned)
QUICKEST = (torchrun_tuned, ft_launcher, torchft_tuned)  # where a minute would pass before those not tuned notice
