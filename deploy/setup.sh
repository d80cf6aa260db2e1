# Sourced by the scripts beside it: `slipstream_setup [core]` makes a virtual environment in .venv, once, with Slipstream
# and vLLM; `core` leaves out what only the learner and vLLM need.
# SLIPSTREAM_EXTRAS adds extras; SLIPSTREAM_TORCH_INDEX names the index of PyTorch's CPU wheels where pip needs it.

slipstream_setup() {
  local root python=${PYTHON:-python3} extras=cpu stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extras=gpu; fi
  if [ "${1:-}" = core ]; then extras=; fi
  extras+=${SLIPSTREAM_EXTRAS:+${extras:+,}$SLIPSTREAM_EXTRAS}

  if [ ! -x "$root/.venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "setup: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed: PYTHON=python3.11 $0" >&2
      return 2
    }
    "$python" -m venv "$root/.venv"
  fi
  export PATH="$root/.venv/bin:$PATH"

  # What was installed, from which requirements: the same again is no work.
  stamp="${extras:-core} $(cksum <"$root/pyproject.toml")"
  local done_for="$root/.venv/slipstream-setup"
  if [ -f "$done_for" ] && grep -qxF "$stamp" "$done_for"; then return 0; fi

  local what="$root${extras:+[$extras]}"
  echo "setup: installing slipstream-rl${extras:+[$extras]} into .venv (about two minutes, once)"
  local log="$root/.venv/setup.log"
  # Installed under its other name as well, it would register its vLLM plug-in twice.
  pip uninstall -q -y slipstream >"$log" 2>&1
  if ! pip install --disable-pip-version-check -q -e "$what" >"$log" 2>&1; then
    if [ -z "${SLIPSTREAM_TORCH_INDEX:-}" ] ||
      ! pip install --disable-pip-version-check -q -e "$what" \
        --extra-index-url "$SLIPSTREAM_TORCH_INDEX" >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      echo "setup: pip failed (whole output: $log). If it missed torch's CPU build, set SLIPSTREAM_TORCH_INDEX to" \
        "the index of PyTorch's CPU wheels and run this again." >&2
      return 2
    fi
  fi
  # vLLM's CPU build asks for these without saying which; builds for another torch keep vLLM from starting.
  if [[ $extras == cpu* ]] && ! python -c 'import torchvision' >/dev/null 2>&1; then
    pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
  fi
  # A stamp a line, so that the extras of one script do not undo another's.
  echo "$stamp" >>"$done_for"
}
