# `make demo` and `make test` set up what they need in .venv; nothing else has to be typed first.
SHELL := bash
PYTHON ?= python3
# For the sets of other versions; elsewhere: `make test-newest PYTHON312=/path/to/python3.12`.
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
FUNCOLLECT_SCALE ?= 1
FAST := tests-core tests-policies tests-envs tests-docs tests-others tests-contracts
export FUNCOLLECT_SCALE
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.1
export JAX_TRACEBACK_IN_LOCATIONS_LIMIT ?= 0

.PHONY: demo test test-newest test-oldest test-gpu-machine docs docs-serve address dist $(FAST) tests-exact tests-portable tests-ray test-ray test-notebooks soak lint notebooks bench rllib gpu-kit gpu gpu-rehearsal clean

# Python keeps the bytecode of what is imported, which saves seconds in each process; to compile all that is installed would
# take pip almost as long as the rest.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .[envs,viz]
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP_INSTALL) -e .[envs,jax-envs,viz,ray,test,bench,docs]
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

# What CI runs on two cores, five parts at once, the longest first. Notebooks and Ray leave a core idle at times, so they do
# not come last; mypy's cache serves the documents' tests.
RAY_TESTS := tests/collectors/ray tests/docs funcollect/collectors/ray_collector.py
RAY_NOTEBOOK := notebooks/06_ray.ipynb
POLICY_TESTS := tests/policies tests/interop tests/trajectories
ENV_TESTS := tests/envs tests/buffers
EXACT_TESTS := tests/core/loops/test_blocks.py tests/core/loops/test_on_gpu.py tests/interop/test_one_gpu.py
PORTABLE_TESTS := tests/collectors/workers tests/envs/host tests/evaluation
A_FEW := -k "(told_at_once and exit and MultiSync) or (environment_go_with_their_worker and kill) or parent_that_is_killed or newest_weights"
ELSEWHERE := $(RAY_TESTS) $(POLICY_TESTS) $(ENV_TESTS) tests/core tests/contracts
IN_PARALLEL = $(MAKE) --no-print-directory --jobs=5 --output-sync=target
PYTEST = $(BIN)/python -m pytest
NBMAKE := --nbmake --nbmake-timeout=1200
IGNORE = $(addprefix --ignore=,$(1))

# Half of the time of tests that compile much goes into optimising programs that run for milliseconds. Bits that two programs
# share, the notebooks, what runs over Ray, and `make soak` have programs as users have them.
ifeq ($(FUNCOLLECT_SCALE),1)
$(FAST): export XLA_FLAGS ?= --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false
endif

# No broken link, no name without an entry. All is read anew, as warnings are of the pages that were read.
docs: $(VENV)/.test
	$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --fresh-env docs docs/_build/html

# The packages that a release publishes, tried.
dist: $(VENV)/.core
	$(PIP_INSTALL) build
	PYTHON=$(CURDIR)/$(BIN)/python bash .ci/dist.sh

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000

# The repository's address wherever it stands: make address URL=https://github.com/somebody/funcollect
address:
	test -n "$(URL)"
	sed -i "s|$$(sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)|$(URL)|g" pyproject.toml CITATION.cff docs/start/install.md

test: $(VENV)/.test
	$(IN_PARALLEL) test-ray tests-others test-notebooks lint tests-core tests-policies tests-contracts tests-envs tests-exact tests-docs \
		docs tests-portable

test-ray: tests-ray
	$(PYTEST) $(NBMAKE) $(RAY_NOTEBOOK)

test-notebooks: $(VENV)/.test
	$(PYTEST) $(NBMAKE) --ignore=$(RAY_NOTEBOOK) notebooks

tests-ray: $(VENV)/.test
	$(PYTEST) -k ray $(RAY_TESTS)

tests-docs: $(VENV)/.test
	$(PYTEST) -k "not ray" tests/docs

tests-core: $(VENV)/.test
	$(PYTEST) $(call IGNORE,$(EXACT_TESTS)) tests/core

tests-policies: $(VENV)/.test
	$(PYTEST) $(call IGNORE,$(EXACT_TESTS)) $(POLICY_TESTS)

tests-envs: $(VENV)/.test
	$(PYTEST) $(ENV_TESTS)

tests-contracts: $(VENV)/.test
	$(PYTEST) tests/contracts

