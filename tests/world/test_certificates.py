"""Certificates that follow from a run token: the curve, the encoding, and who can speak with whom."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from pathlib import Path
from socket import socketpair

import pytest

from muster.world import certificates

RFC_8032 = [  # seed, public key, message, signature: section 7.1, tests 1 to 3 and "SHA(abc)"
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
        "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b589"
        "09351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]


@pytest.mark.parametrize(("seed", "key", "message", "signature"), RFC_8032)
def test_keys_and_signatures_are_those_of_rfc_8032(seed: str, key: str, message: str, signature: str) -> None:
    assert certificates.public_key(bytes.fromhex(seed)).hex() == key
    assert certificates.sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


def test_a_certificate_is_the_same_wherever_it_is_made_and_another_for_each_token_and_run() -> None:
    made = {certificates.certificate(certificates.seed_of(*who)) for who in (("t", "r"), ("t", "s"), ("u", "r"))}
    assert len(made) == 3
    assert certificates.certificate(certificates.seed_of("t", "r")) in made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_reads_it_and_agrees_with_its_signature(tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(certificates.certificate(certificates.seed_of("token", "run"))))
    verify = ["openssl", "verify", "-check_ss_sig", "-CAfile", str(path), str(path)]
    assert subprocess.run(verify, capture_output=True, timeout=30).returncode == 0
    dates = subprocess.run(["openssl", "x509", "-in", path, "-noout", "-dates"], capture_output=True, timeout=30)
    assert b"1970" in dates.stdout and b"9999" in dates.stdout


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, bytes]:
    """The version and the server's certificate, or an exception of either side."""
    near, far = socketpair()
    near.settimeout(10)
    far.settimeout(10)
    failed: list[Exception] = []

    def serve() -> None:
        try:
            with server.wrap_socket(far, server_side=True) as served:
                served.sendall(b"hello")
        except OSError as error:
            failed.append(error)
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(near) as asked:
            heard = asked.recv(5)
            assert heard == b"hello" or not heard
            return str(asked.version()), asked.getpeercert(binary_form=True) or b""
    finally:
        near.close()
        thread.join(10)
        if failed:
            raise failed[0]


def test_both_sides_of_one_run_speak_tls_1_3() -> None:
    version, shown = handshake(
        certificates.context("token", "run", server=True), certificates.context("token", "run", server=False)
    )
    assert version == "TLSv1.3"
    assert shown == certificates.certificate(certificates.seed_of("token", "run"))


@pytest.mark.parametrize("other", [("another", "run"), ("token", "other")])
def test_nobody_of_another_token_or_run_gets_through(other: tuple[str, str]) -> None:
    ours, theirs = ("token", "run"), other
    for server, client in ((ours, theirs), (theirs, ours)):
        with pytest.raises(OSError):
            handshake(certificates.context(*server, server=True), certificates.context(*client, server=False))


def test_somebody_without_a_certificate_gets_nothing() -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):
        handshake(certificates.context("token", "run", server=True), bare)


def test_nothing_of_the_key_is_left_in_a_file() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    certificates.context("token", "a run of its own", server=True)
    left = {path for path in Path("/proc/self/fd").iterdir() if path not in before and path.is_symlink()}
    assert not [path for path in left if "memfd" in str(path.readlink())]


def test_contexts_are_kept_and_not_without_bound() -> None:
    first = certificates.context("token", "run", server=True)
    assert certificates.context("token", "run", server=True) is first
    assert certificates.context.cache_info().maxsize == certificates.KEPT
