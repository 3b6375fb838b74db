"""Code that was sent runs where its training runs, for every worker, whoever is gone by then; and goes with it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import muster
from muster import TrainingFailed, files
from muster.core.packages import UNUSED, KeptPackage, unused
from tests.contract.test_packages import NOON
from tests.fleet import eventually
from tests.plane import Plane, reasons

TRAIN = """
import os, sys, pathlib
import local_package
notes = pathlib.Path(sys.argv[1])
(notes / f"ran-{os.environ['MUSTER_WORKER']}").write_text(f"{local_package.WORD} {os.getcwd()}")
while not (notes / "go").exists():
    import time; time.sleep(0.01)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "local_package").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "local_package" / "__init__.py").write_text("WORD = 'as sent'\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "mine"))
    return folder


def ran(plane: Plane) -> dict[str, list[str]]:
    found = {path.name.removeprefix("ran-"): path.read_text().split() for path in plane.notes.glob("ran-*")}
    return {name: words for name, words in found.items() if words}  # it may not be written yet


def packages(plane: Plane) -> list[Path]:
    return [path for path in (plane.home / "packages").rglob("*") if path.is_file()]


@pytest.mark.scenario
def test_replacements_run_what_was_sent_after_the_folder_and_the_control_plane_are_gone(
    plane: Plane, project: Path
) -> None:
    training = plane.client.train(script="train.py", args=[str(plane.notes)], name="sent", ship=True, spares=1)
    eventually(lambda: ran(plane), "it runs")
    (first,) = ran(plane)
    assert ran(plane)[first][:2] == ["as", "sent"] and not ran(plane)[first][2].startswith(str(project))
    (project / "local_package" / "__init__.py").write_text("WORD = 'changed since'\n")
    plane.crash()
    plane.serve()
    plane.kill_worker(first)
    eventually(lambda: len(ran(plane)) == 2, "another one takes its place")
    (second,) = set(ran(plane)) - {first}
    assert ran(plane)[second][:2] == ["as", "sent"]
    assert len({where for _, _, where in ran(plane).values()}) == 2, "each has a folder of its own"
    plane.go()
    training.result(timeout=60)
    assert len(packages(plane)) == 1
    training.delete()
    eventually(lambda: not packages(plane), "its code goes with it")
    assert not list((plane.home / "work").iterdir())


def test_code_stays_as_long_as_a_training_names_it(plane: Plane, project: Path) -> None:
    plane.go()
    one, two = (
        plane.client.train(script="train.py", args=[str(plane.notes)], name=name, ship=True) for name in ("one", "two")
    )
    one.result(timeout=60)
    two.result(timeout=60)
    assert len(packages(plane)) == 1
    one.delete()
    assert len(packages(plane)) == 1
    two.delete()
    eventually(lambda: not packages(plane), "its code goes with the last of them")


@pytest.mark.scenario
def test_a_package_that_was_tampered_with_never_runs(plane: Plane, project: Path) -> None:
    training = plane.client.train(
        script="train.py", args=[str(plane.notes)], name="sent", ship=True, max_restarts=0, backend="local"
    )
    eventually(lambda: ran(plane), "it runs")
    (path,) = packages(plane)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    plane.kill_worker(next(iter(ran(plane))))
    with pytest.raises(TrainingFailed, match=r"package sha256:.* is refused: it is not what was sent"):
        training.result(timeout=60)
    assert training.outcome is not None and training.outcome.reason == "cannot_start" and len(ran(plane)) == 1


def a_wheel(folder: Path, name: str, text: str) -> None:
    """As small as a wheel can be."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_an_environment_is_made_once_for_all_workers_with_what_is_required(plane: Plane, project: Path) -> None:
    a_wheel(project, "required_by_us", "WORD = 'required'\n")
    (project / "train.py").write_text(TRAIN.replace("local_package.WORD", "__import__('required_by_us').WORD"))
    (project / "requirements.txt").write_text("--no-index\n./required_by_us-1.0-py3-none-any.whl\n")
    training = plane.client.train(
        script="train.py", args=[str(plane.notes)], ship=True, world_size=2, requirements="requirements.txt"
    )
    eventually(lambda: len(ran(plane)) == 2, "both run", 120)
    assert {words[0] for words in ran(plane).values()} == {"required"}
    made = [one for one in (plane.home / "cache" / "environments" / "default").iterdir() if one.is_dir()]
    assert len(made) == 1
    plane.go()
    training.result(timeout=60)


def test_namespaces_share_no_environment_though_their_lines_are_the_same(plane: Plane, project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace("local_package.WORD", "__import__('required_by_us').WORD"))
    for team in ("team-a", "team-b"):
        wheels = plane.folder / team
        wheels.mkdir()
        a_wheel(wheels, "required_by_us", f"WORD = {team!r}\n")
        training = plane.client.train(
            script="train.py",
            args=[str(plane.notes)],
            ship=True,
            namespace=team,
            requirements=["required_by_us==1.0"],
            env={"PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"},
        )
        eventually(lambda: ran(plane), "it runs", 120)
        assert {words[0] for words in ran(plane).values()} == {team}
        plane.go()
        training.result(timeout=60)
        for note in plane.notes.iterdir():
            note.unlink()
    folders = sorted((plane.home / "cache" / "environments").iterdir())
    assert [folder.name for folder in folders] == ["team-a", "team-b"]
    assert {folder.stat().st_mode & 0o077 for folder in folders} == {0}


def test_what_cannot_be_installed_is_one_clear_line_before_any_rank(plane: Plane, project: Path) -> None:
    lines = ["--no-index", "no-such-package-anywhere==1.0"]
    training = plane.client.train(script="train.py", args=[str(plane.notes)], ship=True, requirements=lines)
    with pytest.raises(TrainingFailed, match="No matching distribution found for no-such-package-anywhere"):
        training.result(timeout=120)
    assert training.outcome is not None and training.outcome.reason == "cannot_start" and not ran(plane)
    assert "RoundReleased" not in reasons(training)


def test_a_function_travels_with_its_module(plane: Plane, project: Path) -> None:
    (project / "functions.py").write_text(
        "import os, pathlib, muster, local_package\n"
        "@muster.distributed(ship=True)\n"
        "def work(where):\n"
        "    pathlib.Path(where, 'ran-it').write_text(f'{local_package.WORD} {os.getcwd()}')\n"
        "if __name__ == '__main__':\n"
        f"    work({str(plane.notes)!r}).result(timeout=60)\n"
    )
    where = {"MUSTER_URL": plane.url, "MUSTER_TOKEN": plane.api_token}
    done = plane.start("sh", "-c", f"cd {project} && exec {sys.executable} functions.py", **where)
    assert done.wait() == 0, done.text
    assert ran(plane)["it"][:2] == ["as", "sent"] and not ran(plane)["it"][2].startswith(str(project))


def test_a_far_control_plane_is_sent_the_code_without_being_told_to(
    plane: Plane, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sees other files says so."""
    monkeypatch.setattr(files, "place", lambda: "elsewhere")
    client = muster.Client(plane.url, plane.api_token)
    training = client.train(script="train.py", args=[str(plane.notes)], name="far")
    assert training.training.spec.package is not None and training.training.spec.script == "train.py"
    monkeypatch.undo()
    monkeypatch.chdir(project)
    near = client.train(script="train.py", args=[str(plane.notes)], name="near")
    assert near.training.spec.package is None and near.training.spec.script == str(project / "train.py")
    plane.go()
    for one in (training, near):
        one.result(timeout=60)


def test_what_nobody_names_goes_after_an_hour_and_what_was_named_at_once() -> None:
    kept = [KeptPackage("a", f"sha256:{number}", 1, NOON) for number in range(3)]
    named = {("a", "sha256:0"), ("b", "sha256:1")}
    assert unused(kept, named, NOON) == []
    assert unused(kept, named, NOON, left=("a", "sha256:2")) == kept[2:]
    assert unused(kept, named, NOON, left=("a", "sha256:0")) == []
    assert unused(kept, named, NOON + UNUSED) == kept[1:]
