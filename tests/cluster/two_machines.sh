#!/bin/bash
# Two machines on this one, each with its own network address, host name, processes, /tmp and /dev/shm, joined by one cable;
# then a Ray cluster over both, behind a token; then the command. Run it as
#   unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash two_machines.sh FOLDER COMMAND...
# FOLDER is /mnt on both machines. While there is a file /mnt/late, machine b has not joined; with /mnt/lost it is gone.
# The command runs in /mnt/a of machine a, with RAY_ADDRESS set. All processes are in one
# process namespace, so nothing outlives the command.
set -e
mount --make-rprivate /
mount --bind "$1" /mnt
shift
export IP_A=10.77.0.1 IP_B=10.77.0.2 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=a-token-of-this-cluster
machine() {  # NAME: what a machine of its own has
  mount -t tmpfs none /tmp
  mount -t tmpfs none /dev/shm
  hostname "$1"
  ip link set lo up
  # As on Debian: the host's own name is loopback. No name server answers.
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$1" > /tmp/hosts
  printf 'nameserver 10.77.0.9\noptions timeout:1 attempts:1\n' > /tmp/resolv.conf
  mount --bind /tmp/hosts /etc/hosts
  mount --bind /tmp/resolv.conf "$(readlink -f /etc/resolv.conf)"
}
node_b() {
  machine machine-b
  until ip link show eth-b > /dev/null 2>&1; do sleep 0.05; done
  ip addr add $IP_B/24 dev eth-b
  ip link set eth-b up
  ip route add default via $IP_A
  cd /mnt/b
  until [ ! -e /mnt/late ] && (exec 3<> /dev/tcp/$IP_A/6379) 2> /dev/null; do sleep 0.2; done
  "$PYTHON" -m ray.scripts.scripts start --address=$IP_A:6379 --node-ip-address=$IP_B --block --num-cpus="$CPUS_B" \
    --object-store-memory=134217728 > /mnt/b/ray.log 2>&1 &
  until [ -e /mnt/lost ]; do sleep 0.2; done
  ip link set eth-b down  # gone without a word, and then all of machine b with this shell
}
export -f machine node_b
mkdir -p /mnt/a /mnt/b
unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash -ec node_b &
B=$!
machine machine-a
ip link add eth-a type veth peer name eth-b
until [ "$(readlink /proc/$B/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
nsenter --net=/proc/$B/ns/net sleep infinity &  # without its other end, the cable of machine a would be gone too
ip link set eth-b netns $B
ip addr add $IP_A/24 dev eth-a
ip link set eth-a up
ip route add default via $IP_B
cd /mnt/a
"$PYTHON" -m ray.scripts.scripts start --head --port=6379 --node-ip-address=$IP_A --include-dashboard=false --block \
  --num-cpus="$CPUS_A" --object-store-memory=134217728 > /mnt/a/ray.log 2>&1 &
export RAY_ADDRESS=$IP_A:6379
"$@"
