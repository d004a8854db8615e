# `make demo` and `make test` need Python >= 3.11, make and a package registry; nothing else.

PYTHON ?= python3
VENV   ?= .venv
# Test processes side by side.
N      ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --constraint constraints.txt
LOCK := pyproject.toml constraints.txt

.PHONY: help venv demo test check format format-check lint types layers slow site soak bench clean

help:
	@echo "make demo     evaluate a bundled environment: a fake model behind a flaky server, a real one; then train a tiny one"
	@echo "make test     the tests, the doctests, and every python block of the docs"
	@echo "make check    all that must be green: format, lint, types, layers, tests"
	@echo "make format   put the code into the format that check asks for"
	@echo "make slow     the tests too slow for every day (make soak: the long ones under load)"
	@echo "make bench    every benchmark, each printing its figures"
	@echo "make site     the documentation as a site in build/site, which needs no network to be read"
	@echo "make venv     the virtual environment all of these use ($(VENV)); they make it themselves"
	@echo "make clean    remove it, and every cache"

# One environment, filled in two steps: the demo needs only what users of the library install.
# The build backend comes from constraints.txt too, hence no build isolation.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
	sys.exit(f"verifiers needs Python 3.11 or newer, and {sys.executable} is {v}; try: make PYTHON=python3.12")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(LOCK) | $(BIN)/python
	@echo "installing verifiers into $(VENV)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(LOCK) | $(VENV)/.core
	@echo "installing the development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $(VENV)/.core $@

venv: $(VENV)/.dev

$(VENV)/.train: $(LOCK) | $(VENV)/.core
	@echo "installing what a model in the process and its training need (torch among it: a few minutes the first time)"
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

# pytest exits with 5 where no test carries the mark.
slow: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -n $(N) --dist worksteal -m "slow and not gpu" --timeout 1800 || [ $$? -eq 5 ]

# The documentation as a site, in build/site; it opens from disk, without any network.
site: $(LOCK) | $(VENV)/.core
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

soak: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet -m "soak and not gpu" --timeout 7200 || [ $$? -eq 5 ]

bench: $(VENV)/.dev
	@set -e; for file in benchmarks/[!_]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
