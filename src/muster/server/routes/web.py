"""The page that people look at: static files, read once, which speak to the public API only.

They need no token: the page asks for one. They are answered from memory by exact name, so there is no path to trick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parents[1] / "web"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again: after an upgrade nobody runs half of the old page
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class WebFile:
    """A file as it is sent."""

    body: bytes
    media_type: str

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def routes() -> list[Route]:
    """One route per file."""
    pages = {file.relative_to(FOLDER).as_posix(): read(file) for file in sorted(FOLDER.rglob("*")) if file.is_file()}
    served = {"/" if name == INDEX else f"/{name}": page for name, page in pages.items()}
    return [Route(path, _endpoint(path, page), methods=["GET"]) for path, page in served.items()]


def read(file: Path) -> WebFile:
    return WebFile(file.read_bytes(), _TYPES[file.suffix])


def _endpoint(path: str, page: WebFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": page.tag}

    async def endpoint(request: Request) -> Response:
        request.scope["muster.route"] = path
        known = request.headers.get("if-none-match", "")
        if page.tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(page.body, headers=headers, media_type=page.media_type)

    return endpoint
