# make profile: run the profiler.   make test: run the test suite.   make compare: compare with other projects' layers.
# make exactness: write docs/exactness.md.   make lint: check style and types.
# make story: download a small language model, once, and let it write a paragraph.
# make cuda: run all checks that need a GPU, and write their output into the folder OUT= (default: cuda-acceptance).
# Each target creates .venv on first use; exactness creates .venv-exactness.
# ARGS= passes arguments on:        make profile ARGS="--seq-len 1024"    make test ARGS="-k rope"

PYTHON ?= python3
VENV := .venv
OUT ?= cuda-acceptance
# The pin of the dev extra. pip needs it as an argument, too; otherwise it first downloads the newest torch.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml)

.PHONY: profile test compare exactness story cuda lint
profile: $(VENV)/installed
	$(VENV)/bin/python scripts/profile_block.py $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

compare: $(VENV)/installed-bench
	$(VENV)/bin/python scripts/compare_peers.py $(ARGS)

exactness: $(VENV)-exactness/installed
	$(VENV)-exactness/bin/python scripts/exactness.py --write docs/exactness.md --plot docs/exactness.png $(ARGS)

story: $(VENV)/installed-examples
	$(VENV)/bin/python examples/story.py

cuda: $(VENV)/installed-bench
	PYTHON=$(CURDIR)/$(VENV)/bin/python bash scripts/cuda_acceptance.sh "$(OUT)" $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Runs again when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinyblock needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(TORCH) -e ".[dev]"
	touch $@

# An extra of pyproject.toml: bench or examples.
$(VENV)/installed-%: $(VENV)/installed
	$(VENV)/bin/python -m pip install $(TORCH) -e ".[dev,$*]"
	touch $@

# Apart, because litgpt and torchtune require older releases of transformers and torchao.
$(VENV)-exactness/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-exactness
	$(VENV)-exactness/bin/python -m pip install $(TORCH) -e ".[exactness]"
	touch $@
