"""Does the code on the page about state run, from its top to its end?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from muster.state import disk

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_block_of_python_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for _ in range(2):
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    assert list(disk.steps(tmp_path / "dcp", disk.DCP)) == [1]
    assert names["reader"].step == 1
