#!/usr/bin/env bash
# Installs a set of other versions into an environment of its own: versions.sh NAME fills .venv-NAME.
# TorchRL wants tensordict below 0.15, so the newest versions are two sets: with TorchRL and without it.
set -euo pipefail
cd "$(dirname "$0")/.."
python311=${PYTHON311:-python3.11} python312=${PYTHON312:-python3.12}
extras=envs,jax-envs,agents,viz,ray,test

make_environment() { # INTERPRETER
    "$1" -m venv "$folder"
}
install() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$folder/constraints.txt" "$@"
}
pins_without() { # PACKAGES, separated by bars: the constraints without theirs
    grep -vE "^($1)==" constraints.txt > "$folder/constraints.txt"
}

folder=.venv-$1
case $1 in
    newest)
        make_environment "$python312"
        pins_without "tensordict|torchrl"
        install -e ".[$extras]" tensordict==0.15.3
        ;;
    newest-torchrl)
        make_environment "$python312"
        cp constraints.txt "$folder"
        install -e ".[$extras,torchrl]"
        ;;
    oldest)
        make_environment "$python311"
        "$python311" .ci/lower_bounds.py > "$folder/constraints.txt"
        install -e ".[$extras,torchrl]"
        ;;
    gpu-machine) # the GPU machine's versions, tested on the CPU; this Torch wants an older setuptools
        make_environment "$python312"
        pins_without "torch|jax|jaxlib|numpy|setuptools|gymnasium|gymnax|mujoco|mujoco-mjx"
        install -e ".[$extras,torchrl]" torch==2.11.0 jax==0.11.2 jaxlib==0.11.2 numpy==2.5.2 \
            gymnasium==1.3.0 gymnax==1.0.1 mujoco==3.12.0 mujoco-mjx==3.12.0
        ;;
    gpu-rehearsal) # what the GPU machine has, and nothing else
        make_environment "$python312"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r benchmarks/gpu/machine.txt
        ;;
    rllib) # RLlib needs another gymnasium than the library's, so it is measured from an environment of its own
        make_environment "${PYTHON:-python3}"
        grep -v ^gymnasium constraints.txt > "$folder/constraints.txt"
        install "ray[rllib]" torch
        ;;
    *)
        echo "there is no set of versions $1" >&2
        exit 1
        ;;
esac
touch "$folder/.done"
