"""What `muster kube install` would apply: as the files in `golden` have it, with no more rights than it needs.

After a wanted change: python -m tests.kube.test_manifests writes the files anew; look at what git diff says.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given, settings

from muster.backends.kube import render
from muster.cli.kube import documents
from muster.cli.main import call
from muster.cli.output import yaml_of
from muster.daemon import options as daemon
from muster.kube import crd, manifests, rbac
from muster.types.codec import from_wire, to_wire
from muster.types.training import Cancel, Metadata, RankExit, Spec, Status, Training, check
from tests.training_builders import BIRTH, a_training
from tests.types import strategies

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[2] / "docs"
CASES = {
    "default": manifests.InstallOptions(image="muster:1.2.3"),
    "options": manifests.InstallOptions(
        namespace="training-system",
        image="registry.example.com/muster@sha256:0123",
        worker_image="registry.example.com/torch:2",
        worker_user="1000",
        replicas=3,
        tls_secret="muster-tls",
        pull_secrets=("registry", "mirror.example"),
        cpu="500m",
        memory="2Gi",
    ),
}
BASE = Path(__file__).parents[2] / "deploy/base"  # for kustomize

Json = dict[str, Any]


def of_kind(kind: str, options: manifests.InstallOptions = CASES["default"]) -> Json:
    (found,) = [one for one in manifests.render(options) if one["kind"] == kind]
    return found


# What is rendered --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_manifests_are_those_of_the_golden_file(name: str) -> None:
    shown = documents(manifests.render(CASES[name])) + "\n"
    assert shown == (GOLDEN / f"{name}.yaml").read_text(), "python -m tests.kube.test_manifests, then git diff"


@pytest.mark.parametrize("name", CASES)
def test_yaml_readers_find_what_was_rendered(name: str) -> None:
    rendered = manifests.render(CASES[name])
    assert list(yaml.safe_load_all(documents(rendered))) == rendered


def test_the_definition_comes_first_and_the_program_last() -> None:
    kinds = [one["kind"] for one in manifests.render(CASES["default"])]
    assert kinds[:2] == ["CustomResourceDefinition", "Namespace"] and kinds[-1] == "Deployment"


def test_an_upgrade_says_nothing_about_the_leaders_address() -> None:
    kinds = {manifest["kind"] for manifest in manifests.render(CASES["default"])}
    assert not kinds & {"Endpoints", "EndpointSlice"}
    assert "selector" not in of_kind("Service")["spec"]


def test_the_policy_and_the_deployment_select_the_same_pods() -> None:
    pods = of_kind("Deployment")["spec"]
    labels = pods["template"]["metadata"]["labels"]
    assert pods["selector"]["matchLabels"] == labels
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels


def test_the_policy_lets_workers_in_by_a_label_that_they_have() -> None:
    assert manifests.WORKER_LABEL == render.TRAINING


@pytest.mark.parametrize("chosen", CASES.values(), ids=CASES)
def test_the_control_plane_understands_how_it_is_started(chosen: manifests.InstallOptions) -> None:
    verb, *words = manifests.arguments(chosen)
    started = daemon.read(["--home", "x", *words])
    assert verb == "server" and (started.store, started.backend) == ("kube", "kube")
    assert (started.coordinator_port, started.mesh_port) == (8471, 8472)
    assert started.advertise == "muster.$(POD_NAMESPACE).svc"  # an overlay may move it
    assert started.image == (chosen.worker_image or chosen.image)
    assert started.insecure is (chosen.tls_secret is None) is (started.tls_cert is None)


def test_with_a_certificate_nothing_is_served_in_clear() -> None:
    (container,) = of_kind("Deployment", CASES["options"])["spec"]["template"]["spec"]["containers"]
    assert "--insecure" not in container["args"] and "--tls-cert" in container["args"]
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_values_reach_the_pod() -> None:
    pod = of_kind("Deployment", CASES["options"])["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror.example"}]
    wanted = {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    assert pod["containers"][0]["resources"] == wanted
    assert "imagePullSecrets" not in of_kind("Deployment")["spec"]["template"]["spec"]


def test_the_home_is_a_folder_in_the_volume_that_others_may_write() -> None:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    (home,) = [one["value"] for one in container["env"] if one["name"] == "MUSTER_HOME"]
    assert Path(home).parent == Path(mount["mountPath"])


def test_the_base_for_kustomize_is_what_is_rendered() -> None:
    wanted = manifests.kustomization(manifests.render(manifests.InstallOptions()))
    assert {place.name for place in BASE.iterdir()} == set(wanted)
    for name, content in wanted.items():
        assert (BASE / name).read_text() == yaml_of(content) + "\n", (
            "python -m tests.kube.test_manifests, then git diff"
        )


def test_kubectl_builds_the_base_and_an_overlay_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a cluster. The overlay has another namespace, image and number of replicas."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    assert call(["kube", "install", "--kustomize", str(tmp_path / "base")]) == 0
    assert str(tmp_path / "base/kustomization.yaml") in capsys.readouterr().out
    overlay = {"resources": ["../base"], "namespace": "elsewhere", "images": [{"name": "muster", "newTag": "9"}]}
    overlay |= {"replicas": [{"name": "muster", "count": 3}]}
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))

    def built(folder: str) -> dict[str, Json]:
        done = subprocess.run([kubectl, "kustomize", str(tmp_path / folder)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}

    assert built("base") == {one["kind"]: one for one in manifests.render(manifests.InstallOptions())}
    moved = built("overlay")
    assert moved["Deployment"]["metadata"]["namespace"] == "elsewhere"
    assert moved["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == "muster:9"
    assert moved["Deployment"]["spec"]["replicas"] == 3
    assert moved["ClusterRoleBinding"]["subjects"][0]["namespace"] == "elsewhere"


# Rights ------------------------------------------------------------------------------------------

GRANTS = [*rbac.EVERYWHERE, *rbac.AT_HOME]
_READ = {"get", "list", "watch"}
_VERBS = _READ | {"create", "update", "patch", "delete"}


@pytest.mark.parametrize("grant", GRANTS, ids=lambda grant: f"{grant.resource}-{'-'.join(grant.verbs)}")
def test_a_right_is_of_named_verbs_on_one_named_kind_and_has_a_reason(grant: rbac.Permission) -> None:
    rule = grant.rule()
    assert set(rule["verbs"]) <= _VERBS and rule["verbs"]
    assert len(rule["resources"]) == len(rule["apiGroups"]) == 1
    assert "*" not in json.dumps(rule)
    assert grant.reason


def test_secrets_are_read_in_its_own_namespace_only() -> None:
    everywhere = of_kind("ClusterRole")["rules"]
    read = [rule for rule in everywhere if "secrets" in rule["resources"] and _READ & set(rule["verbs"])]
    assert read == []
    assert of_kind("Role")["metadata"]["namespace"] == "muster"


def test_no_right_lets_it_give_itself_more() -> None:
    kinds = {grant.resource for grant in GRANTS if (grant.resource, grant.verbs) != ("nodes", ("get",))}
    assert not {kind for kind in kinds if re.search("role|binding|token|serviceaccount|node|exec|escalate", kind)}


def test_the_roles_have_the_rights_of_the_table_and_no_others() -> None:
    assert of_kind("ClusterRole")["rules"] == [grant.rule() for grant in rbac.EVERYWHERE]
    assert of_kind("Role")["rules"] == [grant.rule() for grant in rbac.AT_HOME]


def test_the_documentation_explains_every_right() -> None:
    page = (DOCS / "kubernetes.md").read_text()
    assert [grant.row() for grant in GRANTS if grant.row() not in page] == []
    shown = re.findall(r"^\| `[-a-z./0-9]+`(?: named .*)? \| (?:get|list|create|update).*\|$", page, re.MULTILINE)
    assert len(shown) == len(GRANTS)


# The definition ----------------------------------------------------------------------------------

SCHEMA = crd.schema()
OBJECT = jsonschema_rs.Draft4Validator(SCHEMA)  # exclusiveMinimum is true or false there, as Kubernetes has it


def fields(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every field with its path; lists and maps are looked into."""
    for name, part in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        yield at, part
        yield from fields(part.get("items", part), at)


