"""What ranks wrote: from before the first round to the end, one rank, one round, and after it is gone."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster
from muster import DistributedTraining
from tests.fleet import eventually
from tests.plane import Plane, fresh

TALKER = """
import os, sys, time
from pathlib import Path
rank, round_ = os.environ["RANK"], os.environ["MUSTER_ROUND"]
print(f"round {round_} rank {rank} begins", flush=True)
print(f"round {round_} rank {rank} warns", file=sys.stderr, flush=True)
if rank == "0" and int(round_) < 2:
    sys.exit(3)
if int(round_) < 2:
    time.sleep(600)
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
sys.stdout.write(f"round {round_} rank {rank} ends without a newline")
"""


@pytest.fixture
def talker(plane: Plane, tmp_path: Path) -> Iterator[DistributedTraining]:
    script = tmp_path / "talker.py"
    script.write_text(TALKER)
    yield plane.train(script=str(script), args=[str(plane.notes)], world=(2, 2, 2), max_restarts=5)


@pytest.mark.shared
@pytest.mark.scenario
def test_following_from_pending_through_two_restarts_to_the_end_gives_every_line_once(
    plane: Plane, talker: DistributedTraining
) -> None:
    lines: list[str] = []

    def follow() -> None:
        client = muster.Client(url=plane.url, token=plane.api_token)
        lines.extend(client.get("demo").logs(follow=True))

    follower = threading.Thread(target=follow)
    follower.start()
    eventually(lambda: (fresh(talker).training.status.round or 0) >= 2, "two restarts")
    plane.go()
    talker.result(timeout=30)
    follower.join(20)
    assert not follower.is_alive(), "the stream ends with the training"
    for number in range(3):
        assert lines.count(f"[0] round {number} rank 0 begins") == 1
        assert lines.count(f"[0] round {number} rank 0 warns") == 1
    assert lines.count("[1] round 2 rank 1 ends without a newline") == 1


def test_following_survives_the_control_plane(plane: Plane, talker: DistributedTraining) -> None:
    client = muster.Client(url=plane.url, token=plane.api_token)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(client.get("demo").logs(follow=True)))
    follower.start()
    eventually(lambda: (fresh(talker).training.status.round or 0) >= 2, "two restarts")
    eventually(lambda: any("round 2" in line for line in lines), "it reads")
    plane.crash()
    plane.serve()
    plane.go()
    talker.result(timeout=30)
    follower.join(20)
    assert not follower.is_alive()
    assert lines.count("[0] round 0 rank 0 begins") == 1, "nothing twice"
    assert lines.count("[1] round 2 rank 1 ends without a newline") == 1, "nothing lost"


@pytest.mark.shared
def test_one_rank_one_round_and_a_tail(plane: Plane, talker: DistributedTraining) -> None:
    eventually(lambda: (fresh(talker).training.status.round or 0) >= 2, "two restarts")
    begun = ["round 2 rank 1 begins", "round 2 rank 1 warns"]
    eventually(lambda: sorted(talker.logs(rank=1, round=2)) == begun, "its end is later than all that")
    plane.go()
    talker.result(timeout=30)
    assert list(talker.logs(rank=0, round=1)) == ["round 1 rank 0 begins", "round 1 rank 0 warns"]
    assert {line[:3] for line in talker.logs(rank=None)} == {"[0]", "[1]"}
    assert list(talker.logs(rank=1, tail=1, round=2)) == ["round 2 rank 1 ends without a newline"]
    assert len(list(talker.logs(tail=3))) == 3
    with pytest.raises(muster.NotFound, match="can have ranks 0, 1, and never rank 7"):
        list(talker.logs(rank=7))
    refused = plane.muster("logs", "demo", "--rank", "99")
    assert refused.wait() == 3 and "rank 99" in refused.text
    shown = plane.muster("logs", "demo", "--rank", "0", "--round", "0")
    assert shown.wait() == 0 and shown.text.splitlines() == ["round 0 rank 0 begins", "round 0 rank 0 warns"]


@pytest.mark.usefixtures("processes")
def test_a_pending_training_says_so_and_a_deleted_one_is_not_found(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    try:
        plane.serve(MUSTER_GPUS="1")
        training = plane.train(world=(1, 1, 1), resources={"gpus": 2}, force=True)
        eventually(lambda: fresh(training).training.status.condition("Admitted"), "it was looked at")
        (told,) = training.logs()
        assert "pending" in told and "needs 2 GPUs" in told
        other = plane.client.get("demo")
        deleter = threading.Timer(0.3, other.delete)
        deleter.start()
        list(training.logs(follow=True))  # ends with the training
        deleter.join()
        with pytest.raises(muster.NotFound):
            list(other.logs())
        shown = plane.muster("logs", "demo")
        assert shown.wait() == 3
    finally:
        plane.close()


def test_logs_stay_as_small_as_was_asked_while_ranks_write_and_somebody_follows(plane: Plane) -> None:
    """Two ranks write 8 MB each and may keep 64 KiB: no line waits, none is told twice, and what is gone is said."""
    program = (
        "import os, sys, time\n"
        "for number in range(400_000): print(f'{number:019d}')\n"
        "sys.stdout.flush()\n"
        "while not os.path.exists('over'): time.sleep(0.05)\n"
        "print('the end')\n"
    )
    training = plane.train(world=(2, 2, 2), command=[sys.executable, "-c", program], log_bytes=1 << 16)
    training.wait_until_target_world(timeout=60)
    following = plane.muster("logs", "-f", "--rank", "0", training.name)
    logs = plane.home / "logs" / training.training.uid

    def taken() -> int:
        return sum(one.stat().st_blocks * 512 for one in logs.glob("*/round-*/rank-*.out"))

    def lengths() -> list[int]:
        return [one.stat().st_size for one in logs.glob("*/round-*/rank-*.out")]

    eventually(lambda: lengths() == [8_000_000, 8_000_000] and taken() < 400_000, "they are small")
    (plane.folder / "over").touch()
    training.result(timeout=60)
    assert following.wait() == 0
    place = 0
    for line in following.text.splitlines():
        if told := re.fullmatch(r"\(muster: (\d+) bytes of older output were dropped\)", line):
            place += int(told[1])
        elif line != "the end":
            assert int(line) * 20 == place, "nothing twice, nothing skipped without a word"
            place += 20
    assert place == 8_000_000 and following.text.endswith("the end\n")
    first = next(training.logs(rank=1))
    assert first.startswith("(muster: ") and first.endswith("bytes of older output were dropped)")


IN_TURN = """
import os, sys, time
from pathlib import Path
rank, turns = int(os.environ["RANK"]), Path(sys.argv[1])
for turn in range(10):
    while not (turns / f"turn-{turn}").exists():
        time.sleep(0.002)
    if turn % 2 == rank:
        print(f"turn {turn}", file=sys.stderr if turn % 4 > 1 else sys.stdout, flush=True)
        time.sleep(0.06)
        (turns / f"turn-{turn + 1}").touch()
"""


@pytest.mark.shared
def test_ranks_that_write_by_turns_are_shown_in_that_order(plane: Plane, tmp_path: Path) -> None:
    script = tmp_path / "in_turn.py"
    script.write_text(IN_TURN)
    training = plane.train(script=str(script), args=[str(tmp_path)], world=(2, 2, 2), max_restarts=0)
    expected = [f"[{turn % 2}] turn {turn}" for turn in range(10)]
    following = iter(training.logs(follow=True))
    (tmp_path / "turn-0").touch()
    assert list(following) == expected
    training.result(timeout=30)
    assert list(training.logs()) == expected
    assert list(training.logs(tail=3)) == expected[-3:]
    said = plane.muster("logs", "demo", "--timestamps")
    assert said.wait(30) == 0
    found = [re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (.*)", line) for line in said.text.splitlines()]
    times = [one[1] for one in found if one is not None]
    assert [one[2] for one in found if one is not None] == expected
    assert times == sorted(times) and len(set(times)) == len(times)
