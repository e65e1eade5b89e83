# `make serve` and `make test` work from a bare clone with Python >= 3.10; `make help` lists the rest.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch>=2.11,<2.14

.DEFAULT_GOAL := help
.PHONY: help serve chat doctor test test-fast test-all check docs gpu-bench install install-test clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the interpreter of a new .venv; ARGS=\"--port 9000\" is passed on."

serve: $(VENV)/.installed ## install, and serve the demonstration model on 127.0.0.1:8000
	@$(BIN)/moe-serve serve $(ARGS)

chat: $(VENV)/.installed ## talk to a running server from the terminal
	@$(BIN)/moe-serve chat $(ARGS)

doctor: $(VENV)/.installed ## say what this machine has
	@$(BIN)/moe-serve doctor $(ARGS)

test: $(VENV)/.installed-test ## install with the test extra, and run the whole suite
	@scripts/test $(ARGS)

test-fast: $(VENV)/.installed-test ## the quick half of the suite: at most 90 s on two cores
	@scripts/test --fast $(ARGS)

test-all: $(VENV)/.installed-test ## the suite with every case of sampled tests: for a night
	@scripts/test --all $(ARGS)

check: $(VENV)/.installed-test ## lint, types, structure and tests: what CI runs
	@scripts/check $(ARGS)

docs: $(VENV)/.installed-test ## build the documentation as a site into build/site
	@PYTHONPATH=scripts $(BIN)/python -m docs_site $(ARGS)

# Installs nothing: on a GPU machine without a network, PYTHON is what has torch and triton.
gpu-bench: ## on a GPU: kernel tests, tuning, benchmarks; goes on where it ended
	@python="$(BIN)/python"; test -x "$$python" || python="$(PYTHON)"; \
	  PYTHONPATH=.:kernels "$$python" benchmarks/run.py gpu_all $(ARGS)

install: $(VENV)/.installed ## make .venv and install the server

install-test: $(VENV)/.installed-test ## make .venv and install with the test extra

# torch goes in first and alone, so that the one pip chose for this machine is the one that stays.
# Each stamp is older than pyproject.toml as soon as that file changes: then pip runs again.
$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "moe-serve needs Python 3.10 or newer; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e ".[test]"
	@touch $@ $(VENV)/.installed

clean: ## remove .venv and the tools' caches
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
