"""Keys and certificates of one test cluster: an authority, a certificate for loopback, the service accounts' key."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Pki:
    ca: Path
    certificate: Path
    key: Path
    account_key: Path


def make(folder: Path, addresses: Sequence[str] = ("127.0.0.1",)) -> Pki:
    """`addresses`: where the server is reached."""
    folder.mkdir(parents=True)
    ca, ca_key = folder / "ca.crt", folder / "ca.key"
    pki = Pki(ca, folder / "tls.crt", folder / "tls.key", folder / "account.key")
    authority = ("-addext", "keyUsage=critical,keyCertSign")
    _openssl("req", "-x509", *_EC, "-subj", "/CN=test-ca", *authority, "-keyout", str(ca_key), "-out", str(ca))
    places = ",".join(f"IP:{address}" for address in addresses)
    names = f"subjectAltName={places},DNS:localhost,DNS:kubernetes.default.svc"
    leaf = ("-addext", names, "-addext", "basicConstraints=critical,CA:FALSE")
    signed = ("-CA", str(ca), "-CAkey", str(ca_key), "-keyout", str(pki.key), "-out", str(pki.certificate))
    _openssl("req", "-x509", *_EC, "-subj", "/CN=loopback", *leaf, *signed)
    _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(pki.account_key))
    return pki


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)
