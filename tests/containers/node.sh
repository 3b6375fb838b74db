#!/usr/bin/env bash
# One machine of the lab: started as the first process of new PID, mount and UTS namespaces, so that its end is the end of
# everything on it. node.sh FOLDER NAME KUBELET; FOLDER becomes its /var/lib, /var/log and /run.
set -eu
folder=$1 name=$2 kubelet=$3

mount --make-rshared /
mount -t proc proc /proc
hostname "$name"
# The kubelet would set these for the whole machine. It is shown that they are as it wants them.
for file in "$folder"/sysctl/*; do
  target=/proc/sys/$(basename "$file" | tr . /)
  if [ -e "$target" ]; then mount --bind "$file" "$target"; fi
done
mount --bind "$folder/log" /var/log
mount --bind "$folder/lib" /var/lib
mount -t tmpfs -o mode=755 tmpfs /run

containerd --config "$folder/containerd.toml" >"$folder/containerd.log" 2>&1 &
until [ -S /run/containerd/containerd.sock ] && ctr version >/dev/null 2>&1; do
  kill -0 $! || exit 1
  sleep 0.05
done
"$kubelet" --config "$folder/kubelet.json" --kubeconfig "$folder/kubeconfig.json" --container-runtime=remote \
  --container-runtime-endpoint=unix:///run/containerd/containerd.sock --cert-dir /var/lib/kubelet/pki \
  --hostname-override "$name" --node-ip "$(cat "$folder/address")" --v=2 >"$folder/kubelet.log" 2>&1 &
# Orphans of containers are this one's to collect.
while :; do wait -n || sleep 0.2; done
