#!/bin/bash
# Runs TorchRL's tests against TorchRL (base), and against this library (strict, adapted); then prints the counts.
#   run.sh [base|strict|adapted …]
# PROJECT: this checkout.  MIRROR: a git directory of pytorch/rl, or TESTS: an existing checkout of it.
# PYTHON: an interpreter with torchrl, ray, pytest and pytest-timeout (the extras torchrl, ray, envs, test).
# SUITE: where results go (by default the current folder). Tests that they have are not run again: remove them to repeat.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export SUITE=${SUITE:-$PWD} PROJECT=${PROJECT:-$(cd "$here/../.." && pwd)}
python=${PYTHON:-$PROJECT/.venv/bin/python}
tests=${TESTS:-$SUITE/rl}
mkdir -p "$SUITE/results"
if [ ! -d "$tests/test" ]; then  # the commit nearest to torchrl 0.14.1
  mkdir -p "$tests" && git --git-dir="${MIRROR:?or TESTS}" archive "${COMMIT:-ae9719f17}" test | tar -x -C "$tests"
  sed -i 's/find_spec("gym") is not None/find_spec("gymnasium") is not None/' "$tests/test/rb/_rb_common.py"
fi
export PYTHONPATH=$here:$PROJECT OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE=1 WANDB_MODE=disabled
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_raylet_start_wait_time_s=300
cd "$tests/test" || exit 1

run() {  # MODE FILE [pytest's arguments]; goes on after a crash of the process
  local name=$(echo "${2%.py}" | tr / _)
  export SUITE_MODE=${1/processes/adapted} SUITE_OUT=$SUITE/results/$1.$name.jsonl
  for try in $(seq 15); do
    timeout -k 10 5400 "$python" -m pytest -p plugin -p no:cacheprovider -q --tb=short --timeout "${TIMEOUT:-240}" \
      -W ignore "${@:2}" > "$SUITE/results/$1.$name.$try.log" 2>&1
    local code=$?
    echo "$1 $2 try $try exit $code"
    if [ $code -le 1 ] || [ $code -eq 5 ]; then break; fi
  done
}

# In test_distributed, the tests over Ray that neither fork after ray.init nor ask for private names.
over_ray="TestRayCollector and not private and not ddp and not trainer and not learner and not inference \
and not replaybuffer and not basic and not mult and not next_method and not drains"
for mode in ${@:-base strict adapted}; do
  export SUITE_START=fork
  [ "$mode" = base ] && export SUITE_START=spawn  # which TorchRL's shared buffers need
  for file in test_collectors test_postprocs rb/test_{samplers,rb_core,prioritized,storages,writers,rb_transforms} \
    rb/test_{composable,query,her,ensemble,rb_distributed}; do
    run "$mode" $file.py
  done
  run "$mode" test_distributed.py -k "$over_ray"
done
SUITE_ONLY=$here/processes.txt run processes test_collectors.py
"$python" "$here/classify.py" --list
