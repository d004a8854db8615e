# `make demo` and `make test` need Python >= 3.11, make and a package registry; nothing else.

PYTHON ?= python3
VENV   ?= .venv
# Number of parallel test processes.
N      ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --constraint constraints.txt
LOCK := pyproject.toml constraints.txt

.PHONY: help venv demo test check format format-check lint types layers slow oldest clients integrations soak gpu sanitize bench site clean

help:
	@echo "make demo     evaluate a bundled environment with a fake model behind a flaky server and with a real one; then train a tiny one"
	@echo "make test     the tests, the doctests, and every python block of the docs"
	@echo "make check    everything that must pass: format, lint, types, layers, tests"
	@echo "make format   format the code and sort imports"
	@echo "make slow     the slow tests (make soak: the long ones under load)"
	@echo "make oldest   tests of the core with the oldest packages that pyproject.toml allows (needs a package registry)"
	@echo "make gpu      the tests that need a CUDA device"
	@echo "make sanitize the tests of the C code, compiled with AddressSanitizer and UBSan"
	@echo "make integrations  our environments in third-party trainers: the real packages, each in its own virtual environment"
	@echo "make clients  third-party clients against vf serve, each in its own virtual environment"
	@echo "make bench    all benchmarks, which print their results"
	@echo "make site     the documentation as a site: open build/site/index.html, no server and no network needed"
	@echo "make venv     create the virtual environment that all of these use ($(VENV)); they also create it themselves"
	@echo "make clean    remove it, and all caches"

# One virtual environment, installed in two steps: the demo needs only what users of the library install.
# The build backend is pinned in constraints.txt too, hence no build isolation.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
	sys.exit(f"verifiers needs Python 3.11 or newer, but {sys.executable} is {v}; try: make PYTHON=python3.12")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(LOCK) | $(BIN)/python
	@echo "installing verifiers into $(VENV)"
	@$(PIP) hatchling editables setuptools
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# The default build of torch for Linux includes gigabytes of CUDA libraries, which are unused without a GPU. The CPU build
# has a tenth of that size. It is taken from pip's configured index if that has it, else from PyTorch's; if neither has
# it, the default build is installed with the packages below. TORCH=any leaves the choice to pip.
TORCH           ?= $(if $(filter Linux,$(shell uname -s)),$(if $(wildcard /dev/nvidia0 /dev/dxg /dev/kfd),any,cpu),any)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_CPU        = torch$(shell sed -n 's/^torch\(==[0-9.]*\)$$/\1/p' constraints.txt)+cpu

$(VENV)/.torch: constraints.txt | $(VENV)/.core
	@if [ "$(TORCH)" = cpu ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	echo "no GPU here: looking for the CPU build of torch"; \
	$(PIP) --no-deps --retries 0 '$(TORCH_CPU)' 2>/dev/null || \
	$(PIP) --no-deps --retries 0 --timeout 10 -i $(TORCH_CPU_INDEX) '$(TORCH_CPU)' 2>/dev/null || \
	echo "found none; the usual build will do"; fi
	@touch $@

$(VENV)/.dev: $(LOCK) | $(VENV)/.core $(VENV)/.torch
	@echo "installing the development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $(VENV)/.core $@

venv: $(VENV)/.dev

$(VENV)/.train: $(LOCK) | $(VENV)/.core $(VENV)/.torch
	@echo "installing the packages for local models and training (a few minutes the first time)"
	@$(PIP) --no-build-isolation --editable '.[train]'
	@touch $@

demo: $(VENV)/.train
	@$(BIN)/python -m verifiers models pull smollm2
	@$(BIN)/python -m examples.demo

test: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -n $(N) --dist worksteal

check: format-check lint types layers test
	@echo "check: all green"

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --select I --fix --exit-zero .
	@$(BIN)/ruff format --quiet .

format-check: $(VENV)/.dev
	@$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	@$(BIN)/ruff check .

types: $(VENV)/.dev
	@$(BIN)/mypy

layers: $(VENV)/.dev
	@$(BIN)/lint-imports --no-logo

# pytest exits with 5 if no test has the mark.
slow: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -n $(N) --dist worksteal -m "slow and not gpu" --timeout 1800 || [ $$? -eq 5 ]

oldest: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -m slow tests/test_project.py -k oldest

clients: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -m slow tests/engine/test_clients.py --timeout 1800

integrations: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -m "slow and not gpu" --timeout 1800 tests/integrations

soak: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -m "soak and not gpu" --timeout 7200 || [ $$? -eq 5 ]

gpu: $(VENV)/.dev
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("make gpu: torch sees no CUDA device here")'
	@$(BIN)/python -m pytest --quiet -m gpu --timeout 1800

# The sanitizer's library must be loaded first, together with the C++ library, whose exception functions it looks up at
# start: torch throws C++ exceptions. Leaks are not checked, because Python itself leaks by design.
sanitize: $(VENV)/.dev
	@cc=$${CC:-cc}; LD_PRELOAD="$$($$cc -print-file-name=libasan.so) $$($$cc -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 VERIFIERS_SANITIZE=1 $(BIN)/python -m pytest --quiet -p no:cacheprovider --timeout 1800 tests/kernels/test_cpu.py \
	tests/kernels/test_cpu_model.py tests/kernels/test_cpu_learning.py tests/kernels/test_sampling.py tests/kernels/test_head_norms.py

bench: $(VENV)/.dev
	@set -e; for file in benchmarks/[!_]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

$(VENV)/.docs: $(LOCK) | $(VENV)/.core
	@echo "installing the packages that build the site into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

site: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
