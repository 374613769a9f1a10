import subprocess
import sys

HEAVY = ("torch", "transformers", "zmq", "flowpath_native")


def test_the_http_half_starts_without_torch_transformers_zmq_and_native_code():
    script = (
        "import sys, services.gateway.app, services.gateway.fake_backend;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
