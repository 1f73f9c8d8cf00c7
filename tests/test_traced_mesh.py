import os
import subprocess
import sys
from pathlib import Path


def test_a_mesh_equals_its_parts_one_after_another():
    """In a process of its own: the number of devices is fixed before JAX starts."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).parent / "mesh_run.py"
    flags["PYTHONPATH"] = str(script.parent.parent)
    run = subprocess.run(
        [sys.executable, "-W", "error", script], env=os.environ | flags, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal"]
