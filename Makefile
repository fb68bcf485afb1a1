# make demo   the main job, on data that ships with the package; make demo RECIPE=sparse-vd trains it to be sparse
# make test   lint, types, tests and doctests
# make reader a digit reader of 8 kilobytes in C: builds it for every processor there is a compiler for, and runs it
# make docs   the site, in docs/_build/html: tutorials are run, warnings are errors, nothing is fetched but packages
# make package   a wheel and an sdist in dist/, checked, installed in an environment of their own and tried without extras
# make bench  the cost of every method and every peer, as ratios to the plain network; a table and a plot in docs/
# make benchmark-peers   speed against the plain network and other libraries, which get an environment of their own
# Each works as the first command in a fresh clone: it makes .venv and installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.installed-demo
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
PEERS  := .venv-peers

.PHONY: demo reader docs test lint types check install clean package bench benchmark-peers

# the demonstration needs the command line, the report and ONNX; linters and test tools come with $(STAMP)
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cli,report,onnx]"
	touch $(DEMO)

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

$(DOCS): $(DEMO)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(DOCS)

install: $(STAMP)

demo: $(DEMO)
	$(BIN)/bayeslim demo $(if $(RECIPE),--recipe "$(RECIPE)" --out "demo-$(RECIPE)")

reader: $(DEMO)
	$(BIN)/python examples/reader/run.py

docs: $(DOCS)
	BAYESLIM_PROGRESS=0 $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "The site is in docs/_build/html/index.html."

# hatchling builds both; the clean environment has what the wheel asks for and nothing else
package: $(DEMO)
	rm -rf dist build/clean
	$(BIN)/python -m pip install --quiet -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	$(PYTHON) tests/installed.py build/clean

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# the library is compiled once for all the processes that tests start, also where it was asked not to;
# each worker takes tests that lie together, which share fixtures
check: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint types check

$(PEERS)/.installed: constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	echo '*' > $(PEERS)/.gitignore
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt torch numpy safetensors
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r benchmarks/peers.txt
	touch $@

# measured beside the peers, in their environment; drawn where matplotlib is
bench: $(PEERS)/.installed $(DOCS)
	PYTHONPATH=src $(PEERS)/bin/python -m benchmarks --no-report
	$(BIN)/python -m benchmarks --report

benchmark-peers: $(PEERS)/.installed
	PYTHONPATH=src $(PEERS)/bin/python benchmarks/steps.py

clean:
	rm -rf $(VENV) $(PEERS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis docs/_build docs/api docs/methods docs/tutorials docs/plots docs/benchmarks.md docs/gallery docs/gallery.rst
