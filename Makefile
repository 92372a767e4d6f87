# make            installs everything into .venv (needs Python 3.11 or newer, nothing else)
# make run        the main job, end to end, on a data set of product reviews
# make test       all tests but the benchmarks
# make check      formatting, lint, types, import directions and the unit tests, in under a minute
# make bench      the benchmarks
# make test-compose  the tests in containers: needs root, Docker and docker-compose
# make screenshots  the pictures that the README shows, from the real thing; needs Chromium
# make clean      removes what tools left behind; .venv and .batchmill stay

SHELL := /bin/bash
PYTHON := .venv/bin/python
PYTEST_ARGS ?=
# Tests mostly wait for processes, so two at a time halve the time; a file stays together.
SIDE_BY_SIDE := -n 2 --dist loadfile
.DEFAULT_GOAL := install
.PHONY: install run test test-compose check bench screenshots clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt ops/bootstrap
	@ops/bootstrap

# torch and its kin: large, so that only what needs them waits for them
.venv/.transformers: .venv/.installed
	@ops/bootstrap transformers

run: install
	@$(PYTHON) -m batchmill.demo

test: install .venv/.transformers
	$(PYTHON) -m pytest --ignore=tests/benchmarks $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# pytest-celery's fixtures warn of what is not ours; the containers of a slow machine take their time.
test-compose: install
	$(PYTHON) -m pytest tests/compose -o python_files='container_*.py' -p no:cacheprovider -W default --timeout=600 --durations=5 $(PYTEST_ARGS)

check: install
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) -m pytest tests/unit -q $(SIDE_BY_SIDE) $(PYTEST_ARGS)

bench: install .venv/.transformers
	$(PYTHON) -m pytest tests/benchmarks -s --timeout=1800 -o python_files='test_*.py bench_*.py' $(PYTEST_ARGS)

screenshots: install
	$(PYTHON) -m tests.screenshots

clean:
	rm -rf dist build htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
