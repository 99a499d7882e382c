# Two commands are enough to start: `make demo` and `make test`. Everything here is a thin layer over
# the CMake presets (cmake --preset release; cmake --build --preset release; ctest --preset release).
.PHONY: help demo test build nightly mutants bench simulate gpu gpu-checks gpu-kit wheel docs format format-check lint fuzz clean \
        configure-again venv dependencies mpi-dependencies nccl-dependencies lint-dependencies clang-dependencies \
        bench-dependencies docs-dependencies
.DEFAULT_GOAL := help

# make test PRESET=dev: another preset; make test ARGS="-R Mesh": more arguments for ctest;
# make test TORCH=0: without PyTorch and its tests; make test TORCH_VERSION=2.9.1: only those, with another release
# of it, in an environment of its own; CMAKE_ARGS: more arguments for the configuration.
# PYTHON names another interpreter than python3; make wheel takes several.
PYTHON ?= python3
PRESET ?= release
TEST_PRESET ?= $(PRESET)
TORCH ?= 1
TORCH_VERSION ?=
ARGS ?=
CMAKE_ARGS ?=
TARGETS ?= all
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
INSTALL := sh cmake/install_dependencies.sh
# The same objects are built in several folders: for the wheel, for another linkage, with CUDA.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
export CCACHE_NOHASHDIR ?= 1
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
# By the files that were read: a precompiled header of what differs in comments alone would not do.
export CCACHE_DEPEND ?= 1
# Ranks wait for each other; those of torch take two places (tests/python/CMakeLists.txt).
TEST_JOBS ?= $(shell expr $(JOBS) \* 5 / 2)
# ThreadSanitizer cannot place its shadow memory under every kernel's address randomization.
RUN_TESTS = $(if $(filter tsan%,$(PRESET)),$(shell setarch -R true 2>/dev/null && echo setarch -R))
OTHER_TORCH = $(CURDIR)/build/venv-torch-$(TORCH_VERSION)
RESULTS = $(CURDIR)/build/$(PRESET)/tests.xml

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | \
	  awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: dependencies build/release/build.ninja  ## train on a 2x2 mesh of processes and prove every claim
	@cmake --build --preset release -j $(JOBS) --target examples/all hsdp/tools/all hsdp_python
	@examples/demo.sh build/release

build: dependencies build/$(PRESET)/build.ninja  ## build everything that PRESET has, or TARGETS of it
	@cmake --build --preset $(PRESET) -j $(JOBS) --target $(TARGETS)

test: WITH_TORCH = $(if $(TORCH_VERSION),0,$(TORCH))
test: dependencies mpi-dependencies venv build  ## build everything and run all tests
	@$(if $(TORCH_VERSION),sh cmake/make_venv.sh $(OTHER_TORCH) $(TORCH_VERSION))
	@rm -f $(RESULTS); $(if $(TORCH_VERSION),HSDP_PYTHON=$(OTHER_TORCH)/bin/python) $(RUN_TESTS) \
	  ctest --preset $(TEST_PRESET) -j $(TEST_JOBS) --output-junit $(RESULTS) \
	  $(if $(TORCH_VERSION),-L '^torch$$') $(if $(filter 0,$(TORCH)),-LE '^torch$$') $(ARGS); status=$$?; \
	  [ "$(TORCH)" != 0 ] || echo "TORCH=0: PyTorch and the tests that need it were left out"; \
	  python3 tests/count_cases.py $(RESULTS) || [ $$status -ne 0 ] || status=1; exit $$status

nightly:  ## what takes too long for every change: all sources linted, all tests sanitized, long runs
	@.ci/nightly

mutants: WITH_TORCH = $(TORCH)
mutants: dependencies mpi-dependencies venv  ## plant faults in the product and tell which no test sees
	@build/venv/bin/python -B tests/mutants/run.py $(ARGS)

bench: bench-dependencies build/bench/build.ninja  ## measure against Intel MPI, Open MPI, MPICH, Gloo and the roofline
	@cmake --build --preset bench -j $(JOBS)
	@python3 tests/bench/run.py --build build/bench --json build/bench/bench.json \
	  --markdown build/bench/bench.md $(ARGS)

