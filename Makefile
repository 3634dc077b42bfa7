# make train   set up everything on a bare machine, then run the main job
# make test    set up everything, then run the tests
# make build   set up everything      make lint, make format   check or set style (lint: types too)
# make clean   remove what was made here
#
# PYTHON, VENV, TORCH, EXTRAS, ARGS (of `fusedops train`), PYTEST_ARGS, WORKERS (test processes; one a core, but one alone
# where there is a GPU) can be given: make train ARGS="--steps 50".
# A torch >= 2.11 that PYTHON already has is used as it is, unless PYTHON is a virtual environment's own, which VENV can't
# see; else one is installed into VENV.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cli,test
ARGS ?=
PYTEST_ARGS ?=
# Threads that wait sleep: where other programs want the cores too, spinning ones make a run on a CPU many times as long.
export OMP_WAIT_POLICY ?= passive

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)
CPP = $(shell find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
# A build with other settings is another build.
BUILT := $(VENV)/built-$(or $(FUSEDOPS_CUDA),auto)-$(or $(FUSEDOPS_NATIVE),1)-$(or $(FUSEDOPS_WERROR),0)

HAS_TORCH = $(PYTHON) -c 'import sys, torch; \
	sys.exit(sys.prefix != sys.base_prefix or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
HAS_GPU = nvidia-smi -L >/dev/null 2>&1
CPU_TORCH := torch==2.13.0
CPU_TRITON := triton==3.7.1
CPU_INDEX := https://download.pytorch.org/whl/cpu
# The extra `lint`, without the package that it is an extra of: that would be compiled. Python 3.10 has no tomllib.
LINT_TOOLS = $(PY) -c 'from setuptools.config.pyprojecttoml import load_file; \
	print(*load_file("pyproject.toml")["project"]["optional-dependencies"]["lint"])'

.PHONY: build train test lint format clean

build: $(BUILT)

train: $(BUILT)
	$(VENV)/bin/fusedops train $(ARGS)

# By whole files: what a file's tests share is made once. With two threads each, so that work is cut between threads.
WORKERS ?= $(shell $(HAS_GPU) && echo 0 || echo auto)
PYTEST = $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# Triton reads TRITON_INTERPRET when it is imported, so its kernels need a process of their own to run on a CPU.
test: export OMP_NUM_THREADS ?= 2
test: $(BUILT)
	$(PYTEST)
	@if $(PY) -c 'import triton' 2>/dev/null; then set -x; \
		TRITON_INTERPRET=1 $(PYTEST) -k triton --device cpu --require triton; fi

lint: $(VENV)/lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/lint
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist *.egg-info fusedops/_build_info.py fusedops/*.so .pytest_cache .mypy_cache .ruff_cache

$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fusedops needs Python 3.10 or newer: make PYTHON=python3.12")'
	@echo "Setting up $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv $$($(HAS_TORCH) && echo --system-site-packages) $(VENV)
	@if [ -n "$(TORCH)" ]; then $(INSTALL) $(TORCH); \
	elif $(HAS_TORCH); then :; \
	elif $(HAS_GPU); then $(INSTALL) 'torch>=2.11'; \
	else \
		$(INSTALL) --retries 0 --timeout 10 --index-url $(CPU_INDEX) $(CPU_TORCH) 2>/dev/null || $(INSTALL) $(CPU_TORCH); \
		if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(INSTALL) $(CPU_TRITON); fi; \
	fi
	@$(INSTALL) 'setuptools>=77' wheel ninja pybind11 packaging
	@touch $@

# editable_mode=compat: a path, where the default is a finder, which a folder of the clone's name comes before.
$(BUILT): $(VENV)/torch $(SOURCES)
	@echo "Building fusedops"
	@if [ $(VENV)/installed -nt pyproject.toml ]; then $(PY) setup.py -q build_ext --inplace; \
	else $(INSTALL) --no-build-isolation -C editable_mode=compat -e '.[$(EXTRAS)]' && touch $(VENV)/installed; fi
	@$(PY) -m fusedops.cli report
	@rm -f $(VENV)/built-* && touch $@

$(VENV)/lint: $(VENV)/torch pyproject.toml
	@$(INSTALL) $$($(LINT_TOOLS))
	@touch $@
