"""Benchmarks: ours, its peers and the limits, in interleaved rounds of one process with one thread each.

Thread counts act only when set before the frameworks load, hence here. A process that has loaded them, as the tests
have, keeps its settings.
"""

import os
import sys

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}
if "torch" not in sys.modules:
    os.environ.update(ONE_THREAD)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # compile times are measured, too
