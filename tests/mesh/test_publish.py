"""`muster mesh publish`: real agents, real key servers, and programs that import only the mesh part."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.mesh import lines
from muster.mesh.publishing import Agents, judge_command
from muster.types.world import Gate, GateState
from tests.mesh.servers import Embedded, Etcd, Server, ask, embedded, free_port

SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 60.0
TOKEN = "a token that nobody guesses"
VARIABLES = re.compile("MUSTER_|BASILICA_|.*NODE_NAME$")

# The standard library and nothing else: neither an environment's packages nor an installed muster.
_ALONE = """
import sys; sys.path.insert(0, {src!r})
from muster.mesh.__main__ import main
sys.exit(main({words!r}))
"""


_MUSTER = "import sys; from muster.cli.entry import main; sys.exit(main())"


class Program:
    """A real process with output lines that a test can await."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
        self.process = subprocess.Popen(
            words, env={**clean, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._over = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    def until(self, part: str) -> str:
        """Wait for the first line with this text, and return it."""
        with self._news:
            self._news.wait_for(lambda: self._over or any(part in line for line in self.lines), PATIENCE_S)
            assert any(part in line for line in self.lines), self.lines
            return next(line for line in self.lines if part in line)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)


Start = Callable[..., Program]


@pytest.fixture(autouse=True)
def _no_keys_of_other_tests(request: pytest.FixtureRequest) -> None:
    if "place" in request.fixturenames:
        ask(request.getfixturevalue("place").address, "DELETE", "basilica", "recursive=true")


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def begin(*words: str, **env: str) -> Program:
        programs.append(Program(list(words), env))
        return programs[-1]

    yield begin
    for program in programs:
        program.end()


@pytest.fixture
def probe(start: Start) -> Callable[..., int]:
    """Start an agent that has only the standard library, and return its port."""

    def begin(name: str = "", port: int = 0, **env: str) -> int:
        port = port or free_port()
        words = ["probe", "--listen", f"127.0.0.1:{port}", *(["--name", name] if name else [])]
        agent = start(sys.executable, "-I", "-S", "-c", _ALONE.format(src=str(SRC), words=words), **env)
        agent.until("listening")
        return port

    return begin


@pytest.fixture
def publish(start: Start) -> Callable[..., Program]:
    def begin(*words: str, **env: str) -> Program:
        return start(sys.executable, "-c", _MUSTER, "mesh", "publish", *words, **env)

    return begin


def waiter(start: Start, place: Server, node: str) -> Program:
    code = _ALONE.format(src=str(SRC), words=["wait", "--timeout", "60"])
    return start(
        sys.executable, "-I", "-S", "-c", code, NODE_NAME=node, BASILICA_RDZV_ENDPOINT=f"http://{place.address}/"
    )


def keys(place: Server) -> set[str]:
    body: Any = ask(place.address, "GET", "basilica", "recursive=true").body

    def names(node: dict[str, Any]) -> Iterator[str]:
        if "value" in node:
            yield node["key"].removeprefix("/basilica/")
        for child in node.get("nodes", ()):
            yield from names(child)

    return set(names(body.get("node", {})))


def options(place: Server, nodes: dict[str, int], *more: str) -> list[str]:
    named = [word for name, port in nodes.items() for word in ("--node", f"{name}=127.0.0.1:{port}")]
    return ["--etcd", f"http://{place.address}", "--prefix", "basilica", *named, *more]


# From agents -------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_programs_in_any_image_are_released_when_their_nodes_reach_each_other(
    place: Server, start: Start, probe: Any, publish: Any
) -> None:
    ask(place.address, "PUT", "basilica/mesh-ready/gone", value="old")
    ask(place.address, "PUT", "basilica/mesh-degraded/gone", value="old")
    nodes = {"a": probe("a"), "b": probe("b"), "c": probe()}
    publisher = publish(*options(place, nodes))
    waiting = [waiter(start, place, name) for name in nodes]
    assert publisher.wait() == 0, publisher.lines
    for program in waiting:
        assert program.wait() == 0
        program.until("mesh-wait: OK")
    assert keys(place) == {f"mesh-ready/{name}" for name in nodes}
    assert "all 3 nodes reach each other" in publisher.lines[-1]


def test_a_mesh_that_is_late_is_degraded_and_then_ready(place: Server, start: Start, probe: Any, publish: Any) -> None:
    late = free_port()
    nodes = {"a": probe(), "b": late}
    publisher = publish(*options(place, nodes, "--timeout", "1s", "-o", "json"))
    waiting = waiter(start, place, "a")
    publisher.until('"degraded"')
    waiting.until("mesh-wait: DEGRADED")
    assert waiting.wait() == 0
    assert keys(place) == {"mesh-degraded/a", "mesh-degraded/b"}
    probe(port=late)
    assert publisher.wait() == 0, publisher.lines
    assert keys(place) == {"mesh-ready/a", "mesh-ready/b"}
    told = [json.loads(line) for line in publisher.lines]
    degraded = next(one for one in told if one["state"] == "degraded")
    assert degraded["nodes"] == ["a", "b"] and "b" in degraded["reason"] and "after 1 s" in degraded["reason"]
    assert told[-1]["state"] == "ready"


