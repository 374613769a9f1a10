"""What this host computes with, as far as its files tell."""

from pathlib import Path

NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Processor flags (x86 and Arm) of bfloat16 products in hardware."""

CPU_INFO = Path("/proc/cpuinfo")
GPU_DRIVER = Path("/dev/nvidiactl")


def has_native_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Tell whether the processor multiplies bfloat16 in hardware; no where it does not say."""
    try:
        text = cpu_info.read_text()
    except OSError:
        return False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not NATIVE_BFLOAT16_FLAGS.isdisjoint(value.split())
    return False


def may_have_gpu(driver: Path = GPU_DRIVER) -> bool:
    """Tell whether a driver of NVIDIA GPUs is there."""
    return driver.exists()
