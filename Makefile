# make train   a GPT-2 learns on this machine, from nothing but Python >= 3.10, make and a C++20 compiler
# make test    every test           make bench   ours beside everybody else's kernels
# make lint    what CI demands      make format  mends what can be mended      make wheel   a wheel in dist/
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
SOURCES := $(wildcard csrc/*.h csrc/*/*.* csrc/*/*/*.* ops/* cmake/*) CMakeLists.txt setup.py pyproject.toml
BUILT := $(STAMPS)/built-$(GPTKERNELS_CUDA)

.PHONY: train test bench lint format wheel sanitize clean

train: $(BUILT)
	$(PY) -m gptkernels train $(ARGS)

test: $(BUILT) $(STAMPS)/test-tools
	$(PY) -m pytest -n $(if $(filter cuda,$(DEVICE)),4,2) --dist loadgroup --device $(DEVICE) $(ARGS)

bench: $(BUILT)
	$(PY) -m benchmarks $(ARGS)

# Memory errors, races, misused barriers and uninitialised reads in the kernels (CUDA), on the tests' small shapes and on
# one for every place that a row is kept in. Of races and uninitialised reads only ours count: torch's own sums load
# values that they then leave out, before anything has written these.
SANITIZED = $(PY) -m pytest --device cuda -m "not large" \
  -k "(matches_float64 and 33) or (wherever and bfloat16) or long_sums" $(ARGS)

sanitize: $(BUILT) $(STAMPS)/test-tools
	for tool in memcheck synccheck; do compute-sanitizer --tool $$tool --error-exitcode 1 $(SANITIZED) || exit 1; done
	for tool in racecheck initcheck; do \
	  compute-sanitizer --tool $$tool --print-limit 0 --log-file $(STAMPS)/$$tool.log $(SANITIZED) && \
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

CXX_FILES = $(wildcard csrc/*.h csrc/*/*.* csrc/*/*/*.* ops/*.h ops/*.cpp tests/*.cpp examples/*/*.cu examples/*/*.h examples/*/*.cuh)
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
