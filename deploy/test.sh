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
# Programs that some tests need besides Python's packages. What is missing is installed where it may be.
debian() {
    local as_root=()
    if [[ $EUID -ne 0 ]]; then as_root=(sudo -n); fi
    command -v apt-get >/dev/null && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q "$@" >/dev/null 2>&1
}
has_postgres() { command -v postgres >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null; }
has_browser() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }
has_slurm() { command -v sbatch >/dev/null && command -v munged >/dev/null; }
has_ray() { python -c 'import ray' >/dev/null 2>&1; }
has_postgres || debian postgresql || echo "test: no PostgreSQL here: the tests of that store are skipped" >&2
has_browser || debian chromium chromium-driver || echo "test: no Chromium here: the page is not tried in a browser" >&2
# Some machines switch this off for all programs; the tests start several hundred Pythons, which would compile again.
unset PYTHONDONTWRITEBYTECODE
ruff format --check .
ruff check .
mypy
python examples/multiply/build_model.py --out examples/multiply/models/seed-0
if [[ $# -gt 0 ]]; then
    exec pytest "${all[@]}" "$@"
fi
# One thread each, or they would wait for one another; more processes than cores, as half of a test's time is waiting.
# They are copies of one that has collected: tests/kit/parallel.py. Real servers and long files begin first, two of the
# servers' at a time: tests/conftest.py.
copies=$((2 * $(nproc) + 1))  # nproc heeds the next line
export OMP_NUM_THREADS=1
pytest "${all[@]}" --copies "$copies" -m "not slurm and not ray and not frameworks" --durations=15
# Minutes of jobs that begin and end; without --all they are asked for by name: deploy/test.sh -m "slurm or ray"
if [[ ${#all[@]} -gt 0 ]]; then
    has_slurm || debian slurm-wlm munge || echo "test: no SLURM here: runs under it are not tried" >&2
    has_ray || python -m pip install -q "$PWD[ray]" >/dev/null 2>&1 || echo "test: no Ray here: runs on it are not tried" >&2
    pytest "${all[@]}" -m "slurm or ray" --durations=5 tests/deploy/clusters
    # Downloads an environment for each framework and library of environments: deploy/test.sh -m frameworks
    pytest "${all[@]}" -m frameworks --durations=5 tests/frameworks tests/environments
fi
