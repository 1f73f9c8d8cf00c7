import os
import subprocess
import sys

import pytest

from tests.support.running import ROOT


@pytest.mark.evening
def test_lanes_over_a_mesh_equal_the_same_lanes_on_one_device():
    """In a process of its own: the number of devices is fixed before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.programs.mesh_run"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal"]
