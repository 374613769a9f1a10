# FlowPath on one machine:
#
#   make serve                      set up, prepare the default model, serve it
#   make test                       set up, prepare the default model, run the tests
#   make serve ARGS="--port 9000"   arguments of `flowpath serve`; `make test ARGS=...` of pytest
#
# Set-up is part of both and instant once it is done; deploy/setup.sh holds its steps.
#
# FLOWPATH_TORCH chooses the build of PyTorch, and with it where the engine can run:
#   cpu    (the default) the CPU build
#   cuda   the CUDA build, and the packages of its CUDA version:  make serve FLOWPATH_TORCH=cuda

FLOWPATH_TORCH ?= cpu
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

ifeq ($(filter cpu cuda,$(FLOWPATH_TORCH)),)
$(error FLOWPATH_TORCH=$(FLOWPATH_TORCH): say cpu or cuda)
endif

BIN := .venv/bin
STAMPS := .venv/stamps
SETUP := FLOWPATH_TORCH=$(FLOWPATH_TORCH) bash deploy/setup.sh
NATIVE_FILES := $(shell find native -type f \( -name '*.?pp' -o -name CMakeLists.txt \))
NATIVE_TESTS := tests/unit/native tests/unit/storage/test_block_files.py $(wildcard $(addprefix tests/property/test_,segment_allocator.py alignment.py run_copy.py checksum.py))

.PHONY: help serve test compose-test gpu-test soak bench setup model lint asan clean

help:
	@echo 'make serve   set up, prepare the default model and serve it (ARGS="--port 9000")'
	@echo 'make test    set up, prepare the default model and run the tests (ARGS="-k gateway")'
	@echo 'make compose-test   build the container image, bring it up and chat (some minutes)'
	@echo 'make gpu-test   run the tests that need a GPU (with FLOWPATH_TORCH=cuda)'
	@echo 'make soak    run the tests that change the load for minutes'
	@echo 'make bench   run the benchmarks (ARGS="--help")'
	@echo 'make lint    check style, formatting, types and import rules'
	@echo 'make asan    run the native tests under the address and undefined-behaviour sanitizers'
	@echo 'make setup   only set up .venv and build the native extension'
	@echo 'make clean   delete .venv and everything built (the converted model stays)'
	@echo 'FLOWPATH_TORCH=cuda with any of them uses the CUDA build of PyTorch'

# Programs replace their shell: Ctrl-C reaches each once, and make waits for them to finish.
serve: setup model
	@exec $(BIN)/flowpath serve $(ARGS)

test: setup model
	@exec $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

compose-test: setup model
	@exec $(BIN)/pytest -m compose tests/e2e/test_compose.py $(ARGS)

gpu-test: setup model
	@exec $(BIN)/pytest -m gpu tests/gpu $(ARGS)

soak: setup model
	@exec $(BIN)/pytest -m soak tests/e2e tests/chaos $(ARGS)

bench: setup model
	@exec $(BIN)/python -m benchmarks $(ARGS)

model: setup
	@$(BIN)/python -m common.models.default_model >/dev/null

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks
	$(BIN)/lint-imports

asan: setup
	@bash native/sanitize/run.sh $(NATIVE_TESTS) $(ARGS)

setup: $(STAMPS)/native
	@:

$(STAMPS)/venv:
	@$(SETUP) venv

$(STAMPS)/torch-$(FLOWPATH_TORCH): deploy/constraints-cpu.txt | $(STAMPS)/venv
	@$(SETUP) torch

$(STAMPS)/packages: pyproject.toml $(STAMPS)/torch-$(FLOWPATH_TORCH)
	@$(SETUP) packages

$(STAMPS)/native: $(NATIVE_FILES) $(STAMPS)/packages
	@$(SETUP) native

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find common services tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
