#!/usr/bin/env bash
# Runs a part of the tests with $PYTHON: tests.sh PART, at the scale FUNCOLLECT_SCALE (1, or more for more cases and counts).
set -euo pipefail
cd "$(dirname "$0")/.."
scale=${FUNCOLLECT_SCALE:-1}

pytest() {
    "${PYTHON:-.venv/bin/python}" -m pytest "$@"
}
notebooks() {
    pytest --nbmake --nbmake-timeout=1200 "$@"
}
# Half of the time of tests that compile much goes into optimising programs that run for milliseconds. Bits that two
# programs share, the notebooks, what runs over Ray, and larger scales have programs as users have them.
quickly() {
    if [ "$scale" = 1 ]; then
        export XLA_FLAGS=${XLA_FLAGS:---xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false}
    fi
    pytest "$@"
}

over_ray=(tests/collectors/ray tests/docs funcollect/collectors/ray_collector.py)
ray_notebook=notebooks/06_ray.ipynb
of_policies=(tests/policies tests/interop tests/trajectories)
of_envs=(tests/envs tests/buffers)
exact=(tests/core/loops/test_blocks.py tests/core/loops/test_on_gpu.py tests/interop/test_one_gpu.py)
elsewhere=("${over_ray[@]}" "${of_policies[@]}" "${of_envs[@]}" tests/core tests/contracts)

case $1 in
    core) quickly "${exact[@]/#/--ignore=}" tests/core ;;
    policies) quickly "${exact[@]/#/--ignore=}" "${of_policies[@]}" ;;
    envs) quickly "${of_envs[@]}" ;;
    docs) quickly -k "not ray" tests/docs ;; # after mypy, whose cache serves them
    contracts) quickly tests/contracts ;;
    others) quickly "${elsewhere[@]/#/--ignore=}" tests funcollect ;;
    exact) pytest "${exact[@]}" ;;
    ray) pytest -k ray "${over_ray[@]}" ;;
    ray-notebook) notebooks "$ray_notebook" ;;
    notebooks) notebooks --ignore="$ray_notebook" notebooks ;;
    portable) # what worker processes do where the system is not Linux: some of the tests, or at larger scales all of them
        few=(-k "(told_at_once and exit and MultiSync) or (environment_go_with_their_worker and kill) or parent_that_is_killed or newest_weights")
        [ "$scale" = 1 ] || few=()
        FUNCOLLECT_PORTABLE=1 FUNCOLLECT_SCALE=1 pytest tests/collectors/workers tests/envs/host tests/evaluation "${few[@]}"
        ;;
    installed) # all tests but those of packages that are not installed, for other versions
        export FUNCOLLECT_INSTALLED_ONLY=1 CUDA_VISIBLE_DEVICES=
        pytest
        notebooks notebooks
        ;;
    *)
        echo "there is no part $1 of the tests" >&2
        exit 1
        ;;
esac
