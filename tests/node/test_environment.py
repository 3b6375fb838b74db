"""An environment is shared only by trainings of one namespace for which pip and uv read the same."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from muster.node import environment
from muster.node.installer_inputs import CannotMake, name_of
from tests.control.test_sent_code import a_wheel

Change = Callable[[Path, dict[str, str]], None]


def set_variable(name: str, value: str = "x") -> Change:
    return lambda folder, env: env.update({name: value})


def write(name: str, text: str = "changed\n") -> Change:
    def change(folder: Path, env: dict[str, str]) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return change


def link_uv(folder: Path, env: dict[str, str]) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text("#!/bin/sh\n")
    (folder / "bin" / "uv").chmod(0o755)
    env["PATH"] = str(folder / "bin")


DIFFERENT: dict[str, tuple[list[str], Change]] = {
    "other links": (["numpy==2.0"], set_variable("PIP_FIND_LINKS", "/tmp/wheels")),
    "any variable of pip": (["numpy==2.0"], set_variable("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:1/")),
    "any variable of uv": (["numpy==2.0"], set_variable("UV_INDEX")),
    "a proxy": (["numpy==2.0"], set_variable("https_proxy", "http://127.0.0.1:1")),
    "a certificate": (["numpy==2.0"], set_variable("SSL_CERT_FILE")),
    "a used variable": (["--find-links ${WHERE}", "numpy"], set_variable("WHERE")),
    "a wheel that a variable leads to": (["--find-links ${PLACE}", "numpy"], write("wheels/numpy.whl")),
    "a wheel in the links of pip": (["numpy==2.0"], write("linked/numpy.whl")),
    "the configuration of a user": (["numpy==2.0"], write("home/.config/pip/pip.conf")),
    "the old configuration of a user": (["numpy==2.0"], write("home/.pip/pip.conf")),
    "the configuration that a variable names": (["numpy==2.0"], write("pip.conf")),
    "credentials": (["numpy==2.0"], write("home/.netrc")),
    "a wheel by its path": (["./numpy-2.0.whl"], write("numpy-2.0.whl")),
    "a wheel by its name": (["numpy-2.0.whl"], write("numpy-2.0.whl")),
    "an archive by its name": (["numpy-2.0.tar.bz2"], write("numpy-2.0.tar.bz2")),
    "a tar by its name": (["numpy-2.0.TGZ[extra]"], write("numpy-2.0.TGZ")),
    "a folder whose name has a space": (["./my pkg"], write("my pkg/setup.py")),
    "a wheel whose folder has a space": (["numpy @ ./my wheels/numpy-2.0.whl"], write("my wheels/numpy-2.0.whl")),
    "quoted links of a line": (["--find-links 'my wheels'", "numpy"], write("my wheels/numpy.whl")),
    "quoted requirements": (['-r "my files/more.txt"'], write("my files/more.txt")),
    "a wheel by its address": (["numpy @ file://{folder}/numpy-2.0.whl"], write("numpy-2.0.whl")),
    "a folder": (["./pkg[extra]"], write("pkg/deep/setup.py")),
    "an editable folder": (["-e pkg"], write("pkg/deep/setup.py")),
    "a folder behind a link": (["./linking"], write("pkg/deep/setup.py")),
    "links of a line": (["--find-links wheels", "numpy"], write("wheels/numpy.whl")),
    "links of a line, short": (["-fwheels/", "-f wheels", "numpy"], write("wheels/numpy.whl")),
    "links of a line, with =": (["--find-links=wheels", "numpy"], write("wheels/numpy.whl")),
    "another file of lines": (["-r more/lines.txt"], write("more/lines.txt")),
    "a file of a file of lines": (["-r more/outer.txt"], write("more/inner.txt")),
    "a constraint": (["-c constraints.txt", "numpy"], write("constraints.txt")),
    "links of a line, in one word": (["-fwheels", "numpy"], write("wheels/numpy.whl")),
    "a constraint in one word": (["-cconstraints.txt", "numpy"], write("constraints.txt")),
    "a folder by its address without slashes": (["numpy@file:./pkg"], write("pkg/deep/setup.py")),
    "a repository on this machine": (["numpy @ git+file://{folder}/pkg"], write("pkg/deep/setup.py")),
    "a revision of a repository": (["numpy @ git+file://{folder}/pkg@main#egg=numpy"], write("pkg/deep/setup.py")),
    "uv in the place of pip": (["numpy==2.0"], link_uv),
}


def an_env(folder: Path) -> dict[str, str]:
    for name in ("home", "linked", "wheels", "pkg/deep", "more"):
        (folder / name).mkdir(parents=True)
    (folder / "linking").mkdir()
    (folder / "linking" / "src").symlink_to("../pkg")
    (folder / "more" / "outer.txt").write_text("-r inner.txt\n")
    (folder / "more" / "inner.txt").write_text("numpy\n")
    return {
        "HOME": str(folder / "home"),
        "PATH": "/nowhere",
        "PLACE": str(folder / "wheels"),
        "PIP_FIND_LINKS": str(folder / "linked"),
        "PIP_CONFIG_FILE": str(folder / "pip.conf"),
    }


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_name_covers(tmp_path: Path, what: str) -> None:
    lines, change = DIFFERENT[what]
    lines = [line.replace("{folder}", str(tmp_path)) for line in lines]
    env = an_env(tmp_path)
    before = name_of(lines, env, tmp_path)
    assert name_of(lines, env, tmp_path) == before
    change(tmp_path, env)
    assert name_of(lines, env, tmp_path) != before


def test_what_no_installer_reads_changes_no_name(tmp_path: Path) -> None:
    env = an_env(tmp_path)
    before = name_of(["numpy==2.0", "torch==2.8"], env, tmp_path)
    (tmp_path / "train.py").write_text("changed")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "data.bin").write_text("x")
    assert name_of(["numpy==2.0", "torch==2.8"], env | {"SEED": "7"}, tmp_path) == before


def test_the_settings_of_a_project_count_where_uv_reads_them(tmp_path: Path) -> None:
    env = an_env(tmp_path)
    link_uv(tmp_path, env)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    before = name_of(["numpy"], env, tmp_path / "pkg")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "y"\n')
    assert name_of(["numpy"], env, tmp_path / "pkg") == before
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nindex-url = "http://127.0.0.1:1/"\n')
    assert name_of(["numpy"], env, tmp_path / "pkg") != before


def test_an_editable_folder_is_that_of_one_worker(tmp_path: Path) -> None:
    """The environment leads to the folder itself, which is gone with its worker."""
    names = set()
    for worker in ("w-0", "w-1"):
        (tmp_path / worker / "pkg").mkdir(parents=True)
        (tmp_path / worker / "more.txt").write_text("-e ./pkg\n")
        for line in ("-e ./pkg", "-r more.txt"):
            names.add(name_of([line], {"PATH": "/nowhere", "HOME": str(tmp_path)}, tmp_path / worker))
    assert len(names) == 4


@pytest.mark.parametrize("namespace", ["../team-a", "team/a", ".", "Team", "a" * 64])
def test_a_namespace_is_one_folder(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(CannotMake, match="no name of a namespace"):
        environment.python(["x"], tmp_path, namespace)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["pip", "venv", "logging"])
def test_a_module_beside_the_script_is_no_part_of_the_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / f"{module}.py").write_text("raise SystemExit('the module of the training was run')\n")
    a_wheel(tmp_path, "required_by_us", "WORD = 1\n")
    monkeypatch.chdir(code)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python = environment.python(["required_by_us==1.0"], tmp_path / "cache", "team-a")
    assert subprocess.run([python, "-P", "-c", "import required_by_us"]).returncode == 0


@contextmanager
def an_index(folder: Path) -> Iterator[str]:
    """Serve what is in the folder as the wheel of `required_by_us`, to be kept for a day."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (wheel,) = folder.glob("*.whl")
            page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            body = wheel.read_bytes() if self.path.endswith(".whl") else page
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if body is page else "application/zip")
            self.send_header("Cache-Control", "max-age=86400")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_what_one_namespace_has_downloaded_is_not_installed_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip keeps downloads by their address, and an editor can put a proxy behind any address."""
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "shared"))
    monkeypatch.delenv("PIP_NO_CACHE_DIR", raising=False)
    words = []
    with an_index(tmp_path) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        for namespace in ("team-a", "team-b"):
            a_wheel(tmp_path, "required_by_us", f"WORD = {namespace!r}\n")
            python = environment.python(["required_by_us==1.0"], tmp_path / "cache", namespace)
            asked = [python, "-c", "import required_by_us; print(required_by_us.WORD)"]
            words.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    assert words == ["team-a", "team-b"]
    assert not (tmp_path / "shared").exists()
    for folder in (tmp_path / "cache").glob("*/team-*"):
        assert folder.stat().st_mode & 0o077 == 0
