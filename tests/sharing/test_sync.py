"""Does a pipeline that blocks get what it waits for, generate only with a lease, and act as one over its ranks?"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.errors import GrantTimeout, InvalidRequest, PipelineKilled, RequestRefused, SharingError, Unavailable
from muster.sharing import ClusterSpec, Priority, pool_log
from muster.sharing.crew import Crew
from muster.sharing.crew_hooks import owners
from muster.sharing.devices import Devices
from muster.sharing.sync import SharedPool, connect
from tests.fleet import PROGRAMS, Process, eventually, free_port
from tests.sharing.blocking import (
    BOUND_S,
    ONE,
    Checker,
    ControlPlane,
    Engine,
    PoolHouse,
    control_plane,
    in_process,
    in_thread,
)

TWO = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1])}


# Stages


def test_a_pipeline_generates_trains_and_holds_nothing_in_between() -> None:
    with in_process() as house:
        engine = Engine()
        pool = house.pipeline("p1", TWO, engine)
        for step in range(2):
            with pool.generation(step, 4) as rollout:
                with rollout.turn() as turn:
                    assert turn.gpus and {gpu for _, gpus in engine.awake.items() for gpu in gpus} >= set(turn.gpus)
                    pool.completed(2)
                with rollout.turn():
                    rollout.completed(2)
            assert not engine.awake and not house.snapshot().leases
            with pool.training() as stage:
                assert stage.gpus == (0, 1) and stage.devices == ("0", "1")
                assert {one.cluster for one in house.snapshot().leases.values()} == {"actor_train"}
            assert not house.snapshot().leases
        reports = house.ask(lambda scheduler: scheduler.reports())
        assert reports["p1"].completed == 4
        pool.close()
        assert [one.kind for one in house.ask(lambda scheduler: scheduler.events())][-1] == "unregistered"


def test_what_makes_no_sense_is_refused() -> None:
    with in_process() as house:
        pool = house.pipeline("p1")
        with pytest.raises(RequestRefused, match="no rollout open"):
            pool.completed()
        with pool.generation(0, 1) as rollout:
            with pytest.raises(InvalidRequest, match="whole numbers"):
                rollout.completed(-1)
            with pytest.raises(RequestRefused, match="generating already"), pool.generation(1, 1):
                pass
            with rollout.turn(), pytest.raises(RequestRefused, match="taken already"), rollout.turn():
                pass
        with pytest.raises(RequestRefused, match="is over"), rollout.turn():
            pass
        with pytest.raises(InvalidRequest, match="async"):
            house.pipeline("p2", engine=object())  # type: ignore[arg-type]
        pool.close()
        with pytest.raises(RequestRefused, match="closed"), pool.training():
            pass


def test_a_wait_says_what_it_waits_for_and_goes_on_unless_it_has_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_log, "SAY_S", 0.01)
    caplog.set_level(logging.WARNING, "muster.pool")
    with in_process() as house:
        p1, p2 = house.pipeline("p1"), house.pipeline("p2")
        with p1.training():
            with pytest.raises(GrantTimeout, match="p1"), p2.training(timeout=0.05):
                pass
            with pytest.raises(GrantTimeout), p2.generation(0, 1, timeout=0.05):
                pass
            waiting = in_thread(lambda: _trains(p2))
            eventually(lambda: "s for actor_train" in caplog.text, "the wait is logged", BOUND_S)
            assert "p1/actor_train" in caplog.text.split("s for actor_train")[1]
        assert waiting() == (0,)


def _trains(pool: SharedPool) -> tuple[int, ...]:
    with pool.training() as stage:
        return stage.gpus


def test_an_interrupted_wait_is_withdrawn_and_an_interrupted_stage_given_back() -> None:
    with in_process() as house:
        p1, p2 = house.pipeline("p1"), house.pipeline("p2")
        with pytest.raises(KeyboardInterrupt), p2.generation(0, 4) as rollout, rollout.turn():
            raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), p2.training():
            raise KeyboardInterrupt
        assert not house.snapshot().leases and not house.snapshot().open_rollouts
        with p1.training():
            interrupting = in_thread(lambda: _interrupt_when(lambda: _waits(house, "p2")))
            with pytest.raises(KeyboardInterrupt), p2.training():
                raise AssertionError("it is not to be had")
            interrupting()
        eventually(lambda: not house.snapshot().pending, "nobody waits", BOUND_S)
        assert _trains(p2) == (0,)


def _interrupt_when(look: Callable[[], object]) -> None:
    """As Ctrl-C does."""
    eventually(look, "somebody waits", BOUND_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_forked_child_has_no_part_in_it() -> None:
    with in_process() as house:
        pool = house.pipeline("p1")
        with pool.training():
            child = os.fork()
            if not child:
                try:
                    pool.close()  # nothing happens
                    with pool.training():
                        os._exit(1)
                except RequestRefused as error:
                    os._exit(0 if "forked child" in error.message else 2)
                finally:
                    os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert house.snapshot().leases[0].pipeline == "p1"


def test_a_quarantined_pipeline_comes_back_by_itself_and_a_killed_one_does_not() -> None:
    with in_process() as house:
        engine = Engine()
        pool = house.pipeline("p1", engine=engine)
        with pool.generation(0, 4):
            house.ask(lambda scheduler: scheduler.quarantine_pipeline("p1", "silence"))
        assert not engine.awake and not house.snapshot().quarantined
        house.ask(lambda scheduler: scheduler.quarantine_pipeline("p1", "silence"))
        assert _trains(pool) == (0,)
        with pytest.raises(PipelineKilled, match="enough"), pool.generation(1, 4):
            house.ask(lambda scheduler: scheduler.kill_pipeline("p1", "enough"))
        assert not engine.awake and house.snapshot().idle == (0, 1, 2, 3)


# Turns


def test_a_shrink_waits_for_the_turn_in_flight_and_tells_it() -> None:
    with in_process() as house:
        engine = Engine()
        pool, rival = house.pipeline("p1", engine=engine), house.pipeline("p2")
        with pool.generation(0, 8) as rollout:
            with rollout.turn() as turn:
                assert not rollout.interrupted()
                waiting = in_thread(lambda: _trains(rival))
                eventually(rollout.interrupted, "it is told", BOUND_S)
                assert not rollout.interrupted(after_s=1000)
                assert engine.awake and house.snapshot().leases[0].pipeline == "p1", "the engine is not touched"
                assert turn.gpus == (0,)
            assert waiting() == (0,)
            with rollout.turn():  # it comes back by itself
                assert house.snapshot().leases[0].pipeline == "p1"


def test_a_turn_that_waits_hears_that_its_rollout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.sharing.sync.LOOK_S", 0.01)
    with in_process() as house:
        pool, rival = house.pipeline("p1"), house.pipeline("p2")
        with pool.generation(0, 8) as rollout, rival.training():
            house.ask(lambda scheduler: scheduler.clear_progress("p1"))
            with pytest.raises(TimeoutError), rollout.turn(timeout=0.01):
                pass
            with pytest.raises(RequestRefused, match="closed by somebody"), rollout.turn():
                pass


def tokens_while_bundles_are_taken_back(house: PoolHouse, rollouts: int) -> Checker:
    """A rival trains on the GPU at random moments between a grant and the first token, and in between tokens."""
    rng, checker = random.Random(7), Checker(house)
    pool, rival = house.pipeline("p1"), house.pipeline("p2")
    wanted, over = threading.Semaphore(0), threading.Event()
    counts = {"wanted": 0, "asks": 0, "has had": 0}

    def compete() -> None:
        while wanted.acquire(timeout=BOUND_S) and not over.is_set():
            counts["asks"] += 1
            with rival.training() as stage:
                counts["has had"] += 1
                checker.token("p2", stage.gpus)

    competing = in_thread(compete)

    def take_back(chance: float) -> None:
        if rng.random() < chance:
            wanted.release()
            counts["wanted"] += 1
            until = rng.choice(["wanted", "asks", "has had"])  # at once; when it is being taken back; when it is gone
            eventually(lambda: counts[until] >= counts["wanted"], until, BOUND_S)

    for step in range(rollouts):
        with pool.generation(step, 4) as rollout:
            take_back(0.8)
            for _ in range(4):
                with rollout.turn() as turn:
                    checker.token("p1", turn.gpus)
                    checker.token("p1", turn.gpus)
                rollout.completed()
                take_back(0.2)
    over.set()
    wanted.release()
    competing()
    return checker


def _waits(house: PoolHouse, name: str) -> bool:
    return any(one.pipeline == name for one in house.snapshot().pending)


def _is_clean(checker: Checker) -> None:
    assert not checker.wrong, checker.wrong[:3]
    by_who = [name for _, name in checker.seen]
    assert by_who.count("p1") and by_who.count("p2") > 5


def test_no_token_is_made_without_a_lease_in_process() -> None:
    with in_process() as house:
        _is_clean(tokens_while_bundles_are_taken_back(house, 40))


@pytest.mark.usefixtures("processes")
def test_no_token_is_made_without_a_lease_over_http(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        _is_clean(tokens_while_bundles_are_taken_back(house, 15))


# Ranks


class Memory:
    """A board for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total


