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
# Those that share one vLLM server run one after another, those with a server of their own beside them.
exec pytest -n 2 --dist loadgroup -m e2e --durations=5
