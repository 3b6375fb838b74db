from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from muster import files
from muster.server.audit import Audit, AuditSize
from muster.types.audit import AuditEntry
from tests.cli.conftest import Muster

AN_HOUR = timedelta(hours=1)


def an_entry(decision: Any = "allowed", ago: timedelta = timedelta(0), **more: Any) -> AuditEntry:
    told: dict[str, Any] = {"who": "ann", "role": "editor", "from_": "10.0.0.1", "method": "POST", "status": 202}
    return AuditEntry(datetime.now(UTC) - ago, decision, **(told | {"path": "/v1/trainings/demo/scale"} | more))


def write(*entries: AuditEntry, size: AuditSize | None = None) -> Path:
    files.home().mkdir(exist_ok=True)
    audit = Audit(files.home(), size)
    for entry in entries:
        audit.note(entry)
    audit.stop()
    return files.home() / "audit.log"


def test_the_newest_come_last_with_who_what_and_from_where(muster: Muster) -> None:
    write(an_entry(ago=2 * AN_HOUR), an_entry("refused", who="-", role="-", method="GET", status=401))
    said = muster("audit")

    title, first, last = said.out.splitlines()
    assert title.split() == ["TIME", "DECISION", "WHO", "ROLE", "FROM", "STATUS", "WHAT"]
    assert first.endswith("POST /v1/trainings/demo/scale") and "ann" in first and "10.0.0.1" in first
    assert " refused " in last and " 401 " in last


def test_what_is_not_asked_for_is_left_out(muster: Muster) -> None:
    write(
        an_entry(ago=2 * AN_HOUR),
        an_entry("refused", who="eve", status=403),
        an_entry("ended", who="eve", status=401),
        an_entry("failed", who="eve", status=409),
        an_entry(),
    )

    def shown(*options: str) -> list[tuple[str, str]]:
        items = json.loads(muster("audit", "-o", "json", *options).out)["items"]
        return [(one["who"], one["decision"]) for one in items]

    assert len(shown()) == 5
    assert shown("--since", "1h") == [("eve", "refused"), ("eve", "ended"), ("eve", "failed"), ("ann", "allowed")]
    assert shown("--refused") == [("eve", "refused"), ("eve", "ended")]
    assert shown("--who", "ann", "--since", "1h") == [("ann", "allowed")]
    assert shown("-n", "2") == [("eve", "failed"), ("ann", "allowed")]
    assert len(shown("-n", "0")) == 5


def test_what_was_rotated_is_read_too(muster: Muster) -> None:
    for number in range(5):
        path = write(*(an_entry(about=f"ns/{number}-{one}") for one in range(200)), size=AuditSize(1 << 16, 4))

    items = json.loads(muster("audit", "-n", "0", "-o", "json").out)["items"]
    told = [one["about"] for one in items]
    assert (path.parent / "audit.log.3").exists()
    assert told == [f"ns/{number}-{one}" for number in range(5) for one in range(200)][-len(told) :]
    assert len(told) > 400


def test_what_strangers_wrote_cannot_drive_the_terminal(muster: Muster) -> None:
    write(an_entry("refused", path="/v1/\x1b[2J\x1b]0;owned\x07\r\nfake   allowed   root", forwarded_for="\x9b31m"))
    said = muster("audit")

    assert len(said.out.splitlines()) == 2
    assert not any(char in said.out for char in "\x1b\x07\r\x9b")


def test_lines_that_stand_for_others_and_lines_that_are_missing_are_said(muster: Muster) -> None:
    write(an_entry("refused", more=297), an_entry("lost", more=12))
    said = muster("audit").out

    assert "297 more, the last was POST /v1/trainings/demo/scale" in said
    assert "12 lines could not be written" in said


def test_lines_that_cannot_be_read_are_passed_over(muster: Muster) -> None:
    path = write(an_entry())
    with path.open("a") as file:
        file.write('nonsense\n{"at": "never", "decision": "allowed"}\n[]\n{"at": "2026-01-31T12:00:00Z"}\n{"at": ')

    assert len(json.loads(muster("audit", "-o", "json").out)["items"]) == 1


def test_nothing_to_show_is_said_and_is_no_error(muster: Muster) -> None:
    nothing = muster("audit")
    write(an_entry())
    none_like_that = muster("audit", "--who", "nobody")

    assert (nothing.code, nothing.out) == (none_like_that.code, none_like_that.out) == (0, "")
    assert "there is no" in nothing.err and "nothing like that" in none_like_that.err


@pytest.mark.parametrize("options", [("--since", "soon"), ("-n", "-1"), ("-n", "many"), ("-o", "xml")])
def test_what_is_typed_wrongly_is_answered_as_that(muster: Muster, options: tuple[str, str]) -> None:
    said = muster("audit", *options)

    assert (said.code, said.out) == (2, "")
    assert "hint: muster audit" in said.err


def test_a_link_in_its_place_is_not_followed(muster: Muster, tmp_path: Path) -> None:
    files.home().mkdir(exist_ok=True)
    (tmp_path / "secret").write_text("{}")
    (files.home() / "audit.log").symlink_to(tmp_path / "secret")
    said = muster("audit")

    assert said.code == 1 and "cannot be read" in said.err and "hint: ls -l" in said.err


@pytest.mark.usefixtures("processes")
def test_following_goes_on_through_a_rotation_and_ends_with_ctrl_c() -> None:
    path = write(an_entry(about="ns/first"))
    command = [sys.executable, "-m", "muster.cli.main", "audit", "-f", "-o", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["about"] == "ns/first"
        write(an_entry(about="ns/second"))
        assert json.loads(process.stdout.readline())["about"] == "ns/second"
        path.rename(path.with_name("audit.log.1"))
        write(an_entry(about="ns/third"))
        assert json.loads(process.stdout.readline())["about"] == "ns/third"
        process.send_signal(2)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()


def test_what_is_done_to_tokens_here_is_told_too_and_their_secrets_are_not(muster: Muster) -> None:
    made = muster("token", "create", "ci", "--role", "viewer")
    rotated = muster("token", "rotate", "ci")
    muster("token", "revoke", "ci")
    said = muster("audit").out

    assert [line.split()[-3:] for line in said.splitlines()[1:]] == [
        ["token", verb, "ci"] for verb in ("create", "rotate", "revoke")
    ]
    assert made.out.strip() not in said and rotated.out.strip() not in said
