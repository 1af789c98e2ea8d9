# What people and CI run. Running a target twice is quick and harmless.
#
#   make setup    .venv with everything in it, exact versions from constraints.txt
#   make demo     a job end to end, on free ports in a scratch folder, everything stopped afterwards
#   make up       Torchstone on http://127.0.0.1:8000 until Ctrl-C
#   make test     lint, then every test
#   make gpu-check  every kind on this machine's GPUs, then the tests that need one; fails where there is none
#
# PYTHON=... names another interpreter than the first fitting one on PATH.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup up demo test lint gpu-check clean

# Tests that measure nothing may run beside one another, the others not. LIVES start and break whole services and workers,
# which is mostly waiting, or compare what was computed; the longest files first.
NO_TIMES := tests/torchstone tests/service
LIVES := tests/faults \
  $(addprefix tests/worker/, workloads/test_resume.py parallel/test_strategies.py workloads/test_jit_variants.py \
    test_host.py workloads/test_train.py parallel/test_ranks_on_fake_devices.py test_checkpoints.py test_deposit.py \
    test_faults.py) \
  tests/test_s3.py tests/test_up.py tests/test_cases.py tests/test_compose.py \
  $(addprefix tests/worker/, parallel/test_ranks.py test_servers.py parallel/test_on_fake_devices.py \
    workloads/test_cpp_example.py test_app.py test_models.py data measure/test_roofline.py measure/test_statistics.py) \
  tests/test_floors.py
STAMP := .venv/.installed
BIN := .venv/bin

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	for candidate in $${python:-python3 python3.13 python3.12 python3.11}; do \
	  if command -v "$$candidate" >/dev/null && "$$candidate" -c "$$fits" 2>/dev/null; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$${chosen:-}" ]; then \
	  found=$$($${python:-python3} --version 2>&1 || true); \
	  echo "Torchstone needs Python 3.11, 3.12 or 3.13; found: $$found." >&2; \
	  echo "Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! "$$chosen" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$chosen cannot make virtual environments: install its venv package (Debian: $$chosen-venv)." >&2; exit 1; \
	fi; \
	if ! [ -x $(BIN)/python ] || ! $(BIN)/python -c "$$fits"; then "$$chosen" -m venv --clear .venv; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[service,worker,onnx,dev]'
	@# pip compiles what it copies, not what it installs in place; where Python may not write, each start would pay for it.
	@$(BIN)/python -m compileall -q torchstone service worker
	@touch $@
	@echo "ready: $(BIN)/torchstone, with $$($(BIN)/python --version)"

up: setup
	$(BIN)/torchstone up

demo: setup
	@demo/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup lint
	$(BIN)/python -m pytest -n 3 -p tests.no_torch $(NO_TIMES)
	$(BIN)/python -m pytest -n 3 --dist loadfile $(LIVES)
	$(BIN)/python -m pytest $(addprefix --ignore ,$(NO_TIMES) $(LIVES))

gpu-check: setup
	@$(BIN)/python -m demo.gpu_check

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
