# `make demo` shows what the library does, `make test` checks it, `make docs` builds the documentation. All set up .venv on their own.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs docs-check release-check bench compare pages slow clean

demo: .venv/ready
	$(BIN)/meha reproduce --quick

test: .venv/ready lint docs-check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, with every example run and the reproduction report: open out/docs/index.html.
docs: .venv/ready
	rm -rf out/docs docs/gallery docs/api/generated
	$(BIN)/meha reproduce --draw --records lab/records --out out/site-extra/reproduction --home ../index.html
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html -d out/doctrees docs out/docs
	$(BIN)/python tools/check_links.py out/docs

# The same pages with the quick examples only; warnings are errors.
docs-check: .venv/ready
	OMP_NUM_THREADS=1 MEHA_GALLERY=check $(BIN)/sphinx-build -W --keep-going -q -b html -d out/doctrees-check docs out/docs-check

# A wheel and an sdist, checked, and the wheel installed alone into a new environment, where the README's first example runs.
release-check: .venv/ready
	$(BIN)/python tools/release_check.py

slow: .venv/ready
	$(BIN)/pytest -m slow

bench: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m meha_lab.benchmarks.speed
	OMP_NUM_THREADS=1 $(BIN)/python -m meha_lab.benchmarks.structured
	OMP_NUM_THREADS=1 $(BIN)/python -m meha_lab.benchmarks.network --memory
	OMP_NUM_THREADS=1 $(BIN)/python -m meha_lab.benchmarks.newton

compare: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/meha reproduce comparison --tune

# All tables, figures and pages, from lab/records: open out/pages/index.html.
pages: .venv/ready
	$(BIN)/meha reproduce --draw --records lab/records --out out/pages
	$(BIN)/python -m meha_lab.benchmarks --draw
	$(BIN)/python -m meha_lab.tools.five_problems --out out/pages

.venv/ready: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs,release,recipes]" --editable lab
	touch $@

clean:
	rm -rf .venv .peers build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
