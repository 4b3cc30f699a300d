# make train                trains a small GPT-2; needs Python >= 3.10, make and a C++20 compiler. In a fresh clone, with
#                           two CPU cores, this takes four minutes, three of them for installing and compiling
# make test                 runs every test: about ten minutes on two CPU cores
# make bench                times the ops of this package and of other libraries
# make lint, make format    check the style, as CI does; correct it
# make wheel                writes a wheel into dist/, with the tag of the oldest glibc that it works with, or with
#                           PLAT=manylinux_2_28_x86_64, which fails where the compiler's glibc is newer
# make sdist                writes a source distribution into dist/
# make docs                 renders the documentation into build/docs; needs Python >= 3.11
# make docs-links           checks the links to other sites
# make fuzz                 runs random calls of every op, training steps, and reads of damaged files
# make test-capabilities    runs the ops' tests with each instruction set of the CPU
# make test-torches         runs all tests with several releases of torch
# make sanitize             runs compute-sanitizer on tests of the CUDA kernels
#
# The environment .venv is created with pinned versions. TORCH=installed uses the current Python and its torch instead,
# and installs nothing but this package. GPTKERNELS_CUDA=1 requires the CUDA library, 0 omits it. By default it is built
# if the machine has a GPU. A wheel has it if nvcc is found. CUDACXX names the nvcc of another toolkit than the one on
# PATH. With TORCH=installed, `make wheel` needs requirements/wheel.txt.

PYTHON ?= python3
TORCH ?= 2.13.0
PLAT ?= auto
DEVICE ?= $(if $(wildcard /dev/nvidia0),cuda,cpu)
WHEEL_CUDA := $(or $(GPTKERNELS_CUDA),auto)
wheel: GPTKERNELS_CUDA := $(WHEEL_CUDA)
wheel: export TORCH_CUDA_ARCH_LIST := $(or $(TORCH_CUDA_ARCH_LIST),8.0 8.6 8.9 9.0a 10.0+PTX 12.0)
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

.PHONY: train test test-capabilities test-torches fuzz bench lint format docs docs-links wheel sdist sanitize clean

train: $(BUILT)
	$(PY) -m gptkernels train $(ARGS)

# Each of pytest's workers has one OpenMP thread. More threads would slow down the workers, because OpenMP threads spin
# while they wait for each other.
test: $(BUILT) $(STAMPS)/test-tools
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(WORKERS) --dist loadgroup --device=$(DEVICE) $(ARGS)

# Runs the ops' tests once for each pair of an instruction set for torch's CPU kernels and an instruction set for this
# package's CPU kernels. ARGS=--same runs only equal pairs. Other arguments replace the ops' tests in pytest's command
# line.
test-capabilities: $(BUILT) $(STAMPS)/test-tools
	$(PY) tests/capabilities.py $(ARGS)

# Tests the same library with several releases of torch, each in its own environment. A release that is not installed
# yet is downloaded, with gigabytes of CUDA libraries, unless PIP_INDEX_URL names an index of CPU builds.
TORCHES ?= 2.10.0 2.13.0 2.15.0
python_with = $(if $(filter $(TORCH),$(1)),$(PY),build/torches/$(1)/bin/python)

test-torches: $(BUILT) $(STAMPS)/test-tools $(foreach t,$(filter-out $(TORCH),$(TORCHES)),build/torches/$(t)/ready)
	@mkdir -p build/torches; status=0; \
	$(foreach t,$(TORCHES),PYTHONPATH=$(CURDIR)/python $(call python_with,$(t)) -m pytest -o addopts= --tb=short -n $(WORKERS) \
	  --dist loadgroup --device=$(DEVICE) $(ARGS) > build/torches/$(t).log 2>&1 || status=1; \
	echo "torch $(t): $$(tail -n 1 build/torches/$(t).log)";) exit $$status

build/torches/%/ready: requirements/build.txt requirements/run.txt requirements/test.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install torch==$* $(^:%=-r %)
	touch $@

# A SEED always gives the same calls. For each failure the command that repeats it is printed. The timing of float8
# matmuls' algorithms is off, because each matmul has another shape and timing would take most of the time.
# GPTKERNELS_MATMUL_CHOICES=<folder> enables it.
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

# Searches the CUDA kernels for memory errors, races, misused barriers and reads of uninitialised memory. The tests have
# small shapes, and one shape for each kind of memory in which a kernel keeps a row. memcheck and synccheck also run a
# test with one more tile than SMs. All tools but synccheck run without torch's caching allocator: in its blocks of 2
# MB, an access beyond a tensor's end would be valid, and reused memory would count as initialised. synccheck checks
# only this package's kernels, because some float8 matmuls of cuBLASLt do not end under it. It also omits the rows of
# 600000 elements, for which its report is wrong (docs/notes/softmax.md). racecheck and initcheck fail only for reports
# about this package's kernels, because torch's sums load uninitialised values and ignore them. Reports about
# attention's wgmma kernels are ignored, because racecheck does not follow mbarriers, and initcheck does not follow
# stores by TMA (docs/notes/attention.md).
SANITIZED_TESTS = (matches_float64 and 33) or (each_kind_of_memory and bfloat16) or long_sums
SANITIZED = $(PY) -m pytest --device=cuda -m "not large" $(ARGS) -k

