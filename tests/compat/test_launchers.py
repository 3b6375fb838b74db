"""A command that begins with torchrun: the program of each rank, and the options that apply."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from muster.compat import launchers
from muster.compat.launchers import RankProgram
from muster.types.training import WorldSize

SIZE = WorldSize(1, 2, 3)


def refuse(message: str) -> NoReturn:
    raise ValueError(message)


def read(*words: str, gpus: int = 0, names: tuple[str, ...] = ()) -> RankProgram:
    return launchers.read(words, gpus=gpus, size=SIZE, names=names, refuse=refuse)


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nproc-per-node=2", "t.py", "--lr", "1"],
        ["torchrun", "--nproc_per_node", "2", "t.py", "--lr", "1"],
        ["/opt/conda/bin/torchrun", "--nproc_per_node=2", "--", "t.py", "--lr", "1"],
        ["torchrun", "--nproc-per-node=2", "--run-path", "--standalone", "t.py", "--lr", "1"],
    ],
)
def test_torchrun_and_its_options_are_replaced(words: list[str]) -> None:
    assert read(*words) == RankProgram({"script": "t.py"}, ("--lr", "1"), 2)


def test_the_command_of_basilica_s_own_examples_is_understood() -> None:
    words = ["--rdzv-backend=etcd", "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT", "--rdzv-id=$BASILICA_RDZV_ID"]
    words += ["--nnodes=$BASILICA_WORLD_TARGET", "--nproc-per-node=$BASILICA_GPUS_PER_POD", "/workspace/train.py"]
    assert read("torchrun", *words, gpus=4) == RankProgram({"script": "/workspace/train.py"}, (), 4)
    assert read("torchrun", *words).ranks_each == 1


@pytest.mark.parametrize(
    ("words", "program", "args"),
    [
        (["torchrun", "-m", "pkg.train", "-m", "x"], {"module": "pkg.train"}, ("-m", "x")),
        (["torchrun", "--module", "pkg.train"], {"module": "pkg.train"}, ()),
        (["torchrun", "--no-python", "./run.sh", "--nnodes=9"], {"command": ["./run.sh"]}, ("--nnodes=9",)),
        (["python", "-m", "torch.distributed.run", "t.py", "1"], {"command": ["python", "t.py"]}, ("1",)),
        (
            ["/v/bin/python3.11", "-u", "-W", "error", "-m", "torch.distributed.run", "-m", "p"],
            {"command": ["/v/bin/python3.11", "-u", "-W", "error", "-m", "p"]},
            (),
        ),
    ],
)
def test_what_a_rank_runs_is_what_torchrun_would_have_run(
    words: list[str], program: dict[str, Any], args: tuple[str, ...]
) -> None:
    found = read(*words)
    assert (found.program, found.args) == (program, args)


def test_limits_are_kept() -> None:
    found = read("torchrun", "--max-restarts=7", "--shutdown_timeout", "12", "t.py")
    assert found.limits == {"max_restarts": 7, "stop_grace_seconds": 12.0} and not found.dropped


def test_options_that_have_no_effect_are_named() -> None:
    words = ["--nnodes", "8", "--log-dir=/l", "-r", "3", "--tee=3", "--rdzv-conf=timeout=9", "--role", "x", "t.py"]
    named = ", ".join(read("torchrun", *words, names=("A", "PET_NNODES")).dropped)
    for name in ("--log-dir", "--redirects", "--tee", "--rdzv-conf", "--role", "--nnodes=8", "PET_NNODES"):
        assert name in named
    assert read("torchrun", "--nnodes=1:3", "t.py").dropped == read("torchrun", "--nnodes=2", "t.py").dropped == ()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["torchrun", "--virtual-local-rank", "t.py"], "--virtual-local-rank"),
        (["torchrun", "--frobnicate=1", "t.py"], "cannot be read"),
        (["torchrun", "--nproc-per-node=gpu", "t.py"], "Give a number"),
        (["torchrun", "--nproc-per-node=0", "t.py"], "Give a number"),
        (["torchrun", "--max-restarts=$BASILICA_X", "t.py"], "not a number"),
        (["torchrun", "--nnodes=2"], "cannot be read"),
        (["torchrun", "-m", "--no-python", "t"], "both"),
        (["torchrun", "t.py", "${BASILICA_RANK}"], r"\$BASILICA_RANK"),
        (["python", "t.py", "$BASILICA_RANK"], r"\$BASILICA_RANK"),
        (["python", "-m", "torch.distributed.launch", "t.py"], "torch.distributed.launch"),
        (["bash", "-c", "cd /w && torchrun --nnodes=2 t.py"], "inside a shell"),
        (["/bin/mpirun", "x"], "begins with mpirun"),
        (["env", "A=1", "torchrun", "t.py"], "starts torchrun by env"),
        (["/usr/bin/numactl", "-N0", "/v/bin/torchrun", "t.py"], "starts torchrun by numactl"),
        (["nice", "python", "-m", "torch.distributed.run", "t.py"], "starts torch.distributed.run by nice"),
    ],
)
def test_a_command_that_would_mean_something_else_here_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(*words)


def test_a_command_in_one_text_is_refused() -> None:
    with pytest.raises(ValueError, match="list of words"):
        launchers.read("torchrun t.py", gpus=0, size=SIZE, names=(), refuse=refuse)


def test_a_program_that_only_takes_a_launcher_s_name_is_left_alone() -> None:
    words = ["python", "train.py", "--launcher", "torchrun"]
    assert read(*words) == RankProgram({"command": words})
    assert read("env", *words[:3], "--x=torchrun") == RankProgram({"command": ["env", *words[:3], "--x=torchrun"]})


def test_every_option_of_the_installed_torchrun_is_known() -> None:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()

    for action in parser._actions:
        for option in action.option_strings:
            if option in ("-h", "--help"):
                continue
            value = [] if action.nargs == 0 else ["1"]
            try:
                read("torchrun", option, *value, "t.py")
            except ValueError as why:
                assert "cannot be read" not in str(why), option
