"""Somebody with a browser: signs in, looks, takes pictures, and notices what a user would call broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, CDPSession, ConsoleMessage, Locator, Page, Request, expect

from tests.fleet import eventually

SCREENS = Path(__file__).parents[2] / "build" / "screens"
WIDE, NARROW = 1280, 400
PATIENCE_MS = 20_000
expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Work:
    seconds: float = 0.0


class Visitor:
    def __init__(self, browser: Browser) -> None:
        self._context = browser.new_context(viewport={"width": WIDE, "height": 860})
        self._context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self._context.new_page()
        self.requests: list[Request] = []
        self.errors: list[str] = []
        self.may_fail = False  # while the control plane is away, the browser itself reports what it cannot load
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not self.may_fail:
            self.errors.append(message.text)

    def sign_in(self, url: str, token: str, view: str = "") -> None:
        self.page.goto(f"{url}/{view}")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation", name="Views").wait_for()

    def answer(self, path: str, body: object) -> None:
        """Whoever asks for that path is told this, whatever the control plane would say."""
        self.page.route(lambda url: urlsplit(url).path.endswith(path), lambda route: route.fulfill(json=body))

    def go(self, view: str) -> None:
        self.page.evaluate("view => { location.hash = view }", view)

    def see(self, text: str) -> Locator:
        """Wait until that is on the page."""
        found = self.page.get_by_text(text).first
        found.wait_for()
        return found

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def card(self, name: str) -> Locator:
        return self.page.get_by_role("region", name=name, exact=True)

    def picture(self, name: str) -> None:
        """In both themes and at both widths."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        for theme in ("light", "dark"):
            self.page.emulate_media(color_scheme=theme)
            for width in (WIDE, NARROW):
                self.page.set_viewport_size({"width": width, "height": 860})
                self._fits(name, width)
                self.page.screenshot(path=SCREENS / f"{name}-{theme}-{width}.png")
        self.page.set_viewport_size({"width": WIDE, "height": 860})

    def _fits(self, name: str, width: int) -> None:
        """What scripts draw follows a moment later."""
        wide = "document.documentElement.scrollWidth"
        eventually(lambda: self.page.evaluate(wide) <= width, f"{name} fits on a screen of {width} pixels", 5)

    def faults(self) -> list[str]:
        """All that axe finds, of any weight, in both themes and at both widths."""
        found = []
        for width in (WIDE, NARROW):
            self.page.set_viewport_size({"width": width, "height": 860})
            for theme in ("light", "dark"):
                self.page.emulate_media(color_scheme=theme)
                for one in Axe().run(self.page).response["violations"]:
                    nodes = [_shown(node) for node in one["nodes"]][:3]
                    found.append(f"{theme} {width}: {one['id']} ({one['impact']}): {nodes}")
        self.page.set_viewport_size({"width": WIDE, "height": 860})
        return found

    @contextmanager
    def working(self) -> Iterator[Work]:
        """How much processor time the page takes meanwhile; how busy the machine is does not matter."""
        session = self._context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        work = Work()
        before = _task_seconds(session)
        yield work
        work.seconds = _task_seconds(session) - before
        session.detach()

    def leave(self) -> None:
        hosts = {urlsplit(request.url).netloc for request in self.requests}
        addresses = [request.url for request in self.requests]
        self._context.close()
        assert self.errors == []
        assert len(hosts) <= 1, f"it asks foreign hosts: {hosts}"
        assert not [address for address in addresses if "mst_" in address], "a token is in an address"


def _task_seconds(session: CDPSession) -> float:
    told = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in told if one["name"] == "TaskDuration"))


def _shown(node: dict[str, Any]) -> str:
    return f"{node['html'][:120]} {node['any'][:1] and node['any'][0]['message']}"
