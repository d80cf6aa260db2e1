#!/usr/bin/env bash
# One of the examples on this machine: set-up, its model, and RL on a real vLLM.
#
#   deploy/example.sh NAME [--seed N] [--resume] [--section.key value ...]
#
# NAME is a folder of examples/. Its packages are the extra of that name, if pyproject.toml has one. Its model is made
# once: a tiny policy for each seed, a pretrained model for all of them. The run directory of an earlier run is moved
# aside, unless --resume continues it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-}
example=examples/$name
if [ -z "$name" ] || [ ! -f "$example/build_model.py" ]; then
  # Folders without a builder, such as that of the builder itself, are no examples.
  known=$(for each in examples/*/build_model.py; do basename "$(dirname "$each")"; done | paste -sd ' ')
  echo "example: '$name': give one of: $known" >&2
  exit 2
fi
shift
seed=0
if [ "${1:-}" = --seed ]; then
  seed=${2:-}
  if ! [[ $seed =~ ^[0-9]+$ ]]; then
    echo "example: --seed '$seed': give a whole number, such as --seed 1" >&2
    exit 2
  fi
  shift 2
fi
resume=()
settings=()
for argument in "$@"; do
  if [ "$argument" = --resume ]; then resume=(--resume); else settings+=("$argument"); fi
done

if grep -q "^$name = \[" pyproject.toml; then
  export SLIPSTREAM_EXTRAS=${SLIPSTREAM_EXTRAS:+$SLIPSTREAM_EXTRAS,}$name
fi
source deploy/setup.sh
slipstream_setup

model=$(sed -n '/^\[model\]/,/^\[/s/^path = "\.\/\([^"]*\)".*/\1/p' "$example/run.toml")
model=$example/${model/%seed-0/seed-$seed}
# Asked here as well: the builder imports torch before it can look.
if [ ! -e "$model/config.json" ]; then
  echo "example: making the model in $model, once, in about a minute: a tiny policy is trained, a pretrained model" \
    "downloaded and converted; more where the machine is busy" >&2
  TQDM_DISABLE=1 python "$example/build_model.py" --out "$model" --seed "$seed"
fi
run=runs/$(sed -n '/^\[run\]/,/^\[/s/^name = "\(.*\)"/\1/p' "$example/run.toml")
if [ ${#resume[@]} -eq 0 ] && [ -e "$run" ]; then
  echo "example: looking whether the earlier run in $run has ended" >&2
  # Of a run that is over, status says so too, and begins with its end.
  if seen=$(slipstream status "$example/run.toml" --json --model.path "$model" ${settings[@]+"${settings[@]}"} 2>/dev/null) &&
    [[ ! $seen =~ ^\{\"run\":\"[^\"]*\",\"end\": ]]; then
    echo "example: a run is running already; stop it first, or wait for its end" >&2
    exit 2
  fi
  mv "$run" "$run-$(date +%Y%m%d-%H%M%S)"
fi
echo "example: checking run file, task and model, then starting vLLM, queue, worker and learner" >&2
exec deploy/launch.sh "$example/run.toml" ${resume[@]+"${resume[@]}"} --model.path "$model" --run.seed "$seed" ${settings[@]+"${settings[@]}"}
