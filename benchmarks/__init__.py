"""Benchmarks: ours, its peers and the limits, in interleaved rounds of one process with one thread each.

Thread counts act only when set before the frameworks load, hence here.
"""

import os

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}
os.environ.update(ONE_THREAD)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # compile times are measured, too
