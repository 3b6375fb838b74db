"""Every answer of the API says that it is no page, that it is what it says it is, and that it is not to be kept."""

from __future__ import annotations

from pathlib import Path

import httpx2

from muster.server.app import OPERATIONS
from muster.sharing.service import PoolService
from tests.server.house import TRAININGS, House
from tests.server.test_guests import Line
from tests.server.test_pools import in_pool

FILLED = {"namespace": "default", "name": "demo", "pool": "default", "pipeline": "p1", "key": "k", "node": "0"}
FILLED |= {"digest": f"sha256:{'0' * 64}"}


def _guarded(answer: httpx2.Response) -> None:
    said = answer.headers
    where = (answer.request.method, str(answer.request.url), answer.status_code)
    assert said["x-content-type-options"] == "nosniff", where
    assert said["cache-control"] == "no-store", where
    assert "default-src 'none'" in said["content-security-policy"], where
    assert len(said.get_list("cache-control")) == 1, where


def test_every_answer_of_every_operation_has_them(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await house.submit()
        for client in (house.client, house.as_role("viewer", "other"), house.with_token(None)):
            for operation in OPERATIONS:
                path = operation.path.replace("{action}", "1")
                async with client.stream(operation.method, path.format(**FILLED)) as answer:
                    _guarded(answer)
            for method in ("GET", "HEAD", "PUT", "OPTIONS", "PATCH"):
                _guarded(await client.request(method, f"{TRAININGS}/demo"))
            _guarded(await client.get("/v1/nothing"))

    in_pool(tmp_path, test)


def test_an_answer_to_what_is_not_http_has_them_too(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        said = (await (await Line.to(house, b"nonsense\r\n\r\n")).rest()).lower()
        assert b"x-content-type-options: nosniff\r\n" in said and b"cache-control: no-store\r\n" in said

    in_pool(tmp_path, test)
