#!/usr/bin/env bash
# Builds a wheel and an sdist, and tries each as a user has it: the core dependencies alone, outside the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
"$PYTHON" -m build --outdir dist .

here=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The README's first block of Python.
awk '/^```python$/ { on = 1; next } /^```$/ && on { exit } on' README.md > "$scratch/example.py"
for package in dist/*.whl dist/*.tar.gz; do
    rm -rf "$scratch/venv"
    "$PYTHON" -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$here/$package"
    (
        cd "$scratch"
        venv/bin/python example.py
        venv/bin/funcollect demo --frames 1e4
        venv/bin/funcollect --version
    )
    echo "$package works"
done
