#!/usr/bin/env bash
# Downloads the wheels of kit.txt for x86-64 Linux and Python 3.12 into .gpu-kit, and checks what must be carried there.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=.gpu-kit most_mib=60

rm -rf "$kit"
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux2014_x86_64 manylinux_2_17_x86_64)
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version 3.12 "${platforms[@]/#/--platform=}" \
    --dest "$kit" --requirement benchmarks/gpu/kit.txt

size() { du --bytes --total --files0-from=- | tail -1 | cut -f1; }
wheels=$(find "$kit" -name '*.whl' -print0 | size)
tracked=$(git ls-files -z | size)
echo "$kit: $(ls "$kit" | wc -l) wheels, $((wheels >> 20)) MiB; with the repository $((wheels + tracked >> 20)) MiB of $most_mib"
((wheels + tracked < most_mib << 20))
