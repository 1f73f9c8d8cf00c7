# `make demo` and `make test` set up what they need in .venv; nothing else has to be typed first.
SHELL := bash
PYTHON ?= python3
PYTHON_3_12 ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
FUNCOLLECT_SCALE ?= 1
export FUNCOLLECT_SCALE
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla

.PHONY: demo test tests-a-to-j tests-k-to-z soak lint notebooks bench rllib gpu-kit gpu gpu-rehearsal clean

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[envs,viz]
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[envs,jax-envs,viz,ray,test,bench]
	touch $@

# RLlib needs another gymnasium than the library's, so it is measured from an environment of its own.
.venv-rllib/.done: constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v ^gymnasium constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt "ray[rllib]" torch
	touch $@

rllib: .venv-rllib/.done

demo: $(VENV)/.core
	$(BIN)/funcollect demo

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests in two halves, one on each of CI's two cores.
HALVES = $(MAKE) --no-print-directory --jobs=2 --output-sync=target tests-a-to-j tests-k-to-z

test: lint
	$(HALVES)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=280 notebooks

tests-a-to-j:
	$(BIN)/python -m pytest tests/test_[a-j]*.py

tests-k-to-z:
	$(BIN)/python -m pytest tests/test_[k-z]*.py funcollect

# Runs the notebooks and keeps their pictures. Coalescing leaves the last state of each progress bar.
notebooks: NBCONVERT = $(BIN)/jupyter-nbconvert --to notebook --inplace notebooks/*.ipynb
notebooks: export SDL_VIDEODRIVER = dummy
notebooks: export SDL_AUDIODRIVER = dummy
notebooks: $(VENV)/.test
	$(NBCONVERT) --execute --ExecutePreprocessor.record_timing=False
	$(NBCONVERT) --coalesce-streams

# The issues' full counts; the output is kept beside the benchmarks' results.
soak: FUNCOLLECT_SCALE = 10
soak: $(VENV)/.test
	set -o pipefail; PYTEST_ADDOPTS=-q $(HALVES) 2>&1 | tee benchmarks/results/soak.txt

bench: $(VENV)/.test
	for name in imports memory overhead collect suites torchrl fused policies replay workers ray; do $(BIN)/python -m benchmarks $$name || exit 1; done

# For a GPU machine without a package index: `gpu-kit` downloads the wheels to carry there, `gpu` runs there.
gpu-kit:
	PYTHON=$(PYTHON) bash benchmarks/gpu/kit.sh

gpu:
	PYTHON=$(PYTHON) bash benchmarks/gpu/run.sh

# The same on a CPU, in an environment that has what such a machine has.
.venv-gpu-machine/.done: benchmarks/gpu/machine.txt
	$(PYTHON_3_12) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

gpu-rehearsal: .venv-gpu-machine/.done gpu-kit
	PYTHON=.venv-gpu-machine/bin/python PLATFORM=cpu OUT=.cache/gpu bash benchmarks/gpu/run.sh

clean:
	rm -rf $(VENV) .venv-* .gpu-kit .gpu-site .cache
