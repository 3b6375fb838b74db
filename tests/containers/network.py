"""Which network do machines and Pods of the lab have? One of the test's own, with a subnet of Pods for each node."""

from __future__ import annotations

import ctypes
import subprocess

HOST = "10.78.0.1"  # the API server and the DNS
SERVICES = "10.96.0.0/16"  # as tests/kube/cluster.py has it
API_SERVICE = "10.96.0.1"
PODS = "10.78.0.0/16"

_CLONE_NEWNET = 0x40000000
_SWITCH = "lab0"


def isolate() -> None:
    """Moves this thread, and whatever it starts from now on, into a new network. It goes when the last of them ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network of its own for the lab: it needs root")
    ip("link", "set", "lo", "up")
    ip("link", "add", "name", _SWITCH, "type", "bridge")
    ip("address", "add", f"{HOST}/24", "dev", _SWITCH)
    ip("link", "set", _SWITCH, "up")
    _set("net/ipv4/ip_forward", "1")
    _set("net/bridge/bridge-nf-call-iptables", "1")  # Pods of one node speak through Services, too


def address(number: int) -> str:
    """Of the node itself."""
    return f"10.78.0.{10 + number}"


def subnet(number: int) -> str:
    """Of the node's Pods."""
    return f"10.78.{number}.0/24"


def bridge(number: int) -> str:
    return f"pods{number}"


def plug_in(number: int) -> None:
    ip("address", "add", f"{address(number)}/24", "dev", _SWITCH)


def unplug(number: int) -> None:
    """As when the power goes: what its Pods had to say does not come out any more, and what is sent to them is lost."""
    ip("link", "delete", bridge(number), check=False)
    ip("route", "add", "blackhole", subnet(number), check=False)
    ip("address", "delete", f"{address(number)}/24", "dev", _SWITCH, check=False)


def plug_in_again(number: int) -> None:
    ip("route", "delete", "blackhole", subnet(number), check=False)
    plug_in(number)


def ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr}")


def _set(name: str, value: str) -> None:
    with open(f"/proc/sys/{name}", "w") as file:
        file.write(value)
