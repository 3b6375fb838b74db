"""Where a training runs; who gets which GPUs is told in tests/core/sharing/test_crews.py."""

from __future__ import annotations

import pytest

from muster.core.training.admission import backend_of
from muster.types.training import Spec


@pytest.mark.parametrize(
    ("named", "served", "meant"),
    [
        ("local", ["local"], "local"),
        ("local", ["kube"], "kube"),
        ("local", ["kube", "local"], "local"),
        ("local", ["kube", "moon"], "local"),
        ("moon", ["kube"], "moon"),
        ("local", [], "local"),
    ],
)
def test_who_did_not_choose_a_backend_means_the_only_one(named: str, served: list[str], meant: str) -> None:
    assert backend_of(Spec(backend=named), served) == meant
