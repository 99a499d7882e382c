# Two commands are enough to start: `make demo` and `make test`. Everything here is a thin layer over
# the CMake presets (cmake --preset release; cmake --build --preset release; ctest --preset release).
.PHONY: help demo test bench gpu format format-check lint fuzz clean venv \
        dependencies mpi-dependencies nccl-dependencies lint-dependencies fuzz-dependencies \
        bench-dependencies
.DEFAULT_GOAL := help

# make test PRESET=dev: another preset; make test ARGS="-R Mesh": more arguments for ctest;
# make test TORCH=0: without PyTorch and its tests. PYTHON names another interpreter than python3.
PRESET ?= release
TORCH ?= 1
ARGS ?=
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
ANALYZER ?= shallow
INSTALL := sh cmake/install_dependencies.sh
# The tests build the library again as a wheel and as the other kind of library, in other folders.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
export CCACHE_NOHASHDIR ?= 1

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | \
	  awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: dependencies build/release/build.ninja  ## train on a 2x2 mesh of processes and prove every claim
	@cmake --build --preset release -j $(JOBS) --target examples/all hsdp/tools/all hsdp_python
	@examples/demo.sh build/release

test: WITH_TORCH = $(TORCH)
test: dependencies mpi-dependencies venv build/$(PRESET)/build.ninja  ## build everything and run all tests
	@cmake --build --preset $(PRESET) -j $(JOBS)
	@ctest --preset $(PRESET) $(if $(filter 0,$(TORCH)),-LE '^torch$$') $(ARGS)
	@[ "$(TORCH)" != 0 ] || echo "TORCH=0: PyTorch and the tests that need it were left out"

bench: bench-dependencies build/bench/build.ninja  ## measure against Open MPI, MPICH, Gloo and the roofline
	@cmake --build --preset bench -j $(JOBS)
	@python3 tests/bench/run.py --build build/bench --json build/bench/bench.json $(ARGS)

gpu:  ## check and measure this machine's GPU; needs CMake, nvcc and a C++ compiler
	@tests/gpu/run.sh

fuzz: fuzz-dependencies build/fuzz/build.ninja  ## feed hostile files to the snapshot reader for FUZZ_SECONDS
	@cmake --build --preset fuzz -j $(JOBS) --target snapshot_fuzzer
	@mkdir -p build/fuzz/corpus
	@$$(find build/fuzz/tests/fuzz -name snapshot_fuzzer -type f) -max_total_time=$(FUZZ_SECONDS) \
	  -print_final_stats=1 -artifact_prefix=build/fuzz/ build/fuzz/corpus

format: lint-dependencies  ## lay out all sources
	@$(SOURCES) | xargs -0 clang-format -i

format-check: lint-dependencies  ## fail when a source is laid out differently
	@$(SOURCES) | xargs -0 clang-format --dry-run -Werror

# -Wno-unknown-warning-option: the compile commands are those of the compiler that builds. The
# static analyzer takes half the time when it follows calls less far; make lint ANALYZER=deep: farther.
lint: format-check build/dev/build.ninja  ## layout, then clang-tidy
	@cd build/dev && run-clang-tidy -quiet -j $(JOBS) -p . \
	  -extra-arg=-Wno-unknown-warning-option -extra-arg=-Xclang -extra-arg=-analyzer-config \
	  -extra-arg=-Xclang -extra-arg=mode=$(ANALYZER) \
	  '^$(CURDIR)/(hsdp|zero|quant|examples)/' >tidy.log 2>&1 || \
	  { grep -E 'error:|warning:' -A4 tidy.log; exit 1; }
	@echo "clang-tidy: clean"

clean:  ## remove everything that was built
	rm -rf build

# Ninja configures again by itself when a CMake file changes.
build/%/build.ninja: | dependencies venv
	@mkdir -p build && cmake --preset $* >build/$*.log 2>&1 || { cat build/$*.log; exit 1; }

dependencies:
	@$(INSTALL) build
mpi-dependencies: dependencies
	@$(INSTALL) mpi
venv: dependencies
	@sh cmake/make_venv.sh build/venv $(or $(WITH_TORCH),0)
build/cuda/build.ninja: | nccl-dependencies
nccl-dependencies: venv
	@PYTHON=build/venv/bin/python sh cmake/install_nccl.sh build/nccl || echo "make: without NCCL's headers: no NCCL engine"
lint-dependencies: dependencies
	@$(INSTALL) lint
fuzz-dependencies: dependencies
	@$(INSTALL) fuzz
bench-dependencies: dependencies
	@$(INSTALL) bench

SOURCES = find hsdp zero quant bindings examples tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
  -type f -print0 2>/dev/null
