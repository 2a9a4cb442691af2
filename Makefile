# One entry per verb. Every verb makes and fills .venv in the clone first; that is quick once it has been done.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin

.PHONY: setup lint host test test-gpu bench demo clean

setup:
	@$(PYTHON) scripts/bootstrap.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m skyrl_isoexec patches lint

ifdef ARGS
test: setup
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)
else
test: setup  # whole runs need both cores; everything else is done on two at a time, file by file
	$(BIN)/python -m pytest -m "not gpu" --ignore=tests/loop -n 2 --dist loadfile
	$(BIN)/python -m pytest -m "not gpu" tests/loop
endif

host:  # what a verb for a GPU needs of the Python that runs it
	@$(or $(wildcard $(BIN)/python),python3) -c "import torch, triton" 2>/dev/null || \
		{ echo "$(or $(wildcard $(BIN)/python),python3) has no torch or no triton; install them, or run make setup" >&2; exit 2; }

test-gpu: host  # needs torch, triton, numpy and pytest alone, so it fills no .venv where there is none
	$(or $(wildcard $(BIN)/python),python3) -m pytest -m gpu tests/gpu $(ARGS)

bench: host  # refuses an operator whose gate is not valid; as test-gpu, it needs no .venv
	$(or $(wildcard $(BIN)/python),python3) -m skyrl_isoexec.bench layers $(ARGS)

demo: setup
	$(BIN)/python -m skyrl.train +exec=isoexec $(ARGS)

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find skyrl_isoexec tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
