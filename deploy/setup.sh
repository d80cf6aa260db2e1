# Sourced by the scripts next to it: `slipstream_setup [core]` makes a virtual environment in .venv, once, with Slipstream
# and vLLM; `core` leaves out what only the learner and vLLM need.
# SLIPSTREAM_DEVICE (gpu, cpu or core) decides in place of nvidia-smi. SLIPSTREAM_EXTRAS adds extras;
# SLIPSTREAM_TORCH_INDEX names the index of PyTorch's CPU wheels where it is needed.

slipstream_setup() {
  local root python=${PYTHON:-python3} extras=cpu stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extras=gpu; fi
  if [ -n "${SLIPSTREAM_DEVICE:-}" ]; then extras=$SLIPSTREAM_DEVICE; fi
  if [ "${1:-}" = core ] || [ "$extras" = core ]; then extras=; fi
  extras+=${SLIPSTREAM_EXTRAS:+${extras:+,}$SLIPSTREAM_EXTRAS}

  if [ ! -x "$root/.venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "setup: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed: PYTHON=python3.11 $0" >&2
      return 2
    }
    echo "setup: making an environment in .venv" >&2
    "$python" -m venv "$root/.venv"
  fi
  export PATH="$root/.venv/bin:$PATH"

  # What was installed, from which requirements: the same again is no work.
  stamp="${extras:-core} $(cksum <"$root/pyproject.toml")"
  local done_for="$root/.venv/slipstream-setup"
  if [ -f "$done_for" ] && grep -qxF "$stamp" "$done_for"; then return 0; fi

  local what="$root${extras:+[$extras]}" log="$root/.venv/setup.log" code=0
  echo "setup: installing slipstream-rl${extras:+[$extras]} into .venv, once: by uv one to two minutes, by pip about five" >&2
  exec 9> >(slipstream_clock installing)
  slipstream_install "$what" "$extras" "$log" || code=$?
  exec 9>&-
  if [ "$code" != 0 ]; then
    tail -n 20 "$log" >&2
    echo "setup: uv and pip failed (whole output: $log). If they missed torch's CPU build, set SLIPSTREAM_TORCH_INDEX" \
      "to the index of PyTorch's CPU wheels and run this again." >&2
    return 2
  fi
  # vLLM's CPU build asks for these without saying which; builds for another torch keep vLLM from starting.
  # vLLM's models that see need what is written in Python of torchvision, which only vLLM's processes are shown
  # (weight_sync/vllm/cpu_server.py).
  if [[ $extras == cpu* ]] && ! python -c 'import torchvision' >/dev/null 2>&1; then
    local seen="$root/.venv/share/slipstream/torchvision" there
    there=$(python -c 'from importlib.metadata import version; print(version("torchvision"))' 2>/dev/null) || there=
    if [ -n "$there" ] && [ ! -d "$seen" ]; then
      python -m pip install -q --no-deps --target "$seen" "torchvision==${there%%+*}" >>"$log" 2>&1 || rm -rf "$seen"
    fi
    python -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
  fi
  # A stamp a line, so that the extras of one script do not undo another's.
  echo "$stamp" >>"$done_for"
}

# slipstream_clock WHAT: says every ten seconds since when WHAT runs, until its input ends: with the script at the latest.
slipstream_clock() {
  local began=$SECONDS last=$SECONDS
  while true; do
    # Fails at the end of the input as well as after the time.
    read -r -t 10 || true
    if ((SECONDS - last < 9)); then return; fi
    last=$SECONDS
    echo "setup: $1, $((SECONDS - began)) s" >&2
  done
}

# slipstream_install WHAT EXTRAS LOG: by uv; by pip where uv cannot be had or fails.
slipstream_install() {
  local what=$1 extras=$2 log=$3
  # Installed under its other name as well, it would register its vLLM plug-in twice.
  python -m pip uninstall -q -y slipstream >"$log" 2>&1
  if slipstream_install_with_uv "$what" "$extras" >>"$log" 2>&1; then return 0; fi
  echo "setup: uv did not do it (why: $log); pip takes longer" >&2
  local pip=(python -m pip install --disable-pip-version-check -q -e "$what")
  "${pip[@]}" >>"$log" 2>&1 && return 0
  [ -n "${SLIPSTREAM_TORCH_INDEX:-}" ] && "${pip[@]}" --extra-index-url "$SLIPSTREAM_TORCH_INDEX" >>"$log" 2>&1
}

# In a process of its own: the settings end with it.
slipstream_install_with_uv() (
  python -m pip install --disable-pip-version-check -q uv || exit 1
  settings=$(python -m pip config list | slipstream_uv_settings "$2") || exit 1
  while IFS= read -r setting; do
    if [ -n "$setting" ]; then export "${setting?}"; fi
  done <<<"$settings"
  # Compiled now, by all cores, or else by each of a run's processes at its start.
  exec python -m uv pip install --compile-bytecode --python "$(command -v python)" -e "$1"
)

# slipstream_uv_settings EXTRAS: reads `pip config list`, prints NAME=VALUE a line. uv reads no settings of pip's; where
# there are several indices it takes, like pip, the best version of all. A variable of uv's own that is set stays.
slipstream_uv_settings() {
  SLIPSTREAM_ON_CPU=$([[ $1 == cpu* ]] && echo 1) python -c '
import ast, os, sys

lines = [line.partition("=") for line in sys.stdin.read().splitlines()]
pip = {}
for section in ("global.", "install.", ":env:."):  # the later one counts
    for name, _, value in lines:
        if name.startswith(section):
            pip[name.removeprefix(section)] = str(ast.literal_eval(value)).split()
more = pip.get("extra-index-url", [])
if os.environ["SLIPSTREAM_ON_CPU"] and (torch := os.environ.get("SLIPSTREAM_TORCH_INDEX")):
    more.append(torch)
settings = {
    "UV_DEFAULT_INDEX": " ".join(pip.get("index-url", [])),
    "UV_INDEX": " ".join(more),
    "UV_INDEX_STRATEGY": "unsafe-best-match" if more else "",
    "UV_FIND_LINKS": ",".join(pip.get("find-links", [])),
    "UV_NO_INDEX": " ".join(pip.get("no-index", [])),
    "UV_CONSTRAINT": " ".join(pip.get("constraint", [])),
    "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", [])),
    "SSL_CERT_FILE": " ".join(pip.get("cert", [])),
}
print("\n".join(f"{name}={value}" for name, value in settings.items() if value and name not in os.environ))'
}
