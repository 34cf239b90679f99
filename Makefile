# Every target creates .venv by itself if it is missing or older than pyproject.toml and requirements.lock.
PYTHON ?= python3
bin := .venv/bin
# several torch processes, each with all threads, run many times slower than with one thread each
export OMP_NUM_THREADS ?= 1
# tests start hundreds of processes: with cached bytecode each imports torch in half the time
unexport PYTHONDONTWRITEBYTECODE
# glibc keeps freed memory: to map it anew for every large tensor takes longer than most operations on it
export MALLOC_MMAP_THRESHOLD_ ?= 4294967296
export MALLOC_TRIM_THRESHOLD_ ?= 4294967296

pytest := $(bin)/pytest -n 2 --dist worksteal
# shapes are checked at every call: of the unit tests always, of the exact ones, which that makes half as fast, by verify
checked := --jaxtyping-packages=sedd,beartype.beartype

.PHONY: help demo test lint verify journeys ray gpu docs results pictures reference audit lock bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/'

.venv/ready: pyproject.toml requirements.lock install_locked.py
	$(PYTHON) -m venv --clear .venv
	$(bin)/python install_locked.py --editable '.[dev,docs]'
	@touch $@

demo: export OMP_NUM_THREADS = 2
demo: .venv/ready  ## watch a story form, then train on sentences of known entropy (500 steps, about three minutes)
	$(bin)/python examples/demo.py

test: .venv/ready  ## run the tests
	$(pytest) -m "not verify" tests/unit $(checked)
	$(pytest) -m "not verify" tests/docs tests/integration tests/exact tests/browser tests/faults tests/fuzz
	$(pytest) tests/compile tests/ops

lint: .venv/ready  ## check style, types and imports
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports

verify: .venv/ready  ## run the long verification tests
	env -u MALLOC_MMAP_THRESHOLD_ -u MALLOC_TRIM_THRESHOLD_ $(pytest) tests/exact $(checked)  # large tensors: memory is freed
	$(pytest) -m verify tests/unit tests/integration tests/docs
	SEDD_FUZZ=1000 $(pytest) tests/fuzz  # other examples each time
	$(bin)/python tests/mutations/run.py
	$(bin)/python tests/faults/run.py
	$(MAKE) ray journeys
	$(bin)/python experiments/audit_dependencies.py || [ $$? -eq 3 ]  # 3: no database could be reached

ray: .venv/ready  ## test serving and training on a local Ray, two replicas or workers (installs Ray in build/ray)
	links=$$($(bin)/python -m pip config get global.find-links 2>/dev/null || true); UV_FIND_LINKS="$$links" \
	  $(bin)/uv pip install --quiet --python $(bin)/python --target build/ray --constraint constraints.txt 'ray[serve,train]'
	PYTHONPATH=$(CURDIR)/build/ray $(bin)/pytest -q -m verify tests/integration/test_ray_serve.py tests/integration/test_engines.py

journeys: export OMP_NUM_THREADS = 2
journeys: .venv/ready  ## type what three users would type, in a fresh environment; read what is in build/journeys (20 minutes)
	rm -rf build/journeys && $(PYTHON) -m venv build/journeys/environment
	build/journeys/environment/bin/python install_locked.py .
	build/journeys/environment/bin/python tests/journeys/run.py build/journeys

gpu: .venv/ready  ## run the tests that need a GPU
	$(bin)/pytest -q tests/gpu tests/ops

docs: .venv/ready  ## build the documentation in site/
	$(bin)/zensical build --strict

results: .venv/ready  ## write the results page and the tables of the README from the stored results
	$(bin)/python experiments/results_page.py

pictures: .venv/ready  ## draw the figures of the documentation; its screenshots need Chromium
	$(bin)/python experiments/pictures.py

reference: .venv/ready  ## write the reference pages (command line, configuration, HTTP) and the tree of the tour
	$(bin)/python experiments/reference_pages.py
	$(bin)/python experiments/tree.py

audit: .venv/ready  ## look the locked versions up in a database of known vulnerabilities; needs the network
	$(bin)/python experiments/audit_dependencies.py

lock: .venv/ready  ## write requirements.lock, the tested versions for all platforms with hashes, and the licences of docs/security.md
	$(bin)/uv pip compile --quiet --universal --python-version 3.11.5 --no-header --no-annotate --generate-hashes --python $(bin)/python \
	  --constraint constraints.txt --extra dev --extra docs --output-file requirements.lock pyproject.toml
	$(bin)/python experiments/licences.py

bench: .venv/ready  ## measure time and memory of the core on this machine
	$(bin)/python benchmarks/core.py

clean:  ## remove .venv and all build outputs
	rm -rf .venv site build .pytest_cache .mypy_cache .ruff_cache .hypothesis
