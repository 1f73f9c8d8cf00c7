"""What every test runs under, and how much of it."""

import gc
import importlib.util
import os
import signal
import warnings
from importlib.metadata import version
from unittest.mock import patch

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.running import RAY, ROOT, STORE
from tests.support.selection import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_make_collect_report,
    pytest_report_collectionfinish,
)

if importlib.util.find_spec("Box2D"):
    with warnings.catch_warnings():  # its SWIG types warn as they are made, and crash where a warning is an error
        warnings.simplefilter("ignore")
        import Box2D  # noqa: F401

torch.set_num_threads(1)
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

os.environ |= RAY  # before Ray is imported


def pytest_configure(config):
    """Ray before 2.60 leaves its own processes and files for the garbage collector, which warns of them."""
    if importlib.util.find_spec("ray") and tuple(map(int, version("ray").split(".")[:2])) < (2, 60):
        for message in (r"subprocess \d+ is still running", "unclosed file .*/dev/null"):
            config.addinivalue_line("filterwarnings", f"ignore:{message}:ResourceWarning")


def pytest_collection_finish(session):
    """What has been imported by now stays, and need not be looked through each time that garbage is collected."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module")
def sent_by_value(request):
    """Processes get what a test module defines by value. By name they would import the module, pytest and all."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def cartpole():
    """Three lanes of gymnax's, for all tests of a module, so that JAX compiles its programs once."""
    from funcollect.envs.jax_envs.like_gymnax import from_gymnax

    return from_gymnax("CartPole-v1", num_envs=3)


@pytest.fixture(scope="session")
def ray_cluster():
    """A cluster of Ray's on this machine, with more CPUs than it has, for all tests; the module `ray`."""
    import ray

    path = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }  # pgx installs a module `tests`
    with warnings.catch_warnings(), patch.dict(os.environ, path):
        warnings.filterwarnings("ignore", "os.fork")  # JAX warns of forks once it has been used; Ray's exec at once
        ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    yield ray
    ray.shutdown()


def pytest_runtest_setup(item):
    """Tests marked `gpu` need a CUDA device, nothing else is skipped; random networks are the same each time."""
    torch.manual_seed(0)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
