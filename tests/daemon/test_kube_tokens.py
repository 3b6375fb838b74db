"""What becomes of a change of the Secret of tokens when the control plane's own disk does not take it?"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from muster import files
from muster.daemon import kube_tokens
from muster.daemon.kube_tokens import TokenSecret
from muster.server.auth import Tokens


def test_a_change_that_the_disk_did_not_take_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    write = files.write_private

    class Told:
        """The server, of which everything is heard at once and then nothing more."""

        def __init__(self, api: object, path: str, handler: TokenSecret, params: object) -> None:
            self._handler = handler

        async def run(self) -> None:
            nonlocal asked
            asked += 1
            items: Sequence[dict[str, Any]] = [{"data": {"token": base64.b64encode(b"first").decode()}}]
            self._handler.listed(items, "1")
            await asyncio.Event().wait()

    def full_at_first(path: Path, text: str) -> None:
        if asked == 1:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(kube_tokens, "Informer", Told)
    monkeypatch.setattr(kube_tokens, "write_private", full_at_first)
    monkeypatch.setattr(kube_tokens, "AGAIN_S", 0.0)

    async def follow() -> None:
        secret = TokenSecret(None, "muster", tmp_path)  # type: ignore[arg-type]
        following = asyncio.create_task(secret.follow())
        async with asyncio.timeout(20):
            while secret.token != "first":
                await asyncio.sleep(0)
        following.cancel()

    asyncio.run(follow())
    assert asked == 2 and Tokens(tmp_path).identify("first").role == "admin"