FIELDS = {path: part for path, part in fields(SCHEMA) if not path.startswith("metadata")}


def test_every_field_has_a_sentence_and_every_sentence_a_field() -> None:
    told = {path: part.get("description") for path, part in FIELDS.items()}
    assert [path for path, words in told.items() if not words or not words.endswith(".")] == []
    assert crd.ABOUT.keys() - {""} - told.keys() == set()


def test_the_fields_are_those_of_the_records() -> None:
    spec = to_wire(Spec(cancel=Cancel(BIRTH)))
    assert spec.keys() <= SCHEMA["properties"]["spec"]["properties"].keys()
    assert len(SCHEMA["properties"]["spec"]["properties"]) == len(Spec.__dataclass_fields__)
    status = SCHEMA["properties"]["status"]["properties"].keys() - {"journal"}  # the store's own
    assert len(status) == len(Status.__dataclass_fields__)
    first_failure = FIELDS["status.outcome.firstFailure"]["properties"]
    assert len(first_failure) == len(RankExit.__dataclass_fields__)


def test_the_schema_is_structural() -> None:
    allowed = {"type", "description", "default", "enum", "format", "items", "maxItems", "minItems", "maxLength"}
    allowed |= {"minLength", "minimum", "maximum", "exclusiveMinimum", "pattern", "properties", "required", "oneOf"}
    allowed |= {"not", "additionalProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
    open_to_all = [path for path, part in FIELDS.items() if part.get("x-kubernetes-preserve-unknown-fields")]
    assert open_to_all == ["spec.template"]
    for path, part in FIELDS.items():
        assert part["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        assert set(part) - {"x-kubernetes-preserve-unknown-fields"} <= allowed | (
            {"nullable"} if part["type"] == "string" else set()
        ), path
        assert not ("properties" in part and "additionalProperties" in part), path
    assert set(SCHEMA["properties"]["metadata"]["properties"]) == {"name"}


EXIT_TEXTS = ("terminationReason", "worker", "node", "exception", "place")


def test_texts_that_may_be_empty_are_nullable_and_nothing_else_is() -> None:
    assert {path for path, part in FIELDS.items() if part.get("nullable")} == {
        *(f"status.conditions.{name}" for name in ("reason", "message")),
        *(f"status.ranks.{name}" for name in ("worker", "node")),
        *(f"status.workers.{name}" for name in ("node", "ranks", "note")),
        *(f"status.rankExits.{name}" for name in EXIT_TEXTS),
        *(f"status.outcome.firstFailure.{name}" for name in EXIT_TEXTS),
        *(f"status.outcome.{name}" for name in ("reason", "message")),
        *(f"status.keptState.{name}" for name in ("where", "loss", "resumed", "refused", "lost")),
        *(f"status.bench.{name}" for name in ("via", "error")),
        "status.lastResize.reason",
    }
    assert FIELDS["spec.args"]["items"]["nullable"] and FIELDS["spec.env"]["additionalProperties"]["nullable"]


def defaulted(value: Any, schema: Json) -> Any:
    """As the API server fills in what was left out."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    parts: Json = schema["properties"]
    filled = {name: part["default"] for name, part in parts.items() if "default" in part} | value
    return {name: defaulted(inner, parts.get(name, {})) for name, inner in filled.items()}


def test_the_defaults_are_those_of_the_records_but_for_the_backend() -> None:
    spec = from_wire(Spec, defaulted({"script": "a.py"}, SCHEMA["properties"]["spec"]))
    assert spec == Spec(script="a.py", backend="kube")


@given(strategies.trainings)
@settings(max_examples=200, deadline=None)
def test_what_is_stored_fits_into_the_schema(training: Training) -> None:
    """Whatever the records hold, with one program to run: the strategy gives any number of them."""
    wire = json.loads(json.dumps(training.to_wire()))
    for name in ("command", "module"):
        wire["spec"].pop(name, None)
    wire["spec"]["script"] = "train.py"
    from_wire(Spec, wire["spec"])  # else nothing is promised
    assert [error.message for error in OBJECT.iter_errors(wire)] == []


@pytest.mark.parametrize(
    "asked",
    [
        {"command": ("python", "-c", "pass"), "script": None},
        {"module": "a.b_c", "script": None},
        {"world": (1, 10_000, 10_000), "spares": 10_000, "priority": -5},
        {"env": {"A": "", "_B9": "é"}, "secret_env": ("A",), "args": ("x" * 131_072,)},
        {"cancel": Cancel(BIRTH, 0.0), "active_deadline_seconds": 0.5},
    ],
)
def test_a_training_that_the_records_allow_is_taken(asked: Json) -> None:
    wire = json.loads(json.dumps(check(a_training(**asked)).to_wire()))
    assert [error.message for error in OBJECT.iter_errors(wire)] == []


# What the schema must refuse; tests/kube/test_install.py asks a real server as well.
HOSTILE: dict[str, Json] = {
    "no program": {"spec": {}},
    "two programs": {"spec": {"script": "a.py", "module": "a"}},
    "no spec": {},
    "an empty command": {"spec": {"command": []}},
    "an empty script": {"spec": {"script": ""}},
    "a command of one text": {"spec": {"command": "python a.py"}},
    "numbers as arguments": {"spec": {"script": "a.py", "args": [1]}},
    "too many arguments": {"spec": {"script": "a.py", "args": [""] * 10_001}},
    "too long an argument": {"spec": {"script": "a.py", "args": ["x" * 131_073]}},
    "a number in env": {"spec": {"script": "a.py", "env": {"A": 1}}},
    "a target of 0": {"spec": {"script": "a.py", "worldSize": {"target": 0}}},
    "a negative target": {"spec": {"script": "a.py", "worldSize": {"target": -1}}},
    "too large a target": {"spec": {"script": "a.py", "worldSize": {"target": 10_001}}},
    "half a worker": {"spec": {"script": "a.py", "worldSize": {"target": 1.5}}},
    "a text as target": {"spec": {"script": "a.py", "worldSize": {"target": "2"}}},
    "a module that is a path": {"spec": {"module": "../a"}},
    "memory that is no amount": {"spec": {"script": "a.py", "resources": {"memory": "lots"}}},
    "negative memory": {"spec": {"script": "a.py", "resources": {"memory": "-1Gi"}}},
    "memory as a number": {"spec": {"script": "a.py", "resources": {"memory": 1024}}},
    "no cpu": {"spec": {"script": "a.py", "resources": {"cpu": 0}}},
    "millicpus": {"spec": {"script": "a.py", "resources": {"cpu": "500m"}}},
    "too many gpus": {"spec": {"script": "a.py", "resources": {"gpus": 1025}}},
    "a cancel without its time": {"spec": {"script": "a.py", "cancel": {}}},
    "a backend that is no name": {"spec": {"script": "a.py", "backend": "../x"}},
    "a lease of 0": {"spec": {"script": "a.py", "leaseSeconds": 0}},
    "a lease of a day": {"spec": {"script": "a.py", "leaseSeconds": 86400}},
    "a hang timeout of 0": {"spec": {"script": "a.py", "hangTimeoutSeconds": 0}},
    "a name with a dot": {"metadata": {"name": "a.b"}, "spec": {"script": "a.py"}},
    "too long a name": {"metadata": {"name": "a" * 53}, "spec": {"script": "a.py"}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_training_that_could_never_run_is_refused(case: str) -> None:
    wire = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": {"name": "a"}} | HOSTILE[case]
    assert not OBJECT.is_valid(wire)


def test_a_name_that_the_records_refuse_is_refused() -> None:
    name = SCHEMA["properties"]["metadata"]["properties"]["name"]
    assert name["maxLength"] == 52 and "description" not in name
    assert from_wire(Metadata, {"name": "a" * 52}).name


# The command -------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_kubectl_can_apply(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", "muster:1.2.3"]
    assert call(["kube", "install", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == (GOLDEN / "default.yaml").read_text()
    assert call(["kube", "install", "--dry-run", *words, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == manifests.render(CASES["default"])


def test_every_option_reaches_the_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    words = "kube install --dry-run -n training-system --image registry.example.com/muster@sha256:0123 --replicas 3"
    words += " --worker-image registry.example.com/torch:2 --tls-secret muster-tls --worker-user 1000"
    words += " --pull-secret registry --pull-secret mirror.example --cpu 500m --memory 2Gi"
    assert call(words.split()) == 0
    assert capsys.readouterr().out == (GOLDEN / "options.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["--namespace", "Bad_One"], "--namespace: 'Bad_One' is not a name"),
        (["--namespace", "a" * 64], "is not a name"),
        (["--image", "a b"], "--image: 'a b' is not an image"),
        (["--worker-image", ""], "--worker-image: '' is not an image"),
        (["--tls-secret", "-"], "--tls-secret: '-' is not a name"),
        (["--replicas", "0"], "--replicas"),
        (["--worker-user", "root"], "--worker-user: 'root' is not a number of a user"),
        (["--pull-secret", "fine", "--pull-secret", "A"], "--pull-secret: 'A' is not a name"),
        (["--cpu", "much"], "--cpu: 'much' is not an amount"),
        (["--memory", "2 GB"], "--memory: '2 GB' is not an amount"),
        (["--kustomize", "/dev/null/x"], "--kustomize: /dev/null"),
    ],
)
def test_what_is_typed_wrongly_is_named_and_nothing_printed(
    words: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["kube", "install", "--dry-run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and about in err


def test_an_uninstall_that_contradicts_itself_asks_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["kube", "uninstall", "--keep-crd", "--delete-trainings"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert call(["kube", "uninstall", "-n", "A"]) == 2


_WITHOUT = (
    "import sys; sys.modules['lightkube'] = None; sys.modules['msgspec'] = None; from muster.cli.main import call; "
)


def test_a_dry_run_needs_nothing_of_kubernetes() -> None:
    script = f"{_WITHOUT} sys.exit(call(['kube', 'install', '--dry-run']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("apiVersion: apiextensions.k8s.io/v1\n")


def test_without_the_client_the_error_says_what_to_install() -> None:
    script = f"{_WITHOUT} sys.exit(call(['kube', 'install']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "pip install '.[kube]' in the clone" in done.stderr and "Traceback" not in done.stderr


def test_without_a_cluster_the_error_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert call(["kube", "install"]) == 7
    assert "kubeconfig" in capsys.readouterr().err.lower()
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    nobody = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [context],
        "current-context": "c",
    }
    (tmp_path / "config").write_text(json.dumps(nobody))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert call(["kube", "install"]) == 7
    out, err = capsys.readouterr()
    assert out == "" and "127.0.0.1:9 cannot be reached" in err and "kubectl cluster-info" in err
    assert call(["kube", "install", "--context", "elsewhere"]) == 7
    assert "elsewhere" in capsys.readouterr().err


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for title, chosen in CASES.items():
        (GOLDEN / f"{title}.yaml").write_text(documents(manifests.render(chosen)) + "\n")
    for title, content in manifests.kustomization(manifests.render(manifests.InstallOptions())).items():
        (BASE / title).write_text(yaml_of(content) + "\n")
