"""The local backend's own parts: what is started, which GPUs there are, what ranks wrote, and whose pid it is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.backends.local import gpus, logs, processes, render, storage
from muster.ports import LogQuery
from muster.types.storage import Storage
from muster.types.training import Mesh, Training
from tests.fleet import eventually
from tests.training_builders import a_training


def an_order(training: Training, **known: object) -> render.Order:
    values: dict[str, object] = {
        "gpus": None,
        "token": "t",
        "coordinator_file": Path("/h/c"),
        "logs": Path("/h/logs"),
        "inherited": {},
    }
    return render.order(training, "demo-0", **{**values, **known})  # type: ignore[arg-type]


words = st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8), max_size=5)


@given(words)
def test_arguments_reach_the_program_as_they_are(args: list[str]) -> None:
    argv = an_order(a_training(script="train.py", args=tuple(args))).argv
    assert list(argv[argv.index("--") :]) == ["--", "train.py", *args]


def test_each_kind_of_program_is_started_as_what_it_is() -> None:
    script = an_order(a_training(script="train.py")).argv
    module = an_order(a_training(module="pkg.train")).argv
    command = an_order(a_training(command=("/bin/echo", "-n"), args=("x",))).argv
    assert script[-2:] == ("--", "train.py")
    assert module[-3:] == ("-m", "--", "pkg.train")
    assert command[-5:] == ("--no-python", "--", "/bin/echo", "-n", "x")
    assert script[script.index("--name") + 1] == "demo-0"


def test_a_worker_inherits_everything_but_what_is_musters_own() -> None:
    inherited = {"PATH": "/bin", "MUSTER_TOKEN": "admin's", "MUSTER_HOME": "/h", "A": "old"}
    env = an_order(a_training(env={"A": "new"}), inherited=inherited).env
    assert env["PATH"] == "/bin" and env["A"] == "new"
    assert "MUSTER_TOKEN" not in env and "MUSTER_HOME" not in env
    assert env["MUSTER_RUN_TOKEN"] == "t"


def test_a_worker_is_told_where_its_mesh_is_made_known_only_with_a_gate() -> None:
    gate = Mesh(required=True, timeout_seconds=45.0, probe_address="10.8.0.0/16")
    order = an_order(a_training(mesh=gate, env={"NODE_NAME": "mine"}), mesh_endpoint="127.0.0.1:7")
    told = {name: value for name, value in order.env.items() if "MESH" in name or name == "NODE_NAME"}
    assert told == {
        "NODE_NAME": "demo-0",
        "MUSTER_MESH_ENDPOINT": "127.0.0.1:7",
        "MUSTER_MESH_PREFIX": "muster/default/demo",
        "MUSTER_MESH_TIMEOUT_S": "55",
    }
    assert order.argv[order.argv.index("--probe-addr") + 1] == "10.8.0.0/16"
    plain = an_order(a_training(mesh=Mesh(probe_address="10.8.0.0/16")), mesh_endpoint="127.0.0.1:7")
    assert plain.env["NODE_NAME"] == "demo-0" and "MUSTER_MESH_ENDPOINT" not in plain.env
    assert "--probe-addr" not in plain.argv


def test_gpus_are_shown_to_a_worker_where_there_are_any() -> None:
    assert an_order(a_training(), gpus=("3", "5")).env["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert an_order(a_training(), gpus=()).env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in an_order(a_training(), gpus=None).env


def test_which_gpus_there_are_is_told_left_or_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.visible({"MUSTER_GPUS": "3", "CUDA_VISIBLE_DEVICES": "7"}) == ("0", "1", "2")
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "4,6"}) == ("4", "6")
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": ""}) == ()
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 0\necho 1\n")
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible({}) == ("0", "1")
    asked.write_text("#!/bin/sh\nexit 9\n")
    assert gpus.visible({}) == ()


def test_a_reused_pid_is_not_taken_for_the_old_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ticks = processes.start_ticks(child.pid)
        assert ticks is not None
        handle = processes.ProcessHandle(child.pid, ticks)
        with pytest.raises(ProcessLookupError):
            processes.ProcessHandle(child.pid, ticks + 1)
        handle.signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
        handle.signal(signal.SIGKILL)  # gone: no error, and nobody else is hit
        handle.close()
        assert processes.start_ticks(child.pid) is None
    finally:
        child.kill()
        child.wait()


def test_a_process_is_found_by_words_of_its_command_line() -> None:
    mark = f"mark-{os.getpid()}"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--name", mark, "x"])
    try:
        # Just after it was started a process has no command line yet.
        eventually(lambda: processes.find("--name", mark) == child.pid, "it is found")
        assert processes.find("--name", f"{mark}-other") is None
    finally:
        child.kill()
        child.wait()


NOON = 1_769_860_800_000_000_000  # on 2026-01-31


def written(root: Path, worker: str, number: int, rank: int, text: str, kind: str = "out") -> None:
    folder = root / worker / f"round-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.{kind}").write_text(text)
    for path in (folder, folder / f"rank-{rank}.{kind}"):
        os.utime(path, ns=(NOON, NOON))


def read(root: Path, query: LogQuery) -> list[str]:
    async def gather() -> bytes:
        return b"".join([chunk async for chunk in logs.read(root, query, lambda: True)])

    return asyncio.run(gather()).decode().splitlines()


def test_logs_come_in_order_of_rounds_and_ranks_whoever_ran_them(tmp_path: Path) -> None:
    written(tmp_path, "demo-1", 0, 1, "b\n")
    written(tmp_path, "demo-0", 0, 0, "a\n")
    written(tmp_path, "demo-2", 1, 0, "c\nunfinished")
    written(tmp_path, "demo-0", 0, 0, "err\n", "err")
    (tmp_path / "demo-0" / "worker.log").write_text("not a rank's\n")
    assert read(tmp_path, LogQuery()) == ["[0] a", "[0] err", "[1] b", "[0] c", "[0] unfinished"]
    assert read(tmp_path, LogQuery(rank=0, round=1)) == ["c", "unfinished"]
    assert read(tmp_path, LogQuery(rank=0, tail=1)) == ["unfinished"]
    assert read(tmp_path, LogQuery(rank=9)) == []
    assert read(tmp_path / "nowhere", LogQuery(follow=True)) == []
    marked = ["(muster: round 0)", "[0] a", "[0] err", "[1] b", "(muster: round 1)", "[0] c", "[0] unfinished"]
    assert read(tmp_path, LogQuery(markers=True)) == marked


def test_a_tail_is_of_all_files_together_and_goes_back_over_rounds(tmp_path: Path) -> None:
    for rank in range(4):
        written(tmp_path, f"demo-{rank}", 0, rank, f"old {rank}\n")
        written(tmp_path, f"demo-{rank}", 1, rank, "".join(f"{rank}.{number}\n" for number in range(5)))
    written(tmp_path, "demo-0", 1, 0, "warns\n", "err")
    for age, file in enumerate(("demo-2/round-1/rank-2.out", "demo-0/round-1/rank-0.err")):
        os.utime(tmp_path / file, ns=(NOON + 10**9 + age, NOON + 10**9 + age))  # the last that were written to
    assert read(tmp_path, LogQuery(tail=1)) == ["[0] warns"]
    assert read(tmp_path, LogQuery(tail=2)) == ["[2] 2.4", "[0] warns"]
    nine = read(tmp_path, LogQuery(tail=9))
    assert len(nine) == 9 and {"[0] warns", *(f"[2] 2.{number}" for number in range(5))} < set(nine)
    assert [" old " in line for line in read(tmp_path, LogQuery(tail=22))] == [True] + [False] * 21
    assert len(read(tmp_path, LogQuery(tail=1000))) == 25
    assert read(tmp_path, LogQuery(tail=1, round=0, rank=3)) == ["old 3"]


@given(st.lists(st.text("ab\n", max_size=6), max_size=4), st.integers(0, 5))
def test_a_tail_is_the_end_of_what_there_is(parts: list[str], count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(parts)
        written(Path(folder), "demo-0", 0, 0, text)
        whole = text.removesuffix("\n").split("\n") if text else []
        expected = whole[-count:] if count else []
        assert read(Path(folder), LogQuery(rank=0, tail=count)) == expected


def test_a_worker_is_told_its_domain_where_that_counts() -> None:
    assert "--domain" not in an_order(a_training(), domain="rack-1").argv
    for spec in ({"segment": 1}, {"topology_key": "rack"}):
        argv = an_order(a_training(**spec), domain="rack-1").argv
        assert argv[argv.index("--domain") + 1] == "rack-1"


def test_storage_is_a_folder_that_stays_unless_it_is_not_to_be_kept(tmp_path: Path) -> None:
    asked = (
        Storage("ckpt", "/ckpt", size="1Gi"),
        Storage("tmp-files", "/tmp-files", size="1Gi", keep=False),
        Storage("data", "/data", claim="datasets"),
    )
    training = a_training("demo", namespace="team", storage=asked)
    found = storage.folders(tmp_path, training)
    storage.provide(tmp_path, training)
    storage.provide(tmp_path, training)
    assert all(folder.is_dir() for folder in found.values())
    assert found["MUSTER_STORAGE_DATA"] == tmp_path / "storage/team/claims/datasets"
    assert an_order(training, storage=found).env["MUSTER_STORAGE_CKPT"] == str(found["MUSTER_STORAGE_CKPT"])
    (found["MUSTER_STORAGE_TMP_FILES"] / "left").touch()
    storage.remove(tmp_path, training.key, asked)
    assert [name for name, folder in found.items() if folder.exists()] == ["MUSTER_STORAGE_CKPT", "MUSTER_STORAGE_DATA"]
