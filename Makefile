# Every target makes the environment that it needs from the hashed lock files; nothing is installed by hand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
ARGS ?=
WORKERS ?= 3

.PHONY: bench-parts bench-sweep help setup demo test soak check bench bench-large bench-outbox lock clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(VENV)/.dev ## make the environment with all tools for development

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.server: requirements/server.txt pyproject.toml | $(BIN)/python
	$(PIP) install --require-hashes -r requirements/server.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.server
	$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@

demo: $(VENV)/.server ## start everything and send real signed envelopes (ARGS=--once ends by itself)
	@$(BIN)/postseal demo $(ARGS)

test: $(VENV)/.dev ## run the tests, with a seeded part of the long campaigns
	$(BIN)/pytest -n $(WORKERS) -m "not soak" $(ARGS)

soak: $(VENV)/.dev ## run the rest of the long campaigns
	$(BIN)/pytest -m soak --timeout 3600 $(ARGS)

check: $(VENV)/.dev ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## measure ingest beside pgbench and print the ratios
	$(BIN)/python -m bench.ingest $(ARGS)

bench-large: $(VENV)/.dev ## measure ingest with ten million identities, with holes, and into one stream
	$(BIN)/python -m bench.large $(ARGS)

bench-sweep: $(VENV)/.dev ## measure acknowledgements while a million expired payloads are deleted
	$(BIN)/python -m bench.sweep $(ARGS)

bench-parts: $(VENV)/.dev ## time each step of one envelope alone
	$(BIN)/python -m bench.parts

bench-outbox: $(VENV)/.dev ## measure sending beside other queues on PostgreSQL, which it installs (needs npm)
	$(BIN)/python -m bench.outbox $(ARGS)

lock: $(VENV)/.dev ## renew the lock files (exact versions and hashes, no addresses)
	$(BIN)/uv pip compile $(LOCK) --extra server --group build -o requirements/server.txt pyproject.toml
	$(BIN)/uv pip compile $(LOCK) --extra server --group dev -o requirements/dev.txt pyproject.toml
	$(BIN)/uv pip compile $(LOCK) -o bench/peers/requirements.txt bench/peers/requirements.in

LOCK := --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate

clean: ## remove the environment
	rm -rf $(VENV)