@pytest.mark.usefixtures("processes")
def test_without_an_etcd_it_serves_the_keys_until_it_is_ended(start: Start, probe: Any, publish: Any) -> None:
    port = free_port()
    nodes = {"a": probe(MUSTER_MESH_TOKEN=TOKEN), "b": probe(MUSTER_MESH_TOKEN=TOKEN)}
    words = options(Embedded(), nodes)[2:]
    publisher = publish("--listen", f"127.0.0.1:{port}", *words, MUSTER_MESH_TOKEN=TOKEN)
    publisher.until("serving the keys")
    waiting = start(
        sys.executable, "-m", "muster.mesh", "wait", NODE_NAME="b", BASILICA_RDZV_ENDPOINT=f"127.0.0.1:{port}"
    )
    assert waiting.wait() == 0
    waiting.until("mesh-wait: OK")
    refused = ask(f"127.0.0.1:{port}", "PUT", "basilica/mesh-ready/other", value="mine")
    assert refused.status == 401, "nobody else writes keys there"
    assert publisher.process.poll() is None
    publisher.process.send_signal(signal.SIGINT)
    assert publisher.wait() == 130
    assert not any("Traceback" in line for line in publisher.lines)


@pytest.mark.parametrize("other", ["", "another token that nobody guesses"])
def test_an_agent_with_another_token_is_named_and_never_obeys(
    start: Start, probe: Any, publish: Any, other: str
) -> None:
    with embedded() as place:
        nodes = {"a": probe(MUSTER_MESH_TOKEN=TOKEN), "b": probe(MUSTER_MESH_TOKEN=TOKEN)}
        env = {"MUSTER_MESH_TOKEN": other} if other else {}
        publisher = publish(*options(place, nodes, "--timeout", "1s"), **env)
        line = publisher.until("degraded")
        assert "agent of a" in line
        waiter(start, place, "b").until("mesh-wait: DEGRADED")
        assert keys(place) == {"mesh-degraded/a", "mesh-degraded/b"}


def test_an_address_that_belongs_to_another_node_is_named(probe: Any, publish: Any) -> None:
    with embedded() as place:
        a, b = probe("a"), probe("b")
        publisher = publish(*options(place, {"a": b, "b": a}))
        publisher.until("the agent there is that of b")


def test_an_etcd_that_is_not_there_yet_is_told_of_and_waited_for(probe: Any, publish: Any, tmp_path: Path) -> None:
    place = Etcd(tmp_path)
    nodes = {"a": probe(), "b": probe()}
    publisher = publish(*options(place, nodes))
    publisher.until("it is tried again")
    publisher.until("ready")
    place.start()
    try:
        assert publisher.wait() == 0, publisher.lines
        assert keys(place) == {"mesh-ready/a", "mesh-ready/b"}
    finally:
        place.stop()


def test_an_agent_outlives_strangers_and_a_publisher_that_dies(place: Server, probe: Any, publish: Any) -> None:
    nodes = {"a": probe(), "b": probe()}
    idle = socket.create_connection(("127.0.0.1", nodes["a"]))
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300_000, b'{"muster":"observe","nonce":3}\n', b"[]\n"):
        with socket.create_connection(("127.0.0.1", nodes["a"])) as stranger:
            stranger.settimeout(PATIENCE_S)
            try:
                stranger.sendall(sent)
                assert stranger.recv(100) == b""
            except ConnectionResetError:
                pass
    dying = publish(*options(place, {**nodes, "c": free_port()}))
    dying.until("a ↔ c")
    dying.end()
    assert publish(*options(place, nodes)).wait() == 0
    idle.close()


# From a command ----------------------------------------------------------------------------------


