# Two commands for a fresh machine with Python >= 3.11 and make: `make demo` and `make test`.
# Each makes .venv, installs what it needs (pinned by constraints.txt) and says what it is doing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# pip compiles on one core, and much that nobody imports; what cannot be compiled are templates.
COMPILE := $(BIN)/python -m compileall -q -q -j 0 -x '/tests/|/transformers/models/' $(VENV)/lib || true
# What the tests are to be told besides, such as --thorough.
TESTS ?=

.DELETE_ON_ERROR:
.PHONY: help demo test checks lint types imports unit format clean

help:
	@echo "make demo    train under FSDP2 and YaFSDP, check both runs, compare them (about 5 minutes after installation)"
	@echo "make test    everything that CI runs: lint, types, imports, tests"
	@echo "make test TESTS=--thorough    the same with all tests and cases, not those whose turn it is"
	@echo "make format  rewrite the sources in house style"
	@echo "make clean   remove .venv and everything that was built"

$(BIN)/python:
	@echo "tracekit: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tracekit: needs Python 3.11 or later; name one with: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

# torch first and by itself: its exact version decides which build pip takes.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "tracekit: installing PyTorch (some minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "tracekit: installing tracekit with the extras [dashboard,train]"
	@$(PIP) --editable '.[dashboard,train]'
	@$(COMPILE)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "tracekit: installing tracekit with the extras [all,dev]"
	@$(PIP) --editable '.[all,dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/python -m instrumented_trainers.demo --out $(DEMO)

# The checks run beside the tests and are shown after them.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory --keep-going checks >$(VENV)/checks.log 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory unit; tests=$$?; \
	wait $$checks; checks=$$?; cat $(VENV)/checks.log; \
	test $$tests = 0 || echo "tracekit: tests failed, see above"; \
	test $$checks = 0 || echo "tracekit: lint, types or import contracts failed, see above"; \
	test $$tests = 0 && test $$checks = 0

checks: lint types imports

lint: $(VENV)/.test
	@echo "tracekit: ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.test
	@echo "tracekit: mypy --strict"
	@$(BIN)/mypy

imports: $(VENV)/.test
	@echo "tracekit: import contracts"
	@$(BIN)/lint-imports --no-cache

unit: $(VENV)/.test
	@echo "tracekit: tests"
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
