"""A server that speaks the contracts of vLLM and of SGLang, has GPU memory of its own, and lies as it is told to.

Real sockets, real HTTP; the GPU is a number. `lies` maps a path to a lie. What no honest client does to the real ones
is noted in `broken`: resuming what was not released, and the like.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

GIB = 1 << 30
SIZES = {"weights": 10 * GIB, "kv_cache": 50 * GIB}
CONTEXT = 1 * GIB
TOKEN = 7


def logprob(version: str) -> float:
    """What weights of that version answer with."""
    return -0.5 * (1 + sum(map(ord, version)) % 17)


class LyingServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, gpus: Sequence[int] = (0,)) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gpus = tuple(gpus)
        self.lies: dict[str, str] = {}
        self.calls: list[str] = []
        self.held = set(SIZES)
        self.paused = False
        self.label = self.weights = "default"
        self.on_disk = "default"
        self.generated: list[str] = []  # with which weights
        self.broken: list[str] = []
        self.let_go = threading.Event()  # ends what hangs
        self.hanging = threading.Event()
        self.lock = threading.Lock()
        self.late = 0  # so many readings still see what was freed
        self.dead = False
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def asleep(self) -> bool:
        return self.held != set(SIZES)

    def used(self) -> int:
        with self.lock:
            if self.dead:
                return 0
            if self.late:
                self.late -= 1
                return CONTEXT + sum(SIZES.values())
            return CONTEXT + sum(SIZES[tag] for tag in self.held)

    def die(self) -> None:
        self.dead = True
        self.let_go.set()
        threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        self.let_go.set()
        self.shutdown()
        self.server_close()
        self.closed.set()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients go away in the middle: that is what is tested


class GpuMeter:
    """What the imitated GPUs of these servers hold, and what others have put there."""

    def __init__(self, *servers: LyingServer) -> None:
        self.servers = servers
        self.others: dict[int, int] = {}
        self.readings = 0

    def used(self, gpus: Sequence[int], /) -> dict[int, int]:
        self.readings += 1
        found = {gpu: self.others.get(gpu, 0) for gpu in gpus}
        for server in self.servers:
            own = [gpu for gpu in server.gpus if gpu in found]
            for gpu in own:
                found[gpu] += server.used()
        return found


class _Handler(BaseHTTPRequestHandler):
    server: LyingServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        params = {name: values[0] for name, values in parse_qs(parts.query).items()}
        one = self.server
        with one.lock:
            one.calls.append(f"{self.command} {self.path}")
        lie = one.lies.get(parts.path, "")
        if not self._misbehaves(lie):
            self._answer(*self._honest(parts.path, params, body, lie))

    def _misbehaves(self, lie: str) -> bool:
        """In ways that are the same on every path."""
        one = self.server
        if lie == "hangs":
            one.hanging.set()
            one.let_go.wait()
        elif lie == "hangs, then does it":
            one.hanging.set()
            one.let_go.wait()
            return False
        elif lie == "dies":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{")
            one.die()
        elif lie == "garbage":
            self._answer(200, b"<html>Welcome to nginx!</html>")
        elif lie == "another shape":
            self._answer(200, {"choices": [], "meta_info": [], "is_sleeping": "yes", "data": 3})
        elif lie == "redirects":
            self.send_response(307)
            self.send_header("Location", "http://elsewhere.example/sleep")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif lie == "endless":
            self._endless(b"x" * 65536)
        elif lie == "drips":
            self._endless(b" ", pause_s=0.02)
        elif lie == "500":
            self._answer(500, {"error": "CUDA error: an illegal memory access"})
        elif lie == "absent":
            self._answer(404, {"detail": "Not Found"})
        else:
            return False
        self.close_connection = True
        return True

    def _endless(self, part: bytes, pause_s: float = 0.0) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.let_go.wait(pause_s):
                self.wfile.write(part)
                self.wfile.flush()

    def _answer(self, status: int, body: object = None) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _honest(self, path: str, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        with self.server.lock:
            act = getattr(self, "_" + path.strip("/").replace("/", "_"), None)
            return (404, {"detail": "Not Found"}) if act is None else act(params, body, lie)

    # vLLM

    def _pause(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        self.server.paused = True
        return 200, {"status": "paused"}

    def _resume(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        self.server.paused = False
        return 200, {"status": "resumed"}

    def _sleep(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if lie == "frees nothing":
            self.server.lies.setdefault("/is_sleeping", "says so")
            return 200, None
        self._free(lie, {*SIZES})
        if params.get("level") == "2":
            self.server.weights = "lost"
        return 200, None

    def _wake_up(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if lie != "wakes nothing":
            self.server.held.add(params["tags"])
        return 200, None

    def _is_sleeping(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        said = {"says so": True, "says not": False}.get(lie, self.server.asleep)
        return 200, {"is_sleeping": said}

    def _reset_prefix_cache(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return 200, None

    def _collective_rpc(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return self._updated(lie, None, self.server.on_disk)

    def _update_weight_version(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if lie != "stale":
            self.server.label = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def _weight_info(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return 200, {"weight_version": self.server.label}

    def _v1_models(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return 200, {"data": [{"id": "a-model"}]}

    def _v1_completions(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if refused := self._generate_one(lie):
            return refused
        told = {"tokens": [f"token_id:{TOKEN}"], "token_logprobs": [logprob(self.server.weights)]}
        ended = "abort" if lie == "aborts" else "length"
        return 200, {"choices": [{"text": "a", "finish_reason": ended, "logprobs": told}]}

    # SGLang

    def _pause_generation(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return self._pause(params, body, lie)

    def _continue_generation(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return self._resume(params, body, lie)

    def _release_memory_occupation(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if lie == "frees nothing":
            return 200, None
        if not self.server.paused:
            self.server.broken.append("released while it works")
        if "weights" in body["tags"]:
            self.server.weights = "lost"
        self._free(lie, {*body["tags"]})
        return 200, None

    def _resume_memory_occupation(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        for tag in body["tags"]:
            if tag in self.server.held:
                self.server.broken.append(f"resumed {tag}, which it had")
            self.server.held.add(tag)
        return 200, None

    def _update_weights_from_disk(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if lie == "refuses":
            return 200, {"success": False, "message": "no such folder"}
        status, _ = self._updated(lie, body["weight_version"], body["model_path"].rsplit("/", 1)[-1])
        return status, {"success": True, "message": "done"}

    def _flush_cache(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return 200, b""

    def _model_info(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        return 200, {"model_path": "a-model", "weight_version": self.server.label}

    def _generate(self, params: dict[str, str], body: Any, lie: str) -> tuple[int, object]:
        if refused := self._generate_one(lie):
            return refused
        ended = {"type": "abort" if lie == "aborts" else "length"}
        about: dict[str, object] = {"completion_tokens": 1, "finish_reason": ended}
        about["output_token_logprobs"] = [[logprob(self.server.weights), TOKEN, None]]
        if lie != "tells no version":
            about["weight_version"] = self.server.label
        return 200, {"text": "a", "meta_info": about}

    # Both

    def _free(self, lie: str, tags: set[str]) -> None:
        if lie == "frees late":
            self.server.late = 5
        self.server.held -= tags

    def _updated(self, lie: str, label: str | None, weights: str) -> tuple[int, object]:
        if "weights" not in self.server.held:
            self.server.broken.append("updated weights that have no memory")
        if lie == "stale":
            return 200, None
        if label is not None:
            self.server.label = label
        if lie != "new label, old weights":
            self.server.weights = weights
        return 200, None

    def _generate_one(self, lie: str) -> tuple[int, object] | None:
        if self.server.asleep or self.server.paused:
            return 503, {"error": "it sleeps"}
        self.server.generated.append(self.server.weights)
        return None


@contextlib.contextmanager
def lying_server(gpus: Sequence[int] = (0,)) -> Iterator[LyingServer]:
    server = LyingServer(gpus)
    try:
        yield server
    finally:
        if server.dead:
            server.closed.wait(5)
        else:
            server.close()
