#!/usr/bin/env bash
# The whole loop on this machine: set-up, a tiny policy, and 40 steps of RL on a real vLLM.
#
#   deploy/quickstart.sh [--seed N] [--resume] [--section.key value ...]
#
# It is the example `multiply`; an earlier quickstart's run directory is moved aside. Others: deploy/example.sh NAME.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/example.sh" multiply "$@"
