# make profile: run the profiler.   make test: run the test suite.   Both make .venv first, once.
# ARGS= passes arguments on:        make profile ARGS="--seq-len 1024"    make test ARGS="-k rope"

PYTHON ?= python3
VENV := .venv

.PHONY: profile test lint
profile: $(VENV)/installed
	$(VENV)/bin/python scripts/profile_block.py $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Anew whenever pyproject.toml changes. --upgrade-deps: an old pip cannot install an editable package from pyproject.toml.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinyblock needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -e ".[dev]"
	touch $@
