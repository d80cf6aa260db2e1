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
# One thread each, or they would wait for one another. Long files begin first: tests/conftest.py.
export OMP_NUM_THREADS=1
pytest -n "$(nproc)" --dist loadfile --no-loadscope-reorder -m "not e2e"
# Mostly waits for servers that start: two at a time. Each of the two has its own shared server.
exec pytest -n 2 --dist loadfile --no-loadscope-reorder -m e2e --durations=5
