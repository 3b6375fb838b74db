"""`muster dashboard`: the page, signed in.

The address that is opened has a code and not the token. The code works once, within a minute, and on the control
plane's machine only for this user: other users can see what a browser was started with.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
import webbrowser
from collections.abc import Mapping
from urllib.parse import urlsplit

import typer

from muster.cli import session
from muster.cli.output import tell
from muster.cli.safe_text import shown
from muster.errors import MusterError, NotFound
from muster.sdk import flows

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster dashboard --no-browser")
def dashboard(
    no_browser: bool = typer.Option(False, "--no-browser", help="Print the address, and open nothing."),
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Open the page in a browser, signed in. Where that cannot be, print an address that signs in, once."""
    client = session.open_client(url, token, session.DEFAULT)
    try:
        code = client.run(flows.sign_in_code())
    except NotFound as error:
        hint = f"open {client.url}/ and give it the token: cat ~/.muster/token"
        raise MusterError("this control plane is older: it does not sign browsers in", hint=hint) from error
    address = f"{client.url}/#/sign-in/{code}"
    if not no_browser and may_open(client.url, os.environ, sys.platform) and _opened(address):
        tell(f"opened {client.url}/")
        return
    print(shown(address))
    tell("it signs in once, within a minute")


def may_open(url: str, env: Mapping[str, str], platform: str) -> bool:
    """Whether there is a screen; and whether what other users here can see of a browser's arguments is of no use."""
    try:
        here = ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    except ValueError:
        here = urlsplit(url).hostname == "localhost"
    screen = platform in ("darwin", "win32") or bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))
    return here and screen


def _opened(address: str) -> bool:
    with contextlib.suppress(webbrowser.Error, OSError):
        return webbrowser.open(address)
    return False