def test_the_verdict_of_a_command_counts(place: Server, start: Start, publish: Any, tmp_path: Path) -> None:
    mark = tmp_path / "up"
    command = f"sh -c 'echo waits for $MUSTER_MESH_NODES; test -e {mark}'"
    words = ["--etcd", f"http://{place.address}", "--prefix", "basilica", "--node", "a", "--node", "b"]
    publisher = publish(*words, "--verdict", command, "--every", "0.1s", "--timeout", "1s")
    waiting = waiter(start, place, "b")
    assert "waits for a b" in publisher.until("degraded")
    waiting.until("mesh-wait: DEGRADED")
    mark.touch()
    assert publisher.wait() == 0
    assert keys(place) == {"mesh-ready/a", "mesh-ready/b"}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("echo down; exit 1", "the mesh converges: down"),
        ("echo down && false", "the mesh converges: down"),
        ("! false && test -n $HOME || exit 3", "the command calls the mesh of 1 node ready"),
    ],
)
def test_a_shell_runs_the_command(publish: Any, command: str, line: str) -> None:
    publisher = publish("--node", "a", "--verdict", command, "--listen", f"127.0.0.1:{free_port()}", HOME="/")
    publisher.until(line)
    assert ("ready" in "".join(publisher.lines)) == ("ready" in line), publisher.lines


def test_names_of_nodes_stay_as_they_are_in_a_reason() -> None:
    nodes = {"workers-1": ("127.0.0.1", 1), "workers-2": ("127.0.0.1", 2)}
    finding = Agents(nodes, "").judge(None, 60, 0.0)
    assert "workers-1 ↔ workers-2" in finding.reason
    assert judge_command(True, "", 1, None, 60, 0.0).reason == "the command calls the mesh of 1 node ready"


def test_a_command_s_verdict_follows_the_rules_of_the_gate() -> None:
    begun = judge_command(False, "no", 2, None, 60, now=100)
    assert begun.gate == Gate(GateState.CONVERGING, 2, 100) and begun.look_at == 160
    late = judge_command(False, "no", 2, begun.gate, 60, now=160)
    assert late.gate.state is GateState.DEGRADED and "no" in late.reason and late.look_at is None
    assert judge_command(False, "no", 2, late.gate, 60, now=170).gate.state is GateState.DEGRADED
    assert judge_command(True, "", 2, late.gate, 60, now=180).gate.state is GateState.READY
    assert judge_command(True, "", 2, None, 60, now=0).gate.state is GateState.READY


# Typed wrongly -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--node", "a=127.0.0.1"], "either --etcd or --listen"),
        (["--node", "a=127.0.0.1", "--etcd", "http://h:1", "--listen", "h:1"], "either --etcd or --listen"),
        (["--node", "a", "--etcd", "http://h:1"], "--node a has no address"),
        (["--node", "a=127.0.0.0/8", "--etcd", "http://h:1"], "is a network"),
        (["--node", "a=127.0.0.1:x", "--etcd", "http://h:1"], "127.0.0.1:x"),
        (["--node", "a/b=127.0.0.1", "--etcd", "http://h:1"], "cannot be part of a key"),
        (["--node", "a=127.0.0.1", "--node", "a=127.0.0.2", "--etcd", "http://h:1"], "given twice"),
        (["--node", "a=10.8.0.1", "--etcd", "http://h:1"], "there is no MUSTER_MESH_TOKEN"),
        (["--node", "a", "--verdict", "no-such-program x", "--etcd", "http://h:1"], "names no program"),
        (["--node", "a", "--verdict", "test -e 'x", "--etcd", "http://h:1"], "cannot be read"),
        (["--node", "a", "--verdict", "test -e x &&", "--etcd", "http://h:1"], "cannot be read"),
        (["--node", "a", "--verdict", " ", "--etcd", "http://h:1"], "is empty"),
        (["--node", "a=127.0.0.1", "--etcd", "h"], "is not the address of an etcd"),
        (["--node", "a=127.0.0.1", "--etcd", "http://h:1", "--prefix", "/"], "is no path of keys"),
    ],
)
def test_what_is_typed_wrongly_is_named(publish: Any, words: list[str], reason: str) -> None:
    program = publish(*words)
    assert program.wait() == 2
    assert reason in program.lines[0] and len(program.lines) <= 2


def test_a_port_that_is_taken_is_named(publish: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        program = publish("--node", "a=127.0.0.1", "--listen", where)
        assert program.wait() == 7
        assert where in program.lines[0]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("listen", "env", "reason"),
    [
        ("0.0.0.0", {}, "export MUSTER_MESH_TOKEN"),
        ("127.0.0.1", {"MUSTER_MESH_TOKEN": "short"}, "can be guessed"),
        ("10.0.0.0/8", {}, "is a network"),
    ],
)
def test_an_agent_that_everybody_could_command_does_not_start(
    start: Start, listen: str, env: dict[str, str], reason: str
) -> None:
    program = start(sys.executable, "-m", "muster.mesh", "probe", "--listen", listen, **env)
    assert program.wait() == 2
    assert reason in program.lines[0]


def test_names_of_nodes_are_parts_of_a_path() -> None:
    assert lines.is_name("gpu-1.example.com")
    assert not any(map(lines.is_name, ["", ".", "..", "a/b", "a b", "a=b", "a\n", "x" * 129, 7, None]))
