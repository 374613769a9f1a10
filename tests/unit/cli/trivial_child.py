"""A child of the supervisor's tests: what it does stands in its name."""

import signal
import sys

from common.config.program import run_program
from common.config.settings import Settings
from common.errors import ConfigError

STOPS = {signal.SIGTERM}


def body(_settings: Settings, name: str) -> int:
    if name.startswith("wrong"):
        raise ConfigError("pool.bin is missing")
    if name.startswith("crash"):
        return 3
    print(f"{name} runs", flush=True)
    if name.startswith("stubborn"):
        signal.pause()
    signal.sigwait(STOPS)
    return 0


if __name__ == "__main__":
    # Blocked, a stop signal stays pending until it is waited for: none is lost at the start.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    sys.exit(run_program("child", "child", sys.argv[1:], body))
