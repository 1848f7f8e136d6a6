# SPDX-License-Identifier: Apache-2.0
#
# make serve                 tritonserver with the bundled model, in the foreground
# make serve MODEL=DIR       the same with a checkpoint folder; KNOBS="name=value ..." sets knobs of build.py
# make test, make lint
# make bench                 times of the host's work for every step and chunk, and of the ensemble
#
# Each makes .venv first where it is missing. On a machine with an NVIDIA GPU the CUDA extra goes in.

PYTHON ?= python3
MODEL ?= bundled
KNOBS ?=
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
PIP_ARGS ?=
TESTS ?=

VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
constraints := -c requirements/constraints.txt
ifeq ($(GPU),0)
constraints += -c requirements/constraints-cpu.txt
serve_extras := server
else
serve_extras := server,cuda
endif
development_extras := $(serve_extras),client,test,lint
# xgrammar's metadata asks for triton, 200 MB that a machine without a GPU has no use for: no dependencies there.
ifeq ($(GPU),0)
guided = && $(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps -r requirements/guided-cpu.txt
endif
install = $(BIN)/python -m pip install --quiet $(constraints) $(PIP_ARGS) --editable '.[$(1)]' $(guided)
pinned := pyproject.toml $(wildcard requirements/*.txt)

.PHONY: serve test lint bench clean

serve: $(VENV)/for-serve
	@$(BIN)/python build.py --output served --model '$(MODEL)' $(if $(KNOBS),--set $(KNOBS))
	@exec $(BIN)/python -m flashinfer_backend.serve --model-repository served --host $(HOST) \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

test: $(VENV)/for-development
	$(BIN)/python -m pytest $(TESTS)
	$(if $(TESTS),,$(BIN)/python -m pytest tests/benchmarks --benchmark-disable)  # each once, untimed

bench: $(VENV)/for-development
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-columns=median,min,max,rounds $(TESTS)

lint: $(VENV)/for-development
	$(BIN)/ruff check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/for-serve: $(BIN)/python $(pinned)
	@echo "installing into $(VENV), this takes a minute or two the first time"
	@$(call install,$(serve_extras))
	@touch $@

$(VENV)/for-development: $(BIN)/python $(pinned)
	@echo "installing into $(VENV), this takes a minute or two the first time"
	@$(call install,$(development_extras))
	@touch $@ $(VENV)/for-serve

clean:
	rm -rf $(VENV) served
