# `make serve` and `make test` work from a bare clone with Python >= 3.10; `make help` lists the rest.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch>=2.11,<2.14
# pip compiles on one core, which takes most of the installation. This uses every core, and leaves out
# what is seldom imported: Python compiles those modules when they are.
SELDOM := /tests?/|/testing/|/(_inductor|backrefs|fontTools|graphql|joblib|lexers|models|mypyc?|narwhals|networkx|nltk|pip|selenium|setuptools|sklearn)/
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib >/dev/null 2>&1 || true
# torch and sympy are a quarter of it: another core compiles them while pip installs the rest.
COMPILE_TORCH = nice $(BIN)/python -m compileall -q -x '$(SELDOM)' \
  $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy >/dev/null 2>&1
# The CPU kernels, which the first start would build otherwise: they need torch, numpy and a C++ compiler only.
BUILD_KERNELS = PYTHONPATH=kernels nice $(BIN)/python -W ignore -c \
  'from moe_kernels.cpu.cpu_library import load_cpu_library as load; load()' >/dev/null 2>&1

.DEFAULT_GOAL := help
.PHONY: help serve chat doctor test test-fast test-all check docs gpu-bench install install-test clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 sets the interpreter for a new .venv. ARGS=\"--port 9000\" is passed to the command."

serve: $(VENV)/.installed ## install, and serve the demonstration model on 127.0.0.1:8000
	@$(BIN)/moe-serve serve $(ARGS)

chat: $(VENV)/.installed ## chat with a running server in the terminal
	@$(BIN)/moe-serve chat $(ARGS)

doctor: $(VENV)/.installed ## show this machine's hardware, the usable backends, and problems
	@$(BIN)/moe-serve doctor $(ARGS)

test: $(VENV)/.installed-test ## install the test extra, and run the whole test suite
	@scripts/test $(ARGS)

test-fast: $(VENV)/.installed-test ## run the quick half of the suite: 75 seconds on two quiet cores
	@scripts/test --fast $(ARGS)

test-all: $(VENV)/.installed-test ## run the suite with every case of sampled tests: for a night
	@scripts/test --all $(ARGS)

check: $(VENV)/.installed-test ## run lint, types, structure and tests, as CI does
	@scripts/check $(ARGS)

docs: $(VENV)/.installed-test ## build the documentation as a site into build/site
	@PYTHONPATH=scripts $(BIN)/python -m docs_site $(ARGS)

# Installs nothing. On a GPU machine without a network, set PYTHON to an interpreter with torch and triton.
gpu-bench: ## on a GPU: kernel tests, tuning and benchmarks; a second call continues
	@python="$(BIN)/python"; test -x "$$python" || python="$(PYTHON)"; \
	  PYTHONPATH=.:kernels "$$python" benchmarks/run.py gpu_all $(ARGS)

install: $(VENV)/.installed ## create .venv and install the server

install-test: $(VENV)/.installed-test ## create .venv and install the server with the test extra

# torch is installed first, so that later installations keep the build that pip chose for this machine.
# When pyproject.toml changes, it is newer than each stamp file, and pip runs again.
$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "moe-serve needs Python 3.10 or newer; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)" numpy
	@touch $@

$(VENV)/.installed: $(VENV)/.base
	$(COMPILE_TORCH) & $(BUILD_KERNELS) & $(BIN)/python -m pip install --quiet --no-compile -e .; status=$$?; \
	  wait; exit $$status
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.base
	$(COMPILE_TORCH) & $(BUILD_KERNELS) & $(BIN)/python -m pip install --quiet --no-compile -e ".[test]"; status=$$?; \
	  wait; exit $$status
	@$(COMPILE)
	@touch $@ $(VENV)/.installed

clean: ## remove .venv and the caches of the tools
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
