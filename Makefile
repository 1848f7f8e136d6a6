# SPDX-License-Identifier: Apache-2.0
#
# make serve            run tritonserver with the bundled model, in the
#                       foreground, and the OpenAI API beside it
# make serve MODEL=DIR  the same with a checkpoint folder
#   KNOBS="name=value ..."      knobs (settings) of build.py --list-knobs
#   HOST                        address to listen on (127.0.0.1)
#   HTTP_PORT, GRPC_PORT,       ports of tritonserver (8000, 8001, 8002)
#   METRICS_PORT
#   OPENAI_PORT                 port of the OpenAI API (9000); OPENAI_PORT=
#                               leaves that API out
#   SERVE_ARGS="--option ..."   further options of flashinfer_backend.serve
# make test             run every test, in WORKERS processes (3);
#                       TESTS="..." are arguments of pytest instead
# make lint             check with ruff, mypy and import-linter
# make bench            time the host's work for steps, chunks and the ensemble
# make attack           kill, stop and flood a real server and send it hostile
#                       requests, for MINUTES (30)
# make soak             send mixed traffic to both APIs for MINUTES (30), compare
#                       every answer and watch the memory
# make fuzz             send REQUESTS (100000) random requests to real servers of
#                       each kind
# make clean            remove .venv and served/
#
# Each but clean makes .venv first where it is missing, with PYTHON (python3) and
# pip, or UV (uv, where it is on PATH); PIP_ARGS="..." are arguments of pip. On a
# machine with an NVIDIA GPU CUDA's packages go in, too.

variables := PYTHON MODEL KNOBS HOST HTTP_PORT GRPC_PORT METRICS_PORT OPENAI_PORT SERVE_ARGS PIP_ARGS UV TESTS WORKERS MINUTES REQUESTS
PYTHON ?= python3
MODEL ?= bundled
KNOBS ?=
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
SERVE_ARGS ?=
PIP_ARGS ?=
TESTS ?=
WORKERS ?= 3
MINUTES ?= 30
REQUESTS ?= 100000
# What pip was told about indexes uv does not read.
UV ?= $(if $(PIP_ARGS)$(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL)$(PIP_FIND_LINKS),,$(shell command -v uv))

given := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
unknown := $(filter-out $(variables) -%,$(given))
ifneq ($(unknown),)
$(error unknown variable $(unknown): there are $(variables))
endif

VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
constraints := -c requirements/constraints.txt
ifeq ($(GPU),0)
constraints += -c requirements/constraints-cpu.txt
serve_extras := server,openai
else
serve_extras := server,openai,cuda
endif
development_extras := $(serve_extras),client,test,lint
# Errors and warnings alone; PIP_ARGS=-v brings pip's lines back.
ifneq ($(UV),)
pip = $(UV) pip install -q --python $(BIN)/python --only-binary :all:
else
pip = $(BIN)/python -m pip install -q --disable-pip-version-check --only-binary :all: $(PIP_ARGS)
endif
# xgrammar's metadata asks for triton, 200 MB that a machine without a GPU has no use for: no dependencies there.
# Tests have one: their kernels run in its interpreter.
ifeq ($(GPU),0)
guided = && $(pip) --no-deps -r requirements/guided-cpu.txt
kernels = && $(pip) --no-deps -r requirements/kernels-cpu.txt
endif
install = $(pip) $(constraints) --editable '.[$(1)]' $(guided)
size = $(if $(filter 0,$(GPU)),$(1) GB; 3 GB where torch brings CUDA,4 GB)
announcement = installing into $(VENV) with $(if $(UV),uv,pip), some minutes the first time: downloads some $(size)
pinned := pyproject.toml $(wildcard requirements/*.txt)
listen := --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
listen += $(if $(OPENAI_PORT),--openai-port $(OPENAI_PORT)) $(SERVE_ARGS)

.PHONY: help serve test lint bench attack soak fuzz clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

serve: $(VENV)/for-serve
	@$(BIN)/python -m flashinfer_backend.serve --check --model-repository served $(listen)
	@$(BIN)/python build.py --output served --model '$(MODEL)' $(if $(KNOBS),--set $(KNOBS))
	@exec $(BIN)/python -m flashinfer_backend.serve --model-repository served $(listen)

# Tests of whole servers begin: they take longest. Without a limit of restarts a worker that crashes leaves the others
# waiting for ever. Benchmarks run once each, untimed.
everything := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 --benchmark-disable
everything += tests/reliability tests/server tests/benchmarks tests/engine tests/unit tests/gpu

test: $(VENV)/for-development
	$(BIN)/python -m pytest $(if $(TESTS),$(TESTS),$(everything))

bench: $(VENV)/for-development
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-group-by=func --benchmark-columns=median,min,max,rounds $(TESTS)

attack: $(VENV)/for-development
	$(BIN)/python tests/reliability/attack.py --minutes $(MINUTES)

soak: $(VENV)/for-development
	$(BIN)/python tests/reliability/soak.py --minutes $(MINUTES)

fuzz: $(VENV)/for-development
	$(BIN)/python tests/reliability/fuzz.py --requests $(REQUESTS)

lint: $(VENV)/for-development
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/for-serve: $(BIN)/python $(pinned)
	@echo "$(call announcement,0.4)"
	@$(call install,$(serve_extras))
	@touch $@

$(VENV)/for-development: $(BIN)/python $(pinned)
	@echo "$(call announcement,0.6)"
	@$(call install,$(development_extras)) $(kernels)
	@touch $@ $(VENV)/for-serve

clean:
	rm -rf $(VENV) served
