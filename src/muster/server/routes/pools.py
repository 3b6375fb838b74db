"""Pools of shared GPUs, for pipelines in other processes: look, register, request, release, report, fetch actions.

Pools belong to no namespace: every viewer may look, every editor may take part.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from starlette.responses import Response

from muster.core.training.edits import refused
from muster.errors import Forbidden, NotFound
from muster.ports import Filter
from muster.server.answers import as_json
from muster.server.calls import MOST, Call
from muster.server.describe import Answer, Body, Header, Operation
from muster.sharing import families
from muster.sharing.service import PoolService
from muster.sharing.tenants import Granted, StillWaiting, TokenRights
from muster.types.codec import Problem, limited, to_wire
from muster.types.pools import (
    LONGEST_WAIT_S,
    NAME,
    ActionAnswer,
    GpuRequest,
    KillOrder,
    NodeState,
    ProgressForm,
    Registration,
    ReleaseOrder,
    Why,
)
from muster.types.sharing import MOST_PROCESSES, PipelineId, PipelineProcess, Tenant
from muster.types.training import API_VERSION

POOLS = "/v1/pools"
POOL = POOLS + "/{pool}"
PIPELINE = POOL + "/pipelines/{pipeline}"
KEY = "Idempotency-Key"
SESSION = "Pipeline-Session"
PROCESS, TRAINING, ROUND = "Pipeline-Process", "Pipeline-Training", "Pipeline-Round"
PIDS = "Pipeline-Pids"
_PIDS = f"[0-9]{{1,9}}(,[0-9]{{1,9}}){{0,{MOST_PROCESSES - 1}}}"
_NAME = re.compile(NAME)


@dataclass(frozen=True)
class WaitQuery:
    """How long the answer may be held; it may come earlier, and then says that it is not yet."""

    wait: float = limited(0.0, ge=0, le=LONGEST_WAIT_S)


@dataclass(frozen=True)
class ActionsQuery:
    """With an epoch only actions that are newer are given: whoever works on one need not hear of it again."""

    wait: float = limited(0.0, ge=0, le=LONGEST_WAIT_S)
    after: int = limited(0, ge=0, le=MOST)


@dataclass(frozen=True)
class PoolEventsQuery:
    after: int = limited(0, ge=0, le=MOST)


# Looking -----------------------------------------------------------------------------------------


async def list_pools(call: Call) -> Response:
    items = [pool.view() for pool in call.services.pools.values()]
    return as_json({"apiVersion": API_VERSION, "kind": "PoolList", "items": items})


async def get_pool(call: Call) -> Response:
    return as_json(_pool(call).view())


async def get_pool_events(call: Call) -> Response:
    pool = _pool(call)
    events = pool.events(call.query(PoolEventsQuery).after)
    return as_json({"apiVersion": API_VERSION, "kind": "PoolEventList", "items": [to_wire(one) for one in events]})


async def get_reports(call: Call) -> Response:
    reports = await _pool(call).scheduler.reports()
    items = [to_wire(one) for one in reports.values()]
    return as_json({"apiVersion": API_VERSION, "kind": "ProgressReportList", "items": items})


# Taking part -------------------------------------------------------------------------------------


async def put_pipeline(call: Call) -> Response:
    pool, pipeline = _pipeline(call, anew=True)
    wait, session = call.query(WaitQuery).wait, _named(call, SESSION)
    form, tenant = await call.record(Registration), await _tenant(call)
    found = await pool.tenants.register(pipeline, form, wait, session, tenant, _rights(call))
    if found is not None:
        return as_json({"state": "pending", "reason": found.reason}, 202)
    return as_json({"state": "registered"})


async def delete_pipeline(call: Call) -> Response:
    # A process that was replaced still sends its session at its end: it must not end its successor.
    pool, pipeline = _pipeline(call) if _named(call, SESSION) else _ended_pipeline(call)
    await pool.tenants.unregister(pipeline, call.query(Why).why)
    return as_json({"state": "unregistered"})


async def quarantine_pipeline(call: Call) -> Response:
    pool, pipeline = _ended_pipeline(call)
    await pool.scheduler.quarantine_pipeline(pipeline, (await call.record(Why)).why)
    return as_json({"state": "quarantined"})


async def kill_pipeline(call: Call) -> Response:
    pool, pipeline = _ended_pipeline(call)
    call.request.scope["muster.routine"] = False
    wait, key = call.query(WaitQuery).wait, _named(call, KEY)
    return _outcome(await pool.kill(pipeline, key, await call.record(KillOrder), call.identity.name, wait))


async def put_node(call: Call) -> Response:
    """Bundles of everybody may be on it, so it is for those who look after the pool."""
    if call.identity.role != "admin":
        raise Forbidden(f"token {call.identity.name!r} is no admin's: it may not take a node out of use")
    scheduler, told = _pool(call).scheduler, await call.record(NodeState)
    node: str = call.request.path_params["node"]
    if not re.fullmatch("[0-9]{1,9}", node):
        raise NotFound(f"there is no node {node[:80]!r}", hint="nodes are numbered from 0")
    if told.state == "lost":
        await scheduler.lose_node(int(node), told.why)
    else:
        await scheduler.restore_node(int(node))
    return as_json({"state": told.state})


async def request_gpus(call: Call) -> Response:
    pool, pipeline = _pipeline(call)
    wait = call.query(WaitQuery).wait
    key = _named(call, KEY)
    if key is None:
        raise refused([Problem(KEY, "is required: asking again goes on under it")], "the request")
    return _outcome(await pool.request(pipeline, key, await call.record(GpuRequest), wait))


async def withdraw_request(call: Call) -> Response:
    pool, pipeline = _pipeline(call)
    await pool.withdraw(pipeline, _part(call, "key", "request"))
    return as_json({"state": "withdrawn"})


async def release_gpus(call: Call) -> Response:
    pool, pipeline = _pipeline(call)
    wait = call.query(WaitQuery).wait
    return _outcome(await pool.release(pipeline, _named(call, KEY), await call.record(ReleaseOrder), wait))


async def report_progress(call: Call) -> Response:
    pool, pipeline = _pipeline(call)
    form = await call.record(ProgressForm)
    if uncounted := await pool.progress(pipeline, form):
        return as_json({"state": "uncounted", "reason": uncounted})
    return as_json({"state": "cleared" if form.clear else "reported"})


async def get_action(call: Call) -> Response:
    pool, pipeline = _pipeline(call, anew=True)
    query, session = call.query(ActionsQuery), _named(call, SESSION)
    pool.tenants.must_speak(pipeline, session, _rights(call))
    action = await pool.next_action(pipeline, query.after, query.wait, session)
    return Response(status_code=204) if action is None else as_json(to_wire(action))


async def answer_action(call: Call) -> Response:
    pool, pipeline = _pipeline(call)
    pool.answer(pipeline, _part(call, "action", "action"), await call.record(ActionAnswer))
    return as_json({"state": "answered"})


# Parts -------------------------------------------------------------------------------------------


def _pool(call: Call) -> PoolService:
    name = call.request.path_params["pool"]
    found = call.services.pools.get(name)
    if found is None:
        hint = "the pool 'default' has the GPUs of the control plane's machine; MUSTER_GPUS=4 imitates four"
        raise NotFound(f"there is no pool {name[:80]!r}", hint="" if call.services.pools else hint)
    return found


def _pipeline(call: Call, *, anew: bool = False) -> tuple[PoolService, str]:
    """Whom the call is for. That it came says that the pipeline lives; `anew`: the pool sees itself who that is."""
    if call.identity.role == "viewer":
        raise Forbidden(
            f"token {call.identity.name!r} is a viewer's: it may not take part in a pool",
            hint="use the token of an editor",
        )
    pool = _pool(call)
    call.request.scope["muster.routine"] = True  # pipelines speak at every step: the audit need not tell each word
    pipeline = _part(call, "pipeline", "pipeline")
    if not anew:
        session = _named(call, SESSION)
        pool.tenants.must_speak(pipeline, session, _rights(call))
        pool.tenants.heard(pipeline, session)
    return pool, pipeline


def _ended_pipeline(call: Call) -> tuple[PoolService, str]:
    """Return the pipeline that the caller ends or freezes: it has the session, or its token may do so."""
    pool, pipeline = _pipeline(call, anew=True)
    session, there = _named(call, SESSION), pool.scheduler.shares.pipelines.get(PipelineId(pipeline))
    rights = _rights(call)
    if there is None or pool.tenants.is_current(pipeline, session) or rights.may_end(there.tenant):
        return pool, pipeline
    if not there.tenant.session and rights.may_register(there.tenant):
        return pool, pipeline
    raise Forbidden(
        f"token {call.identity.name!r} may not end {pipeline}, which another process registered",
        hint="only its own session, an admin, and tokens that may write in its training's namespace may",
    )


def _rights(call: Call) -> TokenRights:
    identity = call.identity

    def writes_for(training: str) -> bool:
        namespace = _namespace_of(call, training)
        return namespace is not None and identity.role != "viewer" and identity.sees(namespace)

    peers = call.services.tokens.peers(identity)
    return TokenRights(identity.name, identity.role == "admin", peers, writes_for)


async def _tenant(call: Call) -> Tenant:
    """Return the tenant that registers: names as the caller gives them, processes only if the kernel confirms them."""
    process, training, number = (_named(call, header) for header in (PROCESS, TRAINING, ROUND))
    if number is not None and not (number.isascii() and number.isdecimal() and int(number) <= MOST):
        raise refused([Problem(ROUND, "must be a number of a round")], "the request")
    if (training is None) != (number is None):
        raise refused([Problem(TRAINING if training is None else ROUND, "is required beside the other")], "the request")
    if training is not None:
        _must_be_his(call, training)
    processes, children = await _processes(call)
    round_number = None if number is None else int(number)
    return Tenant(process, training, round_number, processes, children, token=call.identity.name)


async def _processes(call: Call) -> tuple[tuple[PipelineProcess, ...], tuple[PipelineProcess, ...]]:
    """Return the caller's processes and their children; nothing if the caller is not provably the first process."""
    pids = call.header(PIDS)
    if pids is None:
        return (), ()
    if not re.fullmatch(_PIDS, pids):
        raise refused([Problem(PIDS, f"must be 1 to {MOST_PROCESSES} numbers of processes")], "the request")
    connection = call.request.scope["muster.guest"].connection
    if connection is None:
        return (), ()
    return await asyncio.to_thread(families.prove, connection, [int(pid) for pid in pids.split(",")])


