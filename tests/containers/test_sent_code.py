"""As a user would: `muster run train.py` from a folder with a package, requirements and checkpoints on a claim."""

from __future__ import annotations

from pathlib import Path

from tests.containers.installation import Installation, Trained, furthest
from tests.containers.test_storage import claim
from tests.control.test_sent_code import a_wheel

COUNT = Path(__file__).with_name("programs") / "count.py"


def a_project(folder: Path) -> Path:
    """The program asks its package, and what is required, before it counts."""
    (folder / "local_package").mkdir(parents=True)
    (folder / "local_package" / "__init__.py").write_text("WORD = 'as sent'\n")
    a_wheel(folder, "required_by_us", "WORD = 'required'\n")
    (folder / "requirements.txt").write_text("--no-index\n./required_by_us-1.0-py3-none-any.whl\n")
    head = "import local_package, required_by_us\nprint(local_package.WORD, required_by_us.WORD, flush=True)\n"
    (folder / "train.py").write_text(head + COUNT.read_text())
    return folder


def test_a_spare_continues_from_the_claim_with_the_code_and_its_requirements(
    installed: Installation, trained: Trained, tmp_path: Path
) -> None:
    claim(installed.lab, trained.namespace, installed.lab.folder / f"claim-{trained.namespace}")
    project = a_project(tmp_path / "project")
    options = ("--workers", "1", "--spares", "1", "--name", "demo", "-d", "--requirements", "requirements.txt")
    storage = ("--storage", "checkpoints=/checkpoints:claim=checkpoints")
    command = ("run", "-n", trained.namespace, *options, *storage, "train.py", "--", "100000", "/checkpoints")
    said = installed.as_admin(*command, folder=project)
    assert "with the code of" in said
    before = trained.until_step(20, timeout_s=180.0)
    assert "as sent required" in trained.kubectl("logs", before["ranks"][0]["worker"])
    (victim,) = {one["node"] for one in before["ranks"]}
    installed.lab.nodes[victim].kill()
    after = trained.until_step(furthest(before) + 1, after_round=before["round"], timeout_s=180.0)
    assert {one["node"] for one in after["ranks"]} == {"node-1", "node-2"} - {victim}
    log = trained.kubectl("logs", after["ranks"][0]["worker"])
    (line,) = [line for line in log.splitlines() if "from step" in line]
    assert "as sent required" in log and int(line.split()[-1]) >= furthest(before), log
