"""`--standalone`: a coordinator for this run, started beside the first agent and outliving it.

It runs in a session of its own with a state file. If it dies while the agent that started it lives, that agent
starts it again on the same address, and members find it there.

If a coordinator of this user already listens there, it serves this run, too. Another worker of this launch may have
started it, or an earlier launch: a coordinator stays for a while after the end of its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from muster import files, listening, run_token
from muster.run_token import KeptToken
from muster.types.frames import AskFrame
from muster.types.world import MemberId, RunId
from muster.world import wire
from muster.world.connection import Address, CoordinatorRefused, ask

READY_TIMEOUT_S = 60.0  # on a machine that is very busy; one that ends is noticed at once
REVIVE_PAUSE_S = 1.0
REVIVE_LOOK_S = 0.05
IDLE_S = 30.0  # a coordinator stays for so long after the end of its last run
PRIVATE_IDLE_S = 2.0  # the same for a coordinator that serves one launch
RELEASE_TIMEOUT_S = IDLE_S + 10
RELEASE_LOOK_S = 0.1
ANSWER_TIMEOUT_S = 10.0  # a coordinator whose run has just ended may leave the first question unanswered
LOOPBACK = {
    "0.0.0.0": ("127.0.0.1",),
    "::": ("::1", "127.0.0.1"),
}  # a listener on these blocks a listener on every address


class CannotStart(Exception):
    pass


class Standalone:
    """`token` is one that was made for it, and that others of this user are to find; None if all were given one."""

    def __init__(
        self, host: str, port: int, *, state: Path, idle_s: float, private: bool, token: KeptToken | str | None = None
    ) -> None:
        self.host = host
        self.port = port
        self._kept = token if isinstance(token, KeptToken) else None
        self.token: str | None = token.token if isinstance(token, KeptToken) else token
        self._state = state
        self._idle_s = idle_s
        self._private = private
        self.beside: MemberId | None = None  # the member that is lost with it
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._ready = -1
        self.shares = False  # another process started the coordinator at that address

    @classmethod
    def here(cls, host: str, port: int, *, idle_s: float, private: bool) -> Standalone:
        """With a token of its own, unless one was given. ValueError if there is no place for what it keeps."""
        try:
            state = files.scratch() / f"coordinator-{os.getpid()}-{secrets.token_hex(4)}.json"
        except OSError as error:
            raise ValueError(f"cannot make a folder for a coordinator: {error}; set TMPDIR") from None
        return cls(host, port, state=state, idle_s=idle_s, private=private, token=_new_token(host, port))

    @property
    def addresses(self) -> list[Address]:
        """Where to find it, once it listens."""
        return [(listening.reachable(self.host), self.port)] if self.port else []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it and wait until it listens; CannotStart says that it does not (it has said why itself)."""
        self.begin()
        self.await_ready()

    def begin(self) -> None:
        self._ready, ready_w = os.pipe()
        command = [
            sys.executable,
            "-m",
            "muster.coordinator",
            *("--listen", wire.show_address(self.host, self.port)),
            *("--state", str(self._state)),
            *("--idle-s", str(self._idle_s)),
            *("--ready-fd", str(ready_w)),
            *(["--leave-when-ended"] if self._private else []),
            *(["--keep-token"] if self.token else []),
            *(["--beside", self.beside] if self.beside else []),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(ready_w,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | ({run_token.VARIABLE: self.token} if self.token else {}),
        )
        os.close(ready_w)

    async def introduce(self, run_id: str, say: Callable[[str], None]) -> bool:
        """Once it listens, say where; False if it does not: it has said why itself."""
        try:
            await asyncio.to_thread(self.await_ready)
        except CannotStart:
            return False
        if self.shares and (holder := self._holder_elsewhere()) and not await self._replace(holder, say):
            return False
        shown = wire.show_address(*self.addresses[0])
        others = f"others join with --coordinator {shown} --run-id {run_id}"
        if self.shares:
            if refusal := await self._refusal(RunId(run_id), self.addresses[0]):
                say(f"cannot listen on {shown}: it is in use: {refusal}; choose another --listen")
                return False
            say(f"coordinator on {shown}, which was running already; {others}")
            return True
        say(f"coordinator on {shown}; {others}")
        return True

    def _holder_elsewhere(self) -> Address | None:
        """Return the loopback address of a process that keeps us from listening on every address, or None.

        That process does not listen on our own address, so this run cannot use it.
        """
        if run_token.may_listen(self.addresses[0]):
            return None
        loopback = [(host, self.port) for host in LOOPBACK.get(self.host, ())]
        return next((address for address in loopback if run_token.may_listen(address)), None)

    async def _replace(self, holder: Address, say: Callable[[str], None]) -> bool:
        """Wait until a coordinator of ours has left that address, and start our own; False if that is not possible."""
        listen, occupied = wire.show_address(self.host, self.port), wire.show_address(*holder)
        if refusal := await self._refusal(RunId("none"), holder):
            say(f"cannot listen on {listen}: {occupied} is in use: {refusal}; choose another --listen")
            return False
        say(f"waiting: your coordinator on {occupied} keeps this port until it ends, {IDLE_S:g} s after its last run")
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while run_token.may_listen(holder):
            if time.monotonic() > deadline:
                problem = f"your coordinator on {occupied} is still running"
                say(f"cannot listen on {listen}: {problem}; choose another --listen")
                return False
            await asyncio.sleep(RELEASE_LOOK_S)
        try:
            await asyncio.to_thread(self.start)
        except CannotStart:
            return False
        return True

    async def _refusal(self, run_id: RunId, address: Address) -> str:
        """Return why the process at that address cannot serve this run; "" for a coordinator with our run token."""
        token, deadline = self.token or run_token.given(), time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                await ask([address], run_id, AskFrame(ask="show"), token=token)
            except CoordinatorRefused as refused:
                if refused.code == "not_found":
                    return ""
                whose = "another user's coordinator" if run_token.is_others(address) else "another coordinator"
                return f"{whose} is there: {refused}"
            except TimeoutError:
                if time.monotonic() > deadline:
                    return "a program that is no coordinator listens there"
                await asyncio.sleep(RELEASE_LOOK_S)
            else:
                return ""

    def await_ready(self) -> None:
        """Wait until the coordinator listens, or until it reports that its address is in use."""
        assert self._process is not None
        with open(self._ready) as answer:
            line = answer.readline().strip() if select.select([answer], [], [], READY_TIMEOUT_S)[0] else ""
        if self._is_shared(line):
            return
        if not line:
            self._process.kill()
            self._process.wait()
            self._let_go_of_token(remove=True)
            raise CannotStart(f"no coordinator on {wire.show_address(self.host, self.port)}")
        self.host, self.port = wire.parse_address(line)
        self._let_go_of_token(remove=False)  # it is the coordinator's by now

    def _is_shared(self, answer: str) -> bool:
        self.shares = answer == wire.ADDRESS_TAKEN
        if self.shares:
            assert self._process is not None
            self._process.wait()
            self._let_go_of_token(remove=False)
        return self.shares

    def _let_go_of_token(self, *, remove: bool) -> None:
        if self._kept is not None:
            self._kept.close(remove=remove)
            self._kept = None

    def leave(self, timeout_s: float = 1.0) -> None:
        """A coordinator that nobody else was told of ends with the run; do not leave before it."""
        if self._private and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    async def keep_alive(self, patience_s: Callable[[], float], say: Callable[[str], None]) -> None:
        """Start it again whenever it has died, and was missed for so long; on the loop of the agent."""
        loop = asyncio.get_running_loop()
        seen = loop.time()

        def tell(text: str) -> None:  # from another thread
            loop.call_soon_threadsafe(say, text)

        while True:
            await asyncio.sleep(REVIVE_LOOK_S)
            if (patience := patience_s()) == math.inf:
                seen = loop.time()
            elif loop.time() - seen >= patience:
                await asyncio.to_thread(self.revive, tell)

    def revive(self, say: Callable[[str], None]) -> None:
        """Start it again if it has died."""
        if self._process is None or self._process.poll() is None or time.monotonic() < self._not_before:
            return
        if self.shares and run_token.may_listen(self.addresses[0]):
            return
        self._not_before = time.monotonic() + REVIVE_PAUSE_S
        ended = f"the coordinator died ({self._process.returncode}); starting it again"
        say("the coordinator that this run used has ended; starting another" if self.shares else ended)
        try:
            self.start()
        except CannotStart as error:
            say(str(error))


def _new_token(host: str, port: int) -> KeptToken | str | None:
    """Kept from now on where the address is known, so that those who join at the same moment find it at once."""
    if run_token.given():
        return None
    try:
        if not port:
            return run_token.new()
        places = [(name, port) for name in (listening.reachable(host), *LOOPBACK.get(host, ()))]
        earlier_token = run_token.find(files.home(), places)
        return KeptToken(files.home(), host, port, earlier_token)
    except OSError:
        return run_token.new()  # the coordinator will say that nobody can find it
