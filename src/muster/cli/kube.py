"""`muster kube`: put the control plane into a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import TYPE_CHECKING

import typer

from muster.cli import exits, output
from muster.cli.output import Report
from muster.errors import Forbidden, MusterError, Unavailable, how_to_install
from muster.types.training import DNS_LABEL

if TYPE_CHECKING:
    from muster.kube.install import Applied
    from muster.kube.manifests import InstallOptions, Manifest

app = typer.Typer(
    help="Put the control plane into a Kubernetes cluster.",
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


@app.callback()
def kube() -> None:
    """Keeps `install` a verb of its own while it is the only one."""


@app.command(epilog="Example: muster kube install --image registry.example.com/muster:0.1.1")
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
    context: str | None = typer.Option(None, metavar="CONTEXT", help="Which one of the kubeconfig."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be applied, and ask no cluster."),
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
    )
    rendered = manifests.render(options)
    if dry_run:
        _print(rendered, form)
        return
    try:
        applied = asyncio.run(_apply(rendered, context, shown=form is Report.TABLE))
    except Forbidden as error:
        hint = "it needs an administrator of the cluster; muster kube install --dry-run prints what to hand to one"
        raise Forbidden(error.message, hint=hint) from error
    except Unavailable as error:
        raise Unavailable(
            error.message, hint=error.hint or "kubectl cluster-info; --context chooses another"
        ) from error
    if form is not Report.TABLE:
        output.write_data({"items": [vars(one) for one in applied]}, form)
    _tell_next(options)


async def _apply(rendered: list[Manifest], context: str | None, *, shown: bool) -> list[Applied]:
    try:
        from muster.kube.client import KubeApi
        from muster.kube.install import apply
    except ModuleNotFoundError as error:
        hint = f"{how_to_install('kube')}, or muster kube install --dry-run | kubectl apply -f -"
        raise MusterError(f"talking to Kubernetes needs {error.name}", hint=hint) from error
    api = KubeApi.connect(context=context)
    done = []
    try:
        async for one in apply(api, rendered):
            done.append(one)
            if shown:
                print(f"{one.kind.lower()}/{one.name} {one.change}", flush=True)
    finally:
        await api.close()
    return done


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


def _image(option: str, text: str | None) -> str | None:
    if text is not None and not re.fullmatch(_IMAGE, text):
        raise exits.Misused(f"{option}: {text[:80]!r} is not an image", hint="like registry.example.com/muster:0.1.1")
    return text
