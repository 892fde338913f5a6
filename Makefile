# make setup | run | test | clients | chaos | bench | protos | docs | clean
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: setup run test test-api test-survival test-gateway test-units test-operations test-alone clients chaos bench protos docs clean

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
	$(MAKE) --jobs=3 --output-sync=target --keep-going test-api test-survival test-gateway test-units test-operations
	$(MAKE) test-alone

# The same examples in every run; without the option, new ones.
PYTEST := $(RUN) -m pytest --hypothesis-profile=ci

# These measure delays and memory under attack, or look into the shared memory of the whole machine.
ALONE := tests/integration/hostile tests/unit/channel
SURVIVAL := tests/integration/survival tests/chaos
OTHERS := tests/unit tests/integration/api tests/integration/hostile $(SURVIVAL)

# Five parts, of which three run at a time, since tests often wait: the next one begins when one has ended.
test-api:
	$(PYTEST) tests/integration/api

test-survival:
	$(PYTEST) $(SURVIVAL)

test-gateway:
	$(PYTEST) tests/unit/gateway

test-units:
	$(PYTEST) tests/unit $(patsubst %,--ignore=%,tests/unit/gateway tests/unit/channel)

test-operations:
	$(PYTEST) tests $(OTHERS:%=--ignore=%)

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
