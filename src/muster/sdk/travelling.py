"""The caller's variables that travel with a training, and the caller's interpreter.

A variable that looks like a secret never travels by itself. `--env-pass NAME` and `env=` pass any variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

PREFIXES = ("WANDB_", "HF_", "TOKENIZERS_", "NCCL_", "TORCH_", "CUDA_", "OMP_", "MKL_")
NAMES = ("PYTHONPATH",)
KEPT_BACK = ("CUDA_VISIBLE_DEVICES", "WANDB_RUN_ID", "WANDB_RESUME")  # of this process, or of another run
_LONGEST = 4096
_SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)"
    r"|(^|_)(PASS|PWD|AUTH|AUTHORIZATION|BEARER|PAT|CREDS?|COOKIES?|PRIVATE|JWT)(_|$)"
)
# Hugging Face, GitHub, GitLab, Slack, OpenAI and AWS give out tokens of these forms. JSON Web Tokens and keys follow.
_TOKEN = re.compile(
    r"(?<![\w-])(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{16,}|sk-[\w-]{16,}"
    r"|A(KI|SI)A[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_USER_IN_URL = re.compile(r"://[^/\s]*@")
_EVERYWHERE = {"PATH", "HOME", "USER", "SHELL", "PWD", "LANG", "TMPDIR", "CUDA_VISIBLE_DEVICES"}
_OTHER_TOOLS = (
    "MLFLOW_",
    "COMET_",
    "NEPTUNE_",
    "CLEARML_",
    "AWS_ACCESS_KEY",
    "AWS_SECRET",
    "AWS_SESSION",
    "AWS_PROFILE",
)


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable looks like a secret, by its name, by a token in it or by a password in an address."""
    in_value = _USER_IN_URL.search(value) or _TOKEN.search(value)
    return _SECRET.search(name.upper()) is not None or in_value is not None


def variables(environ: Mapping[str, str], *, far: bool = False) -> dict[str, str]:
    """Return the variables that travel by default. To another machine no path of this one travels."""
    found = {}
    for name, value in sorted(environ.items()):
        listed = name.startswith(PREFIXES) or name in NAMES
        if not listed or name in KEPT_BACK or is_secret(name, value) or not 0 < len(value) <= _LONGEST:
            continue
        if far and (name in NAMES or value.startswith(("/", "~"))):
            continue
        found[name] = _absolute(value) if name == "PYTHONPATH" else value
    return found


def left_behind(environ: Mapping[str, str], env: Mapping[str, str], text: str) -> list[str]:
    """Return exported variables that plausibly matter and are not in `env`. `text` is the script's."""
    read = set(re.findall(r"""["']([A-Z][A-Z0-9_]{2,63})["']""", text)) - {
        "PATH",
        "HOME",
        "USER",
        "CUDA_VISIBLE_DEVICES",
    }
    return [
        name
        for name, value in sorted(environ.items())
        if value
        and name not in env
        and not name.startswith("MUSTER_")
        and ((name.startswith(PREFIXES) and is_secret(name, value)) or name.startswith(_OTHER_TOOLS) or name in read)
    ]


def _absolute(path: str) -> str:
    """Return a search path whose entries mean the same in any folder; an empty entry is the current folder."""
    return os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep))
