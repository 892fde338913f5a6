# make setup | run | test | clients | chaos | bench | protos | docs | clean
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: setup run test test-api test-services test-gateway test-units test-alone clients chaos bench protos docs clean

setup: $(VENV)/.installed

# Runs again whenever a pinned version changes. pip skips what is installed already.
$(VENV)/.installed: requirements.txt requirements-dev.txt requirements-export.txt requirements-bench.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt
	touch $@

run: setup
	exec $(RUN) -m services.launch --sample-prompt "San Francisco is a"

test: setup
	$(RUN) -m ruff check .
	$(MAKE) --jobs=2 --output-sync=target --keep-going test-services test-api test-gateway test-units
	$(MAKE) test-alone

# The same examples in every run; without the option, new ones.
PYTEST := $(RUN) -m pytest --hypothesis-profile=ci

# These measure delays and memory under attack, or look into the shared memory of the whole machine.
ALONE := tests/integration/hostile tests/unit/channel

# Four parts, of which two run at a time: the next one begins when one has ended. The first two often wait.
test-services:
	$(PYTEST) tests --ignore=tests/unit --ignore=tests/integration/api $(ALONE:%=--ignore=%)

test-api:
	$(PYTEST) tests/integration/api

test-gateway:
	$(PYTEST) tests/unit/gateway

test-units:
	$(PYTEST) tests/unit --ignore=tests/unit/gateway $(ALONE:%=--ignore=%)

test-alone:
	$(PYTEST) $(ALONE)

# Installs the clients of other projects that docs/clients.md lists into .clients, and tests them against a cluster.
clients: setup
	$(RUN) -m tests.clients.environments
	$(RUN) -m pytest -rs tests/clients

# Random kills and stops of the workers under load; a failure names its seed.
CHAOS_SEEDS ?= 20
CHAOS_FIRST_SEED ?= 1

chaos: setup
	$(RUN) -m tests.chaos --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED)

bench: setup
	$(RUN) bench/cpu.py
	$(RUN) bench/handoff.py

protos: setup
	$(RUN) protos/generate.py

docs: setup
	$(RUN) docs/generate_configuration.py

clean:
	rm -rf $(VENV) .clients
