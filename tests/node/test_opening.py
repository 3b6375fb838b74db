"""What of a program's first lines can be done ahead: its imports, as written, up to the first line that may matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.node import opening
from tests.node.test_imports import Files, write

# A script, what can be done ahead of it, and whether it sets other variables than that.
CASES: dict[str, tuple[str, str, bool]] = {
    "imports modules": ("import os, a.b as c\nimport d\n", "a.b d", False),
    "takes names from them": ("from a import b, c as d\nfrom e import *\n", "a:b a:c e", False),
    "tries to import": ("try:\n    import a\nexcept ImportError:\n    a = None\nimport b\n", "a b", False),
    "helps itself when it cannot": ("try:\n    import a\nexcept ImportError:\n    install()\nimport b\n", "a", False),
    "imports for types only": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nimport b\n",
        "b",
        False,
    ),
    "imports on a condition": ("import sys\nif sys.argv[1]:\n    import a\nimport b\n", "b", False),
    "is a program": ("import a\nif __name__ == '__main__':\n    import b\n    main()\nimport c\n", "a", False),
    "defines things": ("def f():\n    import a\n    g()\n\nclass A:\n    x = f()\n\nimport b\n", "b", False),
    "has constants": ("import logging\nlog = logging.getLogger('x')\nX = [1, -2.0]\nimport a\n", "a", False),
    "does something": ("import a\nprint()\nimport b\n", "a", False),
    "changes another module": ("import a\na.x = 1\nimport b\n", "a", False),
    "changes where modules are": ("import sys, a\nsys.path.insert(0, 'x')\nimport b\n", "a", False),
    "sets a variable": ("import os\nos.environ['X'] = '1'\nimport a\n", "X=1 a", False),
    "sets one that may be set": ("import os\nos.environ.setdefault('X', '1')\nimport a\n", "X?=1 a", False),
    "sets one from os directly": ("from os import environ\nenviron['X'] = '1'\nimport a\n", "X=1 a", False),
    "computes a variable": ("import os\nimport a\nos.environ['X'] = str(1)\nimport b\n", "a", True),
    "sets one on a condition": (
        "import os\nif 'X' not in os.environ:\n    os.environ['X'] = '1'\nimport a\n",
        "",
        True,
    ),
    "sets one after it did something": ("import a, os\nf()\nos.environ['X'] = '1'\nimport b\n", "a", True),
    "sets one in a function": ("import a, os\ndef f():\n    os.environ.update(X='1')\n", "a", True),
    "hands all of them on": ("import a, os\ndef f():\n    g(os.environ)\n", "a", True),
    "has another name for them": ("import a\nfrom os import environ as e\n", "a", True),
    "reads them from a file": ("from dotenv import load_dotenv\nload_dotenv()\nimport a\n", "dotenv:load_dotenv", True),
    "only reads them": ("import a, os\nx = os.environ.get('X', os.environ['Y'])\nimport b\n", "a b", False),
    "sets what a rank is told": ("import a, os\ndef f():\n    os.environ['MASTER_PORT'] = g()\n", "a", False),
    "imports its own modules": ("import own\nimport a\n", "OWN=1 o.p a", False),
    "imports its own, which does something": ("import acts\nimport a\n", "o", False),
    "imports its own twice": ("import own, own\n", "OWN=1 o.p", False),
    "uses muster": ("import muster, a\n", "a", False),
    "cannot be parsed": ("import a\n)\n", "", True),
}


@pytest.mark.parametrize("what", CASES)
def test_a_script_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    text, wanted, sets = CASES[what]
    own: Files = {"own.py": "import os\nos.environ['OWN'] = '1'\nimport o.p, own\n", "acts.py": "import o\nprint()\n"}
    write(tmp_path, {"script.py": text} | own)
    steps = opening.steps("script", "script.py")
    shown = [
        step.key if isinstance(step, opening.Load) else f"{step.variable}{'?' * step.default}={step.value}"
        for step in steps
    ]
    assert " ".join(shown) == wanted
    assert opening.sets_variables("script", "script.py", steps) is sets


def test_a_module_never_imports_itself_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"mine/__init__.py": "import a\n", "mine/__main__.py": "from . import part\nimport mine.part, b\n"})
    write(tmp_path, {"mine/part.py": "from .other import x\nimport c\n", "mine/other.py": "import d\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [step.key for step in opening.steps("module", "mine") if isinstance(step, opening.Load)] == list("adcb")
