"""Is this worker fit for ranks? Its user's command says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

TIMEOUT_S = 60.0


async def check(command: str) -> str | None:
    """None if well, else what is wrong."""
    guarded = [sys.executable, "-m", "muster.node.contained", str(os.getpid()), "/bin/sh", "-c", command]
    process = await asyncio.create_subprocess_exec(
        *guarded, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"health check took longer than {TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()  # until it has ended what it started
    if process.returncode == 0:
        return None
    last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    return f"health check failed with {process.returncode}: {last[0]}"