def _must_be_his(call: Call, training: str) -> None:
    """What a pipeline uses counts for its training: nobody lets others pay."""
    if (namespace := _namespace_of(call, training)) is not None:
        call.identity.must_write(namespace)


def _namespace_of(call: Call, training: str) -> str | None:
    found = next((one for one in call.services.store.page(Filter()).items if one.uid == training), None)
    return None if found is None else found.key.namespace


def _part(call: Call, parameter: str, what: str) -> str:
    """A name in the address; what cannot be one does not exist."""
    text: str = call.request.path_params[parameter]
    if not _NAME.fullmatch(text):
        raise NotFound(f"there is no {what} {text[:80]!r}", hint="names have letters, digits and . _ : -, up to 128")
    return text


def _named(call: Call, header: str) -> str | None:
    given = call.header(header)
    if given is not None and not _NAME.fullmatch(given):
        raise refused([Problem(header, "must be 1 to 128 letters, digits and . _ : -")], "the request")
    return given


def _outcome(found: Granted | StillWaiting) -> Response:
    if isinstance(found, StillWaiting):
        return as_json({"state": "pending", "reason": found.reason}, 202)
    return as_json({"state": "done", "gpus": list(found.gpus), "text": found.text})


_READ = (403, 404, 422)
_WRITE = (403, 404, 409, 413, 422)
_SESSION_HEADER = Header(SESSION, "Which registration speaks. It alone controls the pipeline that it registered.", NAME)
_TENANT_HEADERS = (
    Header(PROCESS, "The process behind sessions; another one waits until it has ended.", NAME),
    Header(TRAINING, "The uid of the training of which the process is a rank: what it holds ends with it.", NAME),
    Header(ROUND, "And with that round of it.", NAME),
    Header(PIDS, "The pids of its ranks, the caller's first: once all are provably gone, its GPUs are free.", _PIDS),
)
_KEY_HEADER = Header(KEY, "Asking again with it goes on with the same request.", NAME)
_DONE = Answer("Done: which GPUs.", "PoolGpus")
_PENDING = Answer("Not yet, and why: ask again with the same key.", "PoolState")
_STATE = Answer("What became of it.", "PoolState")

