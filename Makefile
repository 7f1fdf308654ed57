# Everything a newcomer needs: `make demo`, `make test`, `make check`. Each sets itself up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
FOLDERS := elastrain comm snapshot offload launcher tests experiments examples docs
# Several processes of tests, which take one test after the other from a common list: tests/conftest.py says how many.
PYTEST := $(BIN)/pytest -q -n auto --dist worksteal
# Of the simulator, what shows in seconds that it still plays production's code.
SIM_FIRST := tests/sim/test_transcripts.py tests/sim/test_local_disks.py::test_a_schedule_is_a_value_that_replays
# One intra-op thread per process: the bits depend on it, and tests run several processes on few cores.
export OMP_NUM_THREADS := 1
export PYTHONHASHSEED := 0
# What is compiled once need not be compiled by every process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install lint check check-tests format test test-all docs house demo clean
help:
	@echo "make demo    three nodes train, a worker and a node are killed, nothing is lost (some two minutes)"
	@echo "make check   format, lint, types, layers, unit and property tests but the slow, transcripts (about a minute)"
	@echo "make test    everything that runs without a GPU (some twelve minutes on two quiet cores)"
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

check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint check-tests

check-tests: $(STAMP)
	$(PYTEST) -n logical -m "not slow and not on_demand" tests/unit tests/property $(SIM_FIRST)

format: $(STAMP)
	$(BIN)/ruff format $(FOLDERS)
	$(BIN)/ruff check --quiet --fix $(FOLDERS)

test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint test-all

test-all: $(STAMP)
	$(PYTEST) -m "not on_demand" tests

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
