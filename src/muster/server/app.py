"""The HTTP app: which call goes to which handler. `build` is all that the process which serves it needs."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from muster.server import describe
from muster.server.calls import Call
from muster.server.describe import Operation
from muster.server.front import Front
from muster.server.routes import objects, orders, packages, pools, reads, sign_in, system, watch, web
from muster.server.services import Services

__all__ = ["OPERATIONS", "App", "Services", "build"]

OPERATIONS: tuple[Operation, ...] = (
    *objects.OPERATIONS,
    *orders.OPERATIONS,
    *reads.OPERATIONS,
    *watch.OPERATIONS,
    *packages.OPERATIONS,
    *pools.OPERATIONS,
    *sign_in.OPERATIONS,
    *system.OPERATIONS,
)


class App(Starlette):
    """Starlette for its router; layers and document are our own. What it would put around a route costs each request
    more than the answer does."""

    def __init__(self, services: Services) -> None:
        super().__init__(routes=[*_routes(OPERATIONS, services), *web.routes()])
        self.router.redirect_slashes = False
        self.services = services

    def build_middleware_stack(self) -> ASGIApp:
        return Front(self.router, self.services)

    async def tend(self) -> None:
        """What has to be done while it serves."""
        services = self.services
        await asyncio.gather(services.visits.tend(services.tokens), services.tokens.keep_use())

    async def close(self) -> None:
        """What has to be written when it no longer serves."""
        services = self.services
        services.tokens.save_use()
        if services.audit is not None:
            await asyncio.to_thread(services.audit.stop)

    def openapi(self) -> dict[str, Any]:
        return describe.document(OPERATIONS, self.services.version, self.services.backends)

    @functools.cached_property
    def openapi_bytes(self) -> bytes:
        """As it is sent. Anybody may ask for it, so it is made once."""
        return json.dumps(self.openapi()).encode()


def build(services: Services) -> App:
    return App(services)


def _routes(operations: Iterable[Operation], services: Services) -> list[Route]:
    by_path: defaultdict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in operations:
        by_path[operation.path][operation.method] = operation
    return [
        Route(path, _endpoint(path, by_method, services), methods=list(by_method))
        for path, by_method in by_path.items()
    ]


def _endpoint(
    path: str, by_method: dict[str, Operation], services: Services
) -> Callable[[Request], Awaitable[Response]]:
    """One route per path, so that a method that is not possible is answered with all that are."""

    async def endpoint(request: Request) -> Response:
        request.scope["muster.route"] = path
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method].handler(Call(services, request))

    return endpoint
