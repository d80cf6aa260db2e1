#!/usr/bin/env bash
# The whole loop on this machine: set-up, a tiny policy, and 60 steps of RL on a real vLLM.
#
#   deploy/quickstart.sh [--seed N] [--section.key value ...]
#
# An earlier quickstart's run directory is moved aside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0
if [ "${1:-}" = --seed ]; then
  seed=${2:-}
  if ! [[ $seed =~ ^[0-9]+$ ]]; then
    echo "quickstart: --seed '$seed': give a whole number, such as --seed 1" >&2
    exit 2
  fi
  shift 2
fi

source deploy/setup.sh
slipstream_setup

model=examples/multiply/models/seed-$seed
python examples/multiply/build_model.py --out "$model" --seed "$seed"
if slipstream status examples/multiply/run.toml --model.path "$model" "$@" >/dev/null 2>&1; then
  echo "quickstart: a run is going on already; stop it first, or wait for its end" >&2
  exit 2
fi
if [ -e runs/quickstart ]; then
  mv runs/quickstart "runs/quickstart-$(date +%Y%m%d-%H%M%S)"
fi
exec deploy/launch.sh examples/multiply/run.toml --model.path "$model" --run.seed "$seed" "$@"
