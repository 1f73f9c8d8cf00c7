#!/usr/bin/env bash
# Runs a part of the tests with $PYTHON: tests.sh PART, at the scale FUNCOLLECT_SCALE (1, or more for more cases and counts).
set -euo pipefail
cd "$(dirname "$0")/.."
scale=${FUNCOLLECT_SCALE:-1}

pytest() {
    "${PYTHON:-.venv/bin/python}" -m pytest "$@"
}
# At scale 1 a notebook runs from top to bottom, but trains for too short a time to learn.
notebooks() {
    if [ "$scale" = 1 ]; then
        export FUNCOLLECT_SCALE=0.05
    fi
    compile_quickly
    whole_notebooks "$@"
}
whole_notebooks() {
    pytest --nbmake --nbmake-timeout=1200 "$@"
}
# Half of the time of tests that compile much goes into optimising programs that run for milliseconds. Bits that two
# programs share, and larger scales, have programs as users have them.
compile_quickly() {
    if [ "$scale" = 1 ]; then
        export XLA_FLAGS=${XLA_FLAGS:---xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false}
    fi
}
quickly() {
    compile_quickly
    pytest "$@"
}

of_policies=(tests/policies tests/interop tests/trajectories)
of_envs=(tests/envs tests/buffers)
exact=(tests/core/loops/test_blocks.py tests/core/loops/test_on_gpu.py tests/interop/test_one_gpu.py)
elsewhere=("${of_policies[@]}" "${of_envs[@]}" tests/core tests/contracts tests/docs)

case $1 in
    core) quickly -m "not ray" "${exact[@]/#/--ignore=}" tests/core ;;
    policies) quickly -m "not ray" "${exact[@]/#/--ignore=}" "${of_policies[@]}" ;;
    envs) quickly -m "not ray" "${of_envs[@]}" ;;
    docs) quickly -m "not ray" tests/docs ;; # after mypy, whose cache serves them
    contracts) quickly -m "not ray" tests/contracts ;;
    others) quickly -m "not ray" "${elsewhere[@]/#/--ignore=}" tests funcollect ;;
    exact) pytest "${exact[@]}" ;;
    ray) # of all folders, over one cluster
        mapfile -t over_ray < <(grep -rl --include="test_*.py" ray_cluster tests)
        quickly -m ray "${over_ray[@]}"
        ;;
    notebooks) notebooks notebooks ;;
    portable) # what worker processes do where the system is not Linux
        FUNCOLLECT_PORTABLE=1 FUNCOLLECT_SCALE=2 pytest tests/collectors/workers tests/envs/host tests/evaluation
        ;;
    installed) # all tests but those of packages that are not installed, for other versions
        export FUNCOLLECT_INSTALLED_ONLY=1 CUDA_VISIBLE_DEVICES=
        pytest
        whole_notebooks notebooks
        ;;
    *)
        echo "there is no part $1 of the tests" >&2
        exit 1
        ;;
esac