sanitize: $(BUILT) $(STAMPS)/test-tools
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(SANITIZED) "$(SANITIZED_TESTS) or one_more_tile"
	compute-sanitizer --tool synccheck --error-exitcode 1 --kernel-name kns=gptkernels \
	  $(SANITIZED) "($(SANITIZED_TESTS) or one_more_tile) and not 600000"
	for tool in racecheck initcheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --print-limit 0 --log-file $(STAMPS)/$$tool.log \
	    $(SANITIZED) "$(SANITIZED_TESTS)" && \
	  ! grep "gptkernels::cuda" $(STAMPS)/$$tool.log | grep -v "attention_[a-z0-9_]*_wgmma_kernel" || exit 1; done

lint: $(STAMPS)/lint-tools
	$(LINT_BIN)ruff check . && $(LINT_BIN)ruff format --check .
	$(LINT_BIN)clang-format --dry-run --Werror $(CXX_FILES)
	$(PY) -m mypy

format: $(STAMPS)/lint-tools
	$(LINT_BIN)ruff check --fix . ; $(LINT_BIN)ruff format .
	$(LINT_BIN)clang-format -i $(CXX_FILES)

docs: BUILDER = html
docs-links: BUILDER = linkcheck
docs docs-links: $(BUILT) $(STAMPS)/docs-tools
	$(PY) -m sphinx -b $(BUILDER) -E -q -W --keep-going docs build/$@

# Two wheels of a commit have the same bytes if the checkouts are in the same folder (nvcc puts hashes of the sources'
# paths into kernels' names), the compilers are the same, and the umask is.
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(if $(filter 0,$(WHEEL_CUDA)),,$(STAMPS)/cublas) $(STAMPS)/wheel-tools
	rm -rf build/wheel
	$(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(dir $(PY)):$$PATH" $(PY) -m auditwheel repair --plat $(PLAT) --exclude "libtorch*.so" --wheel-dir dist \
	  build/wheel/*.whl

sdist: $(STAMPS)/tools
	$(PY) setup.py -q sdist

clean:
	rm -rf build dist python/gptkernels/lib python/*.egg-info

CXX_FILES = $(shell find csrc ops tests examples -regex '.*\.\(h\|cuh\|cpp\|cu\)' -not -path '*/build/*')
LINT_BIN = $(if $(filter installed,$(TORCH)),,.venv/bin/)

# ---- the environment -------------------------------------------------------------------------------------------------

# --no-compile: Python compiles a module when it first imports it. Compiling all modules of torch would take longer
# than the rest of the installation. With PYTHONDONTWRITEBYTECODE, which many containers set, each process of the tests
# would compile them again.
PIP_INSTALL = .venv/bin/pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE

# Without a GPU, torch is installed in its CPU build, which saves gigabytes, unless pip is configured with an index.
CPU_TORCH_INDEX = https://download.pytorch.org/whl/cpu
.venv/tools: requirements/build.txt requirements/run.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch==$(TORCH) $(if $(wildcard /dev/nvidia0),,\
	  $$(.venv/bin/pip config list | grep -q index-url || echo --extra-index-url $(CPU_TORCH_INDEX)))
	$(PIP_INSTALL) -r requirements/build.txt -r requirements/run.txt
	touch $@

.venv/test-tools .venv/lint-tools .venv/wheel-tools .venv/docs-tools: .venv/%-tools: requirements/%.txt .venv/tools
	$(PIP_INSTALL) -r $<
	touch $@

build/installed/tools $(foreach t,test lint wheel docs,build/installed/$(t)-tools):
	mkdir -p $(@D) && touch $@

# Installs cuBLASLt's header if the CUDA toolkit has none.
$(STAMPS)/cublas: $(STAMPS)/tools
ifneq ($(TORCH),installed)
	nvcc=$$(command -v $${CUDACXX:-nvcc}) || exit 0; \
	test -e "$$(dirname $$(readlink -f $$nvcc))/../include/cublasLt.h" \
	  || $(PIP_INSTALL) --no-deps nvidia-cublas==13.10.0.20
endif
	touch $@

$(BUILT): $(SOURCES) $(STAMPS)/tools $(if $(filter 0,$(GPTKERNELS_CUDA)),,$(STAMPS)/cublas)
	@echo "Compiling: two minutes on two CPU cores, and several more for CUDA."
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	rm -f $(STAMPS)/built-* && touch $@
