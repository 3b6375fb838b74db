#!/usr/bin/env bash
# Builds programs of Kubernetes from Debian's source package: build.sh FOLDER NAME…
# Two take about ten minutes on two cores, five about 20, and 2.5 GB of disk meanwhile; about 100 MB each stay. Needs root
# for apt-get.
set -eu

out=$1
shift
[ $# -gt 0 ] || { echo "usage: build.sh FOLDER NAME…" >&2; exit 2; }
version=1.20.2
[ "$(id -u)" = 0 ] || { echo "building needs root for apt-get; set MUSTER_KUBE_BIN to a folder with the binaries" >&2; exit 1; }
mkdir -p "$out"
work=$(mktemp -d "$out/build.XXXXXX")
trap 'rm -rf "$work"' EXIT

echo "building $* $version once into $out (ten minutes and more)" >&2
export DEBIAN_FRONTEND=noninteractive

# The machine's own package sources, read as sources of source packages; the machine's lists stay as they are.
lists=$work/lists sources=$work/sources
mkdir -p "$lists/partial" "$sources/parts"
eval "$(apt-config shell configured Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
as_source='s/^([[:space:]]*)deb([[:space:]])/\1deb-src\2/; s/^([Tt]ypes:).*/\1 deb-src/'
: >"$sources/list"
if [ -f "$configured" ]; then sed -E "$as_source" "$configured" >"$sources/list"; fi
for file in "$parts"/*.list "$parts"/*.sources; do
  if [ -f "$file" ]; then sed -E "$as_source" "$file" >"$sources/parts/$(basename "$file")"; fi
done
apt_source=(-o APT::Sandbox::User=root -o Dir::Etc::SourceList="$sources/list" -o Dir::Etc::SourceParts="$sources/parts" -o Dir::State::Lists="$lists")

apt-get update -qq
apt-get install -y -qq --no-install-recommends golang-go jq rsync make dpkg-dev golang-github-modern-go-reflect2-dev >"$work/apt.log" 2>&1 ||
  { cat "$work/apt.log" >&2; exit 1; }
(
  cd "$work"
  apt-get "${apt_source[@]}" update -qq
  apt-get "${apt_source[@]}" source --download-only -qq kubernetes >/dev/null
  dpkg-source --no-check -x kubernetes_*.dsc tree >/dev/null
)

cd "$work/tree"
# The vendored reflect2 crashes under newer Go releases at the first custom resource.
rm -rf vendor/github.com/modern-go/reflect2
cp -rL /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2
rm -f vendor/github.com/modern-go/reflect2/go.mod

mkdir -p .go/src/k8s.io
ln -s "$PWD" .go/src/k8s.io/kubernetes
export GOPATH=$PWD/.go GOCACHE=$work/cache GOFLAGS=-p=2 CGO_ENABLED=0
export KUBE_GIT_VERSION=v$version KUBE_GIT_COMMIT=unknown KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 KUBE_GIT_TREE_STATE=archive
make WHAT="${*/#/cmd/}" >"$work/make.log" 2>&1 || { tail -40 "$work/make.log" >&2; exit 1; }

built=$(dirname "$(find "$PWD/_output" -type f -name "$1" | head -1)")
for name in "$@"; do
  cp "$built/$name" "$out/$name.new"
  mv "$out/$name.new" "$out/$name"
done
