#!/usr/bin/env bash
# Builds muster's image, and asks no registry for anything: deploy/image.sh [NAME:TAG]
# A Debian base with Python is made once from the machine's own package sources and cached, wheels are fetched by the hashes
# of requirements/image.lock, and buildah puts the Containerfile on top. Needs root, mmdebstrap and buildah. Prints the
# names of what it made; `buildah push NAME docker-archive:FILE:NAME` takes one out.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/muster/containers
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
name=${1:-localhost/muster:$version}
packages=python3,python3-venv,ca-certificates,libstdc++6
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
key=$(echo "$suite $packages" | sha256sum | cut -c1-12)
base=localhost/muster-base:$key

for tool in mmdebstrap buildah; do
  command -v $tool >/dev/null || { echo "$tool is not installed (Debian: $tool)" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "building the base needs root" >&2; exit 1; }
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9

store=(--root "$cache/storage" --runroot "$cache/storage-run" --storage-driver overlay)
buildah() { command buildah "${store[@]}" "$@"; }

make_base() {
  # Debian's own among the machine's package sources, whatever else it has.
  sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' | sort -u)
  echo "making a base of Debian $suite once (about a minute)" >&2
  mmdebstrap --quiet --format=tar --keyring=/usr/share/keyrings --variant=essential --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    "$suite" "$cache/base.tar.new" - <<<"$sources"
  mv "$cache/base.tar.new" "$cache/base-$key.tar"
}

[ -f "$cache/base-$key.tar" ] || make_base
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$cache/base-$key.tar" / >/dev/null
  buildah config --env PATH=/usr/local/bin:/usr/bin:/bin "$container"
  buildah commit --quiet --rm "$container" "$base" >/dev/null
  buildah tag "$base" localhost/muster-base:latest
fi

# The index is asked here, with this machine's settings; the build itself has no need of a network.
target=$(tar -xOf "$cache/base-$key.tar" ./usr/share/python3/debian_defaults | sed -n 's/^default-version = python//p')
"$python" -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
  --python-version "$target" -r requirements/image.lock -d "$cache/wheels" 2> >(grep -v '^WARNING: Location' >&2)
buildah build --quiet --layers --isolation chroot --network host --build-arg BASE="$base" \
  --build-arg PIP_ARGS="--no-index --find-links /wheels" --volume "$cache/wheels:/wheels:ro" \
  --tag "$name" --file Containerfile . >/dev/null
echo "$name"
