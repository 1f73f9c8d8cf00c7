# `make demo` and `make test` set up what they need in .venv; nothing else has to be typed first.
SHELL := bash
export PYTHON ?= python3
# For the sets of other versions; elsewhere: `make test-newest PYTHON312=/path/to/python3.12`.
export PYTHON311 ?= python3.11
export PYTHON312 ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
export FUNCOLLECT_SCALE ?= 1
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.1
export JAX_TRACEBACK_IN_LOCATIONS_LIMIT ?= 0
# Python keeps the bytecode of what is imported, which saves seconds in each process; to compile all that is installed
# would take pip almost as long as the rest.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
TESTS = PYTHON=$(BIN)/python .ci/tests.sh
PARTS := $(addprefix tests-,ray others core policies envs contracts docs exact portable)
IN_PARALLEL = $(MAKE) --no-print-directory --jobs=5 --output-sync=target
# The longest first, but notebooks and Ray, which leave a core idle at times, do not come last.
ALL := tests-policies tests-core tests-envs tests-others tests-ray tests-notebooks lint tests-docs tests-contracts \
	tests-exact docs

.PHONY: demo test test-all test-newest test-oldest test-gpu-machine $(PARTS) tests-notebooks soak lint docs docs-serve \
	notebooks address dist bench rllib gpu-kit gpu gpu-rehearsal clean

demo: $(VENV)/.core
	$(BIN)/funcollect demo
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .[envs,viz]
	touch $@
$(VENV)/.test: $(VENV)/.core
	$(PIP_INSTALL) -e .[envs,jax-envs,agents,viz,ray,test,bench,docs]
	$(PIP_INSTALL) --no-deps craftax # which wants pygame, whose files overwrite those of pygame-ce
	touch $@

# What CI runs, on two cores: every promise once.
test: $(VENV)/.test
	.ci/leaves_nothing.sh $(IN_PARALLEL) $(ALL)
# What an evening can pay: also the tests and cases that `make test` leaves out, the portable path, and other versions.
test-all: $(VENV)/.test
	FUNCOLLECT_SCALE=2 .ci/leaves_nothing.sh $(IN_PARALLEL) $(ALL) tests-portable
	$(MAKE) test-oldest test-newest test-gpu-machine
# The issues' full counts; the output is kept beside the benchmarks' results.
soak: $(VENV)/.test
	set -o pipefail; FUNCOLLECT_SCALE=10 PYTEST_ADDOPTS=-q $(IN_PARALLEL) $(PARTS) 2>&1 | tee benchmarks/results/soak.txt

$(PARTS) tests-notebooks: tests-%: $(VENV)/.test
	$(TESTS) $*
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The same tests with other versions, each set in an environment of its own.
test-newest: suite-newest suite-newest-torchrl
test-oldest test-gpu-machine: test-%: suite-%
suite-%: .venv-%/.done
	PYTHON=.venv-$*/bin/python .ci/tests.sh installed
.venv-%/.done: pyproject.toml constraints.txt .ci/lower_bounds.py .ci/versions.sh benchmarks/gpu/machine.txt
	.ci/versions.sh $*
.PRECIOUS: .venv-%/.done

# No broken link, no name without an entry. All is read anew, as warnings are of the pages that were read.
docs: $(VENV)/.test
	$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --fresh-env docs docs/_build/html
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000
# Runs the notebooks and keeps their pictures. Coalescing leaves the last state of each progress bar.
notebooks: NBCONVERT = SDL_VIDEODRIVER=dummy SDL_AUDIODRIVER=dummy $(BIN)/jupyter-nbconvert --to notebook --inplace notebooks/*.ipynb
notebooks: $(VENV)/.test
	$(NBCONVERT) --execute --ExecutePreprocessor.record_timing=False
	$(NBCONVERT) --coalesce-streams
# The repository's address wherever it stands: make address URL=https://github.com/somebody/funcollect
address:
	test -n "$(URL)"
	sed -i "s|$$(sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)|$(URL)|g" pyproject.toml CITATION.cff docs/start/install.md
# The packages that a release publishes, tried.
dist: $(VENV)/.core
	$(PIP_INSTALL) build
	PYTHON=$(CURDIR)/$(BIN)/python bash .ci/dist.sh
bench: $(VENV)/.test
	for name in imports memory overhead scale collect vector fused policies replay workers ray; do $(BIN)/python -m benchmarks $$name || exit 1; done
rllib: .venv-rllib/.done
# For a GPU machine without a package index: `gpu-kit` downloads the wheels to carry there, `gpu` runs there.
gpu-kit:
	bash benchmarks/gpu/kit.sh
gpu:
	bash benchmarks/gpu/run.sh
# The same on a CPU.
gpu-rehearsal: .venv-gpu-rehearsal/.done gpu-kit
	PYTHON=.venv-gpu-rehearsal/bin/python PLATFORM=cpu OUT=.cache/gpu bash benchmarks/gpu/run.sh
clean:
	rm -rf $(VENV) .venv-* .gpu-kit .gpu-site .cache
