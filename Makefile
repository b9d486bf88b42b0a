# Every target sets itself up: `make test` or `make demo` in a fresh clone is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help install demo test bench lint format clean

help: ## Show this list.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): constraints.txt pyproject.toml setup.py $(CXX_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy setuptools wheel pybind11 ninja
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[triton,plots,test,lint]'
	touch $@

install: $(READY) ## Make .venv with pinned dependencies and this package, editable.

demo: $(READY) ## Grow RBF networks with S2D and S3D (about three minutes); figures go to runs/rbf/.
	$(BIN)/s3d-fast rbf --out runs/rbf

test: $(READY) ## Run the tests.
	$(BIN)/python -m pytest -q

bench: $(READY) ## Time the operations, as ratios against the reference; JSON goes to runs/bench.json.
	mkdir -p runs
	$(BIN)/python -m pytest -q benchmarks --benchmark-enable --benchmark-json=runs/bench.json

lint: $(READY) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: $(READY) ## Rewrite the sources in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

clean: ## Remove .venv and everything that was built.
	rm -rf $(VENV) build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks s3d_fast/_C*.so