OPERATIONS = (
    Operation("GET", POOLS, list_pools, "All pools", {200: Answer("Pools.", "PoolList")}),
    Operation("GET", POOL, get_pool, "Who holds which GPU", {200: Answer("The pool.", "Pool")}, (404,)),
    Operation(
        "GET",
        f"{POOL}/events",
        get_pool_events,
        "What the scheduler decided and saw, oldest first",
        {200: Answer("Events.", "PoolEventList")},
        (404, 422),
        PoolEventsQuery,
    ),
    Operation(
        "GET",
        f"{POOL}/reports",
        get_reports,
        "The latest progress report of each pipeline, counted or not",
        {200: Answer("Reports.", "ProgressReportList")},
        (404,),
    ),
    Operation(
        "PUT",
        f"{POOL}/nodes/{{node}}",
        put_node,
        "Take a node's GPUs out of use, or back into it",
        {200: _STATE},
        _WRITE,
        body=Body("NodeState"),
    ),
    Operation(
        "PUT",
        PIPELINE,
        put_pipeline,
        "Register a pipeline, or attach it again",
        {
            200: _STATE,
            202: Answer("Not yet, and why. Fetch its actions: it may have to shrink its ranks.", "PoolState"),
        },
        _WRITE,
        WaitQuery,
        Body("PipelineRegistration"),
        (_SESSION_HEADER, *_TENANT_HEADERS),
    ),
    Operation(
        "DELETE",
        PIPELINE,
        delete_pipeline,
        "Unregister a pipeline",
        {200: _STATE},
        (*_READ, 409),
        Why,
        headers=(_SESSION_HEADER,),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/quarantine",
        quarantine_pipeline,
        "Freeze what a pipeline holds that is dead or silent",
        {200: _STATE},
        _WRITE,
        body=Body("Why"),
        headers=(_SESSION_HEADER,),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/kill",
        kill_pipeline,
        "End somebody's pipeline",
        {200: _DONE, 202: Answer("It was asked to shrink: ask again with the same key.", "PoolState")},
        _WRITE,
        WaitQuery,
        Body("KillOrder"),
        (_KEY_HEADER, _SESSION_HEADER),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/requests",
        request_gpus,
        "Ask for GPUs, and wait",
        {200: _DONE, 202: _PENDING},
        _WRITE,
        WaitQuery,
        Body("GpuRequest"),
        (_KEY_HEADER, _SESSION_HEADER),
    ),
    Operation(
        "DELETE",
        f"{PIPELINE}/requests/{{key}}",
        withdraw_request,
        "Withdraw a request",
        {200: _STATE},
        (*_READ, 409),
        headers=(_SESSION_HEADER,),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/release",
        release_gpus,
        "Give a cluster back",
        {200: _DONE, 202: _PENDING},
        _WRITE,
        WaitQuery,
        Body("GpuRelease"),
        (_KEY_HEADER, _SESSION_HEADER),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/progress",
        report_progress,
        "Say how far a rollout is, or that it is over",
        {200: _STATE},
        _WRITE,
        body=Body("RolloutProgress"),
        headers=(_SESSION_HEADER,),
    ),
    Operation(
        "GET",
        f"{PIPELINE}/actions",
        get_action,
        "What the pipeline has to do next",
        {200: Answer("An action that is not answered yet.", "PipelineAction"), 204: Answer("Nothing.", media_type="")},
        (*_READ, 409),
        ActionsQuery,
        headers=(_SESSION_HEADER,),
    ),
    Operation(
        "POST",
        f"{PIPELINE}/actions/{{action}}",
        answer_action,
        "Say that an action is done, or has failed",
        {200: _STATE},
        _WRITE,
        body=Body("ActionAnswer"),
        headers=(_SESSION_HEADER,),
    ),
)
