# demo, test, lint, bench, accuracy, regret. PYTHON is any Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench accuracy regret

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

SOURCES := $(shell find hwprofiles planner reports executor shardwise.py -type f \
	-not -path '*/__pycache__/*' 2>/dev/null)

# A stamp says what is installed, so that a second call installs nothing. The demo installs the
# package itself and not a link to it: pip then compiles it, and commands start faster. A build
# folder left from before would bring back files that are gone.
$(VENV)/.demo: $(BIN)/python pyproject.toml $(SOURCES)
	rm -rf build
	$(BIN)/python -m pip install --quiet '.[run]'
	rm -rf build
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/shardwise plan llama-3-70b --cluster dgx-h100 --nodes 16 \
		--global-batch-size 512 --seq-len 8192 -o $(VENV)/plan.json
	$(BIN)/shardwise plan tests/benchmarks/small.toml --cluster local:2 --gpus 2 \
		--global-batch-size 8 --seq-len 128 --runtime shardwise --precision fp32 \
		--top 3 -o $(VENV)/small.json
	$(BIN)/shardwise run $(VENV)/small.json --steps 5 -o $(VENV)/measurements.json
	$(BIN)/shardwise compare $(VENV)/small.json $(VENV)/measurements.json

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(VENV)/.demo
	$(BIN)/python tests/benchmarks/rates.py; rates=$$?; \
	$(BIN)/python tests/benchmarks/plans.py; plans=$$?; \
	$(BIN)/python tests/benchmarks/steps.py && exit $$((rates + plans))

regret: $(VENV)/.demo
	$(BIN)/python tests/benchmarks/regret.py --output reports/published/regret.json

# Predicted against published, under the date of today or DATE=2026-12-31. Takes minutes.
DATE ?= $(shell date +%F)
accuracy: $(VENV)/.test
	$(BIN)/python -m reports.publish $(DATE)
