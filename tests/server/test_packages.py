"""Code is taken from whoever may write in a namespace, and given to the workers of its trainings alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster import package, package_check, run_proof
from muster.core.keeping import TOKEN
from muster.core.packages import RECENT, UNUSED, unused
from muster.package import Entry
from muster.ports import Record, Write
from muster.sdk import flows
from muster.sdk.effects import Response
from muster.sdk.shipping import Packed
from muster.server import package_checks
from muster.server.package_checks import FairTurns, PackageChecks
from muster.store.packages import PackageFolder
from tests.server.house import House, error_of, in_house
from tests.test_package import TRICKS

SOME_TRICKS = (
    "a sparse map",
    "a negative size",
    "an absolute name",
    "a link to é with a zero in it",
    "a link through a link",
    "a device",
    "a bomb behind its end",
    "a bomb that says so",
    "a name of many megabytes",
    "no gzip",
    "an empty file",
    "its first half",
)
RUN_TOKEN = "a-token-of-the-run-0123456789"
Headers = dict[str, str]


def a_package(folder: Path, text: str = "print('hello')\n") -> tuple[str, bytes]:
    (folder / "train.py").write_text(text)
    packed = folder / "packed"
    with open(packed, "wb") as out:
        digest, _ = package.pack(folder, [Entry("train.py", len(text))], out)
    return digest, packed.read_bytes()


def address(digest: str, namespace: str = "default") -> str:
    return f"/v1/namespaces/{namespace}/packages/{digest}"


def in_store(tmp_path: Path, test: Any, most: int = 1 << 20) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    kept = PackageFolder(tmp_path / "packages", most)
    in_house(tmp_path, test, packages=kept, incoming=incoming)
    assert list(incoming.iterdir()) == [], "what was coming is gone"


async def sent(house: House, folder: Path, client: httpx2.AsyncClient | None = None) -> str:
    digest, content = a_package(folder)
    answer = await (client or house.client).put(address(digest), content=content)
    assert answer.status_code in (200, 201), answer.text
    return digest


async def with_worker(house: House, digest: str) -> tuple[str, Headers]:
    """A training with that code, whose workers have a token; where one fetches it, and with what."""
    made = await house.submit(package=digest, script="train.py", command=None)
    record = Record(TOKEN, made["metadata"]["uid"], {"token": RUN_TOKEN})
    await house.store.write(Write(records=(record,)))
    proof = run_proof.of_package(RUN_TOKEN, digest)
    return "/packages/default/demo", {"Authorization": f"{run_proof.SCHEME} {proof}"}


def test_code_is_sent_once_and_fetched_by_a_worker(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest, content = a_package(tmp_path)
        assert (await house.client.get(address(digest))).status_code == 404
        first = await house.client.put(address(digest), content=content)
        assert first.status_code == 201 and first.json()["size"] == len(content)
        assert (await house.client.put(address(digest), content=content)).status_code == 200
        assert (await house.client.get(address(digest))).json()["digest"] == digest
        path, shows = await with_worker(house, digest)
        fetched = await house.with_token(None).get(path, headers=shows)
        assert fetched.status_code == 200 and fetched.content == content
        assert int(fetched.headers["content-length"]) == len(content)

    in_store(tmp_path, test)


def test_a_training_whose_code_was_not_sent_is_refused(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest = f"sha256:{'0' * 64}"
        body = {"metadata": {"name": "demo"}, "spec": {"script": "train.py", "package": digest}}
        answer = await house.client.post("/v1/namespaces/default/trainings", json=body)
        assert answer.status_code == 422 and "has not been sent" in error_of(answer)["message"]
        await sent(house, tmp_path)
        elsewhere = {**body, "spec": {"script": "train.py", "package": await sent(house, tmp_path)}}
        answer = await house.client.post("/v1/namespaces/other/trainings", json=elsewhere)
        assert answer.status_code == 422, "code of one namespace is not another's"

    in_store(tmp_path, test)


@pytest.mark.parametrize(
    ("field", "value"),
    [("script", "/etc/passwd"), ("script", "../x.py"), ("workingDir", "/root"), ("workingDir", "a/..")],
)
def test_paths_of_a_training_with_code_are_within_it(tmp_path: Path, field: str, value: str) -> None:
    async def test(house: House) -> None:
        spec = {"script": "train.py", "package": await sent(house, tmp_path), field: value}
        body = {"metadata": {"name": "demo"}, "spec": spec}
        answer = await house.client.post("/v1/namespaces/default/trainings", json=body)
        assert answer.status_code == 422
        assert [one["field"] for one in error_of(answer)["details"]["fields"]] == [f"spec.{field}"]

    in_store(tmp_path, test)


@pytest.mark.parametrize("kinds", [SOME_TRICKS, pytest.param(tuple(TRICKS), marks=pytest.mark.soak)], ids=len)
def test_what_is_no_package_is_not_taken(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Send tricks to the process of the check; `tests/test_package.py` tries all of them without that process."""

    async def test(house: House) -> None:
        for kind in kinds:
            digest = f"sha256:{hashlib.sha256(TRICKS[kind]).hexdigest()}"
            answer = await house.client.put(address(digest), content=TRICKS[kind])
            assert answer.status_code == 422, kind
            assert "this package is refused" in error_of(answer)["message"], kind
            assert (await house.client.get(address(digest))).status_code == 404, kind

    in_store(tmp_path, test)


