"""Names and contents of files that usually hold secrets, in small and in large letters. They do not travel.

A copy that an editor or a person left beside such a file (`prod.env~`, `.server.key.swp`) holds the same secrets.
Templates without values, such as `.env.example`, are no secrets. Source files are none by a word in their name alone:
`credentials.py` is a module.

Names cannot show every private key: Google names the key of a service account after the project. So the text of a small
file is searched, too, unless the file is a template or source.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator

# Files and folders, by one part of their path or by several.
NAMES = (
    *(
        ".env",
        ".env.*",
        ".env[_-]*",
        ".env[0-9]*",
        "env.local",
        "*.env",
        ".envrc",
        ".envrc.*",
        ".flaskenv",
        "*.env.local",
    ),
    *(
        "*.pem",
        "*.key",
        "*.p8",
        "*.p12",
        "*.pfx",
        "*.pkcs12",
        "*.jks",
        "*.keystore",
        "*.keytab",
        "*.ppk",
        "*.kdb",
        "*.kdbx",
    ),
    *(f"*.{kind}.{version}" for kind in ("key", "pem") for version in ("enc", "[0-9]", "[0-9][0-9]", "[0-9]" * 4)),
    *("secring.*", "*.keychain", "*.keychain-db", "wg[0-9]*.conf", "*.pgp"),
    *("private.asc", "private[_-]*.asc", "*[_-]private.asc", "secret[_-]*.asc", "*[_-]secret.asc"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*_rsa", "*_dsa", "*_ecdsa", "*_ed25519", "*.ovpn"),
    *(
        ".netrc",
        "_netrc",
        ".netrc.*",
        "netrc",
        ".pgpass",
        ".my.cnf",
        ".mylogin.cnf",
        ".renviron",
        ".pypirc",
        ".npmrc",
        ".yarnrc.yml",
        ".git-credentials",
        ".htpasswd",
    ),
    *(
        ".dockercfg",
        ".dockerconfigjson",
        ".docker/config.json",
        ".s3cfg",
        ".boto",
        ".databrickscfg",
        ".terraformrc",
        ".terraform.d",
    ),
    *(
        ".ssh",
        ".aws",
        ".azure",
        ".kube",
        ".gnupg",
        ".gcloud",
        ".config/gcloud",
        ".config/gh",
        ".huggingface",
        ".muster",
    ),
    *("huggingface/token", "huggingface/stored_tokens", "rclone.conf", ".rclone.conf"),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", "kube.config", ".smbcredentials", "smbcredentials", ".modal.toml"),
    *("azureauth.json", "accesstokens.json", "msal_token_cache.*", "wallet.dat", ".doppler.yaml"),
    *("rootkey.csv", "*accesskeys.csv", "gha-creds-*.json", "admin.conf", "clearml.conf", ".clearml.conf", ".cdsapirc"),
    *(".oci", ".snowsql", ".dvc/config.local", ".wandb/settings"),
    *("pip.conf", "wandb/settings", "cookies.txt", "cookies.sqlite", ".kaggle", ".ngrok2", "ngrok.yml"),
    *("*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".vault-token", ".vault_pass*", "*.vault", ".*_history"),
    *(
        "kaggle.json",
        "*[_-]adminsdk*.json",
        "*service[_-]account*.json",
        "*serviceaccount*.json",
        "local.settings.json",
    ),
)
_TOKENS = ("access", "api", "auth", "hf", "gh", "github", "gitlab", "wandb")
# The same, but not for source files.
WORDS = (
    *("credential", "credentials", "credentials*", ".credentials*", "*credentials.json", "client_secret*", "auth.json"),
    *("secret", "secrets", "secret.*", "secrets.*", ".secret*", "*secret*.json", "*secret*.y*ml", "*secret*.toml"),
    *(
        "*secret*.ini",
        "*secret*.txt",
        "*secret*.conf",
        "*.secret",
        "*[_-]secret",
        "secret[_-]key*",
        "token",
        "token.txt",
        "token.json",
        "token.pickle",
    ),
    *("tokens.json", ".token*", "*.token", *(f"*{kind}[_-]token" for kind in _TOKENS)),
    *(f"*{kind}[_-]token.*" for kind in _TOKENS),
    *(
        "*[_-]token",
        "*[_-]token.txt",
        "*[_-]token.json",
        "oauth*.json",
        ".auth.json",
        "creds",
        ".creds",
        "cred.json",
        "passwd",
        "passwd.txt",
        "creds.*",
        "*[_-]creds.*",
    ),
    *("keyfile*", "key.json", "keys.json", "keys.txt", "*[_-]keys.json", "*[_-]keys.txt", "vault.*", "*vault-pass*"),
    *("*[_-]credentials", "*[_-]credentials.*", "*[_-]key", "*[_-]key.txt", "*[_-]key.json"),
    *("token.y*ml", "tokens.y*ml", "bearer.txt", "privatekey", "privatekey.*", "private[_-]key", "private[_-]key.*"),
    *("kubeconfig[_-]*", ".envs", *(f"env.{kind}" for kind in ("production", "prod", "staging", "development", "dev"))),
    *("*password.txt", *(f"*{kind}[_-]password" for kind in ("admin", "database", "db", "mysql", "postgres", "root"))),
    *("*api[_-]key*", "apikey*", "*.apikey", ".passwd*", "password*", "*passwords.*", "*passwords"),
)
_SOURCE = re.compile(r"\.(py|pyi|pyx|ipynb|c|cc|cpp|cu|cuh|h|hpp|rs|go|java|js|ts|md|rst)$")
_COPY = re.compile(
    r"^#(?P<autosaved>.+)#$|^\.(?P<swapped>.+)\.sw[a-p]$|^(?P<kept>.+?)(~|\.(bak|backup|old|orig|save|tmp))$"
)
SEARCHED_BYTES = 64 * 1024  # larger files are data
_CONTENTS = {
    "contains a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY"),
    'contains a "private_key"': re.compile(rb'"private_key"\s*:\s*"[^"]'),
}
_TEMPLATE = re.compile(r"(^|[._-])(example|sample|template|tmpl|dist)([._-]|$)")


def _one_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Match one of the patterns by its last part. That decides for most names, and quickly."""
    return re.compile("|".join(fnmatch.translate(pattern.rpartition("/")[2]) for pattern in patterns))


