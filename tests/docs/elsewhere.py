"""Which blocks are not typed by tests/docs/test_newcomer.py, why, and which test stands for them?

Every other block of README and docs is. A test that is named here must be there, and so must the block.
"""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    why: str
    test: str  # file::function


LONG = "tests/docs/test_newcomer.py::test_what_takes_long_does_what_it_says"  # make soak


def long(page: str, *first_lines: str) -> dict[tuple[str, str], Elsewhere]:
    """They would make up most of the time that make test-pages takes."""
    return {(page, line): Elsewhere("takes long: make soak", LONG) for line in first_lines}


# Pages whose blocks another test reads, or makes.
PAGES = {
    "cli.md": Elsewhere(
        "is what --help prints", "tests/docs/test_docs.py::test_the_page_of_commands_is_what_the_commands_say"
    ),
    "kubernetes.md": Elsewhere(
        "needs a cluster: make test-kube", "tests/kube/test_pages.py::test_what_the_page_types_is_taken"
    ),
    "architecture.md": Elsewhere(
        "are the tree and drawings",
        "tests/docs/test_docs.py::test_the_tree_on_the_page_about_the_architecture_is_the_tree_that_there_is",
    ),
    "share-with-trl.md": Elsewhere(
        "needs TRL: make test-frameworks", "tests/frameworks/test_pages.py::test_two_grpo_runs_share_as_printed"
    ),
    "tracking.md": Elsewhere(
        "needs MLflow and TensorBoard",
        "tests/docs/test_docs.py::test_the_programs_on_the_page_about_trackers_continue_one_run",
    ),
    "state.md": Elsewhere(
        "are parts of one program", "tests/state/test_page.py::test_every_block_of_python_runs_and_runs_again"
    ),
}

# Page and first line of a block.
BLOCKS = {
    ("mesh.md", "$ export MUSTER_MESH_TOKEN=$(openssl rand -hex 32)"): Elsewhere(
        "starts agents in the background, which the shell of that test would leave behind",
        "tests/mesh/test_publish.py::test_without_an_etcd_it_serves_the_keys_until_it_is_ended",
    ),
    ("code.md", "echo pyyaml > requirements.txt"): Elsewhere(
        "makes an environment with pip, which takes a while",
        "tests/control/test_sent_code.py::test_an_environment_is_made_once_for_all_workers_with_what_is_required",
    ),
    ("examples.md", "python examples/hf_trainer.py --steps 100"): Elsewhere(
        "needs transformers: make test-frameworks", "tests/frameworks/test_pages.py::test_an_example_runs_as_printed"
    ),
    ("examples.md", "python examples/lightning_trainer.py --steps 100"): Elsewhere(
        "needs lightning: make test-frameworks", "tests/frameworks/test_pages.py::test_an_example_runs_as_printed"
    ),
    ("examples.md", "python examples/accelerate_loop.py --steps 100"): Elsewhere(
        "needs accelerate: make test-frameworks", "tests/frameworks/test_pages.py::test_an_example_runs_as_printed"
    ),
    ("frameworks.md", "import muster.hf"): Elsewhere(
        "is what examples/hf_trainer.py has, in a whole script",
        "tests/frameworks/test_keep_state.py::test_it_goes_on_at_the_step_that_was_lost_and_ends_as_if_nothing_had_been",
    ),
    ("frameworks.md", "import muster.lightning"): Elsewhere(
        "is what examples/lightning_trainer.py has, in a whole script",
        "tests/frameworks/test_keep_state.py::test_it_goes_on_at_the_step_that_was_lost_and_ends_as_if_nothing_had_been",
    ),
    ("frameworks.md", "import muster.accelerate"): Elsewhere(
        "is what examples/accelerate_loop.py has, in a whole script",
        "tests/frameworks/test_keep_state.py::test_it_goes_on_at_the_step_that_was_lost_and_ends_as_if_nothing_had_been",
    ),
    ("mesh.md", "$ muster explain demo"): Elsewhere(
        "needs workers that do not reach each other",
        "tests/mesh/test_gate_plane.py::test_a_gate_that_fails_open_names_the_pair_and_heals",
    ),
    (
        "operations.md",
        "muster: the control plane of /home/ann/.muster (pid 4711) runs on machine node7, and this is node8",
    ): Elsewhere(
        "needs a second machine",
        "tests/daemon/test_shared_home.py::test_every_command_names_the_machine_that_has_the_control_plane",
    ),
    ("operations.md", "State:"): Elsewhere(
        "is part of what muster describe prints of a training with muster.State",
        "tests/cli/test_trainings.py::test_describe_tells_what_of_its_state_is_safe",
    ),
    ("own-image.md", 'ENTRYPOINT ["python", "-m", "muster.mesh", "wait", "--timeout", "60", "--"]'): Elsewhere(
        "is part of a Containerfile", "tests/mesh/test_wait.py::test_the_command_takes_the_place_of_the_wait"
    ),
    ("sharing.md", 'muster share kill p1 --why "its owner has left"'): Elsewhere(
        "needs a pipeline of somebody else that runs",
        "tests/sharing/test_killing.py::test_the_command_line_ends_a_pipeline_and_says_what_it_keeps",
    ),
    ("sharing.md", "from muster.sharing.ray import connect"): Elsewhere(
        "needs a Ray cluster", "tests/sharing/test_ray.py::test_on_a_cluster"
    ),
    ("sharing.md", "muster kube install --image registry.example.com/muster:0.2.0 --gpus 64"): Elsewhere(
        "needs a cluster: make test-kube",
        "tests/kube/test_lending.py::test_a_filling_training_gives_its_pods_gpus_to_another_and_has_them_again",
    ),
    **long("sharing.md", "muster share demo", "muster share simulate --scenario mixed --seeds 1-5"),
    **long(  # tests/examples runs them all, with fewer steps
        "examples.md",
        "muster run examples/train.py --name plain --workers 2 -- plain.pt",
        ".venv/bin/python examples/ddp_cifar_like.py",
        ".venv/bin/python examples/survive_kill.py",
        ".venv/bin/python examples/elastic_scale.py",
        "muster run examples/fsdp2_transformer.py --name sharded --workers 2 --spares 1 -- losses.txt",
        ".venv/bin/python examples/fsdp2_survives.py loss.svg",
        ".venv/bin/python examples/two_rl_pipelines.py",
    ),
}
