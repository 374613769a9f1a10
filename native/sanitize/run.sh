#!/usr/bin/env bash
# Builds the extension with the address and undefined-behaviour sanitizers into build/asan and runs
# pytest on it: native/sanitize/run.sh [pytest arguments]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly BUILD=build/asan
readonly VENV=$PWD/.venv
export PATH=$VENV/bin:$PATH

mkdir -p "$BUILD"
if ! {
    cmake -S native -B "$BUILD" -G Ninja -DPython_EXECUTABLE="$VENV/bin/python" \
        -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFLOWPATH_SANITIZE=address,undefined &&
        cmake --build "$BUILD"
} >"$BUILD/build.log" 2>&1; then
    tail -n 40 "$BUILD/build.log" >&2
    echo "asan: the build failed; the whole output is in $BUILD/build.log" >&2
    exit 1
fi

# The interpreter is not instrumented: the runtimes must be there before the extension is. The C++
# library is named too, because the sanitizer looks for its throw function at the start.
compiler=${CXX:-c++}
preload=""
for library in libasan.so libubsan.so libstdc++.so; do
    preload+="$("$compiler" -print-file-name="$library") "
done

# Python never frees all of its memory, so leaks cannot be told; everything else is fatal.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc PYTHONPATH=native/sanitize
LD_PRELOAD=$preload exec "$VENV/bin/python" -m pytest -p sanitized_extension -p no:cacheprovider "$@"
