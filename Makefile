# Everything runs from .venv, which the first target that needs it makes. Works with GNU make 3.81 (macOS) and sh.
VENV ?= .venv
# The environment with vLLM, and its extra: cpu-rollout, or gpu where there is one.
VLLM_VENV ?= .venv-vllm
VLLM_EXTRA ?= cpu-rollout
# Anything for the command itself: make reproduce ARGS="--seeds 0,1"
ARGS ?=
TEST_ARGS ?= -n 2 --dist loadgroup

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_INSTALLED := $(VLLM_VENV)/.installed
RESULTS := $(or $(COMPACTIONRL_HOME),compactionrl-data)

# One thread per process: the stages run side by side, and spinning OpenMP threads on shared cores are slower.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: help reproduce test test-vllm install-vllm lint benchmarks claims soak pictures resolve install clean

help:
	@echo "make reproduce    the tiny reproduction: trains, evaluates, prints the result table"
	@echo "make test         the tests"
	@echo "make test-vllm    the tests that need vLLM, in an environment of their own: $(VLLM_VENV)"
	@echo "make lint         ruff, import contracts, mypy"
	@echo "make claims       the reproduction with all variants and three seeds, checked against the paper's findings"
	@echo "make soak         random kills on a whole run, until twenty of them are survived; the log goes to tests/logs"
	@echo "make pictures     the latest run in Prefect and MLflow, photographed by a headless Chromium into tests/logs/pictures"
	@echo "make benchmarks   speed measurements"
	@echo "make resolve      checks the pins with a resolver for Linux and macOS (needs uv and network)"
	@echo "make install      only makes $(VENV)"
	@echo "make install-vllm only makes $(VLLM_VENV); with a GPU: make install-vllm VLLM_EXTRA=gpu"
	@echo "make clean        removes $(VENV), caches and build output; results stay (see: compactionrl clean)"

reproduce: $(INSTALLED)
	@$(BIN)/compactionrl reproduce --preset tiny $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(TEST_ARGS) $(ARGS)

test-vllm: $(VLLM_INSTALLED)
	@$(VLLM_VENV)/bin/python -m pytest -m vllm -n 2 --dist loadfile $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

claims: $(INSTALLED)
	@mkdir -p $(RESULTS)
	$(BIN)/compactionrl reproduce --preset tiny --variants all --seeds 0,1,2 --json $(ARGS) > $(RESULTS)/claims.json
	@mkdir -p tests/logs
	@{ date -u "+claims of %Y-%m-%d %H:%M UTC at $$(git rev-parse HEAD)"; $(BIN)/python -m tests.claims $(RESULTS)/claims.json; } \
		> tests/logs/claims.log; status=$$?; cat tests/logs/claims.log; exit $$status

soak: $(INSTALLED)
	@mkdir -p tests/logs
	@$(BIN)/python -m tests.soak $(ARGS) > tests/logs/soak.log; status=$$?; cat tests/logs/soak.log; exit $$status

pictures: $(INSTALLED)
	@$(BIN)/python -m tests.pictures --home $(RESULTS) $(ARGS)

benchmarks: $(INSTALLED)
	@$(BIN)/python -m tests.benchmarks

resolve:
	@PATH="$(BIN):$$PATH" sh .ci/resolve

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt .ci/make-venv
	@sh .ci/make-venv "$(VENV)"
	@touch $@

install-vllm: $(VLLM_INSTALLED)

$(VLLM_INSTALLED): pyproject.toml constraints-gpu.txt uv-overrides.txt .ci/make-vllm-venv
	@sh .ci/make-vllm-venv "$(VLLM_VENV)" "$(VLLM_EXTRA)"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
