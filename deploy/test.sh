#!/usr/bin/env bash
# Set-up, style, types and all tests, one real vLLM among them: `deploy/test.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SLIPSTREAM_EXTRAS=test
source deploy/setup.sh
slipstream_setup

ruff format --check .
ruff check .
mypy
python examples/multiply/build_model.py --out examples/multiply/models/seed-0
if [[ $# -gt 0 ]]; then
    exec pytest "$@"
fi
# Most of the first ones wait for processes that they start; the others share one vLLM server.
# One thread each, or they would wait for one another.
OMP_NUM_THREADS=1 pytest -n "$(nproc)" --dist loadfile -m "not e2e"
exec pytest -m e2e --durations=5