class Beating(Memory):
    """On which everybody beats, and nobody says anything."""

    def add(self, key: str, amount: int) -> int:
        return super().add(key, amount or 1)


def _ranks(house: PoolHouse, size: int, work: Callable[[SharedPool, int], object]) -> list[object]:
    """What each rank returned, or raised."""
    board = Memory()

    def run(rank: int) -> object:
        crew = Crew(board, rank, size, patience_s=1.0, meeting_s=BOUND_S)
        maps = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1])}
        pool = house.pipeline("p1", maps, Engine(), crew)
        try:
            return work(pool, rank)
        except (SharingError, Unavailable, ValueError) as error:
            return error

    running = [in_thread(lambda rank=rank: run(rank)) for rank in range(size)]  # type: ignore[misc]
    return [result() for result in running]


def test_every_rank_takes_its_turns_on_its_own_bundles_and_progress_is_summed() -> None:
    def work(pool: SharedPool, rank: int) -> object:
        with pool.generation(0, 4) as rollout:
            with rollout.turn() as turn:
                gpus = turn.gpus
            pool.completed(2)
        with pool.training() as stage:
            return gpus, stage.gpus

    with in_process() as house:
        assert _ranks(house, 2, work) == [((0,), (0, 1)), ((1,), (0, 1))]
        assert house.ask(lambda scheduler: scheduler.reports())["p1"].completed == 4
        assert not house.snapshot().leases


