"""A program that expects another launcher is found out by its own files, and told so in one line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from muster.node import remarks
from muster.node.program import Program
from muster.types import frames
from muster.types.frames import Frame, RemarkFrame
from tests.fleet import Fleet, eventually

GROUP = "import torch.distributed as dist\ndef work(rank):\n    dist.init_process_group('gloo')\n"
SPAWNS = "import torch.multiprocessing as mp\nfrom work import work\nmp.spawn(work, nprocs=2)\n"


def lines(
    folder: Path, script: str, modules: dict[str, str] | None = None, env: dict[str, str] | None = None
) -> list[str]:
    for name, text in {"train.py": script, **(modules or {})}.items():
        (folder / name).write_text(text)
    return remarks.about("script", str(folder / "train.py"), env or {})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(work)", "torch.multiprocessing.spawn"),
        ("from torch.multiprocessing import spawn as go\ngo(work)", "torch.multiprocessing.spawn"),
        (
            "from torch import multiprocessing\nmultiprocessing.start_processes(work)",
            "torch.multiprocessing.start_processes",
        ),
        ("import torch\ntorch.multiprocessing.spawn(work)", "torch.multiprocessing.spawn"),
        ("import accelerate\naccelerate.notebook_launcher(work)", "accelerate.notebook_launcher"),
    ],
)
def test_a_script_that_starts_its_own_ranks(tmp_path: Path, call: str, name: str) -> None:
    (line,) = lines(tmp_path, f"from work import work\n{call}\n", {"work.py": GROUP})
    assert line.startswith(f"the program starts ranks by itself ({name})") and "\n" not in line


@pytest.mark.parametrize(
    ("script", "place", "remedy"),
    [
        ("import os\nos.environ.update({'A': '1'})\nimport torch\n", "train.py:2", "with constants"),
        ("import os\nos.environ |= {'A': '1'}\nimport torch\n", "train.py:2", "with constants"),
        ("import os, sys\nos.environ['A'] = sys.argv[1]\nimport torch\n", "train.py:2", "with constants"),
        (
            "import os, warnings\nwarnings.filterwarnings('ignore')\nos.environ['A'] = '1'\nimport torch\n",
            "train.py:2",
            "move it below the imports",
        ),
        ("import setup\nimport torch\n", "setup.py:3", "with constants"),
    ],
)
def test_a_line_that_keeps_torch_from_being_imported_ahead_is_named(
    tmp_path: Path, script: str, place: str, remedy: str
) -> None:
    (line,) = lines(tmp_path, script, {"setup.py": "import os\n\nos.environ.update(A='1')\n"})
    assert line.startswith(f"{place} keeps torch from being imported ahead") and remedy in line


@pytest.mark.parametrize(
    "script",
    [
        "import os\nos.environ['A'] = '1'\nimport torch\n",
        "import warnings\nwarnings.filterwarnings('ignore')\nimport torch\n",
        "import torch\nimport os\nos.environ.update({'A': '1'})\n",
        "import os\nos.environ.update({'A': '1'})\n",
    ],
)
def test_a_script_that_can_be_prepared_gets_no_remark(tmp_path: Path, script: str) -> None:
    assert lines(tmp_path, script) == []


@pytest.mark.parametrize(
    "script",
    [
        "import torch.multiprocessing as mp\nmp.spawn(lambda rank: None)\n",
        "import torch.multiprocessing as mp\nmp.set_start_method('spawn')\nmp.Process(target=print)\n" + GROUP,
        GROUP,
        "def broken(\n",
        "",
    ],
)
def test_others_are_not_bothered(tmp_path: Path, script: str) -> None:
    assert lines(tmp_path, script) == []
    assert remarks.about("command", "sh", {}) == []


def test_what_accelerate_config_wrote_is_named_where_nobody_reads_it(tmp_path: Path) -> None:
    config = tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    config.parent.mkdir(parents=True)
    home, script = {"HOME": str(tmp_path)}, "from accelerate import Accelerator\nAccelerator()\n"
    assert lines(tmp_path, script, env=home) == []
    config.write_text("mixed_precision: bf16\n")
    (line,) = lines(tmp_path, script, env=home)
    assert line.startswith(f"{config} is read by `accelerate launch` alone") and "\n" not in line
    assert lines(tmp_path, script, env={"HF_HOME": str(config.parents[1])}) == [line]
    assert lines(tmp_path, script, env=home | {"ACCELERATE_MIXED_PRECISION": "bf16"}) == []
    assert lines(tmp_path, "from trl import SFTTrainer\n", env=home) == [line]
    assert lines(tmp_path, "print()\n", env=home) == []


def test_it_is_in_the_log_of_rank_0_and_told_by_the_coordinator(fleet: Fleet) -> None:
    notes = fleet.notes
    script = fleet.folder / "train.py"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(notes / 'go')!r}).exists(): time.sleep(0.01)\n"
    unused = "def main():\n    import accelerate\n    accelerate.notebook_launcher(main)\n"
    script.write_text(wait + unused)
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", program=(str(script),))
    node.expect(r"muster-node\[a\] the program starts ranks by itself")
    eventually(lambda: "remark" in [one["kind"] for one in (fleet.view() or {"story": []})["story"]], "told")
    fleet.go()
    assert node.wait() == 0
    assert "[0] muster: the program starts ranks by itself" in node.text


def test_a_folder_whose_name_is_no_text_is_told_so_that_the_coordinator_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that cannot be read costs the worker its connection."""
    script, folder = tmp_path / "train.py", os.fsencode(tmp_path) + b"/odd\xff"
    script.write_text("import accelerate\n")
    os.makedirs(folder + b"/accelerate")
    with open(folder + b"/accelerate/default_config.yaml", "wb"):
        pass
    monkeypatch.setenv("HF_HOME", os.fsdecode(folder))
    sent: list[Frame] = []
    program = Program("script", str(script), args=(), warm=False, preload=(), auto=False)
    asyncio.run(remarks.tell(program, remarks.Where(list, 0), send=sent.append))
    [told] = [frames.read(frames.write(frame)) for frame in sent]
    assert isinstance(told, RemarkFrame) and "accelerate launch" in told.text
