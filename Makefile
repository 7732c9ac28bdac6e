# Everything here works in .venv, which the first target makes; a second run installs nothing.
# make PYTHON=python3.12 ...            choose the interpreter of a new .venv
# make PIP_ARGS="--index-url ..." ...   passed to every pip install
# make WERROR=1 ...                     the native core compiles without a warning, or not at all
# make test PYTEST_ARGS="-k mask -x"    passed to pytest; with files of tests/, only these run

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
WERROR ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
BUILD_INPUTS := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/*/*.*)

# pip builds the package in an environment of its own, which -c does not reach: up to pip 25.2 it reads the first of
# these, later the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Tests start hundreds of processes, which import the same files: bytecode is written and read.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-variants test-amx test-asan test-core test-tsan test-aarch64 test-windows test-gpu wheels lint bench bench-gpu docs clean
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.extra-demo ## install what the main job needs and run it
	$(BIN)/fusion-attention demo

# Triton's interpreter and its compiler cannot live in one process, so there are two: $(call both,options). Files that
# PYTEST_ARGS names go to the one that they belong to; without any, an option may leave one of them nothing to do (5).
# The whole suite keeps every core busy, so threads that wait must not spin; a file or two would spend more on starting
# another process than they take.
FILES := $(filter tests%,$(PYTEST_ARGS))
OPTIONS := $(filter-out tests%,$(PYTEST_ARGS))
IN_SUITE := $(filter-out tests/kernels%,$(FILES))
IN_KERNELS := $(filter tests/kernels%,$(FILES))
WORKERS := $(if $(FILES),,-n auto --dist worksteal)
define both
	$(if $(or $(IN_SUITE),$(if $(FILES),,all)),OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(WORKERS) $(1) $(OPTIONS) $(IN_SUITE))
	$(if $(or $(IN_KERNELS),$(if $(FILES),,all)),TRITON_INTERPRET=1 OMP_WAIT_POLICY=passive \
	  $(BIN)/python -m pytest $(WORKERS) $(1) $(OPTIONS) \
	  $(or $(IN_KERNELS),tests/kernels) || test $$? -eq 5)
endef

test: $(VENV)/.extra-test $(VENV)/.extra-demo ## the everyday test suite
	$(call both)

# FUSION_ATTENTION_CPU caps the processor; the strongest instruction set is `make test`'s.
VARIANTS = $(shell $(BIN)/python -c "from fusion_attention import _native; f = _native.cpu_features(); print(*(n for n in f['runnable'] if n != f['chosen']))")
VARIANT_TESTS ?= tests/training tests/inference tests/sparse tests/native tests/integrations tests/cli/test_doctor.py
test-variants: $(VENV)/.extra-test $(VENV)/.extra-demo ## what ends in the native core, on each weaker instruction set of this machine
	for name in $(VARIANTS); do \
	  FUSION_ATTENTION_CPU=$$name OMP_WAIT_POLICY=passive \
	  $(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS) $(VARIANT_TESTS) || exit 1; done

# The model of tiles is no part of the module that is installed: a build of its own has it.
AMX := $(VENV)-amx
AMX_TESTS ?= tests/native tests/training tests/sparse
test-amx: $(BUILD_INPUTS) ## the kernels for AMX, over a model of its tiles that any x86-64 runs
	test -d $(AMX) || $(PYTHON) -m venv $(AMX)
	$(subst $(VENV)/,$(AMX)/,$(PIP_INSTALL)) --config-settings=cmake.define.FUSION_AMX_MODEL=ON ".[test]"
	FUSION_ATTENTION_CPU=amx_model OMP_WAIT_POLICY=passive \
	  $(AMX)/bin/python -m pytest -p no:cacheprovider -n auto --dist worksteal $(OPTIONS) $(AMX_TESTS)

# What a kernel takes depends on the compiler: each Triton of which something is recorded, in a folder of its own, which
# the pins do not reach.
TRITONS := $(patsubst tests/support/resources/%.json,build/triton/%,$(wildcard tests/support/resources/[0-9]*.json))
OTHER_TRITONS := $(filter-out build/triton/$(shell sed -n 's/^triton==//p' constraints.txt),$(TRITONS))

build/triton/%:
	PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps $(PIP_ARGS) --target $@ triton==$*

test-all: $(VENV)/.extra-test $(VENV)/.extra-demo $(OTHER_TRITONS) ## the suite with its slow tests, the other instruction sets, and the mutants that tests must catch
	$(call both,-m "")
	$(foreach folder,$(OTHER_TRITONS),PYTHONPATH=$(folder) $(BIN)/python -m pytest -n auto -m "" tests/backends/test_triton_ahead.py && ) true
	$(MAKE) test-variants test-amx $(if $(WINE),test-windows)
	$(BIN)/python tests/repository/mutants.py

# Both take a Python with torch (CUDA) and triton as it is; the package's sources, nothing built: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= python3

test-gpu: ## the cases on a real GPU
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu $(PYTEST_ARGS)

bench-gpu: ## the kernels beside torch's on a real GPU; writes build/gpu/figures.json and .png
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu

ASAN := .venv-asan
# The sanitizers' libraries must be there before Python's own; leaks are Python's and torch's, which free nothing at exit;
# a test asks for more memory than there is, and wants MemoryError. A report is written past Python: nothing catches it.
# One test reads the loops of the object, into which the sanitizers write calls.
test-asan: $(BUILD_INPUTS) ## the native core's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	test -d $(ASAN) || $(PYTHON) -m venv $(ASAN)
	$(subst $(VENV)/,$(ASAN)/,$(PIP_INSTALL)) --config-settings=cmake.define.FUSION_SANITIZE=ON ".[test]"
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  $(ASAN)/bin/python -m pytest -p no:cacheprovider --capture=sys tests/native tests/training/test_gradients_of_wrong_statistics.py \
	  tests/backends/test_cpu_backend.py --deselect tests/native/test_amx_instructions.py::test_amx_code_multiplies_tiles_without_extra_tile_loads_or_stores \
	  $(PYTEST_ARGS)

CORE_TEST := cmake -DFUSION_CORE_TEST=ON -DFUSION_SCHEDULE_TEST=ON -DFUSION_WERROR=ON -DCMAKE_BUILD_TYPE=Release -S .
test-core: ## the native core against naive loops, without Python: every instruction set of this machine
	$(CORE_TEST) -B build/core
	cmake --build build/core --parallel
	build/core/core_test
	$(if $(filter x86_64,$(shell uname -m)),FUSION_ATTENTION_CPU=amx_model build/core/core_test amx_model)
	build/core/schedule_test

# Threads of the standard library's: for ThreadSanitizer every barrier of OpenMP's is a race. A test asks for more memory
# than there is. Where it ends with "unexpected memory mapping": setarch -R make test-tsan
test-tsan: ## the same test of the base instruction set under ThreadSanitizer
	$(CORE_TEST) -B build/tsan -DFUSION_SCHEDULE_TEST=OFF -DFUSION_STD_THREADS=ON -DFUSION_TSAN=ON
	cmake --build build/tsan --parallel
	TSAN_OPTIONS=allocator_may_return_null=1 build/tsan/core_test

# Three processors: without dot products, with those of bytes, with bfloat16 too. Each must choose its own variant, and
# tests that one.
test-aarch64: ## the same test, compiled for aarch64 and run by qemu as three processors
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { echo >&2 \
	  "make test-aarch64: needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	$(CORE_TEST) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build build/aarch64 --parallel
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu cortex-a72 build/aarch64/core_test base
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu neoverse-n1 build/aarch64/core_test asimddp
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/aarch64/core_test asimddp+bf16

# Where wine is, test-all has it too. Windows is not asked for tile registers: no variant for AMX is built.
WINE := $(shell command -v wine)
test-windows: $(VENV)/.extra-cross ## the same test, compiled for Windows and run by wine: every instruction set of this machine
	@test -n "$(WINE)" || { echo >&2 "make test-windows: needs Windows' functions: apt-get install wine64"; exit 1; }
	$(CORE_TEST) -B build/windows -DFUSION_SCHEDULE_TEST=OFF -DFUSION_AMX_MODEL=OFF \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/release/zig.cmake -DFUSION_TARGET=x86_64-windows-gnu \
	  -DFUSION_PYTHON=$(CURDIR)/$(BIN)/python
	cmake --build build/windows --parallel
	WINEDEBUG=-all wine build/windows/core_test.exe

# Each of 3.10, 3.11, and 3.12 or later, by name or path; one that is tested gets torch by PIP_ARGS.
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12
WHEEL_TESTS ?= $(PYTHON)
wheels: $(VENV)/.extra-release ## wheels for Linux, macOS and Windows, checked, into dist/ (docs/dev/release.md)
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo >&2 \
	  "make wheels: needs a cross compiler: apt-get install g++-aarch64-linux-gnu"; exit 1; }
	$(BIN)/python release/wheels.py --pythons $(WHEEL_PYTHONS) --test $(WHEEL_TESTS) --pip="$(PIP_ARGS)"

NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h tests/native/*.cpp tests/native/*.h \
  tests/native/schedule/*.cpp tests/native/schedule/*.h tests/native/schedule/plan/*.h examples/capi/*.c \
  examples/capi/*.h src/fusion_attention/capi/include/acl/*.h src/fusion_attention/capi/include/aclnn/*.h \
  src/fusion_attention/capi/include/aclnn/opdev/*.h src/fusion_attention/npu/device/cpp/*.*)
# The core without the way from Python, and headers of kernels as the base variant includes them: no build is needed,
# as it is for the definitions that operators.cpp includes, nor headers of another system.
UNTIDIED := csrc/capi/operators.cpp csrc/system_macos.cpp csrc/system_windows.cpp
TIDIED := $(filter-out $(UNTIDIED), $(wildcard csrc/*.cpp csrc/plan/*.cpp csrc/capi/*.cpp tests/native/*.cpp \
  tests/native/schedule/*.cpp))
AS_BASE := -std=c++20 -Icsrc -Isrc/fusion_attention/capi/include -Wall -Wextra -DFUSION_VARIANT_ENTRY=fusion_variant_base

# The device npu is compiled against torch, which is there.
DEVICE := src/fusion_attention/npu/device/cpp
TORCH_HEADERS = $(shell $(BIN)/python -c "from importlib.util import find_spec as f; print(f('torch').submodule_search_locations[0])")/include
AS_DEVICE = -std=c++20 -I$(DEVICE) -isystem $(TORCH_HEADERS) -isystem $(TORCH_HEADERS)/torch/csrc/api/include

lint: $(VENV)/.extra-lint ## style, format, types (two checkers)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/clang-tidy --quiet $(TIDIED) -- $(AS_BASE)
	$(BIN)/clang-tidy --quiet $(wildcard $(DEVICE)/*.cpp) -- $(AS_DEVICE)
	$(BIN)/python -m mypy
	$(BIN)/python -m basedpyright

bench: $(VENV)/.extra-bench $(VENV)/.extra-demo ## the benchmarks
	$(BIN)/python -m benchmarks

docs: $(VENV)/.extra-docs $(VENV)/.extra-demo ## write the stub, the C headers and README's picture from the records, build the site into site/
	$(BIN)/python -m codegen
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## remove what builds, tests and checks left behind (not .venv)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The package itself: editable, so Python sources are used in place; a change of the native core or of the pins
# installs it again.
$(VENV)/.installed: $(BUILD_INPUTS) | $(VENV)/.made
	@echo "Installing fusion_attention into $(VENV) (builds the native core; the first time also fetches torch) ..."
	$(PIP_INSTALL) $(if $(WERROR),--config-settings=cmake.define.FUSION_WERROR=ON) --editable .
	@touch $@

# An extra's packages alone: the installed package already satisfies its own name, so nothing is built twice.
$(VENV)/.extra-%: $(VENV)/.installed
	@echo "Installing the packages of the extra '$*' ..."
	$(PIP_INSTALL) "fusion-attention[$*]"
	@touch $@
