# The tasks of this checkout. Each sets up .venv first, once; nothing is needed beforehand but Python 3.11 to 3.13,
# make and git. Variables: VENV=folder, PYTHON=interpreter for a new VENV, ARGS="further arguments of the command",
# MINUTES=of a soak.

VENV ?= .venv
PYTHON ?=
ARGS ?=
MINUTES ?= 30
BIN := $(VENV)/bin
# tests/conftest.py says how many processes there are, and which runs what.
PYTEST := $(BIN)/python -m pytest --no-loadscope-reorder --max-worker-restart 0 -n auto
CODE := app clusters strategies datasets docs/conf.py docs/images examples benchmarks tests .ci

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE # with it each of a thousand processes would compile what it imports

.PHONY: help
help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: setup ## train a small network on Fashion-MNIST, to a report
	@done=$$($(BIN)/trainwright show fashion-mnist --json 2>/dev/null | grep -c '"state": "done"'); \
	$(BIN)/trainwright fit examples/fashion_mnist.py $$(test "$$done" = 0 || echo --fresh) $(ARGS)

.PHONY: lm
lm: setup ## train a language model on the King James text, in a pipeline of two workers, to a report
	@done=$$($(BIN)/trainwright show gpt-laptop --json 2>/dev/null | grep -c '"state": "done"'); \
	$(BIN)/trainwright fit examples/gpt.py --set plan=pp=2,schedule=1f1b,accumulation=8 \
		$$(test "$$done" = 0 || echo --fresh) $(ARGS)
	@echo; $(BIN)/python examples/generate.py "In the beginning"

.PHONY: test
test: setup ## test all units and every engine, without Ray; ARGS="-k word" picks some
	@$(PYTEST) tests/unit tests/conformance $(ARGS)

.PHONY: test-all
test-all: setup ## run all tests, also users' programs, those on Ray clusters and with faults; ARGS="tests/ray -k word" picks some
	@$(PYTEST) $(ARGS)

.PHONY: hosts
hosts: setup ## run the tests of several hosts, in network namespaces (needs the rights of root), of `submit` and of pages
	@$(PYTEST) -n 3 -m hosts $(ARGS)

.PHONY: nodes
nodes: setup ## run the tests of several nodes on this machine: lost and coming ones, links that are cut (as root)
	@$(PYTEST) -n 2 -m nodes $(ARGS)

.PHONY: extras
extras: setup ## install the wheel into fresh environments, one framework each, and train (network, minutes)
	@$(BIN)/python -m pytest -m extras $(ARGS)

.PHONY: check
check: types lint imports sizes docs ## run all static checks

.PHONY: lint
lint: setup ## ruff: rules and format
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

.PHONY: types
types: setup links ## mypy, strict
	@$(BIN)/mypy -p trainwright

.PHONY: imports
imports: setup links ## who may import whom
	@PYTHONPATH=.typing $(BIN)/lint-imports

.PHONY: sizes
sizes: setup ## rules for the sizes of files, functions, classes and packages
	@$(BIN)/python .ci/sizes.py

# Sphinx sees the packages through links too. A link to nothing and a docstring that it cannot read are errors.
.PHONY: docs
docs: setup links ## build the documentation as a site, into build/docs
	@TF_CPP_MIN_LOG_LEVEL=3 PYTHONPATH=.typing $(BIN)/python -m sphinx -q -W --keep-going -E -c docs -d build/doctrees . build/docs

.PHONY: format
format: setup ## let ruff mend what it can
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

.PHONY: soak
soak: setup ## the longest tests (of hosts and nodes as root), then half an hour under random faults; MINUTES=5 for less
	@$(PYTEST) -m "soak and not (hosts or nodes)"
	@$(PYTEST) -n 2 -m "soak and (hosts or nodes)"
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

.PHONY: matrix
matrix: ## run tests with the lowest and the highest versions that are supported; ARGS=lowest for one of them
	@python3 .ci/matrix.py $(ARGS)

.PHONY: schedules
schedules: setup ## ten thousand failure schedules against the driver, simulated; ARGS="--first 10000" for others
	@$(BIN)/python -m tests.simulation.schedules $(ARGS)

.PHONY: bench
bench: setup ## measure against plain DDP, Ray Train, torchrun and others
	@$(BIN)/python benchmarks/run.py $(ARGS)

.PHONY: dist
dist: setup ## build wheel and sdist into dist/, beside the versions that they were tested with
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@cp constraints.txt dist/

.PHONY: setup
setup: ## make .venv, once
	@PYTHON="$(PYTHON)" sh .ci/setup.sh "$(VENV)"

# mypy and import-linter do not follow an editable install that maps folders: they see the packages through links.
.PHONY: links
links:
	@rm -rf .typing/trainwright && mkdir -p .typing/trainwright
	@for entry in app/*; do ln -s "../../$$entry" .typing/trainwright/; done
	@ln -s ../../strategies ../../datasets ../../clusters .typing/trainwright/

.PHONY: clean
clean: ## remove what the checks and builds left behind; keeps .venv, data/ and runs/
	@rm -rf build dist .typing .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis *.egg-info
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