def test_a_shrink_waits_for_the_turn_of_another_rank() -> None:
    with in_process() as house:
        rival = house.pipeline("p2", {"actor_train": ClusterSpec([1]), "actor_infer": ClusterSpec([2])})
        seen: list[object] = []

        def work(pool: SharedPool, rank: int) -> object:
            with pool.generation(0, 4) as rollout, rollout.turn():
                if rank == 1:
                    waiting = in_thread(lambda: _trains(rival))
                    eventually(rollout.interrupted, "rank 1 is told", BOUND_S)
                    seen.append(house.snapshot().leases[1].pipeline)
                    return waiting
            return None

        found = _ranks(house, 2, work)
        assert seen == ["p1"]
        assert found[1]() == (1,)  # type: ignore[operator]


def test_a_failure_of_one_rank_is_raised_on_all_and_everything_is_given_back() -> None:
    def refused(pool: SharedPool, rank: int) -> object:
        with pool.training(cluster="critic"):
            return "granted"

    def fails(pool: SharedPool, rank: int) -> object:
        with pool.training():
            if rank == 1:
                raise ValueError("no memory")
        return "went on"

    with in_process() as house:
        first = _ranks(house, 2, refused)
        assert [type(one) for one in first] == [RequestRefused, RequestRefused]
        second = _ranks(house, 2, fails)
        assert isinstance(second[1], ValueError)
        assert isinstance(second[0], SharingError) and "rank 1: actor_train: ValueError: no memory" in str(second[0])
        assert not house.snapshot().leases


