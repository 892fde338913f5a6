# make setup | run | test | test-long | test-fast | durations | clients | ray | containers | chaos | bench | protos | docs | site | clean
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

# Without compiled modules each of a hundred processes would compile them again, and pytest would rewrite all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-long test-fast durations clients ray containers chaos bench protos docs site clean

setup: $(VENV)/.installed

# Both run again whenever a pinned version changes. pip skips what is installed already.
$(VENV)/.installed-runtime: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)/.installed: $(VENV)/.installed-runtime requirements-dev.txt requirements-export.txt requirements-bench.txt requirements-gguf.txt requirements-kv-events.txt
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt
	touch $@

run: $(VENV)/.installed-runtime
	exec $(RUN) -m services.launch --sample-prompt "San Francisco is a"

# Few examples of each property, the same in every run, and no long tests; `make chaos` tries all of them.
PYTEST := $(RUN) -m pytest --hypothesis-profile=quick
# Processes that take files of tests from one queue, those that take long first: more than two per core, for tests wait.
# Up to three that fail run again alone at the end; `make test QUEUE="--processes=5 --no-second-chance"` finds those that
# sometimes fail.
QUEUE := --processes=5
# These measure how long others wait during an attack: two processes, whose servers run on a core each, run them at last.
ALONE := --alone=tests/integration/hostile/delays
# In a new clone all of these processes would compile the same modules at the same time.
COMPILE := $(RUN) -m compileall -q --workers=0 services bench tests/support

test: setup
	$(RUN) -m ruff check .
	$(COMPILE)
	$(PYTEST) $(QUEUE) $(ALONE) tests

# What `make test` leaves out, because shorter tests beside these show most of it; continuous integration runs both.
test-long: setup
	$(PYTEST) $(QUEUE) $(ALONE) --only-long tests

# For daily work: no clusters, and no files of tests that took longer than so many seconds beside others.
FAST_FILE_S := 5
test-fast: setup
	$(RUN) -m ruff check .
	$(COMPILE)
	$(PYTEST) $(QUEUE) --files-up-to=$(FAST_FILE_S) tests/unit

# How long each file takes, by which `make test` orders its queue.
durations: setup
	$(PYTEST) $(QUEUE) $(ALONE) tests --no-second-chance --save-durations=tests/durations.json

# Installs the clients of other projects that docs/clients.md lists into .clients, and tests them against a cluster.
clients: setup
	$(RUN) -m tests.clients.environments
	$(RUN) -m pytest -rs tests/clients

# Installs Ray into .clients, and tests deploy/ray on a cluster of two nodes: deaths, scaling, an update. Some minutes.
ray: setup
	$(RUN) -m tests.clients.environments ray
	$(RUN) -m pytest -rs tests/clients/test_ray.py

# Builds the image, runs deploy/compose.yaml with Docker, also with keys, TLS and a host tier, and kills what runs in it.
containers: setup
	docker build --file deploy/docker/Dockerfile --target cpu --tag twostroke:cpu \
		--build-arg REVISION=$$(git rev-parse HEAD) .
	docker image inspect --format 'the image has {{.Size}} bytes' twostroke:cpu
	docker run --rm --interactive --network none --entrypoint python twostroke:cpu - \
		< deploy/docker/sbom.py > twostroke-cpu.cdx.json
	TWOSTROKE_TEST_CONTAINERS=1 $(RUN) -m pytest -rP --show-capture=stdout tests/deploy/test_containers.py

# All examples of properties and the long tests, random kills and stops of the workers under load, then 12,000 answers
# with a form; a failure names its seed.
CHAOS_SEEDS ?= 20
CHAOS_FIRST_SEED ?= 1

chaos: setup
	$(RUN) -m pytest -m hypothesis tests/unit
	$(RUN) -m pytest --only-long tests
	$(RUN) -m pytest --all-families tests/unit/dense_worker/ranks tests/integration/survival/test_several_ranks.py
	$(RUN) -m pytest tests/integration/api/test_requests.py tests/integration/api/test_fuzz.py
	$(RUN) -m tests.chaos --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED)
	$(RUN) -m tests.chaos --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED) --host-tier
	$(RUN) -m tests.chaos --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED) --lanes
	$(RUN) -m tests.chaos.moves --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED)
	$(RUN) -m tests.chaos.moves --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED) --short --kv-cache-dtype int8
	$(RUN) -m tests.chaos.moves --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED) --short --split-context
	$(RUN) -m tests.chaos.changes --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED)
	$(RUN) -m tests.chaos.ranks --seeds $(CHAOS_SEEDS) --first-seed $(CHAOS_FIRST_SEED)
	$(RUN) -m tests.chaos.forms
	$(RUN) -m tests.chaos.deterministic
	$(RUN) -m tests.chaos.vectors

bench: setup
	$(RUN) bench/cpu.py
	$(RUN) bench/handoff.py

protos: setup
	$(RUN) protos/generate.py

docs: setup
	$(RUN) docs/generate_configuration.py

# A site of all pages in .site/html, with all links checked. mkdocs has an environment of its own.
site: .site/venv/.installed
	.site/venv/bin/python docs/build_site.py

.site/venv/.installed: requirements-docs.txt
	$(PYTHON) -m venv .site/venv
	.site/venv/bin/python -m pip install --quiet --requirement requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) .clients .site
