# Two commands on a machine with Python, its venv module and make:
#   make demo    sets up .venv and runs the demonstration
#   make test    sets up .venv, then lint, types and the whole test suite
# uv is used where it is installed, pip where not.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(shell command -v uv 2>/dev/null)

.PHONY: demo test lint format types lock clean

demo: $(STAMP)
	$(BIN)/python -m ghmdet.demonstration

test: lint types
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

# The pinned versions, for one build that repeats another; pyproject.toml says what is needed at the least.
$(STAMP): pyproject.toml requirements.txt
ifdef UV
	test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) $(VENV)
	uv pip install --quiet --python $(BIN)/python --requirement requirements.txt
	uv pip install --quiet --python $(BIN)/python --no-deps --editable .
else
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
endif
	touch $(STAMP)

lock:
	uv pip compile --quiet --universal --no-emit-index-url --no-annotate --no-header --python-version 3.10 \
		--group dev pyproject.toml --output-file requirements.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
