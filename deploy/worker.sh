#!/usr/bin/env bash
# A rollout worker for a run whose queue is elsewhere; as many as you like, on any machine. It needs no torch.
#
#   SLIPSTREAM_TOKEN=slw-... deploy/worker.sh http://queue-host:8200 run.toml [--section.key value ...]
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
queue=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
slipstream_setup core
exec slipstream worker "$@" --queue "$queue"
