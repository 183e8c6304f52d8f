# mini-infer. `make serve` on a clean machine installs everything into .venv, fetches the default
# model and serves it. Every target can be repeated; what is done already is not done again.
#
#   make serve PORT=9000 MODEL=/path/to/Qwen2.5-0.5B-Instruct ARGS="--max-num-seqs 16"

PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
SOURCES := mini_infer tests benchmarks

.DEFAULT_GOAL := help
.PHONY: help serve chat dry-run test test-clients lint format bench coverage lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

serve: $(VENV)/.serve  ## Install, fetch the model, serve it on PORT (8000)
	$(BIN)/mini-infer pull $(MODEL)
	$(BIN)/mini-infer serve --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

chat: $(VENV)/.serve  ## Install, fetch the model, chat in the terminal
	$(BIN)/mini-infer pull $(MODEL)
	$(BIN)/mini-infer chat --model $(MODEL) $(ARGS)

dry-run: $(VENV)/.serve  ## Serve invented tokens: the real server, no weights
	$(BIN)/mini-infer serve --dry-run --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.dev  ## Run every test that needs no GPU
	$(BIN)/mini-infer pull smollm2-135m
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-clients: $(VENV)/.dev  ## Run only the tests of real clients, and say how long each takes
	$(BIN)/mini-infer pull smollm2-135m
	$(BIN)/python -m pytest tests/clients --durations=0 $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## Check format, style and types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/.dev  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.dev  ## Run the benchmark BENCH, or all of them quickly
	$(BIN)/mini-infer bench $(or $(BENCH),suite --quick) $(ARGS)

coverage: $(VENV)/.dev  ## Run the tests and show which lines they miss
	$(BIN)/mini-infer pull smollm2-135m
	$(BIN)/python -m pytest --cov=mini_infer --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

lock: $(VENV)/.dev  ## Rewrite constraints.txt from .venv
	{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude-editable | grep == \
	    | grep -v '^pip==' | sed 's/+.*//' | sort -f; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:  ## Remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and by its exact version, so that pip takes a wheel that is already at hand
# (PIP_FIND_LINKS, a CPU-only index in PIP_EXTRA_INDEX_URL) before it looks for a larger one. It is
# the one download that takes long, so pip shows its progress.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: mini-infer needs \
	Python 3.11 or newer and $(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "error: $(PYTHON) can't make a virtual environment;" \
	    "Debian and Ubuntu have what is missing in the package python3-venv" >&2; exit 1; }
	$(PIP) install --quiet --upgrade pip
	$(PIP) install -c constraints.txt $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e ".[serve]"
	$(BIN)/python -m compileall -q mini_infer
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e ".[serve,dev,clients]"
	$(BIN)/python -m compileall -q mini_infer
	@touch $@ $(VENV)/.serve
