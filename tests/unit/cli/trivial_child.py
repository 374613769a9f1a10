"""A child of the supervisor's tests: what it does stands in its name.

One whose name begins with ``real`` or ``wrong`` starts as every program does; the others are up
sooner, for they read no settings.
"""

import signal
import sys

from common.errors import ConfigError

STOPS = {signal.SIGTERM}


def body(name: str) -> int:
    if name.startswith("crash"):
        return 3
    print(f"{name} runs", flush=True)
    if "stubborn" in name:
        signal.pause()
    signal.sigwait(STOPS)
    return 0


def real_program() -> int:
    from common.config import program  # noqa: PLC0415 - loads for longer than most tests take

    def run(_settings: object, name: str) -> int:
        if name.startswith("wrong"):
            raise ConfigError("pool.bin is missing")
        return body(name)

    return program.run_program("child", "child", sys.argv[1:], run)


if __name__ == "__main__":
    # Blocked, a stop signal stays pending until it is waited for: none is lost at the start.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    name = sys.argv[sys.argv.index("--id") + 1]
    sys.exit(real_program() if name.startswith(("real", "wrong")) else body(name))
