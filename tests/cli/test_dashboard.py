from __future__ import annotations

import webbrowser

import pytest

from muster.cli import dashboard
from muster.errors import NotFound
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn

HERE = "http://127.0.0.1:8470"


@pytest.fixture(autouse=True)
def a_code(control: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "url", HERE, raising=False)
    monkeypatch.setattr(StandIn, "run", lambda self, flow: "c-0_de")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def take(address: str) -> bool:
        found.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", take)
    return found


def test_the_page_is_opened_with_a_code_that_is_not_printed(muster: Muster, opened: list[str]) -> None:
    said = muster("dashboard")

    assert opened == [f"{HERE}/#/sign-in/c-0_de"]
    assert (said.code, said.out, said.err) == (0, "", f"opened {HERE}/\n")


def test_without_a_browser_the_address_is_printed(
    muster: Muster, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = f"{HERE}/#/sign-in/c-0_de\n"
    assert muster("dashboard", "--no-browser").out == wanted
    monkeypatch.delenv("DISPLAY")
    assert muster("dashboard").out == wanted
    assert opened == []


@pytest.mark.parametrize("fails", [lambda address: False, lambda address: (_ for _ in ()).throw(webbrowser.Error())])
def test_a_browser_that_does_not_open_leaves_the_address(
    muster: Muster, monkeypatch: pytest.MonkeyPatch, fails: object
) -> None:
    monkeypatch.setattr(webbrowser, "open", fails)

    assert muster("dashboard").out == f"{HERE}/#/sign-in/c-0_de\n"


@pytest.mark.parametrize(
    ("url", "platform", "screen", "opens"),
    [
        ("http://127.0.0.1:1", "linux", True, True),
        ("http://localhost:1", "linux", True, True),
        ("http://[::1]:1", "darwin", False, True),
        ("http://127.0.0.1:1", "linux", False, False),
        ("https://muster.example.com", "linux", True, False),  # there, others could use what they see
    ],
)
def test_a_browser_is_only_started_where_others_cannot_use_what_they_see(
    url: str, platform: str, screen: bool, opens: bool
) -> None:
    assert dashboard.may_open(url, {"DISPLAY": ":0"} if screen else {}, platform) is opens


def test_an_older_control_plane_is_told_apart(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StandIn, flow: object) -> None:
        raise NotFound("there is nothing at '/v1/sign-in-codes'")

    monkeypatch.setattr(StandIn, "run", refuse)
    said = muster("dashboard")

    assert said.code == 1
    assert "older" in said.err and "cat ~/.muster/token" in said.err
