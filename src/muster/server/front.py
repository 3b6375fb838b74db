"""Who may come in, and what do they hear when something goes wrong? One ASGI layer around every route.

It gives each request an id, finds out whose token it carries, turns every exception into the one form of error, ends
what its token may no longer do, counts, and tells the audit. It is a single layer because each costs every request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.core import auditing
from muster.errors import (
    Forbidden,
    InternalError,
    MusterError,
    NotFound,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from muster.server.answers import as_error, as_warning
from muster.server.auth import ExpiredToken, Pass
from muster.server.services import Services
from muster.types.audit import NOBODY, AuditEntry

log = logging.getLogger("muster.server")

_REQUEST_ID = re.compile(rb"[-A-Za-z0-9_.]{1,64}")
_GUARDED = ("/v1", "/metrics")
_AUDITED = (*_GUARDED, "/sign-in")
_OWN_SITES = (b"same-origin", b"none")
_SLASHES = re.compile(rb"%(2f|5c|00)", re.IGNORECASE)
_SECRET = re.compile(r"mst_[-\w]*")
_FORWARDED = re.compile(rb"[0-9A-Fa-f.:, ]{1,100}")
_LAST_WORDS_S = 0.2  # for somebody whose stream ends to take the reason
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)


class Front:
    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Exchange(self._app, self._services, scope, send).run(receive)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._app(scope, receive, send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: ASGIApp, services: Services, scope: Scope, send: Send) -> None:
        self._app = app
        self._services = services
        self._scope = scope
        self._raw_send = send
        self._status = 0
        self._code = ""
        self._request_id = _request_id(scope)
        self._shown: Pass | None = None
        self._expired = NOBODY  # whose token it was
        self._task = asyncio.current_task()
        self._ended: MusterError | None = None
        scope["muster.abort"] = self._abort

    async def run(self, receive: Receive) -> None:
        began = time.perf_counter()
        try:
            await self._answer(receive)
        except MusterError as error:
            self._expired = error.name if isinstance(error, ExpiredToken) else NOBODY
            await self._fail(error, error.status, _headers_of(error))
        except HTTPException as error:
            await self._fail(_no_route(self._scope, error.status_code), error.status_code, error.headers or {})
        except asyncio.CancelledError:
            await self._cut_short()
        except ClientDisconnect:
            log.debug("the client of request %s left", self._request_id)
        except Exception:  # the top of the HTTP app: whatever was not foreseen becomes one error, and a line in the log
            log.exception("request %s failed", self._request_id)
            await self._fail(InternalError("the server failed; its log has the details under this request's id"), 500)
        finally:
            self._count(time.perf_counter() - began)
            self._note()

    async def _answer(self, receive: Receive) -> None:
        try:
            self._admit()
        except Unauthenticated:
            await self._services.attempts.pause(self._scope["muster.guest"].address)
            raise
        if self._shown is None:
            await self._app(self._scope, receive, self._send)
            return
        self._services.visits.begin(self._shown, self)
        try:
            await self._app(self._scope, receive, self._send)
        finally:
            self._services.visits.end(self._shown, self)

    def leave(self, error: MusterError) -> None:
        """The token has ended. A read hears it; what may be in the middle of a change is left alone, and unheard."""
        if self._ended is not None:
            return
        self._ended = error
        if self._scope["method"] in auditing.READING and self._task is not None:
            self._task.cancel()
        else:
            self._cut()

    async def _cut_short(self) -> None:
        if self._ended is None:  # this server ends while somebody waits: the next one answers
            await self._fail(Unavailable("the control plane stops", hint="ask again"), Unavailable.status)
            return
        if self._task is not None:
            self._task.uncancel()
        await self._fail(self._ended, self._ended.status, _headers_of(self._ended))

    def _admit(self) -> None:
        path: str = self._scope["path"]
        if _SLASHES.search(self._scope.get("raw_path") or b""):
            raise NotFound("there is nothing at an address with an encoded slash or NUL")
        if path.startswith(_GUARDED):
            if self._scope["method"] not in auditing.READING and _is_foreign(self._scope):
                raise Forbidden(
                    "a page of another site may not change anything here",
                    hint="a proxy in front of the control plane has to keep the Host header",
                )
            self._shown = shown = self._pass()
            self._scope["muster.identity"] = shown.identity
            guest = self._scope["muster.guest"]
            guest.token, guest.admin = shown.identity.name, shown.identity.role == "admin"

    def _pass(self) -> Pass:
        given = [value for name, value in self._scope["headers"] if name == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise Unauthenticated(
                "a token is needed", hint="send `Authorization: Bearer TOKEN`; the embedded one is in MUSTER_HOME/token"
            )
        return self._services.tokens.admit(token.strip().decode("latin-1"))

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            given = message.get("headers", ())
            said = {name.lower() for name, _ in given}
            added = [one for one in _HEADERS if one[0] not in said]
            message["headers"] = [*given, *added, (b"x-request-id", self._request_id.encode())]
            if (trouble := self._services.store.trouble) is not None and self._scope["path"].startswith(_GUARDED):
                message["headers"].append((b"warning", as_warning(str(trouble))))
        await self._raw_send(message)

    async def _fail(self, error: MusterError, status: int, headers: Mapping[str, str] | None = None) -> None:
        self._code = error.code
        if self._status:
            await self._break_off(error)
            return
        answer = as_error(error, self._request_id, status, headers or {})
        await answer(self._scope, _nothing_more, self._send)

    async def _break_off(self, error: MusterError) -> None:
        """The answer has begun: it ends with a word if it has one for that, else so that nobody takes it for whole."""
        if self._ended is None:
            log.warning("request %s was broken off: %s", self._request_id, error.message)
        words = self._scope.get("muster.last_words")
        try:
            if words is not None:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._raw_send({"type": "http.response.body", "body": words(error)})
                return
        except TimeoutError:  # it does not read
            pass
        await self._abort()

    async def _abort(self) -> None:
        self._cut()
        await asyncio.sleep(0)  # lets the server hear of it before this request is seen to end unfinished

    def _cut(self) -> None:
        """Cut the connection. ASGI has no word for it; a transport that closes politely would wait for the reader."""
        transport: Any = getattr(getattr(self._raw_send, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()

    def _count(self, seconds: float) -> None:
        waited = self._scope.get("muster.stream", False)
        route = self._scope.get("muster.route", "none")
        self._services.meter.count(self._scope["method"], route, self._status, None if waited else seconds)

    def _note(self) -> None:
        """Tell the audit. Neither tokens nor bodies nor queries are told."""
        audit, scope = self._services.audit, self._scope
        ended = self._ended
        if self._status and scope["method"] not in auditing.READING:
            ended = None  # its caller has not heard it, but it was done
        status = self._status if ended is None else ended.status
        if audit is None or not scope["path"].startswith(_AUDITED) or not auditing.is_worth(scope["method"], status):
            return
        whose = self._shown.identity if self._shown is not None else None
        entry = AuditEntry(
            datetime.now(UTC),
            "ended" if ended is not None else auditing.decision_of(status),
            who=whose.name if whose is not None else self._expired,
            role=whose.role if whose is not None else NOBODY,
            from_=scope["muster.peer"],
            forwarded_for=_forwarded_for(scope),
            method=scope["method"][:20],
            path=_SECRET.sub("mst_…", scope["path"][:200]),
            about=scope.get("muster.about", ""),
            status=status,
            code=self._code,
            request_id=self._request_id,
        )
        audit.note(entry, routine=scope.get("muster.routine", False))


def _headers_of(error: MusterError) -> Mapping[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if not isinstance(error, Unavailable) or not error.retryable:
        return {}
    # A client that asks for too much gives its connection back.
    return {"Retry-After": "1"} | ({"Connection": "close"} if isinstance(error, TooManyRequests) else {})


def _forwarded_for(scope: Scope) -> str:
    """As it is said: nobody knows by whom."""
    given = dict(scope["headers"]).get(b"x-forwarded-for", b"")
    return given.decode("ascii") if _FORWARDED.fullmatch(given) else ""


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            given: str = value.decode("ascii")
            return given
    return uuid.uuid4().hex


def _is_foreign(scope: Scope) -> bool:
    """Whether a browser says that the request comes from a page of somebody else. Programs say nothing of the kind."""
    given = dict(scope["headers"])
    origin = given.get(b"origin")
    if origin is not None and origin.partition(b"://")[2].lower() != given.get(b"host", b"").lower():
        return True
    return given.get(b"sec-fetch-site", b"none").lower() not in _OWN_SITES


def _no_route(scope: Scope, status: int) -> MusterError:
    path = scope["path"][:200]
    if status == 405:
        return MusterError(f"{scope['method'][:20]} is not possible on {path!r}", code="method_not_allowed")
    return NotFound(f"there is nothing at {path!r}", hint="/openapi.json describes what there is")


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}
