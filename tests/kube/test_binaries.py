from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube import binaries


def test_a_named_folder_must_hold_the_servers(tmp_path: Path) -> None:
    env = {"MUSTER_KUBE_BIN": str(tmp_path), "PATH": "/usr/bin"}
    for look in (binaries.find, binaries.ensure):
        with pytest.raises(binaries.NotFound, match=f"no kube-apiserver and no kube-controller-manager in {tmp_path}"):
            look(env)


def test_what_lies_in_the_folder_comes_first(tmp_path: Path) -> None:
    for name in ("kube-apiserver", "kube-controller-manager", "etcd", "kubectl"):
        (tmp_path / name).touch(mode=0o755)
    found = binaries.find({"MUSTER_KUBE_BIN": str(tmp_path), "PATH": "/usr/bin"})
    assert found.etcd == str(tmp_path / "etcd")
    assert found.kubectl == str(tmp_path / "kubectl")


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    for name in ("kube-apiserver", "kube-controller-manager", "etcd"):
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(binaries.NotFound, match=r"kubectl is not installed .*kubernetes-client"):
        binaries.find({"MUSTER_KUBE_BIN": str(tmp_path), "PATH": str(tmp_path)})


def test_another_program_is_found_beside_them_or_named(tmp_path: Path) -> None:
    env = {"MUSTER_KUBE_BIN": str(tmp_path)}
    with pytest.raises(binaries.NotFound, match=f"no kubelet in {tmp_path}: make test-containers builds it"):
        binaries.built("kubelet", env)
    (tmp_path / "kubelet").touch(mode=0o755)
    assert binaries.built("kubelet", env) == str(tmp_path / "kubelet")


def test_the_cache_folder_is_found_where_caches_are(tmp_path: Path) -> None:
    assert binaries.folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "muster" / "kube-1.20.2"


def test_sources_are_fetched_from_where_this_machine_gets_its_packages() -> None:
    script = Path(binaries.__file__).with_name("build.sh").read_text()
    assert "Dir::Etc::sourceparts" in script
    assert "://" not in script
