# Two commands set up all they need: `make book` (the main job) and `make test`.

PYTHON ?= python3.11
VENV ?= .venv
MODEL ?= smollm2-135m
PROFILE ?= quick
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: book test lint test-oldest test-newest clean help

help: ## Say what each command does.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

book: $(VENV)/.book ## Run every chapter on the real model and build the book (MODEL=, PROFILE=).
	$(BIN)/draftlayers book --model $(MODEL) --profile $(PROFILE)

test: $(VENV)/.test ## Run all tests: units, all notebooks on a tiny model, one book build.
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The ends of the range of transformers that pyproject.toml allows, each in its own environment.
TARGET_TESTS := tests/test_families.py tests/test_targets.py tests/test_capabilities.py \
	tests/test_writing.py tests/test_asking.py tests/test_engine.py
test-oldest: PINNED = transformers==5.20.0
test-newest: PINNED = transformers>=5.20,<6
test-oldest test-newest: test-%: ## Run the tests of all kinds of targets with this transformers.
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --upgrade --editable '.[test]' '$(PINNED)'
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2 $(TARGET_TESTS)

lint: $(VENV)/.test ## Check the code's style and its types.
	$(BIN)/ruff check .
	$(BIN)/mypy

clean: ## Remove runs and the environment (converted weights in ~/.cache/draftlayers stay).
	rm -rf $(VENV) runs

# A stamp for each set of dependencies: pip runs again only when pyproject.toml changes.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	@echo "installing the project with what '$*' needs (once, a few minutes)"
	$(PIP) install --quiet --editable '.[$*]'
	@touch $@

# speculators, whose loss a test compares with ours, asks for older releases of what is used here.
$(VENV)/.test: $(VENV)/.speculators
$(VENV)/.speculators: | $(VENV)/bin/python
	$(PIP) install --quiet --no-deps 'speculators==0.9.0'
	@touch $@
