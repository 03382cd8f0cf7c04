# demo, test, lint, bench. PYTHON is any Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp says which extras are in, so that a second call installs nothing.
$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/shardwise models llama-3-8b
	$(BIN)/shardwise hardware dgx-h100
	$(BIN)/shardwise plan llama-3-8b --cluster dgx-h100 --nodes 1 \
		--global-batch-size 64 --seq-len 8192 -o $(VENV)/plan.json
	$(BIN)/shardwise estimate llama-3-8b --cluster dgx-h100 --nodes 1 \
		--global-batch-size 64 --seq-len 8192 --layout "tp=2 dp=4 zero=1 recompute=full"

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(VENV)/.demo
	$(BIN)/python tests/benchmarks/plans.py