def test_nobody_waits_for_ever_for_a_rank_that_is_gone() -> None:
    with in_process() as house:
        board = Memory()
        lonely = Crew(board, 1, 2, patience_s=0.2)
        with pytest.raises(Unavailable, match="rank 0 is gone"):
            house.pipeline("p1", ONE, Engine(), lonely)
        assert lonely.is_dead(0)
        assert Crew(board, 0, 2, patience_s=0.1, meeting_s=5).all_left("stage") == [
            "rank 1: rank 1 is gone: nothing was heard of it for 0.1 s"
        ]
        with pytest.raises(Unavailable, match="rank 1 has not come"):  # it lives: its GPUs are not given away
            Crew(Beating(), 0, 2, patience_s=5, meeting_s=0.05).all_left("stage")


def test_bundles_are_spread_over_ranks() -> None:
    assert [owners(bundle, 4, 2) for bundle in range(4)] == [[0], [0], [1], [1]]
    assert [owners(bundle, 2, 4) for bundle in range(2)] == [[0, 1], [2, 3]]
    assert owners(0, 1, 3) == [0, 1, 2]


# Connecting


@pytest.mark.usefixtures("processes")
def test_a_map_that_the_pool_does_not_have_is_refused_at_once(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        url, token = house.plane.url, house.plane.api_token
        with pytest.raises(InvalidRequest, match="no GPU 9"):
            connect("p1", gpus=[9], url=url, token=token)
        with pytest.raises(InvalidRequest, match="either gpus, or clusters"):
            connect("p1", url=url, token=token)
        with connect("p1", gpus=[1, 2], url=url, token=token) as pool:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
            assert pool.devices.names == ("1", "2") and pool.devices.index(2) == 1
            with pytest.raises(InvalidRequest, match="no engine"), pool.training():
                pass
            pool.attach(Engine())
            with pool.training(Priority.OLD_LOG_PROBS) as stage:
                assert stage.devices == ("1", "2")


# Processes


def _env(house: ControlPlane) -> dict[str, str]:
    return {"MUSTER_URL": house.plane.url, "MUSTER_TOKEN": house.plane.api_token}


def _started(house: ControlPlane, what: str, size: int = 1) -> list[Process]:
    port = str(free_port())
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if size > 1 else {}
    program = (sys.executable, str(PROGRAMS / "blocking_ranks.py"), what)
    return [house.plane.start(*program, **_env(house), **place, RANK=str(rank)) for rank in range(size)]


@pytest.mark.usefixtures("processes")
def test_ctrl_c_gives_back_what_is_held_and_leaves_the_pool(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        [process] = _started(house, "holds")
        process.expect("holds")
        assert house.snapshot().leases[0].pipeline == "p1"
        process.kill(signal.SIGINT)
        assert process.wait(BOUND_S) != 0 and "KeyboardInterrupt" in process.text
        assert not house.snapshot().leases
        assert house.ask(lambda scheduler: scheduler.view())["pipelines"] == []


@pytest.mark.usefixtures("processes")
def test_ranks_of_torch_distributed_act_as_one_and_a_failure_of_one_ends_all(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        ranks = _started(house, "works", 2)
        for process in ranks:
            assert process.wait(BOUND_S) == 0, process.text
            assert process.text.count("generates on (0, 1)") == process.text.count("trains on (0, 1)") == 2
        told = "".join(process.text for process in ranks)
        assert house.ask(lambda scheduler: scheduler.view())["pipelines"] == [], told
        first, second = _started(house, "fails", 2)
        assert second.wait(BOUND_S) != 0 and "ValueError: no memory" in second.text
        assert first.wait(BOUND_S) != 0 and "p1 cannot go on: rank 1: actor_train: ValueError" in first.text
        assert "went on" not in first.text + second.text


# Devices


def test_visible_devices_follow_the_pool_before_cuda_has_begun_and_are_checked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: False, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    devices = Devices([1, 0], ["GPU-a", "GPU-b", "GPU-c"])
    env: dict[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
    devices.make_visible(env)
    assert env == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert devices.of([1]) == ("GPU-b",) and len(devices) == 2 and devices[0] == "GPU-a"
    cuda.is_initialized = lambda: True
    devices.make_visible(env)
    with pytest.raises(InvalidRequest, match=r"cannot see GPU-b, .*CUDA_VISIBLE_DEVICES=GPU-a,GPU-c"):
        devices.make_visible({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"})
    with pytest.raises(InvalidRequest, match="cannot see 3"):
        Devices([1, 3], []).make_visible({})
    Devices([0, 1], []).make_visible({})
