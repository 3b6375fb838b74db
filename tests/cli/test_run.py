from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli import run
from muster.cli.exits import Misused
from muster.types.storage import Storage
from muster.types.training import Mesh, Outcome, RankExit, RankStatus, Resources, Spec, Training, WorldSize, WorldStatus
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training


@pytest.fixture(autouse=True)
def script(bare: None, tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def the_spec(control: StandIn) -> Spec:
    [(order, spec)] = control.orders
    assert order == "train"
    assert isinstance(spec, Spec)
    return spec


def history(name: str, *, end: Any = "succeeded", exits: tuple[RankExit, ...] = ()) -> list[Training]:
    """What a watch tells of a training that forms, trains and ends."""
    none = WorldStatus(0, 2, 2, 4)
    failure = next((one for one in exits if one.failed), None)
    outcome = Outcome(end, "RankFailed" if failure else "", str(failure or ""), failure)
    return [
        a_training(name, phase="pending", world_size=none, round=None),
        a_training(name, phase="pending", world_size=none, round=None),
        a_training(name, ranks=(RankStatus(0, step=1),)),
        a_training(name, ranks=(RankStatus(0, step=2),)),
        a_training(name, phase=end, world_size=none, outcome=outcome, rank_exits=exits),
    ]


# What is submitted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), ("auto", ())),
        (("--preload", "auto"), ("auto", ())),
        (("--warm", "never"), ("never", ())),
        (("--preload", "none"), ("auto", ("none",))),
        (("--preload", "a.b,c", "--preload", "d"), ("auto", ("a.b", "c", "d"))),
    ],
)
def test_what_is_imported_ahead_can_be_chosen(
    muster: Muster, control: StandIn, options: tuple[str, ...], asked: tuple[str, tuple[str, ...]]
) -> None:
    muster("run", "train.py", "-d", *options)
    spec = the_spec(control)
    assert (spec.warm, spec.preload) == asked


