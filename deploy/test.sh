#!/usr/bin/env bash
# Set-up, style, types and tests, one real vLLM among them: `deploy/test.sh [--all] [pytest arguments]`.
# Without --all the tests take about ten minutes and say what they left out: see tests/conftest.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SLIPSTREAM_EXTRAS=test
source deploy/setup.sh
slipstream_setup

all=()
if [[ ${1:-} == --all ]]; then
    all=(--all)
    shift
fi
# The tests of the store in PostgreSQL start clusters of their own: tests/kit/postgres.py.
has_postgres() { command -v postgres >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null; }
if ! has_postgres && command -v apt-get >/dev/null; then
    as_root=()
    if [[ $EUID -ne 0 ]]; then as_root=(sudo -n); fi
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q postgresql >/dev/null 2>&1 || true
fi
has_postgres || echo "test: no PostgreSQL here, and none could be installed: the tests of that store are skipped" >&2
# Some machines switch this off for all programs; the tests start several hundred Pythons, which would compile anew.
unset PYTHONDONTWRITEBYTECODE
ruff format --check .
ruff check .
mypy
python examples/multiply/build_model.py --out examples/multiply/models/seed-0
if [[ $# -gt 0 ]]; then
    exec pytest "${all[@]}" "$@"
fi
# One thread each, or they would wait for one another; more processes than cores, as half of a test's time is waiting.
# They are copies of one that has collected: tests/kit/parallel.py. Long files begin first: tests/conftest.py.
export OMP_NUM_THREADS=1
pytest "${all[@]}" --copies "$((2 * $(nproc) + 1))" -m "not e2e"
# Runs and servers, of which each is several processes: two at a time. What shares a server shares a process.
exec pytest "${all[@]}" --copies 2 -m e2e --durations=5 tests/e2e
