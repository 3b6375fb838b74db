"""What travels is what git does not ignore, without secrets and without links that lead out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from muster import package
from muster.errors import InvalidRequest
from muster.sdk import shipping
from muster.sdk.shipping import Parcel, collect, pack, placed, requirements_of


def write(folder: Path, names: Mapping[str, str] | tuple[str, ...]) -> None:
    texts = names if isinstance(names, Mapping) else dict.fromkeys(names, "x")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *words: str) -> None:
    own = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env=own)


def names(parcel: Parcel) -> list[str]:
    return [one.name for one in parcel.entries]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    write(made, ("train.py", "pkg/__init__.py", "pkg/model.py", "data/big.bin", "__pycache__/x.pyc"))
    return made


def test_without_git_everything_travels_but_what_nobody_wants(folder: Path) -> None:
    write(folder, ("venv/pyvenv.cfg", "venv/lib/x.py", ".venv/lib/x.py", ".git/config", "pkg/old.pyc"))
    assert names(collect(folder)) == ["data/big.bin", "pkg/__init__.py", "pkg/model.py", "train.py"]


def test_git_says_what_travels_also_what_is_not_added_yet_and_not_what_is_deleted(folder: Path) -> None:
    git(folder, "init", "-q")
    write(folder, {".gitignore": "data/\n*.log\n", "run.log": "x", "gone.py": "x"})
    git(folder, "add", "train.py", "gone.py", "pkg")
    (folder / "gone.py").unlink()
    assert names(collect(folder)) == [".gitignore", "pkg/__init__.py", "pkg/model.py", "train.py"]
    below = collect(folder / "pkg")
    assert names(below) == ["__init__.py", "model.py"]


def test_a_folder_that_git_ignores_as_a_whole_travels_as_if_there_were_no_git(folder: Path) -> None:
    git(folder, "init", "-q")
    write(folder, {".gitignore": "data/\n"})
    assert names(collect(folder / "data")) == ["big.bin"]


def test_what_musterignore_names_stays_also_if_git_knows_it(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    write(folder, {".musterignore": "data/*\n!data/small.bin\n# a comment\n", "data/small.bin": "x"})
    assert names(collect(folder)) == ["data/small.bin", "pkg/__init__.py", "pkg/model.py", "train.py"]


def test_what_looks_like_a_secret_stays_and_is_told(folder: Path) -> None:
    secrets = (".env", ".env.local", "keys/server.pem", "id_rsa", ".aws/credentials", "deep/.netrc", "tls.key")
    write(folder, (*secrets, ".env.example", "keyboard.py"))
    parcel = collect(folder)
    assert set(secrets) == {file.name for file in parcel.left_out}
    assert {".env.example", "keyboard.py"} <= set(names(parcel))
    (told,) = parcel.warnings()
    assert "left behind" in told and "and 2 more (looks like a secret)" in told


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "pkg/../../outside"])
def test_a_link_that_leads_out_is_refused_by_name(folder: Path, target: str) -> None:
    (folder / "pkg" / "link").symlink_to(target)
    (folder / "inside").symlink_to("pkg/model.py")
    if target == "../outside":
        (folder / "pkg" / "link").unlink()
        (folder / "link").symlink_to(target)
    with pytest.raises(InvalidRequest, match="link: is a link that leads out of the folder"):
        collect(folder)


@pytest.mark.parametrize("target", ["pkg/\x1b[2J", "pkg/\udcff", "b/" * 600 + "c"])
def test_a_link_that_no_package_can_have_is_refused_by_name(folder: Path, target: str) -> None:
    (folder / "link").symlink_to(target)
    with pytest.raises(InvalidRequest, match="link: is a link that no package can have"):
        collect(folder)


def test_links_that_stay_inside_and_links_to_folders_travel_as_links(folder: Path) -> None:
    (folder / "pkg" / "again").symlink_to("../train.py")
    (folder / "alias").symlink_to("pkg")
    links = {one.name: one.link for one in collect(folder).entries if one.link is not None}
    assert links == {"pkg/again": "../train.py", "alias": "pkg"}


def test_what_is_no_file_stays_and_is_told(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    parcel = collect(folder)
    assert [file.name for file in parcel.left_out] == ["pipe"] and "pipe" not in names(parcel)


def test_a_name_that_is_no_text_is_refused(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/\xff.py", "w"):
        pass
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        collect(folder)


def test_unchanged_code_is_not_packed_again_and_changed_code_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(collect(folder), tmp_path / "cache")
    assert package.check(first.path, first.digest) == 4
    with monkeypatch.context() as patched:
        patched.setattr(package, "pack", None)
        assert pack(collect(folder), tmp_path / "cache") == first
    (folder / "train.py").write_text("y")
    os.utime(folder / "train.py", (0, 0))
    second = pack(collect(folder), tmp_path / "cache")
    assert second.digest != first.digest
    second.path.unlink()
    assert pack(collect(folder), tmp_path / "cache") == second, "a cache that lost something is made good"


def test_only_so_many_packages_are_remembered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST_REMEMBERED", 3)
    for number in range(6):
        (folder / "train.py").write_text(str(number))
        last = pack(collect(folder), tmp_path / "cache")
    assert last.path.exists()
    assert len(list((tmp_path / "cache" / "packages").iterdir())) == 6


def test_too_much_says_what_is_large(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data" / "big.bin").write_bytes(os.urandom(100_000))
    monkeypatch.setenv(shipping.MOST_VARIABLE, "50000")
    with pytest.raises(InvalidRequest, match=r"more than 48\.8 KiB when packed") as refused:
        pack(collect(folder), tmp_path / "cache")
    assert "data/big.bin (97.7 KiB)" in refused.value.hint and ".musterignore" in refused.value.hint


def test_a_script_is_named_from_the_folder_that_travels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    where, values = placed({"script": folder / "pkg" / "model.py"})
    assert (where, values["script"]) == (folder, "pkg/model.py")
    monkeypatch.chdir(folder / "data")
    where, values = placed({"script": "train.py", "working_dir": ".."})
    assert (where.resolve(), values["script"]) == (folder, "train.py")
    with pytest.raises(InvalidRequest, match="is not in"):
        placed({"script": folder / "train.py"})


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({"script": "train.py"}, True),
        ({"script": "/app/train.py"}, False),
        ({"script": "none.py"}, False),
        ({"script": "model.py", "working_dir": "pkg"}, True),
        ({"script": "train.py", "working_dir": "/app"}, False),
        ({"module": "pkg.model"}, True),
        ({"module": "train"}, True),
        ({"module": "elsewhere.train"}, False),
        ({"command": ["python", "train.py", "--fast"]}, True),
        ({"command": ["nvidia-smi", "-L"]}, False),
        ({"command": ["python", "../outside.py"]}, False),
    ],
)
def test_a_program_that_is_not_in_the_folder_is_in_the_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: Mapping[str, object], here: bool
) -> None:
    (folder.parent / "outside.py").touch()
    monkeypatch.chdir(folder)
    assert shipping.is_here(given) == here


def test_a_requirements_file_is_its_lines(tmp_path: Path) -> None:
    write(tmp_path, {"r.txt": "# us\n\nnumpy==2.0 \\\n  --hash=sha256:ab  # why\n-r other.txt\n  ./local[x]\n"})
    assert requirements_of(tmp_path / "r.txt") == ["numpy==2.0    --hash=sha256:ab", "-r other.txt", "./local[x]"]
    assert requirements_of(["a", "b"]) == ["a", "b"]
    with pytest.raises(InvalidRequest, match="cannot be read"):
        requirements_of(str(tmp_path / "none.txt"))


# Secrets and replaced files ------------------------------------------------------------------------

SECRETS = [
    ".envrc",
    "prod.env",
    "deploy/Prod.ENV",
    "secrets.json",
    "secrets.yml",
    "SECRETS.yaml",
    "service_account.json",
    "my-secrets.toml",
    "kaggle.json",
    "server.PEM",
    "a/ID_RSA",
    "id_ed25519_work",
    ".vault-token",
    "terraform.tfstate",
    "terraform.tfstate.backup",
    ".netrc",
    ".pypirc",
    ".npmrc",
    ".AWS/config",
    ".ssh/config",
    ".gnupg/x.kbx",
    ".docker/config.json",
    ".kube/config",
    "credentials",
    "Credentials.csv",
    "gcp_credentials.json",
    "token",
    "hf_token.txt",
    "client_secret_1.json",
    ".git-credentials",
    "prod.tfvars",
    ".config/gcloud/x.db",
    "secrets/db.txt",
    "openai_api_key.txt",
    "x.p12",
    "x.PFX",
    "x.ppk",
    ".bash_history",
    # Copies of such files.
    ".env~",
    "prod.env.bak",
    "deep/.prod.env.swp",
    "server.key.old",
    ".server.pem.swo",
    "#secrets.json#",
    "server.pem.bak~",
    ".env_prod",
    ".env-staging",
    "gcp-key.json",
    "openai_key.txt",
    "aws_credentials",
    "shop-firebase-adminsdk-x1.json",
    ".mylogin.cnf",
    ".env.swp",
    ".netrc.swo",
    ".env1",
    "env.local",
    "netrc",
    "my-service-account.json",
    "firebase-adminsdk.json",
    "creds.json",
    "keyfile.json",
    "keys.json",
    "user.keytab",
    "secring.gpg",
    "slack_token",
    "jwt.secret",
    ".dockerconfigjson",
    ".kaggle/access.json",
    "cookies.txt",
    "wg0.conf",
    "pip.conf",
    "rootkey.csv",
    "accessKeys.csv",
    "me_accessKeys.csv",
    "gha-creds-1a2b3c.json",
    "private.asc",
    "privatekey.txt",
    "server.pem.2024",
    "key.pem.1",
    "server.key.enc",
    "my_password.txt",
    "db_password",
    "token.yaml",
    "tokens.yaml",
    "bearer.txt",
    "admin.conf",
    "kubeconfig-prod",
    "env.production",
    ".envs/prod.txt",
    ".clearml.conf",
    ".cdsapirc",
    ".oci/config",
    ".dvc/config.local",
    ".snowsql/config",
    ".wandb/settings",
]
NO_SECRETS = [
    ".env.example",
    "env.sample",
    "secrets.example.yaml",
    ".env.template",
    "credentials.py",
    "secrets/loader.py",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokens/part-0.npy",
    "keyboard.py",
    "docker/config.json",
    "environment.yml",
    "model.keys.py",
    "public.crt",
    "monkey.txt",
    "token_classification.py",
    "credentials.py~",
    "secrets/.loader.py.swp",
    ".env.example.bak",
    "keyboard.json",
    "monkey.json",
    "data.old",
    "~",
    "environment.md",
    "keypoints.json",
    "data/keys.csv",
    "key_value_cache.py",
    ".gitignore.swp",
    "token_dataset.json",
    "tokens.py",
    "password.py",
    "db_password.py",
    "keys.py",
    "private_key.py",
    "bearer.py",
    "kubeconfig_test.go",
    "env.py",
    "environment.prod.ts",
    "reset-password/page.html",
    "public.asc",
    "admin.py",
    "nginx.conf",
    "attention.key.0.npy",
    "tokenizer.yaml",
    ".dvc/config",
    "wandb/run-1/config.yaml",
    "access.csv",
]
PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_that_usually_holds_a_secret_stays(folder: Path, name: str) -> None:
    write(folder, (name,))
    parcel = collect(folder)
    assert name not in names(parcel) and [file.name for file in parcel.left_out] == [name]


def test_code_templates_and_models_travel(folder: Path) -> None:
    write(folder, tuple(NO_SECRETS))
    parcel = collect(folder)
    assert set(NO_SECRETS) <= set(names(parcel)) and parcel.left_out == ()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("myproj-1a2b3c4d5e6f.json", '{"type": "x", "private_key": "abc"}', 'contains a "private_key"'),
        ("notes.txt", f"the key:\n{PRIVATE_KEY}", "contains a private key"),
        ("deploy/prod", PRIVATE_KEY.replace("BEGIN", "BEGIN RSA"), "contains a private key"),
        ("mine", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n", "contains a private key"),
    ],
)
def test_a_small_text_with_a_private_key_stays_whatever_its_name_is(
    folder: Path, name: str, text: str, reason: str
) -> None:
    write(folder, {name: text})
    parcel = collect(folder)
    explanation = f"left out: {name} (looks like a secret: {reason}); to send it, add the line !{name} to .musterignore"
    assert name not in names(parcel) and list(parcel.explanations()) == [explanation]
    write(folder, {".musterignore": f"!{name}\n"})
    assert name in names(collect(folder))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys.py", PRIVATE_KEY),
        ("keys.md", PRIVATE_KEY),
        ("account.example.json", '{"private_key": "YOURS"}'),
        ("schema.json", '{"properties": {"private_key": {"type": "string"}}}'),
        ("empty.json", '{"private_key": ""}'),
        ("public.txt", PRIVATE_KEY.replace("PRIVATE", "PUBLIC")),
        ("large.txt", "x" * 2**16 + PRIVATE_KEY),
        ("weights.bin", f"\0{PRIVATE_KEY}"),
    ],
)
def test_sources_templates_and_data_travel_whatever_they_contain(folder: Path, name: str, text: str) -> None:
    write(folder, {name: text})
    assert name in names(collect(folder))


def test_a_dry_run_says_of_each_file_why_it_stays_and_how_it_would_travel(folder: Path) -> None:
    write(folder, {"prod.env": "x", "deep/ID_RSA": "x", ".musterignore": "data/\n"})
    os.mkfifo(folder / "pipe")
    assert list(collect(folder).explanations()) == [
        "left out: deep/ID_RSA (looks like a secret: id_rsa*); to send it, add the line !deep/ID_RSA to .musterignore",
        "left out: pipe (is neither a file nor a link)",
        "left out: prod.env (looks like a secret: *.env); to send it, add the line !prod.env to .musterignore",
        "left out: data/big.bin (named in .musterignore)",
    ]


@pytest.mark.parametrize(
    ("line", "travels"), [("!prod.env", True), ("!/prod.env", True), ("!*.env", False), ("!*", False)]
)
def test_a_secret_travels_only_if_it_is_named_wholly(folder: Path, line: str, travels: bool) -> None:
    write(folder, {"prod.env": "x", ".musterignore": f"{line}\n"})
    assert ("prod.env" in names(collect(folder))) == travels


def test_a_file_that_is_replaced_after_listing_does_not_travel(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, ("outside/secret", "outside/model.py"))

    def link_file() -> None:
        (folder / "train.py").unlink()
        (folder / "train.py").symlink_to(tmp_path / "outside" / "secret")

    def link_folder() -> None:
        (folder / "pkg").rename(tmp_path / "elsewhere")
        (folder / "pkg").symlink_to(tmp_path / "outside")

    def hard_link() -> None:
        (folder / "train.py").unlink()
        os.link(tmp_path / "outside" / "secret", folder / "train.py")

    def pipe() -> None:
        (folder / "train.py").unlink()
        os.mkfifo(folder / "train.py")

    for replace in (hard_link, pipe, link_file, link_folder):
        (folder / "train.py").unlink(missing_ok=True)
        (folder / "train.py").write_text("x")
        parcel = collect(folder)
        replace()
        with pytest.raises(InvalidRequest, match="cannot be packed"):
            pack(parcel, tmp_path / "cache")


def test_a_folder_that_becomes_a_link_while_it_is_listed_shows_nothing_outside(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ("outside/__init__.py", "outside/model.py"))
    known = [*shipping._walked(folder.resolve(), "")]
    (folder / "pkg").rename(tmp_path / "elsewhere")
    (folder / "pkg").symlink_to(tmp_path / "outside")
    monkeypatch.setattr(shipping, "_known_to_git", lambda _: known)
    assert names(collect(folder)) == ["data/big.bin", "train.py"]


@pytest.mark.parametrize("kind", ["pipe", "bytes"])
def test_a_musterignore_that_is_no_text_is_refused(folder: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(folder / ".musterignore")
    else:
        (folder / ".musterignore").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"\.musterignore cannot be read"):
        collect(folder)
