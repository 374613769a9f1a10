from tests.support.steady import load_steady_profile, one_torch_thread

__all__ = ["one_torch_thread"]

load_steady_profile()
