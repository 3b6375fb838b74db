"""`muster server install` and `uninstall`: the unit's text, its file, and what to type without systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.cli import systemd_unit
from muster.sdk import home
from tests.cli.conftest import Muster

GOLDEN = """\
# Written by muster server install; muster server uninstall removes it.
[Unit]
Description=muster control plane
StartLimitIntervalSec=0

[Service]
ExecStart="/opt/env/bin/python" "-m" "muster.daemon" "--home" "/home/me/my $$home 100%% \\"here\\""
Environment="PATH=/opt/env/bin:/usr/bin"
Environment="MUSTER_GPUS=4"
KillMode=process
Restart=on-failure
RestartSec=2

[Install]
WantedBy=default.target
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder, and no systemd."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "config" / "systemd" / "user" / "muster.service"


def test_the_unit_is_rendered_with_quotes_as_systemd_reads_them() -> None:
    home = '/home/me/my $home 100% "here"'
    env = {"PATH": "/opt/env/bin:/usr/bin", "MUSTER_GPUS": "4", "MUSTER_TOKEN": "secret", "AWS_SECRET": "x"}
    assert systemd_unit.render(["/opt/env/bin/python", "-m", "muster.daemon", "--home", home], env) == GOLDEN


def test_a_line_break_cannot_become_a_line_of_the_unit() -> None:
    with pytest.raises(ValueError, match="control character"):
        systemd_unit.render(["python"], {"MUSTER_DOMAIN": "a\nExecStartPre=/bin/evil"})


def test_install_writes_the_unit_and_says_what_to_type_where_there_is_no_systemd(muster: Muster, config: Path) -> None:
    said = muster("server", "install", "--listen", "127.0.0.1:8470")
    assert said.code == 0, said.err
    text = config.read_text()
    assert f'ExecStart="{sys.executable}" "-m" "muster.daemon" "--home"' in text and '"127.0.0.1:8470"' in text
    assert "systemctl is not on this machine" in said.err
    assert (
        "type this" in said.err and "systemctl --user daemon-reload && systemctl --user enable --now muster" in said.err
    )
    assert "loginctl enable-linger" in said.err
    assert muster("server", "install", "--dry-run").out.startswith(systemd_unit.render([], {})[:20])
    gone = muster("server", "uninstall")
    assert gone.code == 0 and not config.exists(), gone.err


def test_orders_are_given_where_there_is_a_systemd(muster: Muster, config: Path, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "systemctl"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {orders}\n')
    stand_in.chmod(0o755)
    assert muster("server", "install").code == 0
    assert muster("server", "uninstall").code == 0
    assert orders.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now muster.service",
        "--user disable --now muster.service",
        "--user daemon-reload",
    ]


def test_somebody_elses_unit_is_neither_replaced_nor_removed(muster: Muster, config: Path) -> None:
    config.parent.mkdir(parents=True)
    config.write_text("[Service]\nExecStart=/bin/true\n")
    said = muster("server", "install")
    assert said.code != 0 and "was not written by muster" in said.err and "Traceback" not in said.err
    said = muster("server", "uninstall")
    assert said.code == 3 and "muster server install" in said.err
    assert config.read_text() == "[Service]\nExecStart=/bin/true\n"


def test_install_beside_a_control_plane_that_runs_is_refused(
    muster: Muster, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "is_locked", lambda where: True)
    said = muster("server", "install")
    assert said.code == 4 and "muster server stop" in said.err
    assert not config.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze = shutil.which("systemd-analyze", path="/usr/bin:/bin")
    assert analyze is not None
    unit = tmp_path / "muster.service"
    unit.write_text(systemd_unit.render([sys.executable, "-m", "muster.daemon", "--home", "/a b%c"], {"PATH": "/bin"}))
    done = subprocess.run([analyze, "--user", "verify", str(unit)], capture_output=True, text=True)
    assert "muster.service" not in done.stderr, done.stderr
