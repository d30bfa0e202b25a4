# Everything runs from .venv, which `make` fills from constraints.txt. `make help` lists the targets.
#
# pip must know an index that holds the CPU build of torch. Where its default index has only the CUDA build, name
# one with PIP_EXTRA_INDEX_URL before the first `make`.
PYTHON ?= python3.11
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format clean

# Compiling every file at installation takes longer than the rest of it; what is imported is compiled and kept at the
# first import instead, which this variable would prevent.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

quickstart: $(STAMP) ## install, then run the shipped grid on a local Ray cluster
	@$(BIN)/isocompute quickstart

# Two files of tests at a time: on two cores a third one only makes all wait for a core.
test: lint ## install, then lint and all tests (PYTEST_ARGS="-m 'not engine'" leaves the slow ones out)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP) ## install, then ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

install: $(STAMP) ## only make the environment

clean: ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	  || { echo "error: '$(PYTHON)' is no Python 3.11: install it, or name it with 'make PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: '$(PYTHON)' has no venv module: install it (on Debian: python3.11-venv)" >&2; exit 1; }
	@echo "set-up 1/4: virtual environment in $(VENV)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install -qq -c constraints.txt pip
	@total=$$(grep -c '==' constraints.txt); \
	echo "set-up 2/4: $$total pinned packages (about 750 MB, some minutes)"; \
	$(BIN)/pip install --no-deps --no-compile --progress-bar off -r constraints.txt 2>&1 | awk -v total=$$total ' \
	  /^(Collecting|Processing|Requirement already)/ && ++n % 50 == 0 {print "  found " n " of " total} \
	  /^Installing/ {print "  unpacking"} \
	  /^ *(ERROR|error)/ {print > "/dev/stderr"} \
	  {fflush()}'
	@echo "set-up 3/4: isocompute itself"
	@$(BIN)/pip install -qq --no-deps --no-build-isolation --no-compile -e .
	@echo "set-up 4/4: first imports"
	@export VLLM_LOGGING_LEVEL=ERROR; \
	$(BIN)/python -c 'import torch, transformers; from vllm import LLM' & engine=$$!; \
	$(BIN)/python -c 'import ray, mlflow, pandas, scipy.optimize, matplotlib.pyplot, math_verify, typer' && wait $$engine \
	  || { echo "error: the installed set does not import; if torch is named, is it the CPU build? (see Makefile; then: make clean)" >&2; exit 1; }
	@touch $@
