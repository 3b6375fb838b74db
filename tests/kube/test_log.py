"""The journal and the records as a log of Secrets, on a real API server: is anything lost, doubled or out of order?"""

from __future__ import annotations

import asyncio
import base64
import gzip
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube import KubeConfig

from muster import errors
from muster.core.training import metering
from muster.kube.client import InDoubt, Json, KubeApi
from muster.ports import Record, Write
from muster.store import kube_batches, kube_log
from muster.store.kube_batches import Batch
from muster.store.kube_log import KubeLog
from muster.store.ledger import Ledger
from muster.types.event import Event
from tests.kube.cluster import Cluster

BOUND_S = 30.0
Fault = Callable[[str, str], Exception | None]


class FaultyApi(KubeApi):
    """`before` raises instead of asking; `after` loses the answer."""

    before: Fault
    after: Fault

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.calls: list[str] = []
        self.heal()

    def heal(self) -> None:
        self.before = self.after = lambda method, path: None

    async def request(self, method: str, path: str, **more: Any) -> Json:
        self.calls.append(method)
        if (error := self.before(method, path)) is not None:
            raise error
        answer = await super().request(method, path, **more)
        if (error := self.after(method, path)) is not None:
            raise error
        return answer


def once(method: str, error: Exception) -> Fault:
    """That happens to the first request of that kind."""
    left = [error]
    return lambda asked, path: left.pop() if asked == method and left else None


