# Needs Python 3.11+ and make; everything else is installed into .venv by pip.
#
#   make PYTHON=python3.12 setup      another interpreter (used when .venv is first made)
#   make TORCH=torch setup            another torch
#   make test PYTEST_ARGS="-k anderson -x"
#   make soak MINUTES=120 SEED=7      stopped, it goes on where it was

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
WORKERS     ?= 2
PYTEST_ARGS ?=
BENCH_ARGS  ?=
MINUTES     ?= 10
SEED        ?= 1

# Relative on purpose: make splits words at spaces, and the path of the checkout may contain some.
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet
DEV    := $(VENV)/.stamp-dev
DOCS   := $(VENV)/.stamp-docs
BENCH  := $(VENV)/.stamp-bench
# Material's notice about MkDocs 2 does not concern our pages.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
# One thread per worker: the workers are the parallelism. With compiled files, tests that start
# processes do not compile the whole package each time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --timeout=600

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips must not write to one .venv, and the tests run in parallel already.
.NOTPARALLEL:
.PHONY: help setup demo test test-full test-gpu soak fuzz floors lint types format docs docs-serve bench clean

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## create .venv and install both packages with the dev extra
	@:

demo: $(DEV) ## the story of one digit: train, solve, certify; write demo/report.html
	$(PY) examples/demo.py

test: $(DEV) ## run the tests except the slow ones
	$(PYTEST) $(PYTEST_ARGS)

test-full: $(DEV) ## run all tests, with new random examples
	$(PYTEST) -m "" --hypothesis-profile=default $(PYTEST_ARGS)

test-gpu: $(DEV) ## run the tests that need a CUDA device, slow ones too, in one process
	$(PY) -m pytest -m gpu -p no:cacheprovider $(PYTEST_ARGS)

soak: $(DEV) ## random solves against float64 for MINUTES, by SEED
	OMP_NUM_THREADS=1 $(PY) -m tests.adversarial --minutes $(MINUTES) --seed $(SEED) --state .soak-$(SEED).json

fuzz: $(DEV) ## damaged files into every loader for MINUTES, by SEED
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --state .fuzz-$(SEED).json

floors: ## the tests at the lowest versions that pyproject.toml allows, in .venv-lowest
	.ci/versions lowest

lint: $(DEV) ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEV) ## check the types of both packages, strictly
	$(PY) -m mypy

format: $(DEV) ## format the code and apply automatic fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(DOCS) ## build the documentation into site/
	$(MKDOCS) build --strict

docs-serve: $(DOCS) ## serve the documentation with live reload
	$(MKDOCS) serve --strict

bench: $(BENCH) ## compare the solvers with torchdeq, write results/
	$(PY) benchmarks/solvers.py $(BENCH_ARGS)

clean: ## remove caches and build outputs, keep .venv
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests papers benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(DEV): pyproject.toml papers/pyproject.toml
	@test -x $(PY) || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "equilibria needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	    echo "Name another interpreter: make PYTHON=python3.12 setup" >&2; \
	    exit 1; \
	  }; \
	  echo "making $(VENV)"; \
	  $(PYTHON) -m venv $(VENV); \
	}
	@echo "installing into $(VENV) (once, and after a pyproject.toml changes)"
	@$(PIP) install --upgrade pip
	@$(PIP) install "$(TORCH)"
	@$(PIP) install -e ".[dev]" -e papers
	@touch $@

$(DOCS): pyproject.toml $(DEV)
	@$(PIP) install -e ".[docs]"
	@touch $@

$(BENCH): pyproject.toml $(DEV)
	@$(PIP) install -e ".[bench]"
	@touch $@