tests-exact: $(VENV)/.test
	$(PYTEST) $(EXACT_TESTS)

# What worker processes do where the system is not Linux: some of the tests; in `make soak` all of them, as often as in CI.
tests-portable: export FUNCOLLECT_PORTABLE = 1
tests-portable: $(VENV)/.test
	FUNCOLLECT_SCALE=1 $(PYTEST) $(PORTABLE_TESTS) $(if $(filter 1,$(FUNCOLLECT_SCALE)),$(A_FEW))

tests-others: $(VENV)/.test
	$(PYTEST) $(call IGNORE,$(ELSEWHERE)) tests funcollect

# The same suite with other versions, each set in an environment of its own. What needs a package that a set lacks is
# left out. TorchRL wants tensordict below 0.15, so the newest versions are two sets: with TorchRL and without it.
SETS := .venv-newest .venv-newest-torchrl .venv-oldest .venv-gpu-machine
EXTRAS := envs,jax-envs,viz,ray,test
INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt

$(addsuffix /.done,$(SETS)): pyproject.toml constraints.txt .ci/lower_bounds.py

.venv-newest/.done:
	$(PYTHON312) -m venv $(@D)
	grep -vE '^(tensordict|torchrl)==' constraints.txt > $(@D)/constraints.txt
	$(INSTALL) -e .[$(EXTRAS)] tensordict==0.15.3
	touch $@

.venv-newest-torchrl/.done:
	$(PYTHON312) -m venv $(@D)
	cp constraints.txt $(@D)/constraints.txt
	$(INSTALL) -e .[$(EXTRAS),torchrl]
	touch $@

.venv-oldest/.done:
	$(PYTHON311) -m venv $(@D)
	$(PYTHON311) .ci/lower_bounds.py > $(@D)/constraints.txt
	$(INSTALL) -e .[$(EXTRAS),torchrl]
	touch $@

# The GPU machine's versions, tested on the CPU. This Torch wants an older setuptools.
.venv-gpu-machine/.done:
	$(PYTHON312) -m venv $(@D)
	grep -vE '^(torch|jax|jaxlib|numpy|setuptools|gymnasium|gymnax|mujoco|mujoco-mjx)==' constraints.txt > $(@D)/constraints.txt
	$(INSTALL) -e .[$(EXTRAS),torchrl] torch==2.11.0 jax==0.11.2 jaxlib==0.11.2 numpy==2.5.2 \
		gymnasium==1.3.0 gymnax==1.0.1 mujoco==3.12.0 mujoco-mjx==3.12.0
	touch $@

test-newest: suite-newest suite-newest-torchrl

test-oldest: suite-oldest

test-gpu-machine: suite-gpu-machine

suite-%: export FUNCOLLECT_INSTALLED_ONLY = 1
suite-%: export CUDA_VISIBLE_DEVICES =
suite-%: .venv-%/.done
	.venv-$*/bin/python -m pytest
	.venv-$*/bin/python -m pytest $(NBMAKE) notebooks

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
	set -o pipefail; PYTEST_ADDOPTS=-q $(IN_PARALLEL) tests-core tests-ray tests-policies tests-envs tests-docs tests-contracts tests-exact tests-others \
		tests-portable 2>&1 | tee benchmarks/results/soak.txt

bench: $(VENV)/.test
	for name in imports memory overhead scale collect vector fused policies replay workers ray; do $(BIN)/python -m benchmarks $$name || exit 1; done

# For a GPU machine without a package index: `gpu-kit` downloads the wheels to carry there, `gpu` runs there.
gpu-kit:
	PYTHON=$(PYTHON) bash benchmarks/gpu/kit.sh

gpu:
	PYTHON=$(PYTHON) bash benchmarks/gpu/run.sh

# The same on a CPU, in an environment that has what such a machine has, and nothing else.
.venv-gpu-rehearsal/.done: benchmarks/gpu/machine.txt
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

gpu-rehearsal: .venv-gpu-rehearsal/.done gpu-kit
	PYTHON=.venv-gpu-rehearsal/bin/python PLATFORM=cpu OUT=.cache/gpu bash benchmarks/gpu/run.sh

clean:
	rm -rf $(VENV) .venv-* .gpu-kit .gpu-site .cache
