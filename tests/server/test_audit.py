"""The audit: every write and every refusal has a trace, a flood of them is bounded, and nothing waits for it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from muster.core.auditing import MOST_ALLOWED, MOST_LINES, MOST_SOURCES, Sums
from muster.daemon import options
from muster.ports import Stored, Write
from muster.server import audit
from muster.server.audit import Audit, AuditSize
from muster.server.auth import Tokens
from muster.sharing.service import PoolService
from muster.types.audit import AuditEntry
from tests.server.house import BOUND_S, SECRET, TRAININGS, House, a_body, in_house
from tests.server.test_guests import Line, asking
from tests.server.test_pools import P1, in_pool, put

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def lines(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "audit.log").read_text().splitlines()]


def an_entry(decision: Any = "allowed", **more: Any) -> AuditEntry:
    return AuditEntry(NOW, decision, **more)


def after(home: Path, test: Any, **more: Any) -> list[dict[str, Any]]:
    """What is in the audit when the server has ended."""
    in_house(home, test, **more)
    return lines(home)


def test_every_write_and_every_refusal_has_a_line_with_who_what_where_and_what_became_of_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        editor, viewer = house.as_role("editor", "default"), house.as_role("viewer", "default")
        await editor.post(TRAININGS, json=a_body("demo"), headers={"X-Request-Id": "trace-1"})
        await editor.post(TRAININGS, json=a_body("demo"))
        await editor.post(TRAININGS, json={"metadata": {}})
        await editor.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        await editor.get(f"{TRAININGS}/demo")
        await viewer.delete(f"{TRAININGS}/demo")
        await viewer.get("/v1/namespaces/other/trainings")
        await house.with_token("wrong").get(TRAININGS)
        await house.with_token(None).get("/metrics")
        await house.with_token(None).get("/healthz")

    found = after(tmp_path, test)
    assert [(one["who"], one["method"], one["status"], one["decision"]) for one in found] == [
        ("editor-0", "POST", 201, "allowed"),
        ("editor-0", "POST", 409, "failed"),
        ("editor-0", "POST", 422, "failed"),
        ("editor-0", "POST", 202, "allowed"),
        ("viewer-1", "DELETE", 403, "refused"),
        ("viewer-1", "GET", 403, "refused"),
        ("-", "GET", 401, "refused"),
        ("-", "GET", 401, "refused"),
    ]
    first, scaled = found[0], found[3]
    assert (first["about"], first["requestId"], first["from"]) == ("default/demo", "trace-1", "127.0.0.1")
    assert (scaled["path"], scaled["role"]) == (f"{TRAININGS}/demo/scale", "editor")
    assert found[1]["code"] == "already_exists" and found[4]["code"] == "forbidden"
    assert stat.S_IMODE((tmp_path / "audit.log").stat().st_mode) == 0o600


def test_no_secret_comes_into_it_wherever_it_was_put(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        token = house.services.tokens.create("ci", "editor")
        client = house.with_token(token)
        await client.post(TRAININGS, json=a_body(env={"KEY": SECRET}, secretEnv=["KEY"]))
        await client.post(f"/v1/{token}", json={"token": token})
        await client.post(f"{TRAININGS}/demo/scale?token={token}", json={"target": 3})
        await house.with_token(f"{token}x").get(f"/v1/{token}", headers={"X-Forwarded-For": token})
        house.services.tokens.revoke("ci")
        await client.get(TRAININGS)
        text.append(token)

    text: list[str] = []
    found = after(tmp_path, test)
    said = (tmp_path / "audit.log").read_text()
    assert len(found) == 5 and text[0] not in said and SECRET not in said and text[0][8:] not in said


def test_where_a_request_comes_from_cannot_be_made_up(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.with_token("wrong").get(TRAININGS, headers={"X-Forwarded-For": "10.6.6.6"})
        await house.with_token("wrong").get(TRAININGS, headers={"X-Forwarded-For": "<script>evil"})

    found = after(tmp_path, test)
    assert [(one["from"], one.get("forwardedFor")) for one in found] == [("127.0.0.1", "10.6.6.6"), ("127.0.0.1", None)]


def test_an_expired_token_and_a_stream_that_ended_say_whose_they_were(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        tokens = house.services.tokens
        old = house.with_token(tokens.create("old", "viewer", expires_in=timedelta(microseconds=1)))
        await old.get(TRAININGS)
        line = await Line.to(house, asking(house, f"{TRAININGS}/demo/logs?follow=true", tokens.create("eve", "viewer")))
        await line.reader.readuntil(b"\r\n\r\n")
        tokens.revoke("eve")
        await line.is_cut()

    found = after(tmp_path, test)[1:]
    assert [(one["who"], one["status"], one["decision"]) for one in found] == [
        ("old", 401, "refused"),
        ("eve", 401, "ended"),
    ]


def test_a_change_that_was_made_though_its_caller_was_cut_off_is_told_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House) -> None:
        reached, go, write = asyncio.Event(), asyncio.Event(), house.store.write

        async def slow(one: Write) -> Stored | None:
            reached.set()
            await go.wait()
            return await write(one)

        monkeypatch.setattr(house.store, "write", slow)
        eve = house.services.tokens.create("eve", "editor")
        body = json.dumps(a_body("made")).encode()
        head = asking(house, TRAININGS, eve, "POST", f"Content-Length: {len(body)}\r\n")
        line = await Line.to(house, head + body)
        await asyncio.wait_for(reached.wait(), BOUND_S)
        house.services.tokens.revoke("eve")
        await line.is_cut()
        go.set()
        async with asyncio.timeout(BOUND_S):
            while len(house.services.visits):
                await asyncio.sleep(0.01)
        assert house.store.version == 1

    [only] = after(tmp_path, test)
    assert (only["who"], only["status"], only["decision"], only["about"]) == ("eve", 201, "allowed", "default/made")


def test_hundreds_of_refusals_leave_a_trace_and_no_flood(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        stranger = house.with_token("guess")
        for _ in range(300):
            await stranger.get(TRAININGS)
        await house.submit()

    found = after(tmp_path, test)
    refused = [one for one in found if one["decision"] == "refused"]
    assert len(refused) == MOST_LINES + 1
    assert sum(one.get("more", 1) for one in refused) == 300
    assert [one["about"] for one in found if one["decision"] == "allowed"] == ["default/demo"]


def test_reports_of_progress_do_not_push_out_the_rest(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        for number in range(20):
            await house.client.post(f"{P1}/progress", json={"completed": number, "target": 20})

    in_pool(tmp_path, test)
    found = [one for one in lines(tmp_path) if one["path"].endswith("/progress")]
    assert len(found) == 2 and found[-1]["more"] == 19


# Sums ---------------------------------------------------------------------------------------------


def test_what_succeeds_and_what_fails_have_so_many_lines_a_minute_of_their_own() -> None:
    sums = Sums()
    assert all(sums.take(an_entry(who="a", from_="x")) for _ in range(500))
    written = [sums.take(an_entry("failed", who="a", from_="x")) for _ in range(100)]
    assert len([one for one in written if one]) == MOST_LINES
    assert sums.take(an_entry("refused", who="b", from_="x")), "others are not pushed out"
    assert list(sums.over(1000.0, NOW)) == list(sums.over(1059.0, NOW)) == []
    [summed] = sums.over(1060.0, NOW)
    assert (summed.more, summed.who, summed.decision) == (100 - MOST_LINES, "a", "failed")
    assert sums.take(an_entry("failed", who="a", from_="x")), "a new minute"
    assert list(sums.over(1120.0, NOW)) == []


def test_a_hundred_thousand_harmless_writes_do_not_wash_out_what_came_before() -> None:
    sums = Sums()
    written = [sums.take(an_entry(who="eve", path=f"/v1/{number % 5000}")) for number in range(100_000)]
    assert len([one for one in written if one]) == MOST_ALLOWED
    [summed] = sums.over(0.0, NOW, at_once=True)
    assert summed.more == 100_000 - MOST_ALLOWED
    routine = [sums.take(an_entry(who="eve", path=f"/v1/{n}"), routine=True) for n in range(100_000)]
    assert len([one for one in routine if one]) <= MOST_SOURCES + MOST_LINES


def test_a_flood_from_many_addresses_is_bounded_too() -> None:
    sums = Sums()
    written = [sums.take(an_entry("refused", from_=f"10.0.{n >> 8}.{n & 255}")) for n in range(20_000)]
    assert len([one for one in written if one]) == MOST_SOURCES + MOST_LINES
    [others] = sums.over(1000.0, NOW, at_once=True)
    assert (others.from_, others.more) == ("others", 20_000 - MOST_SOURCES - MOST_LINES)


# The file -----------------------------------------------------------------------------------------


def test_it_is_rotated_by_size_and_no_more_than_that_is_kept(tmp_path: Path) -> None:
    kept = Audit(tmp_path, AuditSize(1 << 16, 3))
    for number in range(3000):
        kept.note(an_entry(path=f"/{number}" + "x" * 180))
        if number % 500 == 0:
            time.sleep(0.01)  # lets the thread write in several goes
    kept.stop()
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["audit.log", "audit.log.1", "audit.log.2"]
    assert sum((tmp_path / name).stat().st_size for name in found) < 3 * (1 << 16) + 400_000
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in found)
    last = json.loads((tmp_path / "audit.log").read_text().splitlines()[-1])
    assert last["path"].startswith("/2999x")


@pytest.mark.parametrize("trap", ["link", "pipe", "folder", "second name"])
def test_a_trap_in_its_place_is_not_touched_and_stops_nothing(
    tmp_path: Path, trap: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim, place = tmp_path / "victim", tmp_path / "home" / "audit.log"
    place.parent.mkdir()
    victim.write_text("precious")
    if trap == "link":
        place.symlink_to(victim)
    elif trap == "pipe":
        os.mkfifo(place)
    elif trap == "folder":
        place.mkdir()
    else:
        place.hardlink_to(victim)

    async def test(house: House) -> None:
        for number in range(3):
            await house.submit(f"t-{number}")

    with caplog.at_level(logging.WARNING, "muster.audit"):
        in_house(place.parent, test)
    assert victim.read_text() == "precious"
    assert caplog.text.count("the audit cannot be written") == 1


def test_a_full_disk_stops_nothing_and_what_is_missing_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, write = [True], os.write

    def no_room(file: int, data: bytes) -> int:
        if not full[0]:
            return write(file, data)
        write(file, data[:10])  # as much as fits
        return 10

    monkeypatch.setattr(os, "write", no_room)
    kept = Audit(tmp_path)

    async def test(house: House) -> None:
        for number in range(5):
            await house.submit(f"t-{number}")
        async with asyncio.timeout(BOUND_S):
            while kept._lost != 5:
                await asyncio.sleep(0.01)
        full[0] = False
        await house.submit("last")

    with caplog.at_level(logging.WARNING, "muster.audit"):
        found = after(tmp_path, test, audit=kept)
    assert [(one["decision"], one.get("more")) for one in found] == [("lost", 5), ("allowed", None)]
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 1


def test_a_queue_that_is_full_drops_counts_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_WAITING", 10)
    kept = Audit(tmp_path)
    kept._thread = threading.Thread(target=kept._run, daemon=True)  # does not run yet
    for _ in range(25):
        kept.note(an_entry())
    kept._thread.start()
    kept.stop()
    found = lines(tmp_path)
    assert sum(one.get("more", 0) for one in found if one["decision"] == "lost") == 15
    assert len([one for one in found if one["decision"] == "allowed"]) == 10


def test_a_line_that_was_broken_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "audit.log").write_text('{"at": "2026')
    kept = Audit(tmp_path)
    kept.note(an_entry(path="/after"))
    kept.stop()
    broken, whole = (tmp_path / "audit.log").read_bytes().splitlines()
    assert audit.read_line(broken) is None and audit.read_line(whole) == an_entry(path="/after")


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "audit.log").touch(0o644)
    kept = Audit(tmp_path)
    kept.note(an_entry())
    kept.stop()
    assert stat.S_IMODE((tmp_path / "audit.log").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [("BYTES", "0"), ("BYTES", "many"), ("BYTES", "-1"), ("BYTES", "9" * 400), ("FILES", "0"), ("FILES", "1001")],
)
def test_a_size_that_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"MUSTER_AUDIT_{name}"):
        AuditSize.told({f"MUSTER_AUDIT_{name}": value})


def test_the_size_is_the_users_to_set() -> None:
    assert AuditSize.told({}) == AuditSize(10 << 20, 5)
    assert AuditSize.told({"MUSTER_AUDIT_BYTES": "100000", "MUSTER_AUDIT_FILES": "2"}) == AuditSize(100_000, 2)


def test_nobody_can_ask_the_api_for_the_audit_or_for_tokens(tmp_path: Path) -> None:
    """They are in files of the control plane's user alone."""

    async def test(house: House) -> None:
        Tokens(house.home).create("ci", "viewer")
        for path in ("/v1/audit", "/v1/tokens", "/audit.log", "/tokens.json", "/v1/../audit.log"):
            assert (await house.client.get(path)).status_code == 404

    in_house(tmp_path, test)


def test_where_the_file_ends_with_the_process_the_log_has_it_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Audit(tmp_path, echo=True)
    with caplog.at_level(logging.INFO, "muster.audit"):
        kept.note(an_entry(path="/v1/x"))
        kept.stop()
    assert [json.loads(one.message)["path"] for one in caplog.records] == ["/v1/x"]


def test_a_control_plane_with_a_size_that_makes_no_sense_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_AUDIT_FILES", "none")
    with pytest.raises(ValueError, match="MUSTER_AUDIT_FILES must be a number from 1 to 1000, not 'none'"):
        options.check(options.Options(tmp_path))
