"""Variables that travel with a training, those that never do, and the interpreter that goes with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from muster.sdk import travelling
from muster.sdk.submission import with_callers_own

EXPORTED = {
    "WANDB_PROJECT": "p",
    "WANDB_API_KEY": "s",
    "WANDB_RUN_ID": "mine",
    "HF_HOME": "/data/hf",
    "HF_TOKEN": "s",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_DEBUG": "INFO",
    "NCCL_TOPO_FILE": "/etc/topology.xml",
    "TORCH_LOGS": "dynamo",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_VISIBLE_DEVICES": "3",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "WANDB_BASE_URL": "https://me:pass@host",
    "MLFLOW_TRACKING_URI": "http://mlflow",
    "DATA_DIR": "/data",
    "OTHER": "x",
    "HF_EMPTY": "",
    "HF_LONG": "x" * 5000,
}


def test_what_travels_is_listed_and_no_secret_is_in_it() -> None:
    here = travelling.variables(EXPORTED)
    assert sorted(here) == [
        "CUDA_LAUNCH_BLOCKING",
        "HF_HOME",
        "MKL_NUM_THREADS",
        "NCCL_DEBUG",
        "NCCL_TOPO_FILE",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "TORCH_LOGS",
        "WANDB_PROJECT",
    ]
    far = travelling.variables(EXPORTED | {"PYTHONPATH": "src"}, far=True)
    assert sorted(here.keys() - far.keys()) == ["HF_HOME", "NCCL_TOPO_FILE"] and "PYTHONPATH" not in far


def test_entries_of_pythonpath_mean_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert travelling.variables({"PYTHONPATH": "src:/lib"}) == {"PYTHONPATH": f"{tmp_path}/src:/lib"}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "WANDB_APIKEY",
            "HF_SECRETS",
            "NCCL_PASSWORD",
            "HF_CREDENTIALS_FILE",
            "hf_token",
        ),
        *("HF_AUTH", "WANDB_PASS", "WANDB_PASSPHRASE", "TORCH_PWD", "WANDB_HTTP_BEARER", "HF_PAT", "WANDB_COOKIE"),
    ],
)
def test_a_name_that_looks_like_a_secret_is_one(name: str) -> None:
    assert travelling.is_secret(name)


@pytest.mark.parametrize("name", ["CUDA_PATH", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "HF_DATASETS_OFFLINE"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not travelling.is_secret(name, "/usr/local/task-with-a-very-long-name-indeed")


@pytest.mark.parametrize(
    "value",
    ["hf_" + "aB3" * 8, "ghp_" + "aB3" * 8, "x sk-" + "aB3" * 8, "AKIA" + "A1" * 8, "eyJhbGciOiJI.eyJzdWIiOiIx.s"],
)
def test_a_value_that_looks_like_a_token_is_a_secret(value: str) -> None:
    assert travelling.variables({"HF_NOTES": value}) == {}


def test_the_hint_names_what_plausibly_matters() -> None:
    left = travelling.left_behind(EXPORTED, travelling.variables(EXPORTED), "data = os.environ['DATA_DIR']")
    assert left == ["DATA_DIR", "HF_TOKEN", "MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_BASE_URL"]


def test_what_the_caller_gives_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "exported")
    given = with_callers_own({"env": {"WANDB_PROJECT": "given"}}, far=False)
    assert given["env"]["WANDB_PROJECT"] == "given" and given["interpreter"] == os.path.abspath(sys.executable)
    assert "interpreter" not in with_callers_own({}, far=True)
    assert with_callers_own({"interpreter": None}, far=False)["interpreter"] is None
