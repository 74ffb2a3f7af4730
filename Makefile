# The commands of this project; `make` or `make help` lists them. PYTHON names the Python 3.11 that .venv is made from.

PYTHON ?= python3.11
VENV ?= .venv
EXTRA ?= cpu
TESTS ?= tests

# One thread a process: the machine's cores are shared by the processes of a run, and results do not depend on their number.
export OMP_NUM_THREADS := 1
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test slurm-local slurm-stop test-slurm mutants lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv from requirements/cpu.lock (EXTRA=gpu: from gpu.lock); does nothing where it is up to date
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) was not found; install Python 3.11 (Debian 12: apt-get install" \
		"python3.11 python3.11-venv) or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) scripts/install.py --venv $(VENV) --extra $(EXTRA)

# A lost run (status 4) does not keep the others from being reported; a refusal or Ctrl-C does.
demo: setup  ## run the matched experiment here, end to end, and report its verdicts
	@$(RUN) -m harness.submit experiments/moe_vl.yaml --scale tiny --wait || [ $$? -eq 4 ]
	@$(RUN) -m analysis.report moe_vl --scale tiny
	@$(RUN) -m harness.sync moe_vl
	@echo
	@echo "Next:"
	@echo "  open the report      runs/moe_vl/tiny/report/report.html"
	@echo "  open the MLflow UI   $(VENV)/bin/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db   (then http://127.0.0.1:5000)"
	@echo "  run it on Slurm      $(RUN) -m harness.submit experiments/moe_vl.yaml --scale h100x16"

# Starting engines and importing are one core's work: two processes share the test files.
test: setup  ## run the tests (TESTS=tests/molt_core runs some)
	@$(RUN) -m pytest -n 2 --dist loadfile $(TESTS)

slurm-local:  ## start a real Slurm of four nodes here, below .slurm/ (Debian, root; installs nothing into the system)
	@$(PYTHON) slurm/local/cluster.py start

slurm-stop:  ## end it
	@$(PYTHON) slurm/local/cluster.py stop

test-slurm: setup  ## run the tests that need that Slurm; without one they are NOT RUN and say so
	@$(RUN) -m pytest tests/slurm

mutants: setup  ## plant every fault of tests/mutants in a copy and demand that its tests fail (WITHIN=600: seconds)
	@$(RUN) -m tests.mutants $(if $(WITHIN),--within $(WITHIN))

lint: setup  ## check format and style
	@$(RUN) -m ruff format --check . && $(RUN) -m ruff check .

clean:  ## remove the environment and caches; runs/ stays
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