class House:
    """Where control planes open their journals one after the other, or at once."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self.namespace = namespace
        self.open_ones: list[Journal] = []

    async def open(self, name: str = "one", *, keep: int = kube_log.KEEP_EVENTS) -> Journal:
        config = KubeConfig.from_file(self._cluster.kubeconfig()).get()
        assert config is not None
        journal = Journal(FaultyApi(config), self.namespace, f"{name}/{len(self.open_ones)}", keep)
        self.open_ones.append(journal)
        await journal.open()
        return journal

    async def secrets(self) -> dict[str, Json]:
        found = await asyncio.to_thread(self._cluster.api, "GET", self._path, labelSelector=kube_batches.LABEL)
        return {one["metadata"]["name"]: one for one in found["items"]}

    async def spoil(self, name: str, data: Mapping[str, bytes]) -> None:
        """Write something else into a Secret."""
        wrong = {"data": {key: base64.b64encode(value).decode() for key, value in data.items()} or None}
        await asyncio.to_thread(self._cluster.patch, f"{self._path}/{name}", wrong)

    async def close(self) -> None:
        for journal in self.open_ones:
            await journal.log.close()
            await journal.api.close()


class Journal:
    """A log and the ledger that it serves."""

    def __init__(self, api: FaultyApi, namespace: str, identity: str, keep: int) -> None:
        self.api = api
        self.ledger = Ledger()
        self.log = KubeLog(
            *(api, namespace, identity),
            commit=self.ledger.commit,
            value=self.ledger.record,
            now=self.ledger.clock.steady,
            keep=keep,
        )

    async def open(self) -> None:
        records, last = await self.log.open()
        self.ledger.load((), records, 0, last)
        self.log.start()

    def append(self, *texts: str, **records: Any) -> asyncio.Future[None]:
        events = tuple(Event("Said", text, namespace="n", training="t") for text in texts)
        kept = tuple(Record("kind", key, None if value is None else {"is": value}) for key, value in records.items())
        return self.log.append(self.ledger.prepare(Write(events=events, records=kept)))

    def texts(self) -> list[str]:
        return [event.message for event in self.log.find(None, None, None, 0)]

    def ids(self) -> list[int]:
        return [event.id for event in self.log.find(None, None, None, 0)]

    def records(self) -> dict[str, Any]:
        return {key: value["is"] for key, value in self.ledger.records("kind").items()}


@pytest.fixture(autouse=True)
def tidied_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_log, "TIDY_EVERY_S", 3600.0)


def play(cluster: Cluster, namespace: str, scenario: Callable[[House], Awaitable[None]]) -> None:
    async def bounded() -> None:
        house = House(cluster, namespace)
        try:
            async with asyncio.timeout(BOUND_S):
                await scenario(house)
        finally:
            await house.close()

    asyncio.run(bounded())


# Reading back ------------------------------------------------------------------------------------


def test_what_was_written_is_read_back_in_order_by_the_next(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        first = await house.open()
        await asyncio.gather(first.append("a", x=1), first.append("b", "c", y=1), first.append(x=2))
        await first.append("d", y=None)
        assert first.texts() == ["a", "b", "c", "d"] and first.ids() == [1, 2, 3, 4]
        assert first.records() == {"x": 2}
        await first.log.close()
        second = await house.open()
        assert second.texts() == ["a", "b", "c", "d"] and second.records() == {"x": 2}
        await second.append("e")
        assert second.ids() == [1, 2, 3, 4, 5]
        assert [event.message for event in second.log.find("n", "t", None, 3)] == ["d", "e"]
        assert second.log.find("n", "other", None, 0) == []

    play(cluster, namespace, scenario)


def test_a_thousand_at_once_share_few_secrets(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        journal = await house.open()
        journal.api.calls.clear()
        await asyncio.gather(*(journal.append(f"number {n}", **{f"r{n}": n}) for n in range(1000)))
        assert journal.api.calls.count("POST") <= 3
        again = await house.open()
        assert again.texts() == [f"number {n}" for n in range(1000)]
        assert again.records() == {f"r{n}": n for n in range(1000)}

    play(cluster, namespace, scenario)


def test_large_records_are_split_over_secrets(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        journal = await house.open()
        large = {f"r{n}": random.Random(n).randbytes(225_000).hex()[:300_000] for n in range(6)}
        await asyncio.gather(*(journal.append(f"large {key}", **{key: value}) for key, value in large.items()))
        assert len(await house.secrets()) == 1 + 3
        again = await house.open()
        assert again.records() == large and again.ids() == [1, 2, 3, 4, 5, 6]

    play(cluster, namespace, scenario)


def test_what_the_cluster_never_takes_fails_alone(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        journal = await house.open()
        monster = random.Random(0).randbytes(1_500_000).hex()
        done = [journal.append("a", x=1), journal.append("b", monster=monster), journal.append("c", y=1)]
        results = await asyncio.gather(*done, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), errors.InvalidRequest, type(None)]
        await journal.append("d")
        again = await house.open()
        assert again.texts() == ["a", "c", "d"] and again.records() == {"x": 1, "y": 1}

    play(cluster, namespace, scenario)


@pytest.mark.parametrize(
    "data", [{"batch": b"garbage"}, {"batch": gzip.compress(b'{"by": 3}')}, {"batch": gzip.compress(b"[]")[:9]}, {}]
)
def test_a_secret_that_cannot_be_read_is_named(cluster: Cluster, namespace: str, data: dict[str, bytes]) -> None:
    async def scenario(house: House) -> None:
        first = await house.open()
        await first.append("a")
        name = max(await house.secrets())
        await house.spoil(name, {"batch": b""} | data if data else {})
        with pytest.raises(errors.InternalError, match=name) as raised:
            await house.open()
        assert "delete it" in raised.value.hint

    play(cluster, namespace, scenario)


# Who may write -----------------------------------------------------------------------------------


def test_whoever_opens_it_later_shuts_out_the_others(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        old = await house.open("old")
        await old.append("from the old one")
        new = await house.open("new")
        with pytest.raises(errors.Unavailable, match="has been replaced") as raised:
            await old.append("too late")
        assert not raised.value.retryable
        assert "another control plane" in await old.log.until_fenced()
        with pytest.raises(errors.Unavailable):
            await old.append("later still")
        await new.append("from the new one")
        assert (await house.open()).texts() == ["from the old one", "from the new one"]

    play(cluster, namespace, scenario)


def test_of_several_at_once_one_survives(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        journals = await asyncio.gather(*(house.open(f"plane {n}") for n in range(4)))
        results = await asyncio.gather(*(one.append(f"{n}") for n, one in enumerate(journals)), return_exceptions=True)
        (winner,) = [n for n, result in enumerate(results) if result is None]
        assert all(isinstance(result, errors.Unavailable) for n, result in enumerate(results) if n != winner)
        assert (await house.open()).texts() == [str(winner)]

    play(cluster, namespace, scenario)


def test_a_number_that_was_tidied_away_still_shuts_out_whoever_would_write_it(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 2)

    async def scenario(house: House) -> None:
        old, new = await house.open("old"), await house.open("new")
        for n in range(6):
            await new.append(f"{n}")
        await new.log.tidy()
        with pytest.raises(errors.Unavailable, match="has been replaced"):
            await old.append("after a long sleep")
        assert (await house.open()).texts() == [f"{n}" for n in range(6)]

    play(cluster, namespace, scenario)


@pytest.mark.parametrize("trouble", [InDoubt("the answer is lost"), errors.Conflict("another"), errors.Forbidden("no")])
def test_a_lost_answer_is_recognised_as_ones_own(cluster: Cluster, namespace: str, trouble: Exception) -> None:
    async def scenario(house: House) -> None:
        journal = await house.open()
        journal.api.after = once("POST", trouble)
        journal.api.before = once("GET", InDoubt("and so is the question what is there"))
        await asyncio.gather(journal.append("a", x=1), journal.append("b"))
        await journal.append("c")
        assert journal.ids() == [1, 2, 3]
        again = await house.open()
        assert again.texts() == ["a", "b", "c"] and again.records() == {"x": 1}

    play(cluster, namespace, scenario)


def test_a_request_that_failed_and_was_then_taken_by_another_shuts_out(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        old = await house.open("old")
        old.api.before = lambda method, path: errors.Unavailable("not sent")
        late = old.append("a")
        new = await house.open("new")
        old.api.heal()
        with pytest.raises(errors.Unavailable, match="has been replaced"):
            await late
        await new.append("b")
        assert (await house.open()).texts() == ["b"]

    play(cluster, namespace, scenario)


# Tidying -----------------------------------------------------------------------------------------


async def fill(journal: Journal, count: int, start: int = 0) -> None:
    for n in range(start, start + count):
        await journal.append(f"{n}", latest=n, **{f"r{n % 7}": n})


def filled(count: int) -> tuple[list[str], dict[str, Any]]:
    records = {f"r{n % 7}": n for n in range(count)} | {"latest": count - 1}
    return [str(n) for n in range(count)], records


def as_expected(journal: Journal, count: int) -> bool:
    return (journal.texts(), journal.records()) == filled(count)


def test_small_batches_are_put_together(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 10)
    monkeypatch.setattr(kube_batches, "FULL", 4000)

    async def scenario(house: House) -> None:
        journal = await house.open()
        for start in range(0, 60, 15):
            await fill(journal, 15, start)
            await journal.log.tidy()
        assert as_expected(journal, 60) and len(await house.secrets()) < 25
        again = await house.open()
        assert as_expected(again, 60)
        await again.log.tidy()
        await again.append("60", latest=60, r4=60)
        assert as_expected(await house.open(), 61)

    play(cluster, namespace, scenario)


@pytest.mark.parametrize("killed", [True, False])
def test_a_merge_that_is_cut_short_loses_and_doubles_nothing(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 4)

    async def scenario(house: House) -> None:
        journal = await house.open()
        await fill(journal, 12)
        before = len(await house.secrets())
        journal.api.before = lambda method, path: errors.Unavailable("no") if method == "DELETE" else None
        with pytest.raises(errors.Unavailable):
            await journal.log.tidy()
        assert len(await house.secrets()) == before
        if killed:
            journal = await house.open()
        else:
            journal.api.heal()
        assert as_expected(journal, 12)
        await journal.append("12", latest=12, r5=12)
        await journal.log.tidy()
        assert len(await house.secrets()) <= 5 and as_expected(journal, 13)
        assert as_expected(await house.open(), 13)

    play(cluster, namespace, scenario)


@pytest.mark.parametrize("lost", [InDoubt("the answer is lost"), errors.Conflict("another")])
def test_a_merge_whose_answer_is_lost_is_no_trouble(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 4)

    async def scenario(house: House) -> None:
        journal = await house.open()
        await fill(journal, 8)
        journal.api.after = once("PUT", lost)
        for start in (8, 14, 20):
            try:
                await journal.log.tidy()
            except errors.MusterError as error:
                assert error is lost  # it is told, and tried again
            await fill(journal, 6, start)
        await journal.log.tidy()
        assert as_expected(journal, 26)
        again = await house.open()
        assert as_expected(again, 26)
        await again.log.tidy()
        assert as_expected(await house.open(), 26)

    play(cluster, namespace, scenario)


def test_what_is_put_together_never_overtakes_a_full_batch(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch comes while small ones are being merged: its records are newer than theirs."""
    monkeypatch.setattr(kube_batches, "MERGE_AT", 3)
    monkeypatch.setattr(kube_batches, "FULL", 4000)

    async def scenario(house: House) -> None:
        journal = await house.open()
        for n in range(6):
            await journal.append(f"{n}", x=n)
        put, go = asyncio.Event(), asyncio.Event()
        ask = journal.api.request

        async def slow(method: str, path: str, **more: Any) -> Json:
            answer = await ask(method, path, **more)
            if method == "PUT":
                put.set()
                await go.wait()
            return answer

        monkeypatch.setattr(journal.api, "request", slow)
        tidying = asyncio.create_task(journal.log.tidy())
        await put.wait()
        await journal.append("large", x="new", filling="f" * 5000)
        go.set()
        await tidying
        for n in range(6):
            await journal.append(f"more {n}")
        await journal.log.tidy()
        assert (await house.open()).records() == {"x": "new", "filling": "f" * 5000}

    play(cluster, namespace, scenario)


