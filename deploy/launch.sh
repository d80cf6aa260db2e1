#!/usr/bin/env bash
# One run on this machine: vLLM, queue, workers and learner.
#
#   deploy/launch.sh run.toml [--resume] [--section.key value ...]
#
# Every process logs to <run directory>/logs; the learner's steps go to the terminal. The run ends when the learner has
# made its last step. A vLLM server, a worker or the queue that dies is started again, up to deploy.restart times in a
# row; if it dies once more, or the learner dies, the run ends with a code that is not 0. Ctrl-C stops everything
# once the learner has written a checkpoint; a second one ends it at once.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; }

if [ $# -eq 0 ]; then
  usage
  exit 2
fi
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit 0 ;;
  esac
done

# From a checkout whose environment is not activated.
command -v slipstream >/dev/null || PATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH
if ! command -v slipstream >/dev/null; then
  echo "launch: there is no slipstream command: activate its environment, or make one with deploy/quickstart.sh" >&2
  exit 2
fi
exec slipstream up "$@"
