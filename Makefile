# make demo | test | test-gpu | bench | lint
#
# Each target makes .venv first where it is missing or older than pyproject.toml; afterwards no network is needed.
# PY=python3 uses that interpreter as it is instead (a machine that has torch and triton 3.9 already).
# EXTRA adds pip options (an index of your own, for instance); ARGS goes to pytest or to the benchmark.

PYTHON ?= python3
VENV := .venv
RUN := $(or $(PY),$(VENV)/bin/python)
READY := $(if $(PY),,$(VENV)/ready)
BENCH_READY := $(if $(PY),,$(VENV)/bench-ready)
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(EXTRA)

# Without a GPU the CPU build of torch is enough and spares gigabytes of CUDA. Its "+cpu" version has no triton of its own to
# disagree with ours. The index is PyTorch's own, and pip passes over it where it cannot be reached and another source has the build; what torch needs comes with the next step.
HAS_GPU := $(shell { test -e /dev/nvidia0 || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
CPU_TORCH := --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu

.PHONY: demo test test-gpu bench lint
.DEFAULT_GOAL := test

demo: $(READY)
	@$(RUN) -m tritonkittens demo

test: $(READY)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -q -rs $(ARGS)

test-gpu: $(READY)
	@$(RUN) -m pytest -q -rs tests/gpu $(ARGS)

bench: $(BENCH_READY)
	@$(RUN) -m bench $(ARGS)

lint: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

# torch before tritonkittens: a CUDA torch that pins another triton is then replaced or refused by pip in one step.
# Without build isolation an up-to-date environment is confirmed without a network.
$(VENV)/ready: pyproject.toml
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' wheel
	@$(if $(HAS_GPU),,$(PIP) $(CPU_TORCH))
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/bench-ready: $(VENV)/ready
	@$(PIP) --no-build-isolation -e '.[bench,models]'
	@touch $@
