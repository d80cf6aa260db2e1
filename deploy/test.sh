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
exec pytest "$@"
