"""A torch that is too old is refused at the start of a rank; a store that cannot be reached fails the rank soon."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.cli import doctor
from muster.node import torch_version
from tests.fleet import Fleet, Process, eventually, family

pytestmark = pytest.mark.xdist_group("torch")

USES = "import torch\nprint('it ran', flush=True)\n"
GROUP = """\
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
print("imported", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=timedelta(minutes=30))
print("formed", flush=True)
"""


def put_torch(folder: Path, version: str) -> str:
    """Write a package that shadows torch, and return the PYTHONPATH for it."""
    package = folder / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    (package / "__init__.py").write_text("from .version import __version__\n\n\ndef initial_seed():\n    return 0\n")
    return str(package.parent)


def a_node(fleet: Fleet, program: str, *options: str, packages: str = "") -> Process:
    path = fleet.folder / "script.py"
    path.write_text(program)
    fleet.coordinator()
    return fleet.node("a", "--nnodes", "1", *options, program=(str(path), str(fleet.notes / "go")), PYTHONPATH=packages)


# An old torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (USES, []),
        pytest.param(USES, ["--warm", "never"], marks=pytest.mark.scenario),
        (USES, ["--preload", "none"]),
        (USES, ["--preload", "torch"]),
        ("import torch.nn\nprint('it ran')\n", []),
        ("import importlib\nimportlib.import_module('torch')\nprint('it ran')\n", []),
        ("import os\nos.environ['A'] = os.getcwd()\n" + USES, []),
    ],
    ids=["imported", "never warm", "nothing preloaded", "preloaded", "a module of it", "hidden", "after a variable"],
)
def test_an_old_torch_fails_the_run_at_once_and_says_what_to_type(
    fleet: Fleet, program: str, options: list[str]
) -> None:
    node = a_node(fleet, program, *options, packages=put_torch(fleet.folder, "2.6.0+cu124"))
    assert node.wait() == 1
    assert "it ran" not in node.text
    last = node.text.splitlines()[-1]
    told = r"torch 2\.6\.0\+cu124 is too old: muster needs torch 2\.8 or newer\. Run `\S+ -m pip install 'torch>=2\.8'`"
    assert re.search(told, last), node.text
    assert len(set(re.findall(r"muster-node\[a\] round (\d)", node.text))) <= 2, "one restart shows that none helps"


def test_an_old_torch_that_is_not_used_is_no_concern(fleet: Fleet) -> None:
    node = a_node(fleet, "print('it ran', flush=True)\n", packages=put_torch(fleet.folder, "2.6.0"))
    assert node.wait() == 0
    assert "it ran" in node.text and "too old" not in node.text


def test_a_program_that_can_do_without_torch_goes_on_without_it(fleet: Fleet) -> None:
    optional = "try:\n    __import__('torch')\nexcept ImportError:\n    print('without', flush=True)\n"
    node = a_node(fleet, optional, packages=put_torch(fleet.folder, "2.6.0"))
    assert node.wait() == 0
    assert "without" in node.text


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("2.7.1", True),
        ("2.7.1+cpu", True),
        ("1.13.1", True),
        ("2.8.0", False),
        ("2.10.0a0+git123", False),
        ("2.15.0", False),
        ("3.0", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_versions(version: str, refused: bool, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": put_torch(tmp_path, version)}
    code = (
        "from muster.node import torch_version as t; import sys; print(t.refusal()); assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert bool(ran.stdout.strip()) == refused


@pytest.mark.torches
def test_the_torch_of_this_environment_is_new_enough() -> None:
    assert torch_version.installed() and not torch_version.refusal()


def test_the_doctor_warns_of_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "2.7.1")
    [check] = [check for check in doctor._packages() if check.name == "torch"]
    assert check.state == "warn" and check.message.startswith("torch 2.7.1 is too old: muster needs torch 2.8 or newer")


def test_torchrun_says_it_too(fleet: Fleet) -> None:
    code = "from muster.node.torchrun import MusterRendezvous; MusterRendezvous(None)"
    patched = f"import torch; torch.__version__ = '2.6.0'; {code}"
    ran = subprocess.run([sys.executable, "-c", patched], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stderr.splitlines()[-1].startswith(
        "ImportError: torch 2.6.0 is too old: muster needs torch 2.8 or newer"
    )


# A store that cannot be reached -------------------------------------------------------------------


@contextlib.contextmanager
def a_listener(what: str) -> Iterator[int]:
    """A port whose listener resets each connection, or accepts it and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    if what == "resets":
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        peer.close()
                    else:
                        kept.append(peer)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        for peer in kept:
            peer.close()


@pytest.mark.torches
@pytest.mark.parametrize("what", ["resets", "swallows"])
@pytest.mark.parametrize("first", ["torch", "check"])
def test_a_rank_that_cannot_reach_its_store_fails(what: str, first: str, tmp_path: Path) -> None:
    """Torch is imported before the check is installed, as in a warm parent, or after it, by the rank."""
    installed = {
        "torch": "import torch\nfrom muster.node import store_check\nstore_check.install()\n",
        "check": "from muster.node import torch_import\ntorch_import.watch()\n",
    }[first]
    (tmp_path / "go").touch()
    with a_listener(what) as port:
        env = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "1",
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MUSTER_STORE_TIMEOUT_S": "2",
        }
        command = [sys.executable, "-c", installed + GROUP, str(tmp_path / "go")]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    why = "connection reset by peer" if what == "resets" else "it accepts the connection and does not reply"
    told = f"ConnectionError: rank 1 cannot reach the round's store at 127.0.0.1:{port} within 2 s "
    [line] = [line for line in ran.stderr.splitlines() if line.startswith(told)]
    assert why in line and "--store-timeout-s" in line


def the_store(node: Process) -> int:
    def look() -> int | None:
        for pid in family(node.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"muster\0store"):
                    return pid
        return None

    return eventually(look, "the round's store is there")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "dead"])
def test_a_run_whose_store_is_not_reached_fails_with_that_reason(fleet: Fleet, number: int) -> None:
    node = a_node(fleet, GROUP, "--max-restarts", "0", "--store-timeout-s", "2")
    node.expect("imported")
    os.kill(the_store(node), number)
    (fleet.notes / "go").touch()
    assert node.wait(120) == 1
    last = node.text.splitlines()[-1]
    assert re.search(r"rank 0 cannot reach the round's store at 127\.0\.0\.1:\d+ within 2 s", last), node.text


@pytest.mark.torches
def test_a_store_that_is_there_costs_no_wait(fleet: Fleet) -> None:
    node = a_node(fleet, GROUP + "import torch; assert dist.get_world_size() == 1\n")
    (fleet.notes / "go").touch()
    assert node.wait(120) == 0
    assert "formed" in node.text


def test_a_program_that_brings_a_store_of_its_own_is_left_alone(fleet: Fleet) -> None:
    own = "import os\nos.environ |= {'MASTER_PORT': '0', 'TORCHELASTIC_USE_AGENT_STORE': 'False'}\n"
    node = a_node(fleet, GROUP.replace("dist.init", own + "dist.init"), "--store-timeout-s", "1")
    began = time.monotonic()
    (fleet.notes / "go").touch()
    assert node.wait(120) == 0, node.text
    assert "formed" in node.text and began > 0
