# make demo | test | test-fast | test-slow | test-gpu | bench | lint | docs
#
# test       every test function, with some of its cases: what CI runs, 20 minutes on two cores
# test-fast  the language, its errors and layouts, and one GEMM and one attention in the simulator: two minutes, while editing
# test-slow  the exhaustive cases alone, which `test` leaves out: one to two hours on two cores
# test-gpu   every case of the tests of kernels, on the GPU
#
# Each target makes .venv first where it is missing or older than pyproject.toml; afterwards no network is needed.
# PY=python3 uses that interpreter as it is instead (a machine that has torch and triton 3.9 already).
# EXTRA adds pip options (an index of your own, for instance); ARGS goes to pytest or to the benchmark.

PYTHON ?= python3
VENV := .venv
RUN := $(or $(PY),$(VENV)/bin/python)
READY := $(if $(PY),,$(VENV)/ready)
BENCH_READY := $(if $(PY),,$(VENV)/bench-ready)
DOCS_READY := $(if $(PY),,$(VENV)/docs-ready)
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts $(EXTRA)

# pip finds no versions for triton 3.9 together with a CUDA build of torch, each of which pins another triton: both are installed by themselves, then what they
# and this project need besides. triton comes first: where there is none for an interpreter nothing large is fetched.
TORCH := 2.13.0
TRITON := 'triton>=3.9,<3.10'
NO_TRITON := triton 3.9 needs Python 3.11 or later: PYTHON=python3.11 chooses another interpreter.

# Without a GPU the CPU build of torch is enough and spares gigabytes of CUDA. It is on PyTorch's own index; pip passes over that where it cannot be reached, and
# takes the build from another source that has it (EXTRA, or pip's configuration), else PyPI's build with CUDA.
HAS_GPU := $(shell { test -e /dev/nvidia0 || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
CPU_TORCH := --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu
HAS_TORCH := $(VENV)/bin/python -c "import sys; from importlib.metadata import version; sys.exit(version('torch').split('+')[0] != '$(TORCH)')" 2>/dev/null

.PHONY: demo test test-fast test-slow test-gpu bench lint docs
.DEFAULT_GOAL := test

demo: $(READY)
	@$(RUN) -m tritonkittens demo

# Worker processes share the cores: a thread each.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -q -rs
FAST := $(addprefix tests/,test_types.py test_tensors.py test_decorators.py test_allocations.py test_interning.py test_cluster.py test_ragged.py \
	test_explicit.py test_explicit_errors.py test_mistakes.py test_names_in_errors.py test_template.py test_template_layout.py test_template_memory.py \
	test_template_deferred.py test_template_reduce.py test_template_extensions.py test_schedule.py test_plain_kernel.py test_arch.py test_bind.py test_attention.py test_num_splits.py \
	test_tune.py test_waiting.py test_launch.py sim/test_numbers.py sim/test_ptx.py sim/test_pure_operations.py sim/test_tensor_maps.py \
	sim/test_combiners.py gpu/test_gemm_gpu.py::test_layouts gpu/test_attention_gpu.py::test_causal)

test: $(READY)
	@$(PYTEST) -m "not slow" --durations=25 --durations-min=5 $(ARGS)

test-fast: $(READY)
	@$(PYTEST) -m "not slow" $(FAST) $(ARGS)

test-slow: $(READY)
	@$(PYTEST) -m slow $(ARGS)

test-gpu: $(READY)
	@$(RUN) -m pytest -q -rs tests/gpu $(ARGS)

bench: $(BENCH_READY)
	@$(RUN) -m bench $(ARGS)

lint: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check --quiet .
	@$(RUN) -m mypy
	@$(RUN) -c "from importlinter.cli import lint_imports_command as lint; lint()"

# Warnings are errors. The pages are in docs/_build/html.
docs: $(DOCS_READY)
	@$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Without build isolation an up-to-date environment is confirmed without a network.
$(VENV)/ready: pyproject.toml
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' wheel
	@$(PIP) --no-deps $(TRITON) || { echo '$(NO_TRITON)' >&2; exit 1; }
	@$(HAS_TORCH) || $(if $(HAS_GPU),false,$(PIP) --no-deps $(CPU_TORCH) 2>/dev/null) || $(PIP) --no-deps torch==$(TORCH)
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(VENV)/bin/python tools/requirements.py torch 'tritonkittens[test]' > $(VENV)/requirements.txt
	@$(PIP) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/bench-ready: $(VENV)/ready
	@$(VENV)/bin/python tools/requirements.py 'tritonkittens[bench,models]' > $(VENV)/requirements.txt
	@$(PIP) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/docs-ready: $(VENV)/ready
	@$(VENV)/bin/python tools/requirements.py 'tritonkittens[docs]' > $(VENV)/requirements.txt
	@$(PIP) -r $(VENV)/requirements.txt
	@touch $@
