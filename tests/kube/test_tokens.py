"""On a real API server: a change of the Secret that holds the API's tokens counts without a restart."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

from muster.server.auth import TOKENS_FILE, Tokens
from tests.docs import blocks
from tests.fleet import eventually
from tests.kube.plane import KubePlane

BOUND_S = 20.0


def put(plane: KubePlane, **values: str) -> None:
    path = f"/api/v1/namespaces/{plane.own}/secrets/muster-token"
    data = {key.replace("_", "."): base64.b64encode(value.encode()).decode() for key, value in values.items()}
    plane.cluster.patch(path, {"data": data})


def ask(plane: KubePlane, token: str, path: str) -> HTTPResponse:
    request = urllib.request.Request(f"http://{plane.proxy.address('api')}{path}")
    request.add_header("Authorization", f"Bearer {token}")
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=BOUND_S)
    return answer


def status(plane: KubePlane, token: str) -> int:
    try:
        with ask(plane, token, f"/v1/namespaces/{plane.namespace}/trainings") as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_tokens_come_and_go_with_the_secret(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    tokens = Tokens(tmp_path / "tokens")
    eve = tokens.create("eve", "viewer", (plane.namespace,))
    file = tmp_path / "tokens" / TOKENS_FILE
    first = plane.token
    assert status(plane, eve) == 401
    put(plane, tokens_json=file.read_text())
    eventually(lambda: status(plane, eve) == 200, "hers is good", BOUND_S)
    watching = ask(plane, eve, f"/v1/watch?namespace={plane.namespace}")
    over = threading.Event()

    def watch() -> None:
        watching.read()
        over.set()

    threading.Thread(target=watch, daemon=True).start()

    put(plane, tokens_json='[{"name": "eve"}')
    plane.replicas["one"].expect("cannot be read.*stay as they were")
    assert (status(plane, eve), status(plane, first), over.is_set()) == (200, 200, False)

    tokens.revoke("eve")
    put(plane, tokens_json=file.read_text())
    assert over.wait(BOUND_S), "what she watched ends with her token"
    assert (status(plane, eve), status(plane, first)) == (401, 200)

    put(plane, token="another-for-the-first-user")
    eventually(lambda: status(plane, "another-for-the-first-user") == 200, "the new one is good", BOUND_S)
    assert status(plane, first) == 401


def test_what_the_page_says_of_tokens_works_as_it_is_printed(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    [printed] = [block.body for block in blocks.blocks("kubernetes.md") if "patch secret muster-token" in block.body]
    for ours, theirs in (("-n muster ", f"-n {plane.own} "), ("/tmp/tokens", str(tmp_path / "tokens"))):
        assert ours in printed
        printed = printed.replace(ours, theirs)
    printed = printed.replace("--namespace research", f"--namespace {plane.namespace}")
    env = plane.cluster.env()
    programs = [str(Path(sys.executable).parent), str(Path(plane.cluster.programs.kubectl).parent), env["PATH"]]
    env["PATH"] = os.pathsep.join(programs)
    done = subprocess.run(["bash", "-euc", printed], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    token = next(word for word in done.stdout.split() if word.startswith("mst_"))
    eventually(lambda: status(plane, token) == 200, "ann's token is good", BOUND_S)
