"""As tenant.py, with the client that blocks: tenant_that_blocks.py URL TOKEN FOLDER."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.sharing import ClusterSpec, Priority
from muster.sharing.sync import connect


class Engine:
    async def shrink(self, ranks: Sequence[int]) -> None: ...

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None: ...


def main(url: str, token: str, folder: Path) -> None:
    clusters = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1, 2, 3])}
    pool = connect("p1", clusters=clusters, engine=Engine(), url=url, token=token)
    number = int(os.environ["MUSTER_ROUND"])
    with pool.training(Priority.ACTOR_TRAINING if number else Priority.OLD_LOG_PROBS):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        draft = folder / f"draft-{number}"
        draft.write_text(str(os.getpid()))
        draft.rename(folder / f"holds-{number}")
        while not (folder / "go").exists():
            time.sleep(0.02)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
