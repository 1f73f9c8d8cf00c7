"""What every test runs under, and how much of it."""

import importlib.util
import os
import signal
import warnings

import pytest
import torch

if importlib.util.find_spec("Box2D"):
    with warnings.catch_warnings():  # its SWIG types warn as they are made, and crash where a warning is an error
        warnings.simplefilter("ignore")
        import Box2D  # noqa: F401

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

SCALE = int(os.environ.get("FUNCOLLECT_SCALE", "1"))


def scaled(count):
    """A count for CI, times FUNCOLLECT_SCALE: 1 in CI, 10 for the full counts."""
    return count * SCALE


# JAX warns of them where it has been used; those of Ray become other programs at once.
FORKS_OF_RAY = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_memory_usage_threshold": "0.99"}
os.environ |= RAY  # before Ray is imported
STORE = 300 << 20  # bytes of its object store


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster of Ray's on this machine, with more CPUs than it has; the module `ray`."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    yield ray
    ray.shutdown()


def pytest_runtest_setup(item):
    """Tests marked `gpu` need a CUDA device; nothing else is skipped."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
