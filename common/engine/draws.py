"""Random numbers without a generator: each draw is a pure function of what it is for."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a uniform number in [0, 1) with 53 random bits.

    Equal arguments give equal numbers in every process and on every machine, so that a stream can
    be resumed anywhere; numbers of different arguments are independent for all purposes of
    sampling.
    """
    state = _mix(seed + _GOLDEN)
    state = _mix(state ^ (choice + 1) * _GOLDEN)
    state = _mix(state ^ (position + 1) * _GOLDEN)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """Finalise 64 bits (SplitMix64, Steele, Lea and Flood 2014): every bit moves every other."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
