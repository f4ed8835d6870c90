# Run `make` for the list of targets. On Debian, root gets the few system packages that are missing; others are told.
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
CMAKE := $(BIN)/cmake -G Ninja -S .
SOURCES := $(shell find CMakeLists.txt pyproject.toml cmake include src python -type f -not -name '*.pyc')

.PHONY: help setup demo example test test-cpp test-python test-neon bench lint docs clean
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

demo: .venv/.package  ## pre-train a small GPT with every optimizer on four ranks; results in results/demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 recipes/pretrain_gpt.py \
	  --optimizer all --output results/demo

example: build-cpp  ## train a classifier in C++ on four MPI ranks
	$(BIN)/mpiexec -n 4 build/cpp/examples/mpi_digits

test: test-cpp test-python  ## all tests

test-cpp: build-cpp  ## the tests of the C++ library
	$(BIN)/ctest --test-dir build/cpp --output-on-failure --no-tests=error --parallel $(JOBS)

test-python: .venv/.package  ## the tests of the Python package
	$(BIN)/python -m pytest tests

test-neon: .venv/.requirements  ## the kernels' tests on an emulated Arm processor
	@$(call need,command -v aarch64-linux-gnu-g++,g++-aarch64-linux-gnu) $(call need,command -v qemu-aarch64,qemu-user) $(install)
	$(CMAKE) -B build/neon --toolchain cmake/aarch64-linux-gnu.cmake -DZEROONE_TESTS=ON -DZEROONE_MPI=OFF
	$(BIN)/cmake --build build/neon --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/neon --output-on-failure --no-tests=error -R "Kernels|Wire|no_|registers"

bench: .venv/.package  ## speed of the kernels, and of a step against torch's AdamW
	$(CMAKE) -B build/bench -DZEROONE_BENCHMARKS=ON
	$(BIN)/cmake --build build/bench --parallel $(JOBS)
	build/bench/benchmarks/kernels_benchmark
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py

lint: .venv/.requirements  ## formatting, likely mistakes, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/.package  ## the parts of docs/ that are made from the code
	$(BIN)/python docs/generate.py

clean:  ## remove everything that was built, but not .venv
	rm -rf build .deps .venv/.package

.PHONY: build-cpp
build-cpp: .venv/.requirements
	$(CMAKE) -B build/cpp -DZEROONE_TESTS=ON -DZEROONE_EXAMPLES=ON -DCMAKE_REQUIRE_FIND_PACKAGE_MPI=ON \
	  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
	$(BIN)/cmake --build build/cpp --parallel $(JOBS)

setup: .venv/.package  ## .venv with the package and all tools

.venv/.package: .venv/.requirements $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps \
	  --force-reinstall .
	@touch $@

.venv/.requirements: requirements/dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	@touch $@

$(BIN)/python:
	@$(call need,command -v c++,g++) \
	$(call need,$(PYTHON) -c 'import ensurepip',python3-venv) \
	$(call need,$(PYTHON) -c '$(find-headers)',python3-dev) \
	$(install)
	$(PYTHON) -m venv .venv

# $(call need,TEST,PACKAGE)...  $(install): installs the Debian packages whose test fails.
need = $(1) >/dev/null 2>&1 || missing="$$missing $(2)";
install = [ -z "$$missing" ] || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends $$missing; \
	  else \
	    echo "Run this first: sudo apt-get install$$missing" >&2; exit 1; \
	  fi; }
find-headers = import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")
