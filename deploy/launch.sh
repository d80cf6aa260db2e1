#!/usr/bin/env bash
# One run on this machine: vLLM, queue, workers and learner.
#
#   deploy/launch.sh run.toml [--resume] [--section.key value ...]
#
# Every process logs to <run directory>/logs. The run ends when the learner has made its last step; a process that
# dies before that ends the run with its last log lines and a code that is not 0. Ctrl-C stops everything.
set -euo pipefail

if [ $# -eq 0 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

# Checks everything that can be checked before a process starts, and prints RUN_DIR, RUN_FILE, PIN_SERVER and so on.
settings=$(slipstream preflight "$@") || exit $?
eval "$settings"
export SLIPSTREAM_TOKEN=${SLIPSTREAM_TOKEN:-$TOKEN}
resume=
for argument in "$@"; do [ "$argument" != --resume ] || resume=--resume; done

logs=$RUN_DIR/logs
mkdir -p "$logs"
declare -A name_of=()

# start NAME COMMAND...: in the background, in a process group of its own, with its output in NAME.log.
start() {
  local name=$1
  shift
  setsid "$@" >>"$logs/$name.log" 2>&1 </dev/null &
  name_of[$!]=$name
}

stop_all() {
  trap '' INT TERM
  local pid deadline=$((SECONDS + 20))
  for pid in "${!name_of[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  while ((SECONDS < deadline)) && any_left; do sleep 0.1; done
  for pid in "${!name_of[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}

any_left() {
  local pid
  for pid in "${!name_of[@]}"; do
    if kill -0 -- "-$pid" 2>/dev/null; then return 0; fi
  done
  return 1
}

trap stop_all EXIT
trap 'echo "launch: stopped" >&2; exit 130' INT
trap 'exit 143' TERM

echo "launch: run directory $RUN_DIR, status at $QUEUE_URL/v1/status"

start queue env ${OTHER_THREADS:+OMP_NUM_THREADS=$OTHER_THREADS} $PIN_OTHERS slipstream queue "$RUN_FILE"
for ((i = 0; i < SERVERS; i++)); do
  start "vllm-$i" env ${SERVER_THREADS:+OMP_NUM_THREADS=$SERVER_THREADS} $PIN_SERVER \
    slipstream vllm "$RUN_FILE" --index "$i"
done
for ((i = 0; i < WORKERS; i++)); do
  start "worker-$i" env ${OTHER_THREADS:+OMP_NUM_THREADS=$OTHER_THREADS} $PIN_OTHERS \
    slipstream worker "$RUN_FILE" --name "worker-$i"
done

# The learner speaks to the terminal; what it logs goes to its file.
setsid env ${OTHER_THREADS:+OMP_NUM_THREADS=$OTHER_THREADS} $PIN_OTHERS \
  slipstream learner "$RUN_FILE" $resume 2>>"$logs/learner.log" </dev/null &
name_of[$!]=learner

while true; do
  code=0
  wait -n -p pid "${!name_of[@]}" || code=$?
  name=${name_of[$pid]}
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
