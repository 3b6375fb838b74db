"""Torch is preloaded for the programs that need it, and nothing of a program is imported to find out."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

from muster.node import imports

Files = dict[str, str]


def write(folder: Path, files: Files) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that comes first in `sys.path`, as the warm parent has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def dist(name: str, *needs: str) -> Files:
    """An installed package, as its metadata shows it."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
    return {f"{name.replace('-', '_')}-1.dist-info/METADATA": "\n".join(lines) + "\n"}


NEEDS_IT: dict[str, Files] = {
    "imports it": {"script.py": "import os, torch\n"},
    "imports a part of it": {"script.py": "import torch.nn as nn\n"},
    "imports from it": {"script.py": "from torch.nn import Linear\n"},
    "imports it inside a function": {"script.py": "def main():\n    if True:\n        import torch\n"},
    "imports it in a local module": {"script.py": "import model\n", "model.py": "import torch\n"},
    "imports it two modules away": {
        "script.py": "import a\n",
        "a.py": "from b import thing\n",
        "b.py": "import torch\n",
    },
    "imports it in modules that import each other": {
        "script.py": "import a\n",
        "a.py": "import b\n",
        "b.py": "import a, torch\n",
    },
    "imports it in a module of a local package": {
        "script.py": "from package import part\n",
        "package/__init__.py": "",
        "package/part.py": "import torch\n",
    },
    "imports it around a module of a local package": {
        "script.py": "import package.inner.part\n",
        "package/__init__.py": "import torch\n",
        "package/inner/__init__.py": "",
        "package/inner/part.py": "",
    },
    "imports it in a package without __init__": {
        "script.py": "from package.part import thing\n",
        "package/part.py": "import torch\n",
    },
    "imports it through a relative import": {
        "script.py": "import package\n",
        "package/__init__.py": "from .inner import part\n",
        "package/inner/__init__.py": "",
        "package/inner/part.py": "from .. import other\n",
        "package/other.py": "import torch\n",
    },
    "imports it in a module that hides one of the standard library": {
        "script.py": "import profile\n",
        "profile.py": "import torch\n",
    },
    "uses a package that depends on it": {"script.py": "import trainer.parts\n", **dist("trainer", "torch (>=2)")},
    "uses a package of another spelling": {"script.py": "import py_trainer\n", **dist("py-trainer", "torch>=2,<4")},
    "has a doubtful string in it": {"script.py": "import torch\nx = '\\d'\n"},
}

DOES_NOT: dict[str, Files] = {
    "imports nothing": {"script.py": "print(1)\n"},
    "imports others": {"script.py": "import os, json, nowhere\nfrom package import part\n"},
    "only speaks of it": {"script.py": "# import torch\nx = 'import torch'\ntorch = None\n'''\nimport torch\n'''\n"},
    "imports what only sounds like it": {"script.py": "import torchless\nfrom my import torch\n"},
    "has a syntax error": {"script.py": "import torch\ndef broken(:\n"},
    "has a null byte": {"script.py": "import torch\0\n"},
    "has a broken module": {"script.py": "import part\n", "part.py": "import torch\n)\n"},
    "uses a package that may depend on it": {
        "script.py": "import trainer\n",
        **dist("trainer", "torch; extra == 'all'"),
    },
    "uses a package that needs another": {
        "script.py": "import trainer\n",
        **dist("trainer", "torch-like", "torchless"),
    },
    "uses muster": {"script.py": "import muster\nmuster.progress(1)\nfrom muster.node import store\n"},
}


@pytest.mark.parametrize("what", NEEDS_IT)
def test_a_script_needs_torch_when_it(folder: Path, what: str) -> None:
    write(folder, NEEDS_IT[what])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imports.needs_torch("script", "script.py")


@pytest.mark.parametrize("what", DOES_NOT)
def test_a_script_does_not_need_torch_when_it(folder: Path, what: str) -> None:
    write(folder, DOES_NOT[what])
    assert not imports.needs_torch("script", "script.py")


def test_where_a_script_lies_is_where_its_modules_are_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"here/model.py": "import torch\n", "here/script.py": "import model\n", "there/file": ""})
    monkeypatch.chdir(tmp_path / "there")
    os.symlink("../here/script.py", "link.py")
    assert imports.needs_torch("script", "../here/script.py")
    assert imports.needs_torch("script", "link.py")
    assert imports.needs_torch("script", str(tmp_path / "here" / "script.py"))
    assert not imports.needs_torch("script", "missing.py")


def test_a_directory_is_read_from_its_main(folder: Path) -> None:
    write(folder, {"app/__main__.py": "import part\n", "app/part.py": "import torch\n", "empty/file": ""})
    assert imports.needs_torch("script", "app")
    assert not imports.needs_torch("script", "empty")


def test_modules_on_the_python_path_are_local_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"lib/part.py": "from inner import torchy\n", "lib/inner/torchy.py": "import torch\n"})
    write(folder, {"script.py": "import part\n"})
    assert not imports.needs_torch("script", "script.py")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    assert imports.needs_torch("script", "script.py")


PACKAGE: Files = {
    "package/__init__.py": "raise SystemExit('imported')\n",
    "package/__main__.py": "from .sub.deep import work\n",
    "package/sub/__init__.py": "raise SystemExit('imported')\n",
    "package/sub/deep.py": "from ..heavy import tool\n",
    "package/heavy.py": "import torch\n",
    "package/light.py": "from . import other\n",
    "package/other.py": "",
}


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("package", True),
        ("package.__main__", True),
        ("package.sub.deep", True),
        ("package.light", False),
        ("package.missing", False),
        ("package.light.deeper", False),
        ("missing", False),
        ("json.tool", False),
    ],
)
def test_a_module_is_followed_through_relative_imports(folder: Path, module: str, needs: bool) -> None:
    write(folder, PACKAGE)
    assert imports.needs_torch("module", module) is needs
    assert not any(name.partition(".")[0] == "package" for name in sys.modules), "its ranks will import it"


def test_a_module_runs_the_packages_around_it(folder: Path) -> None:
    write(folder, PACKAGE | {"package/__init__.py": "import torch\n"})
    assert imports.needs_torch("module", "package.light")


def test_a_command_is_never_looked_into(folder: Path) -> None:
    write(folder, {"script.py": "import torch\n"})
    assert not imports.needs_torch("command", "script.py")


def test_where_there_is_no_torch_none_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"script.py": "import torch\n"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not imports.needs_torch("script", "script.py")
