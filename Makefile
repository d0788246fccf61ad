# One command each; every target sets up what it needs in .venv and target. `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STUB   := python/kvcore/_kvcore.pyi
PROMPT ?= What is a cache?

# The locked dependencies are what is tested.
CARGO_FLAGS := --locked

# A wheel names no folder of the machine that built it.
CARGO_HOME ?= $(HOME)/.cargo
REMAP := --remap-path-prefix=$(CARGO_HOME)=cargo --remap-path-prefix=$(CURDIR)=.

# Whatever environment is active, tools work on ours.
export VIRTUAL_ENV := $(abspath $(VENV))
unexport CONDA_PREFIX

.DEFAULT_GOAL := help
.PHONY: help demo test test-models bench lint format wheel smoke test-isa test-memory test-inlined clean lock develop \
	test-rust test-python lint-rustfmt lint-clippy lint-ruff lint-format lint-mypy lint-stubs

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(VENV)/.created ## install kvcore into .venv and generate text with a small real model
	$(BIN)/python -m pip install .
	$(BIN)/kvcore generate "$(PROMPT)"

test: test-rust test-python ## run all tests, Rust and Python

test-rust:
	cargo test $(CARGO_FLAGS)

test-python: develop
	$(BIN)/pytest

test-models: develop ## fetch real models (1.1 GB) and run them against their golden tokens
	$(BIN)/pytest -m real

bench: ## run the benchmarks of the Rust core
	cargo bench $(CARGO_FLAGS)

lint: lint-rustfmt lint-clippy lint-ruff lint-format lint-mypy lint-stubs ## check format, lints and types; changes nothing

lint-rustfmt:
	cargo fmt --all --check

lint-clippy: $(VENV)/.created
	PYO3_PYTHON=$(abspath $(BIN)/python) cargo clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings

lint-ruff: $(VENV)/.dev
	$(BIN)/ruff check .

lint-format: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint-mypy: $(VENV)/.dev
	$(BIN)/mypy

lint-stubs: develop
	$(BIN)/stubtest kvcore._kvcore

format: $(VENV)/.dev ## format all code in place
	cargo fmt --all
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

wheel: $(VENV)/.dev ## build dist/*.whl and check its size
	rm -rf dist
	RUSTFLAGS="$(REMAP)" $(BIN)/maturin build --release --strip $(CARGO_FLAGS) --target-dir target/wheel \
		--interpreter $(BIN)/python --out dist
	$(BIN)/python scripts/check_wheel.py dist

smoke: wheel ## try the wheel in a fresh virtual environment
	scripts/smoke.sh $(PYTHON)

test-isa: ## run the Rust tests for CPUs that are not here: NEON, AVX2 alone, no AVX (Debian, qemu)
	scripts/test_isa.sh

test-memory: ## run the Rust tests of kernels and threads under valgrind (Debian), and Miri if it is installed
	scripts/test_memory.sh

test-inlined: ## look for intrinsics that the release build calls as functions
	scripts/check_inlined.sh

clean: ## remove everything that was built
	rm -rf target dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis python/kvcore/_kvcore*.so
	find python tests -name __pycache__ -prune -exec rm -rf {} +

lock: $(VENV)/.created ## pin the newest versions of all Python dependencies
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock" --output-file requirements/dev.txt pyproject.toml requirements/dev.in

# The extension, optimised, importable from the work tree; cargo builds only what has changed.
develop: $(VENV)/.dev ## build the extension into .venv, to work on the project
	$(BIN)/maturin develop --release $(CARGO_FLAGS)

$(VENV)/.dev: requirements/dev.txt $(VENV)/.created
	$(BIN)/python -m pip install --requirement $<
	@touch $@

$(VENV)/.created: scripts/venv.sh
	scripts/venv.sh $(PYTHON) $(VENV)
	@touch $@
