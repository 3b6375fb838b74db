"""`mesh_wait` against servers that work: a real etcd, and our own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import muster
from tests.mesh import servers
from tests.mesh.servers import Embedded, Etcd, Server, ask

PATIENT_S = 20.0
SOON_S = 5.0  # far from the 20 s and 60 s that a mistake costs, with both cores busy
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    status: str | None
    took_s: float
    log: list[str]

    @property
    def word(self) -> str:
        return self.log[-1].split()[1] if self.log else ""


Wait = Callable[..., Ended]
VARIABLES = re.compile(r"(MUSTER_(MESH|RDZV)_|BASILICA_|NODE_NAME|KUBERNETES_NODE_NAME)")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if VARIABLES.match(name):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def wait(clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wait:
    """Waits with these variables, and tells how it ended."""

    def wait(timeout: float = PATIENT_S, **env: str) -> Ended:
        for name, value in env.items():
            clean.setenv(name, value)
        begun = time.monotonic()
        muster.mesh_wait(timeout)
        took_s = time.monotonic() - begun
        return Ended(muster.mesh_status(), took_s, capsys.readouterr().err.splitlines())

    return wait


@pytest.fixture
def node() -> str:
    return f"node-{uuid.uuid4().hex}"


@contextlib.contextmanager
def soon(do: Callable[[], object], after_s: float = 0.3) -> Iterator[None]:
    """Beside the wait, once that has settled; nothing tells when it has."""
    timer = threading.Timer(after_s, do)
    timer.start()
    yield
    timer.join()


def write(place: Server, *path: str) -> None:
    assert ask(place.address, "PUT", "/".join(path), value="now").status == 201


# Keys --------------------------------------------------------------------------------------------


def test_a_key_that_is_there_opens_at_once(place: Server, wait: Wait, node: str) -> None:
    write(place, "muster/mesh-ready", node)
    ended = wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address)
    assert (ended.status, ended.word) == ("ready", "OK")
    assert ended.took_s < SOON_S
    begin, end = ended.log
    assert begin == f"mesh-wait: BEGIN host={node} endpoint={place.address} timeout=20"
    assert re.fullmatch(r"mesh-wait: OK after=\d+\.\d+s", end)


@pytest.mark.parametrize(("key", "status", "word"), [("ready", "ready", "OK"), ("degraded", "degraded", "DEGRADED")])
def test_a_key_written_while_it_waits_opens_by_the_long_poll(
    place: Server, wait: Wait, node: str, key: str, status: str, word: str
) -> None:
    with soon(lambda: write(place, f"muster/mesh-{key}", node)):
        ended = wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address, MUSTER_MESH_POLL_S="60")
    assert (ended.status, ended.word) == (status, word)
    assert 0.25 < ended.took_s < SOON_S


def test_ready_wins_over_degraded(place: Server, wait: Wait, node: str) -> None:
    write(place, "muster/mesh-degraded", node)
    write(place, "muster/mesh-ready", node)
    assert wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address).status == "ready"


def test_a_key_that_never_comes_is_a_timeout(place: Server, wait: Wait, node: str) -> None:
    write(place, "muster/mesh-ready", f"{node}-other")
    write(place, "muster/default/other/mesh-ready", node)
    ended = wait(0.6, NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address)
    assert (ended.status, ended.word) == ("timeout", "TIMEOUT")
    assert 0.6 <= ended.took_s < SOON_S


def test_what_wakes_but_does_not_open_is_waited_through(place: Server, wait: Wait, node: str) -> None:
    """The delete of a directory wakes a long poll with a 200, as any event does."""
    path = f"muster/{node}"

    def story() -> None:
        write(place, path, "mesh-ready", "other")
        assert ask(place.address, "DELETE", path, "recursive=true").status == 200
        time.sleep(0.2)
        write(place, path, "mesh-degraded", node)

    with soon(story):
        ended = wait(
            NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address, MUSTER_MESH_PREFIX=path, MUSTER_MESH_POLL_S="60"
        )
    assert ended.status == "degraded" and 0.45 < ended.took_s < SOON_S


@pytest.mark.parametrize(
    ("env", "prefix"),
    [
        ({"NODE_NAME": "{node}", "MUSTER_RDZV_ENDPOINT": "{at}"}, "muster"),
        ({"KUBERNETES_NODE_NAME": "{node}", "BASILICA_RDZV_ENDPOINT": "{at}"}, "basilica"),
        ({"NODE_NAME": "{node}", "MUSTER_MESH_ENDPOINT": "{at}", "MUSTER_MESH_PREFIX": "muster/a b/t"}, "muster/a b/t"),
    ],
)
def test_both_families_of_variables_and_prefixes_lead_to_the_key(
    place: Server, wait: Wait, node: str, env: dict[str, str], prefix: str
) -> None:
    odd = f"{node} ü/%"
    write(place, prefix, "mesh-ready", odd)
    made = {name: value.format(node=odd, at=place.address) for name, value in env.items()}
    assert wait(2, **made).status == "ready"


def test_a_name_is_resolved(place: Server, wait: Wait, node: str) -> None:
    write(place, "muster/mesh-ready", node)
    ended = wait(5, NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address.replace("127.0.0.1", "localhost"))
    assert ended.status == "ready"


def test_proxies_are_ignored(place: Server, wait: Wait, node: str) -> None:
    write(place, "muster/mesh-ready", node)
    nowhere = "http://127.0.0.1:9"
    ended = wait(2, NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address, http_proxy=nowhere, ALL_PROXY=nowhere)
    assert ended.status == "ready"


# Servers that come and go ------------------------------------------------------------------------


@pytest.fixture(params=["etcd", "embedded"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Etcd | Embedded]:
    """One of the test's own, which may be stopped."""
    if request.param == "embedded":
        with servers.embedded() as mine:
            yield mine
    elif servers.ETCD is None:
        pytest.skip(servers.NO_ETCD)
    else:
        with servers.etcd(tmp_path) as real:
            yield real


