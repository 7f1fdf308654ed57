# Everything a newcomer needs: `make demo`, `make test`, `make check`. Each sets itself up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
FOLDERS := elastrain comm snapshot offload launcher tests experiments examples docs
# Jobs of real processes that `elastrain run` does not start.
NO_LAUNCHER := tests/integration/comm tests/integration/offload
# One intra-op thread per process: the bits depend on it, and tests run several processes on few cores.
export OMP_NUM_THREADS := 1
export PYTHONHASHSEED := 0

.PHONY: help install lint check check-unit check-rest format test test-cores test-jobs docs house demo clean
help:
	@echo "make demo    three nodes train, a worker and a node are killed, nothing is lost (some two minutes)"
	@echo "make check   format, lint, types, layers, unit and property tests but the slow (about a minute)"
	@echo "make test    everything that runs without a GPU (some ten minutes on two quiet cores)"
	@echo "make sim     whole jobs in virtual time, from SEED=0 on SCHEDULES=2000 of them, and the planted bugs"
	@echo "make docs    pages and API reference, in site/ (a quarter of a minute)"
	@echo "make house   sizes, double names, unused dependencies: what is over the limits (seconds)"
	@echo "make format  rewrite the sources in the house format"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,embedded]'
	@touch $(STAMP)

$(DOCS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS)

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/ruff check --quiet $(FOLDERS)
	$(BIN)/mypy -p elastrain

# Two at a time: a process of pytest keeps one core busy.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-unit check-rest

check-unit: $(STAMP)
	$(BIN)/pytest -q -m "not slow and not on_demand" tests/unit

check-rest: lint
	$(BIN)/pytest -q -m "not slow and not on_demand" tests/property

format: $(STAMP)
	$(BIN)/ruff format $(FOLDERS)
	$(BIN)/ruff check --quiet --fix $(FOLDERS)

# Two at a time: jobs of real processes mostly wait for one another. Each takes about half of the time of all.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-cores test-jobs

test-cores: $(STAMP)
	$(BIN)/pytest -q -m "not on_demand" tests/unit tests/property tests/sim tests/contract tests/gpu $(NO_LAUNCHER)

test-jobs: $(STAMP)
	$(BIN)/pytest -q -m "not on_demand" tests/integration $(NO_LAUNCHER:%=--ignore=%)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

sim: $(STAMP)
	$(BIN)/python -m experiments.simulation.jobs --first $(SEED) --schedules $(SCHEDULES)

house: $(STAMP)
	@$(BIN)/python -m tests.support.table

demo: $(STAMP)
	$(BIN)/python -m experiments.demo.run

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
