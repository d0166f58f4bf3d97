#!/usr/bin/env bash
# Check everything: ./check.sh [options of pytest]; with options, as ./check.sh -k config, pytest runs what they choose.
# All steps run, whatever fails; the last line says which failed, and the exit status is that of the whole.
set -uo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup-env.sh"
prepare_environment dev
cd -- "$ROOT" || exit 1
export PATH="$VENV/bin:$PATH"
failed=()

step() {
    say "== $1"
    shift
    "$@" || failed+=("$*")
}

tests() { # those of the cores and the simulator, which need one core and no clock, beside all others
    if (($#)); then
        python -m pytest -m "not slow" "$@"
        return
    fi
    local status=0
    log=$(mktemp)
    python -m pytest -m "not slow" tests/core tests/sim >"$log" 2>&1 &
    beside=$!
    trap 'kill "$beside"; rm "$log"' EXIT
    python -m pytest -m "not slow" --ignore=tests/core --ignore=tests/sim || status=$?
    wait "$beside" || status=$?
    cat "$log"
    rm "$log"
    trap - EXIT
    return "$status"
}

SECONDS=0
step "format" ruff format --check .
step "lint" ruff check .
step "types" mypy
step "tests" tests "$@"

if ((${#failed[@]})); then
    printf -v list '; %s' "${failed[@]}"
    say "== check.sh FAILED after $SECONDS s: ${list:2}"
    exit 1
fi
say "== check.sh: everything passed in $SECONDS s"
