"""`muster kube uninstall` where a control plane and a training run: does everything go, and can it come back?"""

from __future__ import annotations

from tests.containers.installation import HOME, Installation, Trained


def test_a_running_installation_goes_with_its_trainings_and_comes_back(
    installed: Installation, trained: Trained
) -> None:
    trained.counting()
    trained.until_step(5)
    refused = installed.muster("kube", "uninstall", "--yes", code=4)
    assert f"{trained.namespace}/demo" in refused and installed.leader()
    try:
        said = installed.muster("kube", "uninstall", "--delete-trainings", "--yes").splitlines()
        assert said[0] == "training/demo deleted" and said[-1].endswith("trainings.muster.dev deleted")
        assert not trained.pods(), "the control plane ended its workers before it went"
        assert installed.lab.get(f"/api/v1/namespaces/{HOME}") is None
        everything = installed.lab.kubectl("get", "clusterroles,clusterrolebindings,namespaces", "-o", "name").stdout
        assert "muster" not in everything
    finally:
        installed.install()
    trained.counting()
    trained.until_step(5)