def an_environment(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    return folder


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_that_is_not_used_is_named(
    muster: Muster, control: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    active = an_environment(tmp_path / "vc")
    monkeypatch.setenv(variable, str(active))
    [line] = [line for line in muster("run", "train.py", "-d").err.splitlines() if str(active) in line]
    assert sys.executable in line and f"--interpreter {active}/bin/python" in line
    for words in (("--interpreter", "none"), ("--interpreter", sys.executable)):
        assert str(active) not in muster("run", "train.py", "-d", *words).err
    monkeypatch.setattr(control, "is_far", lambda: True)
    assert str(active) not in muster("run", "train.py", "-d").err, "the workers of another machine have their own"


def test_an_active_environment_that_is_used_or_gone_is_not_named(
    muster: Muster, control: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(an_environment(tmp_path / "vc"))
    link, empty = tmp_path / "link", tmp_path / "empty"
    link.symlink_to(sys.prefix)
    empty.mkdir()
    quiet: list[dict[str, str]] = [
        {"VIRTUAL_ENV": sys.prefix},
        {"VIRTUAL_ENV": str(link)},
        {"VIRTUAL_ENV": str(tmp_path / "gone")},
        {"VIRTUAL_ENV": ""},
        {"CONDA_PREFIX": str(empty)},
        {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": other},
        {"CONDA_PREFIX": sys.base_prefix},
    ]
    for variables in quiet:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert "active environment" not in muster("run", "train.py", "-d").err, variables


def test_the_mesh_is_asked_for_with_its_options(muster: Muster, control: StandIn) -> None:
    muster("run", "train.py", "-d", "--mesh", "--mesh-timeout", "2m", "--probe-address", "10.8.0.0/16")
    assert the_spec(control).mesh == Mesh(True, 120.0, "10.8.0.0/16")


@pytest.mark.parametrize("words", [[], ["--bench"]])
def test_a_bench_is_sent_only_if_it_is_asked_for(muster: Muster, control: StandIn, words: list[str]) -> None:
    muster("run", "train.py", "-d", *words)
    assert the_spec(control).bench is bool(words)


def test_what_pods_are_to_have_is_asked_for(muster: Muster, control: StandIn, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    pod.write_text("kind: Pod\nspec:\n  nodeSelector: {gpu: h200}\n")
    words = ["--segment", "2", "--workers", "2", "--topology-key", "example.com/rack", "--suspend"]
    words += ["--storage", "ckpt=/ckpt:size=500Gi,class=nfs,keep=false", "--storage", "data=/data:claim=datasets"]
    muster("run", "train.py", "-d", *words, "--template", str(pod))
    spec = the_spec(control)
    assert (spec.segment, spec.topology_key, spec.suspend) == (2, "example.com/rack", True)
    assert spec.template == {"spec": {"nodeSelector": {"gpu": "h200"}}}
    assert spec.storage == (
        Storage("ckpt", "/ckpt", size="500Gi", class_="nfs", keep=False),
        Storage("data", "/data", claim="datasets"),
    )


def test_without_a_mesh_its_options_are_of_no_use(muster: Muster) -> None:
    said = muster("run", "train.py", "-d", "--mesh-timeout", "2m")
    assert said.code == 2 and "--mesh-timeout is of no use without --mesh" in said.err


def test_a_script_is_submitted_with_its_arguments(muster: Muster, control: StandIn, script: Path) -> None:
    said = muster(
        *("run", "train.py", "--name", "demo", "-d", "--workers", "2:3:4", "--spares", "1", "--nproc", "2"),
        *("--gpus", "1", "--memory", "4Gi", "--max-restarts", "5", "--priority", "7", "--", "--lr", "3e-4"),
    )
    spec = the_spec(control)

    assert (said.code, said.out) == (0, "demo\n")
    assert (spec.script, spec.args) == (str(script), ("--lr", "3e-4"))
    assert spec.working_dir == str(script.parent)
    assert (spec.world_size, spec.spares, spec.procs_per_worker) == (WorldSize(2, 3, 4), 1, 2)
    assert (spec.resources, spec.max_restarts, spec.priority) == (Resources(None, "4Gi", 1), 5, 7)


def test_a_module_gets_all_words_as_arguments(muster: Muster, control: StandIn) -> None:
    muster("run", "-d", "-m", "pkg.train", "--", "train.py", "--fast")
    spec = the_spec(control)

    assert (spec.module, spec.script, spec.args) == ("pkg.train", None, ("train.py", "--fast"))


def test_a_command_is_taken_word_by_word(muster: Muster, control: StandIn) -> None:
    muster("run", "-d", "--command", "--", "sh", "-c", "echo a b")

    assert the_spec(control).command == ("sh", "-c", "echo a b")


def test_a_name_is_made_from_the_script(muster: Muster, control: StandIn) -> None:
    assert muster("run", "train.py", "-d").out.startswith("train-")


def test_variables_are_given_or_passed_on_and_secrets_marked(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    variables = ("--env", "A=1=2", "--env", "KEY=k", "--secret-env", "KEY", "--secret-env", "HF_TOKEN")
    said = muster("run", "train.py", "-d", *variables)
    spec = the_spec(control)

    assert spec.env == {"A": "1=2", "KEY": "k", "HF_TOKEN": "hunter2"}
    assert spec.secret_env == ("KEY", "HF_TOKEN")
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize(
    ("args", "words", "hint"),
    [
        (["tarin.py"], "there is no script 'tarin.py'", "did you mean train.py?"),
        (["train"], "there is no script 'train'", "did you mean train.py?"),
        (["."], "there is no script '.'", "is a directory"),
        ([], "nothing to run was given", "muster run train.py"),
        (["python", "train.py", "--", "--lr", "3"], "there is no script 'python'", ": muster run train.py -- --lr 3\n"),
        (["python3 train.py"], "there is no script 'python3 train.py'", ": muster run train.py\n"),
        (["torchrun", "a", "b"], "there is no script 'torchrun'", "in the place of torchrun: muster run train.py\n"),
        (["train.py", "--nnodes", "2"], "there is no option --nnodes", "did you mean --workers?"),
        (["train.py", "--nproc_per_node=2"], "there is no option --nproc_per_node", "did you mean --nproc?"),
        (["train.py", "--rdzv-backend", "c10d"], "there is no option --rdzv-backend", "leave it out: workers find"),
        (
            ["train.py", "--epochs", "3"],
            "there is no option --epochs",
            "hint: muster run --help; arguments",
        ),
        (["-m", "a", "--command", "b"], "exclude each other", ""),
        (["train.py", "--workers", "two"], "'two' is not MIN:TARGET:MAX", "--workers 2:2:4"),
        (["train.py", "--workers", "3:2:4"], "the target (2) is below the minimum (3)", ""),
        (["train.py", "--env", "UNSET_HERE"], "'UNSET_HERE' is not set here", "--env UNSET_HERE=VALUE"),
        (["train.py", "-l", "team"], "'team' is not K=V", ""),
        (["train.py", "--storage", "/ckpt"], "'/ckpt' does not say what it is", "--storage NAME=MOUNT:size=500Gi"),
        (["train.py", "--storage", "a=/b:huge=1"], "'huge=1' is not one of claim=…", ""),
        (["train.py", "--storage", "a=/b:size=1Gi,keep=no"], "keep=no is neither true nor false", ""),
        (["train.py", "--storage", "a=b:size=1Gi"], "spec.storage[a].mount: 'b' is not an absolute path", ""),
        (["train.py", "--template", "there-is-none"], "there-is-none cannot be read", ""),
        (
            ["train.py", "--requirements", "there-is-none"],
            "there-is-none cannot be read: No such file or directory",
            "",
        ),
        (["train.py", "--template", "train.py"], "does not hold one partial Pod", ""),
        (["train.py", "-d", "--rm"], "-d leaves", "muster delete"),
        (["train.py", "--lr", "3"], "there is no option --lr", "go behind --"),
        (["train.py", "--memory", "lots"], "is not an amount of memory", ""),
        (["train.py", "--name", "Not A Name"], "is not a name", ""),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(
    muster: Muster, control: StandIn, args: list[str], words: str, hint: str
) -> None:
    said = muster("run", *args)

    assert (said.code, said.out) == (2, "")
    assert said.err.count(words) == 1
    assert hint in said.err
    assert control.orders == []


@pytest.mark.parametrize(
    ("text", "size"), [("3", (3, 3, 3)), ("2:4", (2, 4, 4)), ("2:3:4", (2, 3, 4)), ("01", (1, 1, 1))]
)
def test_workers_are_given_in_three_ways(text: str, size: tuple[int, int, int]) -> None:
    assert run.world_size_of(text) == WorldSize(*size)


@given(st.text("0123456789: -.", max_size=12))
def test_no_number_of_workers_breaks_the_reader(text: str) -> None:
    try:
        size = run.world_size_of(text)
    except Misused as error:
        assert "--workers" in str(error)
    else:
        assert 1 <= size.min <= size.target <= size.max


# What is shown -----------------------------------------------------------------------------------


def test_in_a_pipe_each_change_is_one_line_and_output_goes_to_stdout(muster: Muster, control: StandIn) -> None:
    control.history, control.lines = history("demo"), ["loss 1.0", "loss 0.5\n"]
    said = muster("run", "train.py", "--name", "demo", "--workers", "2:2:4")

    assert said.code == 0
    assert said.out == "loss 1.0\nloss 0.5\n"
    assert said.err.splitlines() == [
        "demo  pending  0/2 workers",
        "demo  ready  2/2 workers  round 0  step 1",
        "demo  succeeded  round 0",
        "demo succeeded.",
    ]


def test_a_training_that_fails_exits_100_and_names_its_ranks(muster: Muster, control: StandIn) -> None:
    exits = (RankExit(0, 3, "Exit 3"), RankExit(1, 137, "OOMKilled", "SIGKILL"), RankExit(2, 143, "Stopped", "SIGTERM"))
    control.history = history("demo", end="failed", exits=exits)
    said = muster("run", "train.py", "--name", "demo", "--workers", "2:2:4")

    assert said.code == 100
    assert said.err.splitlines()[-2:] == [
        "  rank 1: exit_code=137 reason=OOMKilled",
        "demo failed: rank 0: exit_code=3 reason=Exit 3.",
    ]


def test_a_training_that_is_cancelled_exits_103(muster: Muster, control: StandIn) -> None:
    control.history = history("demo", end="cancelled")

    assert muster("run", "train.py", "--name", "demo").code == 103


def test_one_that_somebody_deletes_is_told_as_that(muster: Muster, control: StandIn) -> None:
    control.history = history("demo")[:3]
    said = muster("run", "train.py", "--name", "demo")

    assert (said.code, said.err.splitlines()[-1]) == (1, "demo was deleted by someone else")


def test_ctrl_c_while_it_is_submitted_says_how_to_find_out(muster: Muster, control: StandIn) -> None:
    control.interrupts_submit = True
    said = muster("run", "train.py")

    assert (said.code, said.out) == (130, "")
    assert said.err == "interrupted while it was submitted: muster ps tells whether it was\n"


def test_ctrl_c_detaches_and_says_how_to_come_back(muster: Muster, control: StandIn) -> None:
    control.history, control.interrupts = history("demo")[:3], True
    said = muster("run", "train.py", "--name", "demo", "-n", "research")

    assert said.code == 130
    assert said.err.splitlines()[-4:] == [
        "detached; demo goes on. To come back:",
        "  muster logs -f demo -n research",
        "  muster wait demo -n research",
        "  muster cancel demo -n research",
    ]
    assert [order[0] for order in control.orders] == ["train", "logs"]


def test_whoever_leaves_before_the_end_is_told_that_it_will_not_be_deleted(muster: Muster, control: StandIn) -> None:
    control.history, control.interrupts = history("demo")[:3], True
    said = muster("run", "train.py", "--name", "demo", "--rm")

    assert said.code == 130
    assert said.err.splitlines()[-2:] == ["--rm ends here; when it has ended:", "  muster delete demo"]
    assert [order[0] for order in control.orders] == ["train", "logs"]


def test_it_is_deleted_at_its_end_if_asked(muster: Muster, control: StandIn) -> None:
    control.history = history("demo", end="failed")
    said = muster("run", "train.py", "--name", "demo", "--rm")

    assert said.code == 100
    assert control.orders[-1] == ("delete", "demo")


@pytest.mark.parametrize(
    ("name", "content", "kind", "start"),
    [
        ("run.sh", b"python train.py\n", "a shell script", "sh "),
        ("launch", b"#!/bin/bash\npython train.py\n", "a program for /bin/bash", "/bin/bash "),
        ("trainer", b"\x7fELF\x02\x01", "a compiled program", ""),
    ],
)
def test_a_program_that_is_not_python_is_answered_with_the_option_that_runs_it(
    muster: Muster, control: StandIn, tmp_path: Path, name: str, content: bytes, kind: str, start: str
) -> None:
    (tmp_path / name).write_bytes(content)
    said = muster("run", name, "--", "--lr", "a b")

    assert (said.code, control.orders) == (2, [])
    assert said.err == (
        f"muster: {name} is {kind}, not a Python script\nhint: muster run --command -- {start}./{name} --lr 'a b'\n"
    )


@pytest.mark.parametrize("head", ["#!/usr/bin/env python3", "#!/usr/bin/pypy", "#!/usr/bin/env -S uv run", "import os"])
def test_a_python_script_without_its_suffix_is_submitted(
    muster: Muster, control: StandIn, tmp_path: Path, head: str
) -> None:
    (tmp_path / "train").write_text(f"{head}\n")

    assert muster("run", "-d", "train").code == 0


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("0", "the minimum is 0; a training needs at least 1 worker"),
        ("3:2:4", "the target (2) is below the minimum (3)"),
        ("1:5:4", "the target (5) is above the maximum (4)"),
    ],
)
def test_a_wrong_size_is_answered_with_a_sentence(muster: Muster, control: StandIn, size: str, problem: str) -> None:
    said = muster("run", "--workers", size, "--command", "--", "true")

    assert (said.code, said.err.splitlines()[0]) == (2, f"muster: --workers: {problem}")


def test_a_variable_is_passed_on_and_one_hint_names_the_others(
    muster: Muster, control: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, f"value of {name}")
    (tmp_path / "train.py").write_text("")
    words = ["--env-pass", "WANDB_API_KEY", "--env-pass", "MLFLOW_TRACKING_URI", "--env", "MLFLOW_TRACKING_URI=mine"]
    said = muster("run", "-d", "train.py", *words)

    spec = next(order[1] for order in control.orders if order[0] == "train")
    assert spec.env["WANDB_API_KEY"] == "value of WANDB_API_KEY" and "HF_TOKEN" not in spec.env
    assert spec.env["MLFLOW_TRACKING_URI"] == "mine"
    assert spec.secret_env == ("WANDB_API_KEY",)
    hints = [line for line in said.err.splitlines() if "not sent to the ranks" in line]
    assert len(hints) == 1 and "HF_TOKEN" in hints[0] and "WANDB_API_KEY" not in hints[0]
    assert "value of" not in said.err