_NAMES, _WORDS = _one_of(NAMES), _one_of((*NAMES, *WORDS))


def secret_pattern(name: str) -> str | None:
    """Return the pattern by which a file of that name, from the folder's top, or a folder above it looks secret."""
    folder, _, last = name.lower().rpartition("/")
    for file in _originals(last):
        is_source = _SOURCE.search(file) is not None
        if folder and (pattern := _of_folder(folder, is_source)) is not None:
            return pattern
        if not _TEMPLATE.search(file) and (pattern := _match(folder, file, is_source)) is not None:
            return pattern
    return None


def may_contain_secret(name: str, size: int) -> bool:
    """Return whether the text of a file needs a search: the file is small, and neither source nor a template."""
    return size < SEARCHED_BYTES and not any(
        _SOURCE.search(file) or _TEMPLATE.search(file) for file in _originals(name.lower().rpartition("/")[2])
    )


def secret_content(content: bytes) -> str | None:
    """Return a description of the secret in a file, such as a private key. Binary files are not searched."""
    if b"\0" in content:
        return None
    return next((label for label, pattern in _CONTENTS.items() if pattern.search(content)), None)


def _originals(file: str) -> Iterator[str]:
    """Yield the names that the file may be a copy of, by its name; its own if it is none.

    The swap file of `.env` is `.env.swp`, and so is that of `env`.
    """
    if (match := _COPY.match(file)) is None:
        yield file
    elif swapped := match["swapped"]:
        yield from (*_originals(swapped), *_originals(f".{swapped}"))
    else:
        yield from _originals(match["autosaved"] or match["kept"])


@functools.lru_cache(4096)
def _of_folder(folder: str, for_source: bool) -> str | None:
    above, _, name = folder.rpartition("/")
    pattern = _of_folder(above, for_source) if above else None
    return pattern if pattern is not None else _match(above, name, for_source)


def _match(folder: str, name: str, is_source: bool) -> str | None:
    if not (_NAMES if is_source else _WORDS).fullmatch(name):
        return None
    parts = [*folder.split("/"), name]
    for pattern in NAMES if is_source else (*NAMES, *WORDS):
        if fnmatch.fnmatchcase("/".join(parts[-1 - pattern.count("/") :]), pattern):
            return pattern
    return None
