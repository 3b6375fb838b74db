#!/usr/bin/env bash
# Fetches the programs of a Kubernetes release into a folder for MUSTER_KUBE_BIN: .github/kube-binaries.sh 1.36 FOLDER
# kube-apiserver, etcd and kubectl are those of envtest; kube-controller-manager is of the same release. Needs Go and curl.
set -euo pipefail
minor=$1 folder=$2

found=$(go run sigs.k8s.io/controller-runtime/tools/setup-envtest@latest use -p path "$minor.x!")
version=$(basename "$found" | cut -d- -f1)
platform=$(go env GOOS)/$(go env GOARCH)
mkdir -p "$folder"
cp "$found"/{kube-apiserver,etcd,kubectl} "$folder"

url=https://dl.k8s.io/release/v$version/bin/$platform/kube-controller-manager
curl -fsSL -o "$folder/kube-controller-manager" "$url"
echo "$(curl -fsSL "$url.sha256")  $folder/kube-controller-manager" | sha256sum --check --quiet
chmod 755 "$folder"/*
echo "Kubernetes $version is in $folder"
