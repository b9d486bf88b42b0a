# Every target sets itself up: `make test` or `make demo` in a fresh clone is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help install demo test package bench asan lint format docs clean

help: ## Show this list.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): constraints.txt pyproject.toml setup.py $(CXX_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy setuptools wheel pybind11 ninja
	S3D_FAST_REQUIRE_KERNELS=1 \
		$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[triton,plots,test,lint]'
	touch $@

install: $(READY) ## Make .venv with pinned dependencies and this package, editable.

demo: $(READY) ## Fit a photograph and curves with S2D and S3D (about a minute); the figure goes to runs/demo/.
	$(BIN)/s3d-fast demo --out runs/demo

# Files stay together: fixtures that take long, such as compiling all kernels, are made once.
test: $(READY) ## Run the tests, on two cores.
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Nothing of .venv is used: this is what people get who install the package.
package: ## Build sdist and wheel, install each into an empty environment, and try it; files go to build/package/dist.
	$(PYTHON) .ci/package.py

DEVICE ?= cpu
bench: $(READY) ## Time everything against the reference; ratios go to runs/benchmarks.md. With DEVICE=cuda, on a GPU, see docs/gpu.md.
	$(if $(filter cuda,$(DEVICE)),$(BIN)/python -m benchmarks.gpu_report --check)
	mkdir -p runs
	rm -f runs/bench.json
	S3D_DEVICE=$(DEVICE) $(BIN)/python -m pytest -q -rs -W default benchmarks --benchmark-enable --benchmark-json=runs/bench.json
	$(BIN)/python -m benchmarks.table runs/bench.json > runs/benchmarks.md
	$(if $(filter cpu,$(DEVICE)),$(BIN)/python -m benchmarks.kept_table docs/kept.json >> runs/benchmarks.md)
	cat runs/benchmarks.md
	$(if $(filter cuda,$(DEVICE)),$(BIN)/python -m benchmarks.gpu_report)

# A copy of the package with a checked build of the extension, and the tests beside it.
ASAN := build/asan
asan: $(READY) ## Run the tests of the extension under AddressSanitizer and UndefinedBehaviorSanitizer.
	S3D_FAST_SANITIZE=1 S3D_FAST_REQUIRE_KERNELS=1 $(BIN)/python setup.py --quiet build --build-base $(ASAN) --build-lib $(ASAN)/lib
	cp -r tests pyproject.toml $(ASAN)/lib/
	cd $(ASAN)/lib && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(CURDIR)/$(BIN)/python -m pytest -q -k 'not triton' \
		tests/backends/test_extension*.py tests/backends/test_agreement*.py tests/backends/test_widths.py

# Types are checked across the frontier to the kernels, laid out as they are installed.
TYPES := build/types
LAYOUT = rm -rf $(TYPES) && mkdir -p $(TYPES) && \
	cp -rs $(CURDIR)/s3d_fast $(TYPES)/ && cp -rs $(CURDIR)/kernels $(TYPES)/s3d_fast/
lint: $(READY) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(LAYOUT)
	$(BIN)/mypy --cache-dir $(TYPES)/cache
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: $(READY) ## Rewrite the sources in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

# The tutorials run as they are printed; a broken link or a block that fails ends the build.
docs: $(READY) ## Build the documentation site in build/site, and run the code of its tutorials (about two minutes).
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs,digits]'
	$(LAYOUT)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict

clean: ## Remove .venv and everything that was built.
	rm -rf $(VENV) build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks s3d_fast/_C*.so s3d_fast/_C.txt
