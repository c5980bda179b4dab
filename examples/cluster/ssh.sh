#!/bin/bash
# agentrl on machines that ssh reaches: starts a Ray node on each, trains from this one, and stops them all at the end.
#
#     RUN=/shared/runs/mine HOSTS="10.0.0.2 10.0.0.3" ./ssh.sh my.toml [a.b=c ...]
#
# This machine is the head and takes part. RUN is on a disk that all mount at the same path; if it is there already, the run goes
# on from its newest checkpoint. VENV (default: the active environment) is at the same path on all machines.
set -euo pipefail
: "${RUN:?set RUN to the folder of the run, on a disk that all machines mount}"
: "${HOSTS:?set HOSTS to the other machines}"
config=${1:?usage: RUN=FOLDER HOSTS="a b" ./ssh.sh CONFIG [a.b=c ...]}
shift
venv=${VENV:-${VIRTUAL_ENV:?activate an environment, or set VENV}}
export PATH=$venv/bin:$PATH
ip=${HEAD_IP:-$(python -c 'from agentrl.cluster.machine import own_address; print(own_address())')}
address=$ip:${PORT:-6379}

# The token goes through ssh's input: on a command line every user of the other machine could read it.
ray get-auth-token --generate > /dev/null
export RAY_AUTH_MODE=token
token() { ray get-auth-token 2> /dev/null; }
join='umask 077; mkdir -p ~/.ray; cat > ~/.ray/auth_token; export RAY_AUTH_MODE=token PATH='"$(printf %q "$venv")"'/bin:$PATH;'

stop() {
  for host in $HOSTS; do
    ssh -o ConnectTimeout=10 "$host" "$(printf %q "$venv")/bin/ray stop --force" > /dev/null 2>&1 || true
  done
  ray stop --force > /dev/null 2>&1 || true
}
trap stop EXIT
ray start --head --node-ip-address="$ip" --port="${address##*:}"
for host in $HOSTS; do
  token | ssh -o ConnectTimeout=10 "$host" "$join ray start --address=$address"
done

# Ctrl-C reaches the driver itself: it finishes its step, writes a checkpoint and exits with 130; only then does `stop` run.
trap ':' INT
if [ -f "$RUN/config.toml" ]; then
  agentrl train --resume "$RUN" "cluster.address=$address" "$@"
else
  agentrl train "$config" "out=$(dirname "$RUN")" "name=$(basename "$RUN")" "cluster.address=$address" "$@"
fi
