# Everything a newcomer needs: `make demo`, `make test-all`, `make check`. Each sets itself up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
FLOOR  := build/floor
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

.PHONY: help install lint check check-tests format test test-all test-gpu test-floor run-chosen run-all network docs house demo clean wheel
help:
	@echo "make demo    three nodes train, a worker and a node are killed, nothing is lost (some two minutes)"
	@echo "make check   format, lint, types, layers, unit and property tests but the slow, transcripts (about a minute)"
	@echo "make test    lint, and the tests that a change can reach: since BASE, of the working tree, or of the last commit"
	@echo "make test-all  lint and all tests that run without a GPU (some fourteen minutes on two quiet cores)"
	@echo "make test-gpu  test parts on the GPU of this machine, with PYTHON as it is; tests/gpu/README.md has its variables"
	@echo "make test-floor  the same parts on the test device under torch 2.11, in an environment of its own (3 GB); FULL=1: all rows"
	@echo "make wheel   the wheel in an environment of its own, and one job with it (a minute or two)"
	@echo "make sim     whole jobs in virtual time, from SEED=0 on SCHEDULES=2000 of them, and the planted bugs"
	@echo "make docs    pages and API reference, in site/ (a quarter of a minute)"
	@echo "make house   sizes, double names, unused dependencies: what is over the limits (seconds)"
	@echo "make format  rewrite the sources in the house format"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,embedded,nodes,plot,watch]'
	-$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[integrations]' # else their tests are skipped
	@touch $(STAMP)

$(DOCS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS)

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/ruff check --quiet $(FOLDERS)
	$(BIN)/mypy -p elastrain
	$(BIN)/mypy examples tests/support

check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint check-tests

check-tests: $(STAMP)
	$(PYTEST) -n logical --hypothesis-profile quarter -m "not slow and not on_demand" tests/unit tests/property $(SIM_FIRST)

format: $(STAMP)
	$(BIN)/ruff format $(FOLDERS)
	$(BIN)/ruff check --quiet --fix $(FOLDERS)

test: $(STAMP) network
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint run-chosen

test-all: $(STAMP) network
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint run-all

run-chosen: $(STAMP)
	$(PYTEST) -m "not on_demand" $$($(BIN)/python -m tests.support.choose $(BASE))

run-all: $(STAMP)
	$(PYTEST) -m "not on_demand" tests

# No environment is made: the machine's own torch is what is tested.
test-gpu:
	@$(PYTHON) -m tests.gpu.run

# The lowest version of torch that is allowed: the CPU build where pip finds one, else CUDA's libraries come along.
$(FLOOR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	grep -v '^torch==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install --quiet --constraint $(FLOOR)/constraints.txt 'torch==2.11.*' --editable '.[dev,embedded]'
	@touch $@

# FULL=1: with every row of experiments/accelerator.
test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m tests.gpu.floor $(STEPS)

# Nodes in network namespaces need nft, tc and ip: without them, and without root to install them, their tests are skipped.
network:
	@for program in nft tc ip; do command -v $$program >/dev/null || lacking="$$lacking $$program"; done; \
	if [ -z "$$lacking" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -q -y nftables iproute2 >/dev/null; \
	else echo "missing, and cannot be installed here:$$lacking"; fi

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

sim: $(STAMP)
	$(BIN)/python -m experiments.simulation.jobs --first $(SEED) --schedules $(SCHEDULES)

house: $(STAMP)
	@$(BIN)/python -m tests.support.table

# The wheel in an environment of its own: the command, and one job.
wheel: $(STAMP)
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel/venv
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/pip install --quiet --constraint constraints.txt torch build/wheel/*.whl
	cd build/wheel && venv/bin/elastrain --version && venv/bin/elastrain run --nproc-per-node 2 ../../examples/plain_loop.py

demo: $(STAMP)
	$(BIN)/python -m experiments.demo.run

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