simulate: TARGETS = simulate_control
simulate: build  ## run the control plane of many hosts in virtual time: ARGS="--hosts 512 --ranks-per-host 8"
	@build/$(PRESET)/tests/simulate/simulate_control $(ARGS)

gpu:  ## check and measure this machine's GPUs and write a report; docs/gpu_checks.md says what it takes
	@$(PYTHON) tests/gpu/run.py $(ARGS)

gpu-checks: dependencies nccl-dependencies  ## build what `gpu` runs, in the project of its own that it builds
	@cmake -S tests/gpu -B build/gpu-checks -DCMAKE_BUILD_TYPE=Release -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
	@cmake --build build/gpu-checks -j $(JOBS) && ctest --test-dir build/gpu-checks --output-on-failure

gpu-kit: dependencies venv nccl-dependencies  ## pack what `gpu` needs for a machine without compilers and network
	@build/venv/bin/python tests/gpu/make_kit.py $(ARGS)

wheel: dependencies  ## make a wheel of PYTHON with its libraries inside, and try it without compilers
	@sh cmake/make_wheel.sh build/wheels $(PYTHON)

docs: WITH_DOCS = 1
docs: docs-dependencies venv  ## build the documentation site, strictly: no link leads nowhere
	@NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 build/venv/bin/mkdocs build --strict
	@echo "make: built the site; to read it, open build/site/index.html in a browser"

fuzz: build/asan/build.ninja  ## feed hostile files to the snapshot reader, and messages to the control plane, for FUZZ_SECONDS each
	@cmake --build --preset asan -j $(JOBS) --target snapshot_fuzzer control_fuzzer
	@mkdir -p build/asan/corpus build/asan/control_corpus
	@build/asan/tests/fuzz/snapshot_fuzzer -max_total_time=$(FUZZ_SECONDS) \
	  -print_final_stats=1 -artifact_prefix=build/asan/ build/asan/corpus
	@build/asan/tests/fuzz/control_fuzzer -max_total_time=$(FUZZ_SECONDS) \
	  -print_final_stats=1 -artifact_prefix=build/asan/ build/asan/control_corpus

format: lint-dependencies  ## lay out all sources
	@$(SOURCES) | xargs -0 clang-format -i

format-check: lint-dependencies  ## fail when a source is laid out differently
	@$(SOURCES) | xargs -0 clang-format --dry-run -Werror

# The preset dev compiles source by source, as clang-tidy looks at them.
lint: format-check build/dev/build.ninja  ## layout, then clang-tidy of what changed; TIDY=--all: of everything
	@python3 cmake/clang_tidy.py build/dev $(JOBS) $(TIDY)

clean:  ## remove everything that was built
	rm -rf build

# Ninja configures again by itself when a CMake file changes, but does not know of other CMAKE_ARGS.
configure-again:
build/%/build.ninja: $(if $(CMAKE_ARGS),configure-again) | dependencies venv
	@mkdir -p build && cmake --preset $* $(CMAKE_ARGS) >build/$*.log 2>&1 || { cat build/$*.log; exit 1; }

dependencies:
	@$(INSTALL) build
mpi-dependencies: dependencies
	@$(INSTALL) mpi
venv: dependencies
	@sh cmake/make_venv.sh build/venv $(or $(WITH_TORCH),0) $(or $(WITH_DOCS),0)
build/cuda/build.ninja: | nccl-dependencies
build/asan/build.ninja build/asan-all/build.ninja: | clang-dependencies
nccl-dependencies: venv
	@PYTHON=build/venv/bin/python sh cmake/install_nccl.sh build/nccl || echo "make: without NCCL's headers: no NCCL engine"
lint-dependencies: dependencies
	@$(INSTALL) lint
docs-dependencies: dependencies
	@$(INSTALL) docs
clang-dependencies: dependencies
	@$(INSTALL) clang
bench-dependencies: dependencies venv
	@$(INSTALL) bench
	@PYTHON=build/venv/bin/python sh cmake/install_impi.sh build/impi || echo "make: without Intel MPI, the fastest peer"

SOURCES = find hsdp zero quant bindings examples tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
  -type f -print0 2>/dev/null
