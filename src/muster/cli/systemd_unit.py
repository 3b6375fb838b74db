"""The systemd user unit of the control plane: its text, its file and the orders to this user's systemd."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from muster import files
from muster.errors import Conflict

NAME = "muster.service"
_OURS = "# Written by muster server install; muster server uninstall removes it.\n"
_ORDER_S = 30.0
# What workers inherit from the control plane and a session of systemd lacks. Nothing here is a secret.
_PASSED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")
_SETTINGS = (
    *("MUSTER_GPUS", "MUSTER_POOL_GPUS_PER_NODE", "MUSTER_DOMAIN", "MUSTER_LOG_BYTES"),
    *("MUSTER_EVENTS", "MUSTER_EVENTS_PER_TRAINING", "MUSTER_AUDIT_BYTES", "MUSTER_AUDIT_FILES"),
)


def path(env: Mapping[str, str]) -> Path:
    """Return where systemd looks for this user's unit."""
    folder = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser().absolute() / "systemd" / "user" / NAME


def render(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the unit. Workers outlive the control plane, so systemd ends the control plane's own process only."""
    passed = [f"{name}={env[name]}" for name in (*_PASSED, *_SETTINGS) if env.get(name)]
    return "\n".join(
        [
            _OURS.rstrip("\n"),
            "[Unit]",
            "Description=muster control plane",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"ExecStart={_words(command, dollars=True)}",
            *(f"Environment={_words([variable])}" for variable in passed),
            "KillMode=process",
            "Restart=on-failure",
            "RestartSec=2",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def write(unit: Path, text: str) -> None:
    """Write the unit, which replaces an earlier one of muster. Raises Conflict for somebody else's file."""
    if unit.exists() and not is_ours(unit):
        raise Conflict(f"{unit} was not written by muster", hint="move it away, then install again")
    files.write_private(unit, text)


def is_ours(unit: Path) -> bool:
    try:
        return files.read_text(unit).startswith(_OURS)
    except OSError:
        return False


def order(words: Iterable[str]) -> str:
    """Give one order to this user's systemd; returns what is wrong, "" if nothing is."""
    try:
        done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, timeout=_ORDER_S)
    except FileNotFoundError:
        return "systemctl is not on this machine"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemctl: {error}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"systemctl exited with {done.returncode}"


def _words(words: Iterable[str], *, dollars: bool = False) -> str:
    """Quote words as systemd reads them: `%` begins a specifier everywhere, `$` a variable in commands."""
    quoted = []
    for word in words:
        if any(ord(character) < 32 for character in word):
            raise ValueError(f"systemd cannot be told {word!r}: it contains a control character")
        text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        quoted.append('"' + (text.replace("$", "$$") if dollars else text) + '"')
    return " ".join(quoted)