def test_the_oldest_events_go_and_all_records_stay(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 3)
    monkeypatch.setattr(kube_batches, "FULL", 1200)

    async def scenario(house: House) -> None:
        journal = await house.open(keep=20)
        await journal.append("first", first=1, gone=1)
        await journal.append("second", gone=None)
        await fill(journal, 50)
        for _ in range(40):
            await journal.log.tidy()
        texts, records = filled(50)
        assert 8 <= len(journal.texts()) <= 20 and journal.texts() == texts[-len(journal.texts()) :]
        assert journal.records() == {"first": 1, **records}
        again = await house.open(keep=20)
        assert again.records() == journal.records() and again.texts() == journal.texts()
        await again.append("last")
        assert again.ids()[-1] == 53

    play(cluster, namespace, scenario)


def test_a_crowd_of_entries_pushes_out_nothing_of_what_others_have_used(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_batches, "MERGE_AT", 3)
    monkeypatch.setattr(kube_batches, "FULL", 1200)
    began = datetime(2026, 1, 1, tzinfo=UTC)

    def worked(name: str, reason: str, minutes: int) -> Event:
        at = (began + timedelta(minutes=minutes)).isoformat()
        return Event(reason, name, namespace="n", training="t", uid="u", data={"worker": name, "gpus": 2, "at": at})

    def used(journal: Journal) -> tuple[int, float, float]:
        now = began + timedelta(hours=1)
        [found] = metering.totals(metering.intervals(journal.log.find("n", "t", "u", 0), now), now=now)
        return found.workers, found.worker_seconds, found.gpu_seconds

    async def scenario(house: House) -> None:
        journal = await house.open(keep=20)

        def write(*events: Event) -> asyncio.Future[None]:
            return journal.log.append(journal.ledger.prepare(Write(events=events)))

        await write(worked("t-0", "WorkerStarted", 0), worked("t-1", "WorkerStarted", 10))
        await fill(journal, 30)
        for _ in range(40):
            await journal.log.tidy()
        await write(worked("t-0", "WorkerExited", 20))
        expected = used(journal)
        assert expected == (2, 70 * 60, 2 * 70 * 60)
        await fill(journal, 60)
        for _ in range(40):
            await journal.log.tidy()
        assert len(journal.log.find(None, None, None, 0)) <= 21
        [first, *_] = journal.log.find("n", "t", "u", 0)
        assert first.reason == "JournalTrimmed" and used(journal) == expected
        again = await house.open(keep=20)
        assert used(again) == expected

    play(cluster, namespace, scenario)


# One batch ---------------------------------------------------------------------------------------

texts = st.text(max_size=20)
values = st.none() | st.dictionaries(texts, st.integers(-(2**53), 2**53) | texts | st.booleans(), max_size=3)


@given(
    st.integers(1, 10**12 - 1),
    st.lists(st.dictionaries(texts, texts, max_size=3), max_size=5),
    st.dictionaries(st.tuples(texts, texts), values, max_size=5),
    texts,
)
def test_a_batch_is_what_its_secret_says(
    number: int, said: Sequence[dict[str, str]], records: dict[tuple[str, str], Any], by: str
) -> None:
    events: list[Json] = [{**one, "id": at} for at, one in enumerate(said, 1)]
    batch = Batch(number, events, records, by)
    secret = msgspec.json.decode(msgspec.json.encode(batch.to_secret()))
    secret["metadata"]["resourceVersion"] = "7"
    found = Batch.from_secret(secret)
    assert (found.number, found.events, found.records, found.by) == (number, events, records, by)
    assert (found.version, found.last_event) == ("7", len(events))
    assert found.to_secret()["metadata"]["resourceVersion"] == "7"
