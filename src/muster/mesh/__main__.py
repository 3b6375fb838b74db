"""Commands for images without muster-node: wait for the mesh, print its state, or probe it for `muster mesh publish`.

    python -m muster.mesh wait [--timeout 60] [-- command …]
    python -m muster.mesh status
    python -m muster.mesh probe [--listen HOST:PORT] [--name NODE]

The command runs whatever the wait came to, in the place of this process, with MUSTER_MESH_STATUS in its environment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from muster.mesh import wait

NOT_FOUND, NOT_RUNNABLE, INTERRUPTED, TERMINATED = 127, 126, 130, 143


def main(words: list[str] | None = None) -> int:
    given = sys.argv[1:] if words is None else words
    cut = given.index("--") if "--" in given else len(given)
    command = given[cut + 1 :]
    options = _parser().parse_args(given[:cut])
    if options.verb == "status":
        found, why = wait.ask_once()
        print(found)
        if found in ("waiting", "none"):
            print(f"mesh-wait: {why}", file=sys.stderr)
        return 0
    if options.verb == "probe":
        return _probe(options.listen, options.name)
    # As process 1 of a container it would otherwise not hear a SIGTERM.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        wait.mesh_wait(options.timeout)
    except KeyboardInterrupt:
        return INTERRUPTED
    signal.signal(signal.SIGTERM, before)
    return _become(command) if command else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muster.mesh", description="Wait for the mesh, or probe it.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    waits = verbs.add_parser("wait", usage="%(prog)s [--timeout S] [-- command …]", help="wait, then run the command")
    # Read by mesh_wait: a bad number is logged, and the command runs.
    waits.add_argument("--timeout", metavar="S", help="seconds (default: MUSTER_MESH_TIMEOUT_S, else 60)")
    probe = verbs.add_parser("probe", help="probe other nodes for muster mesh publish, until this process is ended")
    probe.add_argument("--listen", metavar="HOST:PORT", help="where peers and the publisher connect (127.0.0.1:8473)")
    probe.add_argument("--name", metavar="NODE", help="obey only orders for this node (default: NODE_NAME, else any)")
    verbs.add_parser("status", help="ask once; prints ready, degraded, waiting or none")
    return parser


def _probe(listen: str | None, name: str | None) -> int:
    import asyncio

    from muster.mesh import agent, lines
    from muster.mesh.settings import NODES
    from muster.types import address

    try:
        secret = lines.token()
        where = address.read(listen or "127.0.0.1")
        if not isinstance(where, tuple):
            raise ValueError(f"{listen} is a network: give HOST:PORT")
        if not secret and not lines.is_loopback(where[0]):
            raise ValueError(f"{where[0]} is open to other machines: export {lines.TOKEN}, the same value on each node")
    except ValueError as why:
        print(f"mesh-probe: {why}", file=sys.stderr)
        return 2
    chosen = name or next((os.environ[variable] for variable in NODES if os.environ.get(variable)), "")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        asyncio.run(agent.serve(where[0], where[1] or lines.PORT, secret=secret, name=chosen))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as why:
        print(f"mesh-probe: cannot listen on {listen}: {why.strerror or why}. Choose another port", file=sys.stderr)
        return 1
    return 0


def _become(command: list[str]) -> int:
    os.environ.pop(wait.HANDED_ON, None)
    if found := wait.mesh_status():
        os.environ[wait.HANDED_ON] = found
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except (OSError, ValueError) as why:
        print(f"mesh-wait: cannot run {command[0]!r}: {getattr(why, 'strerror', None) or why}", file=sys.stderr)
        return NOT_FOUND if isinstance(why, FileNotFoundError | NotADirectoryError) else NOT_RUNNABLE


if __name__ == "__main__":
    sys.exit(main())
