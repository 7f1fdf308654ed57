# Everything a newcomer needs: `make demo`, `make test`, `make check`. Each sets itself up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FOLDERS := elastrain comm snapshot offload launcher tests experiments
# One intra-op thread per process: the bits depend on it, and tests run several processes on few cores.
export OMP_NUM_THREADS := 1
export PYTHONHASHSEED := 0

.PHONY: help install lint check format test demo clean
help:
	@echo "make demo    three nodes train, a worker and a node are killed, nothing is lost (some two minutes)"
	@echo "make check   format, lint, types, layers, unit tests (some two minutes)"
	@echo "make test    everything that runs without a GPU (some half an hour on two cores)"
	@echo "make format  rewrite the sources in the house format"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,embedded]'
	@touch $(STAMP)

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/ruff check --quiet $(FOLDERS)
	$(BIN)/mypy -p elastrain

check: lint
	$(BIN)/pytest -q -m "not slow and not on_demand" tests/unit tests/property

format: $(STAMP)
	$(BIN)/ruff format $(FOLDERS)
	$(BIN)/ruff check --quiet --fix $(FOLDERS)

test: lint
	$(BIN)/pytest -q -m "not on_demand" tests

demo: $(STAMP)
	$(BIN)/python -m experiments.demo.run

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
