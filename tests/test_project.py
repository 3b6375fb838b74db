"""The files around the code agree with each other: Makefile, `.ci/run`, workflows and metadata."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import muster
from muster.node import torch_version

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://github.com/muster-train/muster"


def phony() -> set[str]:
    (names,) = re.findall(r"(?m)^\.PHONY: (.+)$", MAKEFILE)
    return {*names.split()}


def jobs(workflow: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(workflow.read_text())["jobs"])


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Yield each command line of a job, once for each combination of its matrix."""
    matrix: dict[str, list[str]] = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            text = step.get("run", "")
            for name, value in zip(matrix, values, strict=True):
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            yield from text.splitlines()


def targets(workflow: Path) -> set[str]:
    lines = itertools.chain.from_iterable(map(commands, jobs(workflow).values()))
    return {name for line in lines for name in re.findall(r"\bmake ([-\w]+)", line)}


# make help ---------------------------------------------------------------------------------------


def test_help_lists_every_target_once_in_a_group() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    groups = [block.splitlines() for block in said.split("\n\n")]
    assert len(groups) == 4 and not any(group[0].startswith(" ") for group in groups)
    rows = [re.fullmatch(r"  make ([-\w]+) +(\S.*)", line) for group in groups for line in group[1:]]
    listed = [row[1] for row in rows if row]
    assert len(listed) == len(rows) == len({*listed})
    assert {*listed} == phony()


def test_every_target_that_is_no_file_is_declared_so() -> None:
    assert {*re.findall(r"(?m)^([a-z][-a-z]*):(?!=)", MAKEFILE)} == phony()


def planned(tmp_path: Path, *words: str) -> str:
    """Return the commands that make would run in a fresh clone."""
    command = ["make", "--no-print-directory", "--dry-run", f"VENV={tmp_path}/venv", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_less_than_the_tests_and_both_install_what_is_missing(tmp_path: Path) -> None:
    demo, tests = planned(tmp_path, "demo"), planned(tmp_path, "test")
    both = "requirements/install.py requirements/demo.lock --torch"
    assert both in demo and both in tests
    assert "dev.lock" in tests and "dev.lock" not in demo
    assert "--quiet" not in "".join(line for line in demo.splitlines() if "-e ." not in line)


def test_without_a_lock_the_constraints_hold(tmp_path: Path) -> None:
    commands = planned(tmp_path, "venv", "LOCK=")
    assert "install.py" not in commands
    assert commands.count("-c requirements/constraints.txt") == 3


# Workflows ---------------------------------------------------------------------------------------


def test_a_pull_request_runs_every_target_of_the_ci_script() -> None:
    assert re.findall(r"(?m)^make ([-\w]+)$", (ROOT / ".ci" / "run").read_text()) == ["check", "test-all"]
    (tests,) = re.findall(r"(?m)^TARGETS := (.+)$", MAKEFILE)
    assert len(tests.split()) > 3
    assert targets(GITHUB / "workflows" / "ci.yml") >= {"check", *tests.split()}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    called = targets(workflow)
    assert called and called <= phony()


def test_what_takes_long_runs_each_night() -> None:
    nightly = targets(GITHUB / "workflows" / "nightly.yml")
    assert nightly >= {"test-containers", "test-frameworks", "test-engines", "test-torch"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read_and_name_the_major_version_of_each_action(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    steps = [step for job in jobs(workflow).values() for step in job["steps"]]
    used = [str(step["uses"]) for step in steps if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[-\w]+@v\d+", name) or (ROOT / name).is_dir() for name in used)
    assert not any("permissions" in job for job in jobs(workflow).values())
    kept = [step.get("with", {}) for step in steps if str(step.get("uses")).startswith("actions/checkout@")]
    assert kept and all(options.get("persist-credentials") is False for options in kept)


def test_each_supported_python_and_kubernetes_is_tested() -> None:
    ci = jobs(GITHUB / "workflows" / "ci.yml")
    oldest = f"python:{PROJECT['requires-python'].removeprefix('>=')}-bookworm"
    assert ci["targets"]["container"]["image"] == oldest
    known = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert ci["pythons"]["strategy"]["matrix"]["python"] == known[1:]
    assert ci["kubernetes"]["strategy"]["matrix"]["kubernetes"] == ["1.34", "1.35", "1.36"]
    assert any("MUSTER_KUBE_BIN=" in line for line in commands(ci["kubernetes"]))


def test_every_other_yaml_of_the_project_can_be_read() -> None:
    paths = [*GITHUB.rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(paths) > 6 and all(isinstance(yaml.safe_load(path.read_text()), dict) for path in paths)
    hooks = yaml.safe_load(paths[-1].read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-format", "ruff-check", "prose"]


# Metadata ----------------------------------------------------------------------------------------


def test_the_version_and_the_address_of_the_project_are_the_same_everywhere() -> None:
    assert PROJECT["version"] == muster.__version__
    assert PROJECT["urls"] and all(url.startswith(URL) for url in PROJECT["urls"].values())
    for name in ("mkdocs.yml", "SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert re.findall(r"https://github\.com/[-\w]+/[-\w]+", (ROOT / name).read_text()) == [URL], name


def test_packages_whose_internals_are_overridden_have_an_upper_bound() -> None:
    named = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    bounded = {re.split("[>=<]", text)[0] for text in named if ",<" in text}
    assert bounded == {"typer", "starlette", "uvicorn"}


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    (allowed,) = [text for text in PROJECT["optional-dependencies"]["torch"] if text.startswith("torch>=")]
    (oldest,) = re.findall(r"(?m)^TORCH_OLDEST := (\S+)$", MAKEFILE)
    assert oldest == f"{allowed.removeprefix('torch>=')}.0"
    assert torch_version.refusal(oldest) == ""
    assert torch_version.refusal("2.7.1") != ""
