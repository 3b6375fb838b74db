"""A control plane's command line: what it means when nothing is said, and what cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from muster.backends.kube import render
from muster.daemon import options
from muster.daemon.options import Options


@pytest.fixture(autouse=True)
def nothing_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUSTER_POOL_GPUS", "MUSTER_POOL_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def test_only_a_home_is_needed() -> None:
    assert options.read(["--home", "/srv"]) == Options(Path("/srv"))
    options.check(Options(Path("/srv")))


def test_every_option_arrives_under_its_name() -> None:
    words = "--home /srv --listen :1 --tls-cert c --tls-key k --insecure --forget --etcd http://e --ready-fd 3"
    cluster = (
        "--store kube --backend kube --namespace n --identity i --address a --advertise h --image m --worker-user 7"
    )
    more = "--reconcile-delay-s 0.5 --synchronous NORMAL --coordinator-port 1 --mesh-port 2"
    read = options.read(f"{words} {cluster} {more}".split())
    assert read == Options(
        home=Path("/srv"),
        listen=":1",
        tls_cert=Path("c"),
        tls_key=Path("k"),
        insecure=True,
        ready_fd=3,
        forget=True,
        etcd="http://e",
        reconcile_delay_s=0.5,
        synchronous="NORMAL",
        store="kube",
        backend="kube",
        namespace="n",
        identity="i",
        address="a",
        advertise="h",
        image="m",
        worker_user="7",
        coordinator_port=1,
        mesh_port=2,
    )
    assert options.identity_of(read) == "i"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--tls-cert c", "--tls-cert and --tls-key belong together"),
        ("--tls-cert /nowhere/c --tls-key /nowhere/k", "/nowhere/c cannot be read"),
        ("--store kube", "--store kube and --backend kube belong together"),
        ("--backend kube", "--store kube and --backend kube belong together"),
        ("--etcd https://etcd:2379", "is not http://HOST:PORT"),
        ("--listen 0.0.0.0:80", "0.0.0.0"),
        ("--listen nowhere", "nowhere"),
        ("--worker-user ann", "--worker-user must be a number"),
        ("--worker-user -1", "--worker-user must be a number"),
        ("--worker-user 4294967296", "--worker-user must be a number"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(words: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        options.check(options.read(["--home", "/srv", *words.split()]))


def test_workers_run_as_the_user_that_is_rendered_unless_another_is_named() -> None:
    assert options.worker_user(Options(Path("/srv")).worker_user) == render.USER
    assert (options.worker_user("0"), options.worker_user("image")) == (0, None)


def test_beyond_loopback_it_may_listen_when_told_that_it_may() -> None:
    open_to_all = Options(Path("/srv"), listen="0.0.0.0:80")
    with pytest.raises(ValueError, match="--insecure"):
        options.check(open_to_all)
    options.check(replace(open_to_all, insecure=True))


@pytest.mark.parametrize(("told", "count"), [("", 4), (" ", 4), ("1", 1), ("4", 4), (" 2 ", 2)])
def test_gpus_of_a_pool_are_on_one_node_unless_it_is_said_otherwise(told: str, count: int) -> None:
    assert options.gpus_per_node({"MUSTER_POOL_GPUS_PER_NODE": told}, 4) == count


@pytest.mark.parametrize("told", ["0", "5", "-1", "two", "1.5"])
def test_gpus_per_node_that_cannot_be_are_named(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_POOL_GPUS", "0,1,2,3")
    monkeypatch.setenv("MUSTER_POOL_GPUS_PER_NODE", told)
    with pytest.raises(ValueError, match="must be a number from 1 to 4"):
        options.check(Options(Path("/srv")))


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://etcd", "etcd:2379"), ("http://etcd:1/", "etcd:1"), ("http://[::1]:5", "[::1]:5")],
)
def test_where_an_etcd_is(url: str, address: str) -> None:
    assert options.etcd_address(url) == address


def test_a_password_in_the_url_of_an_etcd_is_not_shown() -> None:
    with pytest.raises(ValueError, match="…@etcd") as refused:
        options.etcd_address("http://ada:hunter2@etcd")
    assert "hunter2" not in str(refused.value)


def test_a_variable_that_is_wrong_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSTER_EVENTS", "many")
    with pytest.raises(SystemExit, match="2"):
        options.read(["--home", "/srv"])
    said = capsys.readouterr().err
    assert said.startswith("muster server: argument --events: ") and said.count("\n") == 1