def test_a_server_that_restarts_in_between_is_found_again(lasting: Etcd | Embedded, wait: Wait, node: str) -> None:
    def story() -> None:
        lasting.stop()
        lasting.start()
        write(lasting, "muster/mesh-ready", node)

    with soon(story):
        ended = wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=lasting.address)
    assert ended.status == "ready"


def test_a_server_that_comes_late_is_found(wait: Wait, node: str) -> None:
    late = Embedded(port=servers.free_port())
    port = late.server._port

    def story() -> None:
        late.start()
        write(late, "muster/mesh-ready", node)

    with soon(story):
        ended = wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=f"127.0.0.1:{port}")
    late.close()
    assert ended.status == "ready" and ended.took_s < SOON_S


def test_a_server_that_is_away_for_a_while_is_noticed_soon_after_it_is_back(wait: Wait, node: str) -> None:
    """It hangs up on forty connections, twenty looks: pauses that doubled would come to hours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENT_S)

        def story() -> None:
            for _ in range(40):
                listener.accept()[0].close()
            for _ in range(2):
                visitor, _ = listener.accept()
                with visitor, contextlib.suppress(OSError):  # one answer is enough for it
                    visitor.recv(4096)
                    visitor.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        with soon(story, 0.0):
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            ended = wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=where, MUSTER_MESH_POLL_S="60")
    assert ended.status == "ready" and ended.took_s < SOON_S


# Nothing to wait for -----------------------------------------------------------------------------


@pytest.mark.parametrize("env", [{}, {"NODE_NAME": "a"}, {"MUSTER_MESH_ENDPOINT": "127.0.0.1:9"}])
def test_without_its_variables_it_returns_at_once_and_says_nothing(wait: Wait, env: dict[str, str]) -> None:
    ended = wait(**env)
    assert (ended.status, ended.log) == (None, []) and ended.took_s < SOON_S


@pytest.mark.parametrize(
    ("env", "timeout"),
    [
        ({"MUSTER_MESH_ENDPOINT": "https://etcd:2379"}, 5),
        ({"MUSTER_MESH_POLL_S": "0"}, 5),
        ({"MUSTER_MESH_TIMEOUT_S": "soon"}, None),
        ({}, "soon"),
        ({}, -1),
        ({}, object()),
    ],
)
def test_a_bad_setting_is_logged_and_nothing_is_waited_for(wait: Wait, env: dict[str, str], timeout: float) -> None:
    ended = wait(timeout, **{"NODE_NAME": "a", "MUSTER_MESH_ENDPOINT": "127.0.0.1:9", **env})
    assert ended.status is None and ended.took_s < SOON_S
    assert [line.split()[:2] for line in ended.log] == [["mesh-wait:", "SKIPPED"]]


def test_a_status_is_that_of_the_last_wait(wait: Wait, place: Server, node: str, clean: pytest.MonkeyPatch) -> None:
    write(place, "muster/mesh-degraded", node)
    assert wait(NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address).status == "degraded"
    clean.delenv("NODE_NAME")
    assert wait().status is None


# Alone in a process ------------------------------------------------------------------------------

_ALONE = """
import sys; sys.path.insert(0, {src!r})
import muster
before = set(sys.modules)
print(muster.mesh_status(), muster.mesh_wait(5), muster.mesh_status())
foreign = {{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names - {{"muster", "__main__"}}
ours = sorted(name for name in set(sys.modules) - before if name.startswith("muster."))
print(sorted(foreign), ours)
"""


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
    return subprocess.run(
        [sys.executable, *words], env={**clean, **env}, capture_output=True, text=True, timeout=30, cwd=ROOT
    )


def mesh(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "muster.mesh", *words, **env)


def test_it_needs_nothing_but_the_standard_library(place: Server, node: str) -> None:
    write(place, "muster/mesh-ready", node)
    code = _ALONE.format(src=str(ROOT / "src"))
    done = run("-I", "-S", "-c", code, NODE_NAME=node, MUSTER_MESH_ENDPOINT=place.address)
    assert done.returncode == 0, done.stderr
    ours = ["muster.mesh", "muster.mesh.asking", "muster.mesh.settings", "muster.mesh.wait"]
    assert done.stdout.splitlines() == ["None None ready", f"[] {ours}"]


@pytest.mark.parametrize("form", ["http://{}", "http://{}/", "{}/"])
def test_a_program_for_basilica_s_sdk_waits_where_a_url_says(place: Server, node: str, form: str) -> None:
    write(place, "basilica/mesh-degraded", node)
    code = "from muster.compat import basilica as b; print(b.mesh_status(), b.mesh_wait(30), b.mesh_status())"
    done = run("-c", code, NODE_NAME=node, BASILICA_RDZV_ENDPOINT=form.format(place.address))
    assert (done.returncode, done.stdout) == (0, "None None degraded\n"), done.stderr


@pytest.mark.parametrize("ruin", ["sys.stderr = None", "sys.stderr.close()", "os.close(2)"])
def test_a_stderr_that_takes_nothing_is_no_reason_to_raise(ruin: str) -> None:
    code = f"import os, sys, muster; {ruin}; muster.mesh_wait(0.3); print(muster.mesh_status())"
    done = run("-c", code, NODE_NAME="a", MUSTER_MESH_ENDPOINT="127.0.0.1:9")
    assert (done.returncode, done.stdout) == (0, "timeout\n"), done.stderr


def test_too_few_files_or_threads_are_no_reason_to_raise() -> None:
    code = (
        "import resource, threading, muster, socket; from muster.mesh import wait\n"
        "held = [socket.socket() for _ in range(40)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 1,) * 2)\n"
        "muster.mesh_wait(0.3); print(muster.mesh_status())\n"
        "[one.close() for one in held[-5:]]\n"
        "muster.mesh_wait(0.3); print(muster.mesh_status())\n"
    )
    done = run("-c", code, NODE_NAME="a", MUSTER_MESH_ENDPOINT="localhost:9")
    assert (done.returncode, done.stdout) == (0, "timeout\ntimeout\n"), done.stderr


def test_an_interrupt_goes_through() -> None:
    code = "import muster\ntry:\n    muster.mesh_wait(20)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    clean = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
    env = {**clean, "NODE_NAME": "a", "MUSTER_MESH_ENDPOINT": "127.0.0.1:9"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "BEGIN" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "interrupted\n"


# In front of a command ---------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_the_command_takes_the_place_of_the_wait(place: Server, node: str) -> None:
    write(place, "muster/mesh-degraded", node)
    script = (
        "import os, signal, muster; print(os.getpid(), muster.mesh_status(), int(signal.getsignal(signal.SIGTERM)))"
    )
    words = ["wait", "--timeout", "5", "--", sys.executable, "-c", script, "--"]
    clean = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
    env = {**clean, "NODE_NAME": node, "MUSTER_MESH_ENDPOINT": place.address}
    process = subprocess.Popen(
        [sys.executable, "-m", "muster.mesh", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, f"{process.pid} degraded {int(signal.SIG_DFL)}\n")
    assert "mesh-wait: DEGRADED" in err


@pytest.mark.parametrize("timeout", ["0.3", "soon"])
@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_the_command_runs_whatever_the_wait_came_to(timeout: str) -> None:
    env = {"NODE_NAME": "a", "MUSTER_MESH_ENDPOINT": "127.0.0.1:9"}
    done = mesh("wait", "--timeout", timeout, "--", "sh", "-c", "echo ran; exit 7", **env)
    assert (done.returncode, done.stdout) == (7, "ran\n")


@pytest.mark.usefixtures("processes")
def test_the_command_may_be_killed_by_a_broken_pipe() -> None:
    done = mesh("wait", "--", "sh", "-c", "kill -PIPE $$; echo survived")
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("command", "code"), [("no-such-command", 127), ("/no/such/command", 127), ("/", 126), ("/etc/passwd", 126)]
)
def test_a_command_that_cannot_run_is_named(command: str, code: int) -> None:
    done = mesh("wait", "--", command)
    assert done.returncode == code
    assert done.stderr.startswith(f"mesh-wait: cannot run '{command}': ") and done.stderr.count("\n") == 1


@pytest.mark.usefixtures("processes")
def test_a_wait_without_a_command_ends_well_and_wrong_words_do_not() -> None:
    assert mesh("wait").returncode == 0
    assert mesh("wait", "python", "train.py").returncode == 2
    assert mesh().returncode == 2


@pytest.mark.usefixtures("processes")
def test_a_wait_can_be_ended_by_a_signal() -> None:
    clean = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
    env = {**clean, "NODE_NAME": "a", "MUSTER_MESH_ENDPOINT": "127.0.0.1:9"}
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        words = [sys.executable, "-m", "muster.mesh", "wait", "--", "true"]
        process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert "BEGIN" in process.stderr.readline()
        process.send_signal(number)
        assert process.communicate(timeout=10)[1] == ""
        assert process.returncode == code


@pytest.mark.usefixtures("processes")
def test_status_asks_once(place: Server, node: str) -> None:
    env = {"NODE_NAME": node, "MUSTER_MESH_ENDPOINT": place.address}
    said = [mesh("status")]
    said.append(mesh("status", **env))
    write(place, "muster/mesh-degraded", node)
    said.append(mesh("status", **env))
    write(place, "muster/mesh-ready", node)
    said.append(mesh("status", **env))
    said.append(mesh("status", NODE_NAME=node, MUSTER_MESH_ENDPOINT="127.0.0.1:9"))
    assert [done.stdout.strip() for done in said] == ["none", "waiting", "degraded", "ready", "waiting"]
    assert {done.returncode for done in said} == {0}
    assert "HTTP 404" in said[1].stderr and "refused" in said[-1].stderr.lower()


def test_no_file_or_thread_is_left_behind(real_etcd: Etcd, wait: Wait, node: str) -> None:
    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = open_now()
    assert wait(0.3, NODE_NAME=node, MUSTER_MESH_ENDPOINT=real_etcd.address).status == "timeout"
    assert open_now() == before
