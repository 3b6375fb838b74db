"""How the page's files are served, and what keeps other sites out."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from muster.server.routes import web
from tests.server.house import BOUND_S, TRAININGS, House, a_body, error_of, in_house

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in web.FOLDER.rglob("*") if file.is_file())


def test_every_file_comes_without_a_token_with_its_type_and_is_kept_until_it_changes(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        visitor = house.with_token(None)
        for file in FILES:
            name = file.relative_to(web.FOLDER).as_posix()
            path = "/" if name == "index.html" else f"/{name}"
            found = await visitor.get(path)
            assert (found.status_code, found.content) == (200, file.read_bytes())
            assert found.headers["content-type"].startswith(
                {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}.get(
                    file.suffix, "text/plain"
                )
            )
            policy = found.headers["content-security-policy"]
            assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["cache-control"] == "no-cache"
            again = await visitor.get(path, headers={"If-None-Match": f'"other", W/{found.headers["etag"]}'})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", found.headers["etag"])
            head = await visitor.head(path)
            assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])
            assert (await visitor.post(path)).status_code == 405
        assert not {"/", "/assets/main.js"} & set((await visitor.get("/openapi.json")).json()["paths"])

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../index.html",
        "/assets/../../app.py",
        "/assets/..%2f..%2fapp.py",
        "/assets/%2e%2e/%2e%2e/app.py",
        "/assets/....//app.py",
        "/assets//main.js",
        "/assets/main.js/",
        "/assets/",
        "/assets",
        "/index.html",
        "//etc/passwd",
        "/assets/main.js%00",
        "/ASSETS/main.js",
    ],
)
def test_no_address_leads_to_another_file(tmp_path: Path, path: str) -> None:
    async def test(house: House) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
        writer.close()
        assert head.split()[1] == b"404"

    in_house(tmp_path, test)


def test_whoami_says_whose_token_it_is(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        token = house.services.tokens.create("vera", "viewer", ("vision",))
        found = (await house.with_token(token).get("/v1/whoami")).json()
        whose = {"name": "vera", "role": "viewer", "namespaces": ["vision"]}
        assert found == whose | {"place": "", "backends": ["local"]}
        assert (await house.with_token(None).get("/v1/whoami")).status_code == 401

    in_house(tmp_path, test)


def test_a_page_of_another_site_may_not_write(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        own = house.url.partition("://")[2]
        foreign = (
            {"Origin": "https://elsewhere.example"},
            {"Origin": "null"},
            {"Origin": ""},
            {"Origin": f"http://{own}.elsewhere.example"},
            {"Origin": f"http://{own}", "Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        )
        for headers in foreign:
            for method, path in (("POST", ""), ("PATCH", "/demo"), ("DELETE", "/demo"), ("POST", "/demo/scale")):
                answer = await house.client.request(method, TRAININGS + path, headers=headers, json=a_body())
                assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden"), headers
            assert (
                await house.client.get(TRAININGS, headers=headers)
            ).status_code == 200  # reading is the token's matter
        for at, headers in enumerate(
            ({}, {"Origin": house.url}, {"Origin": house.url, "Sec-Fetch-Site": "same-origin"})
        ):
            answer = await house.client.post(TRAININGS, headers=headers, json=a_body(f"demo-{at}"))
            assert answer.status_code == 201, headers

    in_house(tmp_path, test)


def test_the_page_asks_no_foreign_host_and_its_libraries_have_their_licences() -> None:
    own = [file for file in FILES if "vendor" not in file.parts]
    foreign = [hit for file in own for hit in re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", file.read_text())]
    assert foreign == []
    licences = (web.FOLDER / "assets/vendor/LICENSES.txt").read_text()
    for library in (web.FOLDER / "assets/vendor").glob("*.js"):
        assert library.name in licences


def test_a_wheel_has_every_file_of_the_page() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["muster"]
    package = ROOT / "src" / "muster"
    packed = {file for pattern in patterns for file in package.glob(pattern)}
    assert FILES and set(FILES) <= packed
