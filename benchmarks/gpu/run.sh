#!/usr/bin/env bash
# On a GPU machine without a package index: installs .gpu-kit, runs the tests marked `gpu`, then `benchmarks gpu`.
# Takes at most 9 minutes, or $ALL seconds. What is known is in $OUT at every moment: gpu.json and three text files; at the
# end tables for the docs and a picture, too.
# ONLY=rest leaves the tests out, and gives all the time to a group of parts of the benchmark, or to those whose names hold
# what stands between commas. The results are then in gpu-rest.json, and so on.
# ONLY=vector runs the cells of `benchmarks vector` whose policy is on the GPU instead; they want 16 processors.
# PLATFORM=cpu runs the same on a CPU: the tests' twins there, the benchmark with fewer lanes.
# Where a machine is lent for a short time, two calls: ALL=480 first, then ALL=240 ONLY=rest, or what the first one lists as
# not measured.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} platform=${PLATFORM:-cuda} out=${OUT:-.cache/gpu}
only=${ONLY:-} part=${ONLY:+-$ONLY} all=${ALL:-525} for_tests=200 # seconds; bash counts them in SECONDS
part=${part//[^A-Za-z0-9.-]/_}
programs=$PWD/.cache/gpu-programs
mkdir -p "$out"

# Torch shares the GPU.
export XLA_PYTHON_CLIENT_PREALLOCATE=false FUNCOLLECT_INSTALLED_ONLY=1 PYTHONPATH=$PWD/.gpu-site
[ "$platform" = cpu ] && export CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu

# Without dependencies, so that the machine's own Torch, JAX and NumPy stay; by the kit's pip, as there may be none. A second
# call on the same machine finds what the first one has installed and compiled.
pip=(.gpu-kit/pip-*.whl)
[ -e "${pip[0]}" ] || { echo "there is no .gpu-kit: run 'make gpu-kit' where there is a package index, and copy it here" && exit 1; }
kit=$(ls .gpu-kit)
if [ "$kit" != "$(cat .gpu-site/kit.txt 2>/dev/null)" ]; then
    rm -rf .gpu-site "$programs"
    "$python" "${pip[0]}/pip" install --quiet --no-index --no-deps --no-compile --target .gpu-site .gpu-kit/*.whl || exit 1
    echo "$kit" >.gpu-site/kit.txt
fi
{
    nvidia-smi
    "$python" "${pip[0]}/pip" list
} >"$out/gpu-machine.txt" 2>&1
echo "installed after $SECONDS s"

# Warnings are not errors here: the machine's packages are not those that CI pins.
tested=0
if [ -z "$only" ]; then
    tests=$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.gpu\|each_device' tests | sort)
    if [ "$platform" = cpu ]; then chosen=(-k "gpu or cpu"); else chosen=(-m gpu); fi
    [ "$platform" = cpu ] || export JAX_COMPILATION_CACHE_DIR=$programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    # They wait for XLA's compiler most of the time, one core each.
    "$python" -c "import xdist" 2>/dev/null && chosen+=(--numprocesses=$(($(nproc) < 8 ? $(nproc) : 8)))
    timeout --kill-after=5 $for_tests "$python" -m pytest -v -W default --timeout=90 -p no:cacheprovider \
        "${chosen[@]}" $tests 2>&1 | tee "$out/gpu-tests.txt"
    tested=$?
    unset JAX_COMPILATION_CACHE_DIR
fi
echo "tested after $SECONDS s"

left=$((all - SECONDS))
if [ "$only" = vector ]; then
    timeout --kill-after=5 $left "$python" -m benchmarks vector --only GPU --rounds 5 --out "$out" 2>&1 | tee "$out/vector.txt"
    exit
fi
timeout --kill-after=5 $left "$python" -m benchmarks gpu --platform "$platform" --only "$only" --rounds 5 --seconds $((left - 20)) \
    --out "$out" 2>&1 | tee "$out/gpu-benchmark$part.txt"
measured=$?
"$python" -m benchmarks.gpu.picture "$out/gpu$part.json" >"$out/gpu-table$part.md"
echo "measured after $SECONDS s"

truncate --size='<900K' "$out"/gpu-*.txt
[ $tested = 0 ] && [ $measured = 0 ]
