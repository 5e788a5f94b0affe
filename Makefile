# make demo    what expertile does, on a real model, on this machine
# make test    everything that this machine can run, cheapest first
# make lint    format, types, import floors
# Each makes its environment in .venv first. PY=python3 uses that interpreter as it is and installs nothing (GPU machines
# that have torch already, with or without a network).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := .venv
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
PINS := requirements/$(if $(GPU),gpu,cpu).txt
# Without a GPU the kernels run in Triton's interpreter, which must be chosen before the first @triton.jit.
INTERPRET := $(if $(GPU),,TRITON_INTERPRET=1 OMP_NUM_THREADS=1)

ifdef PY
PYTHON := PYTHONPATH=$(CURDIR)/src $(PY)
else
PYTHON := $(CURDIR)/$(VENV)/bin/python
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
endif
PYTEST := $(PYTHON) -m pytest -q
PIP := $(VENV)/bin/python -m pip -qq --disable-pip-version-check

.PHONY: help demo test lint unit numerics compile guard transformers serve vllm gpu readme wheel clean

help:
	@sed -n '1,5s/^# //p' $(MAKEFILE_LIST)

demo: $(RUNTIME)
	@$(PYTHON) -m expertile.cli demo

test: lint unit numerics compile guard transformers vllm serve gpu readme wheel

lint: $(DEV)
	@for tool in ruff mypy importlinter; do
	    $(PYTHON) -c "import $$tool" 2>/dev/null || { echo "lint: skipped, $(PY) has no $$tool"; exit 0; }
	done
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

unit: $(DEV)
	$(PYTEST) tests/unit

numerics: $(DEV)
	$(INTERPRET) $(PYTEST) tests/numerics

compile: $(DEV)
	$(PYTEST) tests/compile

guard: $(DEV)
	$(PYTEST) tests/guard

transformers: $(DEV)
	$(PYTEST) tests/transformers

serve: $(DEV)
	OMP_NUM_THREADS=1 $(PYTEST) tests/serve
	$(PYTEST) tests/serve_load
	$(PYTEST) tests/sagemaker

# vLLM's Python files come out of its wheels by ranges; without a network the tests are skipped by name.
vllm: $(DEV)
	$(PYTHON) tests/vllm/fetch.py || true
	for version in 0.26.0 0.24.0 0.33.0; do EXPERTILE_TEST_VLLM=$$version OMP_NUM_THREADS=1 $(PYTEST) tests/vllm; done
	$(INTERPRET) $(PYTEST) tests/vllm/test_interpreted.py tests/vllm/test_contract.py

gpu: $(DEV)
	$(PYTEST) tests/gpu

readme: $(DEV)
	$(PYTEST) tests/readme

# The wheel in an environment of its own, with the other packages lent by the first: what is missing in it fails here.
wheel: $(DEV)
	@$(PYTHON) -c "import build, hatchling" 2>/dev/null || { echo "wheel: skipped, $(PY) has no build or hatchling"; exit 0; }
	rm -rf build/wheel
	$(PYTHON) -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	$(PYTHON) -m venv --without-pip build/wheel/venv
	$(PYTHON) -m pip --disable-pip-version-check --python build/wheel/venv/bin/python install --no-deps --no-index build/wheel/*.whl
	site=$$(build/wheel/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$site/lent.pth"
	cd build/wheel
	EXPERTILE_WHEEL=1 venv/bin/python -m pytest -q -p no:cacheprovider $(CURDIR)/tests/unit

clean:
	rm -rf $(VENV) build dist

$(VENV)/.torch: requirements/cpu.txt requirements/gpu.txt requirements/triton.txt
	@echo "making $(VENV): torch first, the largest part"
	python3 -m venv $(VENV)
	$(PIP) install -c $(PINS) torch numpy
	if [ "$$(uname -s)" = Linux ] && ! $(VENV)/bin/python -c 'import triton' 2>/dev/null; then
	    $(PIP) install --no-deps -r requirements/triton.txt
	fi
	touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	@echo "making $(VENV): expertile and transformers"
	$(PIP) install -c $(PINS) -e '.[transformers]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "making $(VENV): what the tests need"
	$(PIP) install -c $(PINS) -e '.[dev,serve,transformers]'
	touch $@
