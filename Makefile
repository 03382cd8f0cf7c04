# demo, test, lint, bench, accuracy. PYTHON is any Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench accuracy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

SOURCES := $(shell find hwprofiles planner reports executor shardwise.py -type f \
	-not -path '*/__pycache__/*' 2>/dev/null)

# A stamp says what is installed, so that a second call installs nothing. The demo installs the
# package itself and not a link to it: pip then compiles it, and commands start faster. A build
# folder left from before would bring back files that are gone.
$(VENV)/.demo: $(BIN)/python pyproject.toml $(SOURCES)
	rm -rf build
	$(BIN)/python -m pip install --quiet .
	rm -rf build
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
	$(BIN)/shardwise plan gpt2 --cluster local --gpus 2 --precision fp32 --runtime shardwise \
		--global-batch-size 8 --seq-len 256

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(VENV)/.demo
	$(BIN)/python tests/benchmarks/rates.py; rates=$$?; \
	$(BIN)/python tests/benchmarks/plans.py && exit $$rates

# Predicted against published, under the date of today or DATE=2026-12-31. Takes minutes.
DATE ?= $(shell date +%F)
accuracy: $(VENV)/.test
	$(BIN)/python -m reports.publish $(DATE)
