# make        compiles every step
# make check  compiles the device code of every step, and the harness, but links nothing
# make run    checks and times them (needs a GPU); prints the table of the documentation
#
# ARCH is the GPU's architecture: sm_90a for H100 and H200, sm_80 for A100. A folder's Makefile sets UNIT, the unit of
# the rate that its main() prints, and includes this file.

SHELL := /bin/bash
NVCC ?= nvcc
ARCH ?= sm_90a
BUILD := ../../build/$(notdir $(CURDIR))
STEPS ?= $(sort $(basename $(wildcard step*.cu)))
HARNESS := ../steps_harness/harness
HARNESS_OBJECT := ../../build/steps_harness/harness.o

all: $(STEPS:%=$(BUILD)/%)

run: all
	@set -o pipefail; for step in $(STEPS); do $(BUILD)/$$step || exit 1; done | awk -F '\t' ' \
	  BEGIN { print "| step | us | $(UNIT) | x the step before | error |"; print "|---|---|---|---|---|" } \
	  { gain = NR > 1 ? sprintf("%.2f", last / $$2) : ""; last = $$2; \
	    printf "| %s | %s | %s | %s | %s |\n", $$1, $$2, $$3, gain, $$4; fflush() }'

COMPILE = mkdir -p $(@D) && $(NVCC) -std=c++20 -O3 -arch=$(ARCH) --expt-relaxed-constexpr -DGPTKERNELS_CUDA \
  -I../../csrc -I../steps_harness
HEADERS := $(wildcard *.h *.cuh ../../csrc/*.h ../../csrc/cuda/*.h ../../csrc/cuda/*/*.h ../../csrc/cuda/*/*.cuh)

$(BUILD)/%: %.cu $(BUILD)/problem.o $(HARNESS_OBJECT) $(HARNESS).h $(HEADERS)
	$(COMPILE) $< $(BUILD)/problem.o $(HARNESS_OBJECT) -o $@

$(BUILD)/problem.o: problem.cu problem.h $(HARNESS).h
	$(COMPILE) -c $< -o $@

$(HARNESS_OBJECT): $(HARNESS).cu $(HARNESS).h
	$(COMPILE) -c $< -o $@

check: $(STEPS:%=$(BUILD)/%.cubin) $(BUILD)/problem.o $(HARNESS_OBJECT)

$(BUILD)/%.cubin: %.cu $(HARNESS).h $(HEADERS)
	$(COMPILE) -cubin $< -o $@

.PHONY: all check run
