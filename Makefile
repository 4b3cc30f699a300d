# make train   a GPT-2 learns on this machine, from nothing but Python >= 3.10, make and a C++20 compiler
# make test    every test           make bench   ours beside everybody else's kernels
# make lint    what CI demands      make format  mends what can be mended      make wheel   a wheel in dist/
# make fuzz    calls of every op, training steps and damaged files, drawn at random
# make test-capabilities   the ops' tests with each instruction set       make test-torches   all tests with each torch
#
# Everything is set up in .venv, with pinned versions. TORCH=installed uses the Python and the torch at hand instead (and
# installs nothing but this package). GPTKERNELS_CUDA=1 demands the CUDA library, 0 forbids it; by default it is built
# where there is a GPU to use it.

PYTHON ?= python3
TORCH ?= 2.13.0
DEVICE ?= $(if $(wildcard /dev/nvidia0),cuda,cpu)
export GPTKERNELS_CUDA ?= $(if $(wildcard /dev/nvidia0),auto,0)
ARGS ?=

ifeq ($(TORCH),installed)
  PY := $(PYTHON)
  STAMPS := build/installed
else
  PY := .venv/bin/python
  STAMPS := .venv
endif
PY_FROM_TESTS = $(if $(findstring /,$(PY)),$(abspath $(PY)),$(PY))
WORKERS = $(if $(filter cuda,$(DEVICE)),4,2)
SOURCES := $(shell find csrc ops cmake -type f) CMakeLists.txt setup.py pyproject.toml
BUILT := $(STAMPS)/built-$(GPTKERNELS_CUDA)

.PHONY: train test test-capabilities test-torches fuzz bench lint format wheel sanitize clean

train: $(BUILT)
	$(PY) -m gptkernels train $(ARGS)

# One OpenMP thread for each of pytest's workers: with more, they spin while they wait for each other.
test: $(BUILT) $(STAMPS)/test-tools
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(WORKERS) --dist loadgroup --device $(DEVICE) $(ARGS)

# With torch's CPU kernels and with ours for each instruction set that this processor has: all pairs. ARGS=--same runs
# fewer; other arguments are pytest's, in place of the ops' tests.
test-capabilities: $(BUILT) $(STAMPS)/test-tools
	$(PY) tests/capabilities.py $(ARGS)

# One and the same library under several releases of torch, each in an environment of its own. A release that is not here
# yet is downloaded, with gigabytes of CUDA libraries unless pip is told of an index of CPU builds (PIP_INDEX_URL).
TORCHES ?= 2.10.0 2.13.0 2.15.0
python_with = $(if $(filter $(TORCH),$(1)),$(PY),build/torches/$(1)/bin/python)

test-torches: $(BUILT) $(STAMPS)/test-tools $(foreach t,$(filter-out $(TORCH),$(TORCHES)),build/torches/$(t)/ready)
	@mkdir -p build/torches; status=0; \
	$(foreach t,$(TORCHES),PYTHONPATH=$(CURDIR)/python $(call python_with,$(t)) -m pytest -o addopts= --tb=short -n $(WORKERS) \
	  --dist loadgroup --device $(DEVICE) $(ARGS) > build/torches/$(t).log 2>&1 || status=1; \
	echo "torch $(t): $$(tail -n 1 build/torches/$(t).log)";) exit $$status

build/torches/%/ready: requirements/build.txt requirements/run.txt requirements/test.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==$* $(^:%=-r %)
	touch $@

# The same calls for the same SEED; each failure prints the command that repeats it. Each product has another shape, so
# that timing the algorithms for it would take most of the time; GPTKERNELS_MATMUL_CHOICES=<folder> has them timed.
CALLS ?= 100000
STEPS ?= 300
SEED ?= 1
JOBS ?= $(if $(filter cuda,$(DEVICE)),$(shell nproc),2)
fuzz: $(BUILT) $(STAMPS)/test-tools
	cd tests && GPTKERNELS_MATMUL_CHOICES=$${GPTKERNELS_MATMUL_CHOICES:-off} \
	  $(PY_FROM_TESTS) -m fuzz.ops --calls $(CALLS) --seed $(SEED) --jobs $(JOBS) --device $(DEVICE) $(ARGS)
	cd tests && $(PY_FROM_TESTS) -m fuzz.steps --steps $(STEPS) --seed $(SEED) --device $(DEVICE)
	cd tests && $(PY_FROM_TESTS) -m fuzz.files --calls $(CALLS) --seed $(SEED)

bench: $(BUILT)
	$(PY) -m benchmarks $(ARGS)

# Memory errors, races, misused barriers and uninitialised reads in the kernels (CUDA), on the tests' small shapes and on
# one for every place that a row is kept in; memory errors and barriers also with one more tile than multiprocessors. Of
# races and uninitialised reads only ours count: torch's own sums load values that they then leave out, before anything
# has written these.
SANITIZED_TESTS = (matches_float64 and 33) or (wherever and bfloat16) or long_sums
SANITIZED = $(PY) -m pytest --device cuda -m "not large" $(ARGS) -k

sanitize: $(BUILT) $(STAMPS)/test-tools
	for tool in memcheck synccheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
	  $(SANITIZED) "$(SANITIZED_TESTS) or one_more_tile" || exit 1; done
	for tool in racecheck initcheck; do \
	  compute-sanitizer --tool $$tool --print-limit 0 --log-file $(STAMPS)/$$tool.log \
	    $(SANITIZED) "$(SANITIZED_TESTS)" && \
	  ! grep "gptkernels::cuda" $(STAMPS)/$$tool.log || exit 1; done

lint: $(STAMPS)/lint-tools
	$(LINT_BIN)ruff check . && $(LINT_BIN)ruff format --check .
	$(LINT_BIN)clang-format --dry-run --Werror $(CXX_FILES)
	$(PY) -m mypy

format: $(STAMPS)/lint-tools
	$(LINT_BIN)ruff check --fix . ; $(LINT_BIN)ruff format .
	$(LINT_BIN)clang-format -i $(CXX_FILES)

wheel: $(STAMPS)/tools
	$(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf build dist python/gptkernels/lib python/*.egg-info

CXX_FILES = $(shell find csrc ops tests examples -regex '.*\.\(h\|cuh\|cpp\|cu\)' -not -path '*/build/*')
LINT_BIN = $(if $(filter installed,$(TORCH)),,.venv/bin/)

# ---- set-up ----------------------------------------------------------------------------------------------------------

.venv/tools: requirements/build.txt requirements/run.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet torch==$(TORCH)
	.venv/bin/pip install --quiet -r requirements/build.txt -r requirements/run.txt
	touch $@

.venv/test-tools .venv/lint-tools: .venv/%-tools: requirements/%.txt .venv/tools
	.venv/bin/pip install --quiet -r $<
	touch $@

build/installed/tools build/installed/test-tools build/installed/lint-tools:
	mkdir -p $(@D) && touch $@

# cuBLASLt's header, where the CUDA toolkit came without it.
$(STAMPS)/cublas: $(STAMPS)/tools
ifneq ($(GPTKERNELS_CUDA),0)
  ifneq ($(TORCH),installed)
	test -e "$$(dirname $$(readlink -f $$(command -v nvcc || echo /none)))/../include/cublasLt.h" \
	  || .venv/bin/pip install --quiet --no-deps nvidia-cublas==13.10.0.20
  endif
endif
	touch $@

$(BUILT): $(SOURCES) $(STAMPS)/cublas
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	rm -f $(STAMPS)/built-* && touch $@
