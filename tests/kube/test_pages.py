"""On a real API server: is what the page about Kubernetes prints taken, typed from its top to its end?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Block, Command
from tests.docs.elsewhere import Elsewhere
from tests.docs.reader import Reader
from tests.kube import network
from tests.kube.cluster import Cluster
from tests.plane import Plane

pytestmark = [pytest.mark.kube, pytest.mark.xdist_group("kube-uninstall")]

PAGE = "kubernetes.md"
NOT_TYPED = {"pip install '.[kube]'": "that environment has it, by make venv"}

# First line of a block → why it is not typed here: nothing runs Pods in this cluster, nobody leads.
NOT_HERE = {
    "make image IMAGE=localhost/muster:0.2.0": Elsewhere(
        "builds images", "tests/containers/test_control_plane.py::test_two_replicas_run_on_two_nodes_and_one_leads"
    ),
    "LEADER=$(kubectl -n muster get lease muster -o jsonpath={.spec.holderIdentity})": Elsewhere(
        "a port can be forwarded to Pods only", "tests/kube/test_installed.py::test_an_installed_control_plane_trains"
    ),
    "MUSTER_HOME=/tmp/tokens muster token create ann --role editor --namespace research": Elsewhere(
        "the first leader makes that Secret",
        "tests/kube/test_tokens.py::test_what_the_page_says_of_tokens_works_as_it_is_printed",
    ),
    "muster run train.py --workers 2 --spares 1 --requirements requirements.txt "
    "--storage ckpt=/ckpt:size=100Gi -- --out /ckpt": Elsewhere(
        "needs workers",
        "tests/containers/test_sent_code.py::test_a_spare_continues_from_the_claim_with_the_code_and_its_requirements",
    ),
}
PART = "spec:\n"  # of a training


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Who administers a cluster in which nothing was installed yet."""
    network.isolate()
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster")
    shelf = Plane(tmp_path)
    tools = os.pathsep.join([str(Path(cluster.programs.kubectl).parent), os.environ["PATH"]])
    made = Reader(shelf, KUBECONFIG=str(cluster.kubeconfig()), PATH=tools)
    made.activate()
    yield made
    shelf.close()
    cluster.close()


def test_what_the_page_types_is_taken(reader: Reader) -> None:
    here = [block for block in blocks.blocks(PAGE) if block.name[1] not in NOT_HERE]
    wrong = []
    for block in here:
        if "muster kube uninstall" in block.body:  # nobody is here who would end it
            wrong += reader.obey(Command("kubectl delete training first"))
        wrong += patched(reader, block) if block.body.startswith(PART) else reader.read(block, skip=NOT_TYPED)
    assert wrong == [], "\n".join(wrong)


def patched(reader: Reader, block: Block) -> list[str]:
    """Part of a training goes into the one that is there."""
    (reader.clone / "part.yaml").write_text(block.body)
    answer = ("training.muster.dev/first patched",)
    return reader.obey(Command('kubectl patch training first --type merge -p "$(cat part.yaml)"', answer))


def test_what_is_not_typed_stands_on_the_page() -> None:
    found = blocks.blocks(PAGE)
    assert NOT_HERE.keys() <= {block.name[1] for block in found}
    assert NOT_TYPED.keys() <= {one.text for block in found if block.kind == "" for one in blocks.commands(block)}
