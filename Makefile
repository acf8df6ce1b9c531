# make setup | demo [SEED=1] | up | down | status | chaos | test | lint | clean
PYTHON ?= python3
SEED ?= 0
RUN := demo$(if $(filter-out 0,$(SEED)),-seed$(SEED))
READY := .venv/.ready

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMP_NUM_THREADS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_OFFLINE := 1

.PHONY: setup demo up down status chaos test lint clean

setup: $(READY)

# Once, and again when the requirements change.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	pip install --quiet -c constraints.txt -e '.[test,stack,kernels,bench]'
	touch $@

demo: setup
	k3 train infra/configs/tiny.toml run=$(RUN) seed=$(SEED)

up: setup
	k3 up

down:
	k3 down

status:
	k3 status

lint: setup
	ruff check
	ruff format --check
	lint-imports
	mypy

# Two processes, a file in one of them; in the order of the files, which begins with those that take minutes.
test: lint
	pytest -n 2 --dist loadfile --no-loadscope-reorder

# Whole runs on real servers under random faults; about 25 minutes on two cores.
chaos: setup
	k3 chaos --faults 60 --seed 1 --out .k3-chaos.json

clean:
	rm -rf build *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
