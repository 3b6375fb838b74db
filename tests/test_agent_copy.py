"""The agent in an image without muster: copied by the init container's command, started by the Pod's own launcher."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster import agent_copy
from muster.backends.kube import render
from muster.types.pod_template import AGENT
from muster.types.training import problems_of
from tests.mesh.servers import free_port
from tests.training_builders import a_training

Json = dict[str, Any]
PATIENCE_S = 60.0
RANK = """\
import importlib.util, os, sys
import muster
muster.progress(1)
muster.mesh_wait(1)
foreign = [name for name in ("httpx2", "typer", "rich", "yaml") if importlib.util.find_spec(name)]
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {world} agent {muster.__file__} foreign {foreign}", flush=True)
"""


def a_pod(**known: Any) -> Json:
    training = a_training("demo", uid="u1", image="plain:1")
    return render.pod(training, "demo-0", coordinator="c:1", **({"agent_image": "muster:1"} | known))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the volume after the init container's command has run."""
    folder = tmp_path / "volume"
    folder.mkdir()
    (init,) = a_pod()["spec"]["initContainers"]
    _, *words = [str(folder) if word == AGENT else word for word in init["command"]]
    subprocess.run([sys.executable, *words], check=True, timeout=PATIENCE_S, umask=0o077)
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a folder with the programs of an image: a Python without packages, and a shell."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "image")], check=True)
    return tmp_path / "image" / "bin"


def start(image: Path, copied: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the worker's command from the Pod, with other arguments for its launcher."""
    (worker,) = a_pod()["spec"]["containers"]
    shell, flag, script, name, *_ = [word.replace("$$", "$") for word in worker["command"]]
    env = {"PATH": str(image), "HOME": str(copied.parent), agent_copy.VARIABLE: str(copied)}
    env |= {"MUSTER_HOME": str(copied.parent / "home")}
    assert shell == "sh"
    return subprocess.run(
        ["/bin/sh", flag, script, name, *words], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.usefixtures("processes")
def test_the_copy_alone_trains_under_a_python_without_packages(image: Path, copied: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    own = [
        "--standalone",
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--run-id",
        "copied",
        "--nnodes",
        "1",
        "--nproc",
        "2",
    ]
    done = start(image, copied, *own, "--", str(script))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 agent {copied}/muster/__init__.py foreign []" in done.stdout, done.stdout


@pytest.mark.usefixtures("processes")
def test_an_image_with_muster_keeps_its_own(image: Path, copied: Path) -> None:
    own = image / "muster-node"
    own.write_text('#!/bin/sh\necho "own $PYTHONPATH $*"\n')
    own.chmod(0o755)
    assert start(image, copied, "--version").stdout == "own  --version\n"


@pytest.mark.usefixtures("processes")
def test_an_image_without_a_usable_python_says_so_in_one_line(copied: Path, tmp_path: Path) -> None:
    image = tmp_path / "empty"
    image.mkdir()
    (image / "python3").write_text("#!/bin/sh\nexit 1\n")
    (image / "python3").chmod(0o755)
    done = start(image, copied, "--version")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "neither muster-node nor Python 3.11" in done.stderr


@pytest.mark.usefixtures("processes")
def test_a_shell_beside_a_rank_finds_the_agent_that_runs_there(image: Path, copied: Path) -> None:
    env = {"PATH": f"{image}:/bin:/usr/bin", agent_copy.VARIABLE: str(copied), "MUSTER_HOME": str(copied.parent)}
    words = ["sh", "-c", agent_copy.BESIDE, "muster-node"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *more], env=env, capture_output=True, text=True, timeout=PATIENCE_S)

    assert "--rank" in run("--shell", "--help").stdout
    own = image / "muster-node"
    own.write_text('#!/bin/sh\necho "own $*"\n')
    own.chmod(0o755)
    assert run("--shell", "a b").stdout == "own --shell a b\n"


@pytest.mark.usefixtures("processes")
def test_every_user_may_read_the_copy_and_a_second_copy_replaces_it(copied: Path) -> None:
    shutil.rmtree(copied / "muster" / "mesh")
    (copied / "muster" / "left.py").write_text("")
    agent_copy.copy(copied)
    for path in (copied / "muster").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path
    names = {path.name for path in (copied / "muster").iterdir()}
    assert "mesh" in names and not names & {"left.py", "cli", "server", "daemon", "__pycache__"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert agent_copy.main([str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_pod_copies_the_agent_with_no_more_rights_than_its_worker() -> None:
    spec = a_pod()["spec"]
    (init,), (worker,) = spec["initContainers"], spec["containers"]
    assert init["image"] == "muster:1" and worker["image"] == "plain:1"
    assert init["securityContext"] == worker["securityContext"] | {"readOnlyRootFilesystem": True}
    mount = {"name": "muster-agent", "mountPath": AGENT}
    assert init["volumeMounts"] == [mount] and mount | {"readOnly": True} in worker["volumeMounts"]
    assert {"name": "muster-agent", "emptyDir": {}} in spec["volumes"]
    assert worker["command"][3:5] == ["muster-node", "--coordinator"]


@pytest.mark.parametrize("known", [{"agent_image": ""}, {"agent_image": "plain:1"}])
def test_an_image_that_has_muster_for_certain_needs_no_copy(known: Json) -> None:
    spec = a_pod(**known)["spec"]
    assert "initContainers" not in spec and spec["containers"][0]["command"][0] == "muster-node"


def test_what_the_copy_needs_is_not_a_template_s_to_change() -> None:
    init = {"initContainers": [{"name": "muster-agent", "image": "mine"}]}
    mount = {"containers": [{"name": "worker", "volumeMounts": [{"name": "x", "mountPath": f"{AGENT}/"}]}]}
    for spec, field in ((init, "initContainers[muster-agent]"), (mount, "volumeMounts")):
        found = problems_of(a_training(template={"spec": spec}))
        assert any(field in one.field and "muster's own" in one.message for one in found), found


def test_a_template_adds_its_own_init_containers_behind_ours_and_cannot_replace_it() -> None:
    own = {"name": "fetch", "image": "busybox"}
    training = a_training(image="plain:1", template={"spec": {"initContainers": [own]}})
    pod = render.pod(training, "w-0", coordinator="c:1", agent_image="muster:1")
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["muster-agent", "fetch"]
