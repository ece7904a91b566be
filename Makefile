# make demo and make test do all their set-up on a fresh machine with Python and network; fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test lint bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "torch==2.13.0"
	$(PIP) install --quiet -c constraints.txt --editable ".[demo,test]"
	$(PIP) install --quiet -c constraints.txt --no-deps dashscope  # only its vocabulary file is read, by the tokenizer tests
	touch $@

demo: setup
	$(BIN)/python -m lazy_h3 demo --out output

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy memory

bench: setup
	$(BIN)/python -m lazy_h3 bench load
	$(BIN)/python -m lazy_h3 bench release

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info output
