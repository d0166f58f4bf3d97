# The virtual environment of launch.sh and check.sh, which source this file. Needs Python 3.11 to 3.13 and pip's index.
#
#   prepare_environment EXTRA    makes $ROOT/.venv with cbdisagg[EXTRA] in it ("" for no extra), or returns at once if
#                                that has been done for this pyproject.toml; its interpreter is $PYTHON

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
TORCH="torch==2.13.0"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

prepare_environment() {
    local stamp="$VENV/.ready-${1:-serve}" key
    key="$(cat -- "$ROOT/pyproject.toml" "$ROOT/setup-env.sh" | cksum) $ROOT"
    if [[ -r "$stamp" && "$(< "$stamp")" == "$key" && -x "$PYTHON" ]]; then
        return
    fi
    mkdir -p -- "$VENV"
    # Two starts at once would install over each other. The lock is closed with the subshell: it must not live on in exec.
    (
        if command -v flock > /dev/null; then
            flock -n 9 || { say "Waiting for another start that is installing ..."; flock 9; }
        fi
        if ! [[ -r "$stamp" && "$(< "$stamp")" == "$key" ]]; then
            install "$1" >&2
            printf '%s' "$key" | tee -- "$VENV/.ready-serve" > "$stamp"  # every extra holds what serving needs
        fi
    ) 9> "$VENV/.lock" || exit 1
}

install() {
    local base
    if ! "$PYTHON" -c 'import pip' 2> /dev/null; then
        base="$(find_python)" || exit 1
        say "[1/3] Making the virtual environment .venv with $("$base" --version)"
        rm -rf -- "$VENV"/{bin,include,lib,lib64,pyvenv.cfg}  # of a Python that is no longer there
        "$base" -m venv "$VENV" || die "cannot make $VENV; remove it and start again"
    fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    say "[2/3] Installing PyTorch (200 MB for a CPU, 2 GB and more for NVIDIA GPUs; once)"
    install_torch || die "PyTorch cannot be installed: see above"
    say "[3/3] Installing cbdisagg and what it needs"
    "$PYTHON" -m pip install -e "$ROOT${1:+[$1]}" || die "cbdisagg cannot be installed: see above"
    # An editable install is found last: a script run beside the clone would take the clone's folder for the package.
    printf '%s\n' "$ROOT" > "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cbdisagg-root.pth"
}

# The user's own python3 first, if it will do. A name may be there and not run (pyenv), or lack what makes a venv (Debian).
find_python() {
    local name lacks_venv=""
    for name in python3 python3.13 python3.12 python3.11; do
        "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null || continue
        if "$name" -c 'import venv, ensurepip' 2> /dev/null; then
            printf '%s' "$name"
            return
        fi
        lacks_venv="${lacks_venv:-$name}"
    done
    if [[ -n "$lacks_venv" ]]; then
        die "$lacks_venv has no venv module. On Debian and Ubuntu: sudo apt install $("$lacks_venv" -c \
            'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    die "Python 3.11, 3.12 or 3.13 is needed, and none of python3, python3.13, python3.12, python3.11 is one"
}

# Without an NVIDIA GPU the CPU build of PyTorch's own index is wanted; elsewhere, or where it does not answer, pip's.
install_torch() {
    if ! has_nvidia_gpu && [[ "$(uname -s)" == Linux ]] && answers "$TORCH_CPU_INDEX/torch/"; then
        "$PYTHON" -m pip install "$TORCH" --index-url "$TORCH_CPU_INDEX" && return
        say "PyTorch's CPU index gave no build; trying pip's own index"
    fi
    "$PYTHON" -m pip install "$TORCH"
}

has_nvidia_gpu() { [[ -e /proc/driver/nvidia/version || -e /dev/dxg ]] || nvidia-smi -L > /dev/null 2>&1; }

# The alarm ends a name look-up that hangs, which urlopen's own time-out does not.
answers() {
    "$PYTHON" - "$1" 2> /dev/null <<- 'END'
		import signal, sys, urllib.request
		signal.alarm(5)
		urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=4)
	END
}
