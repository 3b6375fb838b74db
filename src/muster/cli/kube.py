"""`muster kube`: put the control plane into a Kubernetes cluster, and take it out again."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster.cli import exits, output
from muster.cli.output import Report
from muster.errors import Conflict, Forbidden, MusterError, Unavailable, how_to_install
from muster.types.training import DNS_LABEL

if TYPE_CHECKING:
    from muster.kube.client import KubeApi
    from muster.kube.install import Applied
    from muster.kube.manifests import InstallOptions, Manifest
    from muster.kube.uninstall import Removed

app = typer.Typer(
    help="Put the control plane into a Kubernetes cluster, or take it out.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster kube install --dry-run | kubectl diff -f -",
)

_DNS_NAME = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
_IMAGE = r"[A-Za-z0-9][-A-Za-z0-9._/:@]{0,511}"

# The leader serves, and Services without a selector cannot be forwarded: hence its Pod.
_NEXT = """\
next, once it runs:
  kubectl -n {namespace} rollout status deployment/muster
  LEADER=$(kubectl -n {namespace} get lease muster -o jsonpath={{.spec.holderIdentity}})
  kubectl -n {namespace} port-forward pod/$LEADER 8470 &
  export MUSTER_URL={scheme}://localhost:8470
  export MUSTER_TOKEN=$(kubectl -n {namespace} get secret muster-token -o jsonpath={{.data.token}} | base64 -d)
  muster ps"""


@app.command(epilog="Example: muster kube install --image registry.example.com/muster:0.2.0")
def install(
    namespace: str = typer.Option("muster", "-n", "--namespace", metavar="NS", help="Where the control plane runs."),
    image: str | None = typer.Option(None, metavar="IMAGE", help="Its image, with muster; muster:VERSION."),
    worker_image: str | None = typer.Option(
        None, metavar="IMAGE", help="For trainings that name none; by default the same."
    ),
    worker_user: str | None = typer.Option(
        None,
        metavar="UID|image",
        help="Who workers run as: 65532, another number, or the image's own user. Pod Security restricted refuses 0.",
    ),
    replicas: int = typer.Option(2, min=1, max=10, help="How many control planes; one leads, the others stand by."),
    tls_secret: str | None = typer.Option(
        None, metavar="SECRET", help="Serve with this certificate: a Secret of type kubernetes.io/tls."
    ),
    pull_secret: list[str] = typer.Option(
        [], metavar="SECRET", help="With which nodes pull the control plane's image; may be repeated."
    ),
    gpus: int = typer.Option(
        0, min=0, metavar="N", help="Of the cluster, shared by trainings that lend and pipelines; 0: no pool."
    ),
    cpu: str | None = typer.Option(None, metavar="CPUS", help="For each replica, like 500m; 250m."),
    memory: str | None = typer.Option(
        None, metavar="SIZE", help="For each replica, asked for and the most, like 2Gi; 256Mi, and at most 1Gi."
    ),
    context: str | None = typer.Option(None, metavar="CONTEXT", help="Which one of the kubeconfig."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be applied, and ask no cluster."),
    kustomize: Path | None = typer.Option(
        None, metavar="DIR", help="Write it there as a base for kustomize instead, and ask no cluster."
    ),
    form: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it; a dry run is YAML or JSON."),
) -> None:
    """Install the control plane, or bring an installed one up to date. Running trainings are not disturbed."""
    from muster.kube import manifests

    options = manifests.InstallOptions(
        namespace=_name("--namespace", namespace),
        image=_image("--image", image) or manifests.DEFAULT_IMAGE,
        worker_image=_image("--worker-image", worker_image),
        worker_user=_user(worker_user),
        replicas=replicas,
        tls_secret=tls_secret and _name("--tls-secret", tls_secret, _DNS_NAME, 253),
        pull_secrets=tuple(_name("--pull-secret", one, _DNS_NAME, 253) for one in pull_secret),
        cpu=_amount("--cpu", cpu, r"\d{1,6}m|\d{1,3}(\.\d{1,3})?", "2 or 500m"),
        gpus=gpus,
        memory=_amount("--memory", memory, r"[1-9]\d{0,11}([kMGT]|[KMGT]i)?", "512Mi or 2Gi"),
    )
    rendered = manifests.render(options)
    if kustomize is not None:
        _write(kustomize, manifests.kustomization(rendered))
        return
    if dry_run:
        _print(rendered, form)
        return
    with _explained("muster kube install --dry-run"):
        applied = asyncio.run(_apply(rendered, context, shown=form is Report.TABLE))
    if form is not Report.TABLE:
        output.write_data({"items": [vars(one) for one in applied]}, form)
    _tell_next(options)


@app.command(epilog="Example: muster kube uninstall --delete-trainings --yes")
def uninstall(
    namespace: str = typer.Option("muster", "-n", "--namespace", metavar="NS", help="Where the control plane runs."),
    delete: bool = typer.Option(
        False, "--delete-trainings", help="End all trainings of the cluster, and delete them, before anything else."
    ),
    keep_crd: bool = typer.Option(
        False, "--keep-crd", help="Leave the definition, and trainings as they are: their ranks go on."
    ),
    yes: bool = typer.Option(False, "--yes", help="Really do it. Without it, see what would be removed."),
    context: str | None = typer.Option(None, metavar="CONTEXT", help="Which one of the kubeconfig."),
    form: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print what became of each object."),
) -> None:
    """Remove what install made: control plane, rights, its namespace with journal and tokens, the definition."""
    if delete and keep_crd:
        raise exits.Misused("--delete-trainings and --keep-crd contradict each other", hint="one of them, or none")
    _name("--namespace", namespace)
    with _explained("muster kube uninstall"):
        removed = asyncio.run(
            _remove(namespace, context, delete=delete, keep_crd=keep_crd, dry=not yes, shown=form is Report.TABLE)
        )
    if form is not Report.TABLE:
        output.write_data({"items": [vars(one) for one in removed]}, form)
    if not yes and any(one.change == "deleted" for one in removed):
        raise exits.Misused("nothing was removed yet", hint="the same with --yes removes what is listed as deleted")


async def _remove(
    namespace: str, context: str | None, *, delete: bool, keep_crd: bool, dry: bool, shown: bool
) -> list[Removed]:
    api = _connect(context, "kubectl delete -f what muster kube install --dry-run prints")
    from muster.kube import manifests, uninstall

    done: list[Removed] = []
    try:
        if (found := await uninstall.trainings(api)) and not keep_crd:
            if not delete:
                hint = "--delete-trainings ends and deletes them first; --keep-crd leaves them, and their ranks go on"
                raise Conflict(f"there are {uninstall.some(found)}; nothing was removed", hint=hint)
            gone = found if dry else await uninstall.delete_trainings(api)
            done += [uninstall.Removed("Training", name, place, "deleted") for place, _, name in map(_split, gone)]
            _tell(done if shown else [])
        options = manifests.InstallOptions(namespace=namespace)
        async for one in uninstall.remove(api, options, keep_crd=keep_crd, dry=dry):
            done.append(one)
            _tell([one] if shown else [])
    finally:
        await api.close()
    return done


def _split(name: str) -> tuple[str, str, str]:
    return name.partition("/")


def _tell(removed: Sequence[Removed]) -> None:
    for one in removed:
        why = f": {one.reason}" if one.reason else ""
        print(f"{one.kind.lower()}/{one.name} {one.change}{why}", flush=True)


# Talking to the cluster --------------------------------------------------------------------------


def _connect(context: str | None, otherwise: str) -> KubeApi:
    try:
        from muster.kube.client import KubeApi
    except ModuleNotFoundError as error:
        hint = f"{how_to_install('kube')}, or {otherwise}"
        raise MusterError(f"talking to Kubernetes needs {error.name}", hint=hint) from error
    return KubeApi.connect(context=context)


@contextmanager
def _explained(command: str) -> Iterator[None]:
    """What to do about a cluster that does not answer, or not to this user."""
    try:
        yield
    except Forbidden as error:
        hint = f"it needs an administrator of the cluster; {command} prints what to hand to one"
        raise Forbidden(error.message, hint=hint) from error
    except Unavailable as error:
        raise Unavailable(
            error.message, hint=error.hint or "kubectl cluster-info; --context chooses another"
        ) from error


async def _apply(rendered: list[Manifest], context: str | None, *, shown: bool) -> list[Applied]:
    api = _connect(context, "muster kube install --dry-run | kubectl apply -f -")
    from muster.kube.install import apply

    done = []
    try:
        async for one in apply(api, rendered):
            done.append(one)
            if shown:
                print(f"{one.kind.lower()}/{one.name} {one.change}", flush=True)
    finally:
        await api.close()
    return done


# Writing -----------------------------------------------------------------------------------------


def _write(folder: Path, files: Mapping[str, Manifest]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(output.yaml_of(content) + "\n")
    except OSError as error:
        raise exits.Misused(f"--kustomize: {error.filename}: {error.strerror}", hint="a folder, or none yet") from error
    print("\n".join(str(folder / name) for name in files))


def _print(rendered: list[Manifest], form: Report) -> None:
    if form is Report.JSON:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": rendered}, indent=2, ensure_ascii=False))
    else:
        print(documents(rendered))
    sys.stdout.flush()


def documents(rendered: list[Manifest]) -> str:
    """As one YAML stream."""
    return "\n---\n".join(output.yaml_of(one) for one in rendered)


def _tell_next(options: InstallOptions) -> None:
    scheme = "https" if options.tls_secret else "http"
    typer.echo(_NEXT.format(namespace=options.namespace, scheme=scheme), err=True)


def _name(option: str, text: str, form: str = DNS_LABEL, longest: int = 63) -> str:
    if len(text) > longest or not re.fullmatch(form, text):
        hint = f"lower-case letters, digits and dashes, at most {longest}, with a letter or digit at both ends"
        raise exits.Misused(f"{option}: {text[:80]!r} is not a name", hint=hint)
    return text


def _user(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"image|\d{1,9}", text, re.ASCII):
        raise exits.Misused(f"--worker-user: {text[:80]!r} is not a number of a user", hint="like 1000, or image")
    return text


def _amount(option: str, text: str | None, form: str, like: str) -> str | None:
    if text is not None and not re.fullmatch(form, text, re.ASCII):
        raise exits.Misused(f"{option}: {text[:80]!r} is not an amount", hint=f"like {like}")
    return text


def _image(option: str, text: str | None) -> str | None:
    if text is not None and not re.fullmatch(_IMAGE, text):
        raise exits.Misused(f"{option}: {text[:80]!r} is not an image", hint="like registry.example.com/muster:0.2.0")
    return text