def test_bytes_that_are_others_than_their_name_says_are_not_taken(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest, content = a_package(tmp_path)
        for wrong in (content[:-1], content[:50] + b"x" + content[51:], b""):
            answer = await house.client.put(address(digest), content=wrong)
            assert answer.status_code == 422 and "not what was sent" in error_of(answer)["message"]

    in_store(tmp_path, test)


def test_too_much_is_refused_before_it_has_come_and_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "MOST_PACKED", 100_000)

    async def test(house: House) -> None:
        digest = f"sha256:{'0' * 64}"
        told = await house.client.put(address(digest), content=bytes(100_001))

        async def unannounced() -> Any:
            for _ in range(20):
                yield bytes(10_000)

        untold = await house.client.put(address(digest), content=unannounced())
        assert [told.status_code, untold.status_code] == [413, 413]

    in_store(tmp_path, test)


def test_there_is_only_so_much_room(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest, content = a_package(tmp_path)
        answer = await house.client.put(address(digest), content=content)
        assert answer.status_code == 403 and "delete trainings" in error_of(answer)["hint"]

    in_store(tmp_path, test, most=100)


def test_a_full_namespace_loses_what_no_training_names_and_never_what_one_does(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        async def send(number: int, namespace: str = "default") -> tuple[str, int]:
            (tmp_path / "train.py").write_bytes(os.urandom(200_000))
            with open(tmp_path / "packed", "wb") as out:
                digest, _ = package.pack(tmp_path, [Entry("train.py", 200_000)], out)
            content = (tmp_path / "packed").read_bytes()
            return digest, (await house.client.put(address(digest, namespace), content=content)).status_code

        named, status = await send(0)
        assert status == 201
        await house.submit(package=named, script="train.py", command=None)
        unused, status = await send(1)
        assert status == 201
        _, refused = await send(2)
        assert refused == 403, "one is in use, and the other was sent just now"
        house.services.clock.at += RECENT  # type: ignore[attr-defined]
        third, status = await send(3)
        assert status == 201
        kept = [(await house.client.get(address(digest))).status_code for digest in (named, unused, third)]
        assert kept == [200, 404, 200]
        assert (await send(4, "other"))[1] == 201, "a full namespace keeps no other one out"

    in_store(tmp_path, test, most=2_000_000)


def test_code_that_was_asked_for_stays_for_a_training_that_is_about_to_name_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest = await sent(house, tmp_path)
        house.services.clock.at += UNUSED  # type: ignore[attr-defined]
        await house.client.get(address(digest))
        assert house.services.packages is not None
        assert unused(house.services.packages.kept(), [], house.services.clock.now()) == []

    in_store(tmp_path, test)


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_who_may_not_write_there_neither_sends_nor_asks(tmp_path: Path, method: str) -> None:
    async def test(house: House) -> None:
        digest, content = a_package(tmp_path)
        await sent(house, tmp_path)
        for client in (house.as_role("viewer"), house.as_role("editor", "other")):
            answer = await client.request(method, address(digest), content=content if method == "PUT" else None)
            assert answer.status_code == 403
        assert (await house.with_token(None).request(method, address(digest))).status_code == 401

    in_store(tmp_path, test)


def test_nobody_but_a_worker_of_that_training_gets_its_code(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        digest = await sent(house, tmp_path)
        path, shows = await with_worker(house, digest)
        stranger = house.with_token(None)
        proof = shows["Authorization"].partition(" ")[2]
        for given in ("", RUN_TOKEN, f"Bearer {proof}", f"{run_proof.SCHEME} {RUN_TOKEN}", f"{run_proof.SCHEME} é"):
            answer = await stranger.get(path, headers=[(b"Authorization", given.encode())] if given else [])
            assert answer.status_code == 401, given
        assert (await house.client.get(path)).status_code == 401, "nor with a token of the API"
        assert (await stranger.get("/packages/default/other", headers=shows)).status_code == 401
        another = run_proof.of_package(RUN_TOKEN, f"sha256:{'1' * 64}")
        answer = await stranger.get(path, headers={"Authorization": f"{run_proof.SCHEME} {another}"})
        assert answer.status_code == 401

    in_store(tmp_path, test)


@pytest.mark.parametrize("name", ["sha256:xyz", "..", "%2e%2e%2fserver.json", f"SHA256:{'0' * 64}"])
def test_what_is_no_hash_leads_nowhere(tmp_path: Path, name: str) -> None:
    async def test(house: House) -> None:
        assert (await house.client.get(address(name))).status_code == 404
        assert (await house.client.put(address(name), content=b"x")).status_code in (404, 405)

    in_store(tmp_path, test)


# Checks --------------------------------------------------------------------------------------------


def test_a_check_is_a_process_of_its_own_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control plane itself never reads a package, and a check that takes all memory or time refuses it."""
    limits = {}

    async def test(house: House) -> None:
        monkeypatch.setattr(package, "check", None)
        await sent(house, tmp_path)
        monkeypatch.setattr(package_check, "__name__", "tests.programs.greedy_check")
        for what in ("memory", "processor", "crash"):
            monkeypatch.setenv("LANG", what)  # one of the few variables that a check has
            digest, content = a_package(tmp_path, what)
            limits[what] = await house.client.put(address(digest), content=content, timeout=60)

    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    in_store(tmp_path, test)
    assert {what: answer.status_code for what, answer in limits.items()} == {
        "memory": 422,
        "processor": 422,
        "crash": 503,
    }
    assert "256 MiB of memory" in error_of(limits["memory"])["message"]
    assert "s of a processor" in error_of(limits["processor"])["message"]
    assert limits["crash"].headers["retry-after"] == "1"


def test_the_largest_package_passes_the_limits_of_a_check(tmp_path: Path) -> None:
    entries = [Entry(f"{number:05}/{'x' * 150}/{'y' * 100}", link="z") for number in range(33_000)]
    folders = 2 * len(entries)
    assert 0.98 * package.MOST_FILES < folders + len(entries) <= package.MOST_FILES
    with open(tmp_path / "packed", "wb") as out:
        digest, _ = package.pack(tmp_path, entries, out)
    asyncio.run(PackageChecks().check("default", tmp_path / "packed", digest))


def test_too_many_packages_of_a_namespace_wait_for_nobody_and_keep_no_other_namespace_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_checks, "OPEN_IN_ALL", package_checks.OPEN_OF_NAMESPACE + 1)

    async def test(house: House) -> None:
        digest, content = a_package(tmp_path)
        checks = house.services.checks
        with contextlib.ExitStack() as open_ones:
            for _ in range(package_checks.OPEN_OF_NAMESPACE):
                open_ones.enter_context(checks.place("default"))
            refused = await house.client.put(address(digest), content=content + bytes(1 << 20))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "namespace 'default'" in error_of(refused)["message"]
            assert (await house.client.put(address(digest, "other"), content=content)).status_code == 201
            open_ones.enter_context(checks.place("other"))
            full = await house.client.put(address(digest, "third"), content=content)
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert (await house.client.put(address(digest), content=content)).status_code == 201

    in_store(tmp_path, test)


def test_turns_go_round_between_namespaces() -> None:
    order: list[str] = []

    async def one(turns: FairTurns, namespace: str) -> None:
        async with turns.turn(namespace):
            order.append(namespace)
            await asyncio.sleep(0)

    async def run() -> None:
        turns = FairTurns(1)
        waiting = [asyncio.create_task(one(turns, name)) for name in ("a", "a", "a", "a", "b", "b", "c")]
        await asyncio.sleep(0)
        waiting[2].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await one(turns, "a")

    asyncio.run(asyncio.wait_for(run(), 60))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


def test_a_client_sends_again_what_came_while_too_many_were_checked(tmp_path: Path) -> None:
    """It is asked as a flow, so that no time passes."""
    (tmp_path / "packed").write_bytes(b"x")
    flow = flows.send_package("default", Packed(f"sha256:{'0' * 64}", tmp_path / "packed", 1))
    busy = Response(429, b'{"error": {"code": "too_many_requests", "message": "busy"}}')
    absent = Response(404, b'{"error": {"code": "not_found", "message": "absent"}}')
    effects: list[object] = [next(flow), flow.send(absent), flow.send(0.0), flow.send(busy)]
    effects += [flow.send(1.0), flow.send(None)]
    kinds = [type(effect).__name__ for effect in effects]
    assert kinds == ["HttpRequest", "Now", "HttpRequest", "Now", "Pause", "HttpRequest"]
    with pytest.raises(StopIteration) as done:
        flow.send(Response(201, b"{}"))
    assert done.value.value is True
