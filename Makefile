# `make demo` and `make test` set up what they need in .venv; nothing else has to be typed first.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUNCOLLECT_SCALE ?= 1
export FUNCOLLECT_SCALE
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla

.PHONY: demo test tests-a-to-j tests-k-to-z soak lint notebooks bench rllib clean

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
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=1200 notebooks

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

clean:
	rm -rf $(VENV) .venv-rllib .cache
