#!/usr/bin/env bash
# One run on this machine: vLLM, queue, workers and learner.
#
#   deploy/launch.sh run.toml [--resume] [--section.key value ...]
#
# Every process logs to <run directory>/logs. The run ends when the learner has made its last step; a process that
# dies before that ends the run with its last log lines and a code that is not 0. Ctrl-C stops everything: what does
# not end within SLIPSTREAM_GRACE_S seconds (20) is killed.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; }

if [ $# -eq 0 ]; then
  usage
  exit 2
fi
resume=()
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit 0 ;;
    --resume) resume=(--resume) ;;
  esac
done

# From a checkout whose environment is not activated.
command -v slipstream >/dev/null || PATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH

# Checks everything that can be checked before a process starts, and prints RUN_DIR, RUN_FILE, PIN_SERVER and so on.
settings=$(slipstream preflight "$@") || exit $?
eval "$settings"
export SLIPSTREAM_TOKEN=${SLIPSTREAM_TOKEN:-$TOKEN}

logs=$RUN_DIR/logs
mkdir -p "$logs"
declare -A name_of=() # by process id, which is also the id of the process's group

# start NAME COMMAND...: in the background, in a session of its own, with its output in NAME.log.
start() {
  local name=$1
  shift
  setsid "$@" >>"$logs/$name.log" 2>&1 </dev/null &
  name_of[$!]=$name
}

# Those that have ended may have left children; one that a signal came right after is known to the shell alone.
all_started() { echo "${!name_of[@]}" $(jobs -p); }

# signal_all SIGNAL: to every group; to the process alone where setsid has not made its group yet.
signal_all() {
  local pid
  for pid in $(all_started); do
    kill -s "$1" -- "-$pid" 2>/dev/null || kill -s "$1" "$pid" 2>/dev/null || true
  done
}

any_left() {
  local pid
  for pid in $(all_started); do
    if kill -0 -- "-$pid" 2>/dev/null || kill -0 "$pid" 2>/dev/null; then return 0; fi
  done
  return 1
}

stop_all() {
  trap '' HUP INT TERM
  local deadline=$((SECONDS + ${SLIPSTREAM_GRACE_S:-20}))
  signal_all TERM
  while any_left && ((SECONDS < deadline)); do sleep 0.1; done
  signal_all KILL
  wait
}

# Sets `pid` to a process that has ended. (`wait -n` would miss one that ends before it is called.)
wait_for_any() {
  while true; do
    for pid in "${!name_of[@]}"; do
      if ! kill -0 "$pid" 2>/dev/null; then return; fi
    done
    sleep 0.2
  done
}

trap stop_all EXIT
trap 'echo "launch: interrupted, stopping" >&2; exit 130' INT
trap 'echo "launch: terminated, stopping" >&2; exit 143' TERM
trap 'exit 129' HUP

echo "launch: run directory $RUN_DIR, status at $QUEUE_URL/v1/status"

# The pins are several words or none.
# shellcheck disable=SC2206
server=(env ${SERVER_THREADS:+OMP_NUM_THREADS=$SERVER_THREADS} $PIN_SERVER slipstream)
# shellcheck disable=SC2206
other=(env ${OTHER_THREADS:+OMP_NUM_THREADS=$OTHER_THREADS} $PIN_OTHERS slipstream)

start queue "${other[@]}" queue "$RUN_FILE"
for ((i = 0; i < SERVERS; i++)); do
  start "vllm-$i" "${server[@]}" vllm "$RUN_FILE" --index "$i"
done
for ((i = 0; i < WORKERS; i++)); do
  start "worker-$i" "${other[@]}" worker "$RUN_FILE" --name "worker-$i"
done

# The learner speaks to the terminal; what it logs goes to its file.
setsid "${other[@]}" learner "$RUN_FILE" "${resume[@]}" 2>>"$logs/learner.log" </dev/null &
name_of[$!]=learner

while true; do
  wait_for_any
  name=${name_of[$pid]}
  code=0
  wait "$pid" || code=$?
  if [ "$name" = learner ] && [ $code -eq 0 ]; then
    break
  elif [[ $name == worker-* ]] && [ $code -eq 0 ]; then
    # A worker ends by itself once the run is finished, which may be a moment before the learner.
    unset "name_of[$pid]"
  else
    echo "launch: $name ended with code $code; the last lines of $logs/$name.log:" >&2
    tail -n 20 "$logs/$name.log" >&2
    exit $((code == 0 ? 1 : code))
  fi
done
