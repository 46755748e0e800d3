# Two commands for a fresh machine with Python >= 3.11 and make: `make demo` and `make test`.
# Each makes .venv, installs what it needs (pinned by constraints.txt) and says what it is doing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# pip compiles on one core, and also modules that are never imported: half of what is installed. Others are compiled on import.
UNUSED := /(tests?|testing|mypyc?|pip|setuptools|debugpy|IPython|jedi|prompt_toolkit|wcwidth|altair|numpy/(distutils|f2py)) \
	/plotly/graph_objs/.* /pygments/lexers /sympy/(physics|combinatorics|stats|parsing) \
	/torch/(_inductor|onnx|_vendor|sparse) /transformers/(models|exporters|pipelines|cli)
comma := ,
empty :=
COMPILE := $(BIN)/python -m compileall -q -q -x '($(subst $(empty) ,|,$(strip $(UNUSED))))/' -j
# Torch is compiled on the core that pip leaves idle. What cannot be compiled are templates.
define install
{ $(COMPILE) 1 $(VENV)/lib/*/site-packages/* & } 2>/dev/null; $(PIP) --editable '.[$(1)]'; done=$$?; wait; \
	$(COMPILE) 0 $(VENV)/lib dashboard instrumented_trainers tests tracekit; test $$done = 0
endef
# Otherwise each of the hundreds of processes that tests start would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Of whatever else offers pytest a plugin, each process of the tests would rewrite the sources: ours, hypothesis', ...
PLUGINS := --disable-plugin-autoload -p xdist -p timeout -p hypothesispytest
# Further pytest arguments, for example TESTS=-x.
TESTS ?=

.DELETE_ON_ERROR:
.PHONY: help demo test quick accuracy checks lint types imports unit fuzz docs wheel format clean

help:
	@echo "make demo    train under FSDP2 and YaFSDP, check both runs, compare them (about 5 minutes after installation)"
	@echo "make test    everything that CI runs: lint, types, imports, tests"
	@echo "make quick   the inner loop: lint, types, imports, unit tests (about 3 minutes)"
	@echo "make accuracy what measures truth on many runs, and writes docs/lab (hours); RUNS=40 JOBS=2"
	@echo "make fuzz    hostile inputs with fresh seeds, for SECONDS=60"
	@echo "make docs    the documentation site in build/site, strictly: a broken link is an error"
	@echo "make wheel   the wheel in dist, installed into an empty environment and tried there"
	@echo "make format  rewrite the sources in house style"
	@echo "make clean   remove .venv and everything that was built"

$(BIN)/python:
	@echo "tracekit: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tracekit: needs Python 3.11 or later; name one with: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@# The pip that comes with Python may take three times as long to find out what to install.
	@$(PIP) --upgrade pip || echo "tracekit: going on with the pip that is there"

# torch first and by itself: its exact version decides which build pip takes.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "tracekit: installing PyTorch (some minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "tracekit: installing tracekit with the extras [dashboard,train]"
	@$(call install,dashboard$(comma)train)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "tracekit: installing tracekit with the extras [all,dev,docs]"
	@$(call install,all$(comma)dev$(comma)docs)
	@touch $@ $(VENV)/.demo $(VENV)/.docs

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "tracekit: installing what builds the site"
	@$(call install,docs)
	@touch $@

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

quick: $(VENV)/.test
	@$(MAKE) --no-print-directory checks
	@$(MAKE) --no-print-directory unit TESTS="tests/unit tracekit $(TESTS)"

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
	@$(BIN)/python -m pytest $(PLUGINS) --numprocesses auto --dist loadfile --no-loadscope-reorder -m 'not accuracy' $(TESTS)

# What measures truth on many simulated and recorded runs: hours of CPU time, not part of `make test`. A change of a rule, of the
# replay or of a reader runs it before it lands; the pages of docs/lab that it writes are part of that change.
RUNS ?= 40
JOBS ?= 2
accuracy: $(VENV)/.test
	@$(BIN)/python -m pytest $(PLUGINS) --numprocesses auto --dist loadfile --no-loadscope-reorder \
		-m 'accuracy or hypothesis' --examples-times 20 $(TESTS)
	@$(BIN)/python -m benchmarks.labelled_runs --runs $(RUNS) --jobs $(JOBS) --out docs/lab/labelled_runs.md
	@$(BIN)/python -m benchmarks.hybrid_runs --runs $(RUNS) --jobs $(JOBS) --out docs/lab/hybrid_runs.md
	@$(BIN)/python -m benchmarks.critical_path --runs $(RUNS) --out docs/lab/critical_path_accuracy.md
	@$(BIN)/python -m benchmarks.scaling --pairs $(RUNS) --out docs/lab/scaling_accuracy.md
	@$(BIN)/python -m benchmarks.larger_jobs --jobs $(RUNS) --out docs/lab/larger_jobs.md
	@$(BIN)/python -m benchmarks.labelled_savings --runs $(RUNS) --out docs/lab/whatif_savings.md
	@$(BIN)/python -m benchmarks.labelled_together --runs $(RUNS) --out docs/lab/whatif_together.md
	@$(BIN)/python -m benchmarks.compare_verdicts --seeds 3 --out docs/lab/compare_verdicts.md
	@$(BIN)/python -m benchmarks.constant_troubles --pairs 3 --out docs/lab/constant_troubles.md
	@$(BIN)/python -m benchmarks.numeric_faults --seeds 2 --first-seed 11 --out docs/lab/gate_accuracy.md
	@$(BIN)/python -m benchmarks.agent_questions --out docs/lab/agent_questions.md
	@$(BIN)/python -m benchmarks.published_table --out docs/lab/published_table.md
	@$(BIN)/python -m tests.fuzz --seconds 600
	@$(BIN)/python -m tests.fuzz.missing --pairs 3000
	@$(BIN)/python -m tests.fuzz.growth

SECONDS ?= 60
fuzz: $(VENV)/.test
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

docs: $(VENV)/.docs
	@$(BIN)/python -m website.build

wheel: $(BIN)/python
	@rm -rf dist build/empty
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python -m venv build/empty
	@build/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	@cd build && empty/bin/tracekit check --sample && empty/bin/python -m tracekit --version

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
