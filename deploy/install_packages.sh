#!/bin/sh
# Installs what the programs import into the active environment: install_packages.sh cpu|cuda.
set -eu
cd "$(dirname "$0")/.."

constraints=deploy/constraints-cpu.txt
cpu_wheel_index=https://download.pytorch.org/whl/cpu

case $1 in
    cpu)
        # pip's own index may carry the CUDA build alone; PyTorch's has the CPU build.
        pip install --constraint $constraints torch ||
            pip install --constraint $constraints --extra-index-url $cpu_wheel_index torch
        python deploy/requirements.py run >/tmp/requirements.txt
        pip install --constraint $constraints --requirement /tmp/requirements.txt
        ;;
    cuda)
        pip install 'torch>=2.11'
        major=$(python -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
        if [ -z "$major" ]; then
            echo "pip's index gave a PyTorch without CUDA" >&2
            exit 1
        fi
        python deploy/requirements.py run "cuda$major" >/tmp/requirements.txt
        pip install --requirement /tmp/requirements.txt
        ;;
    *)
        echo "TORCH=$1: say cpu or cuda" >&2
        exit 1
        ;;
esac
