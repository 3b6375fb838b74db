"""Whom does a simulated worker reach? It tries its peers again and again, and tells what is new."""

from __future__ import annotations

from muster.types.frames import ReachedFrame
from muster.types.world import MemberId, Path
from tests.simulator.clock import Process
from tests.simulator.connection import SimulatedConnection
from tests.simulator.network import Network

PROBE_S, PROBE_AGAIN_S = 0.01, 0.25


class SimulatedProbe:
    def __init__(
        self, member_id: MemberId, machine: str, process: Process, network: Network, connection: SimulatedConnection
    ) -> None:
        self._member_id = member_id
        self._machine = machine
        self._process = process
        self._network = network
        self._connection = connection
        self._known: dict[MemberId, tuple[Path, ...]] = {}
        self._reached: list[tuple[MemberId, float | None, str]] = []

    def told(self, peers: dict[MemberId, tuple[Path, ...]], gone: tuple[MemberId, ...] | None) -> None:
        kept = {} if gone is None else {peer: where for peer, where in self._known.items() if peer not in gone}
        self._known, self._reached = kept | peers, []
        self._process.after(PROBE_S, self._probe, self._known)

    def _probe(self, peers: dict[MemberId, tuple[Path, ...]]) -> None:
        """Try to reach every peer, and tell what is new, until it is told of others."""
        if peers is not self._known:
            return
        here = self._machine
        rows: list[tuple[MemberId, float | None, str]] = [
            (peer, 0.001, "") if self._network.joins(here, where[0][0]) else (peer, None, "refused")
            for peer, where in peers.items()
            if peer != self._member_id
        ]
        if rows != self._reached and self._connection.up:
            self._reached = rows
            self._connection.send(ReachedFrame(peers=tuple(rows)))
        self._process.after(PROBE_AGAIN_S, self._probe, peers)
