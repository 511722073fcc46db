# make demo and make test need nothing but Python >= 3.10 and make: they make their own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo_trace
PAGE := tests/tools/viewer/test_page_browser.py
C_SOURCES := $(wildcard gym_trace/*/c_*/*)

.PHONY: demo docs drawings quick test test-plain test-page test-long check check-extras lint setup compat strangers corpus test-interop test-remote sanitize flat samples viewer pictures wheels sdist wheels-ci workflows paper changelog release release-ready bench bench-against bench-batches bench-device bench-remote bench-training clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/gym-trace record CartPole-v1 -o $(DEMO) --episodes 100 --seed 0
	$(BIN)/gym-trace stats $(DEMO)
	$(BIN)/python benchmarks/demo_callback.py $(DEMO)

test: $(VENV)/.dev
	@test -d tests/__pycache__ || $(BIN)/python -m pytest --collect-only -qq >/dev/null || true  # compile once, not in each worker
	$(BIN)/python -m pytest -n 4 --dist worksteal -q --ignore $(PAGE)
	@echo "make test-long passed last: $$(cat $(VENV)/.test-long 2>/dev/null || echo never here)"

# The page of the viewer in Chromium: a minute of processor time.
test-page: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(PAGE)

# For the loop of edit and test: half a minute on two quiet cores.
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -q tests/data tests/format tests/playback tests/tools/linting \
		--ignore tests/format/test_hostile_traces.py

# mypy with every extra, the training tests, and the real loaders of Minari, Parquet, Stable-Baselines3 and TorchRL, in an environment
# of their own (3 GB).
check-extras:
	PYTHON=$(PYTHON) ONLY=ci bash tests/interop.sh

# The tests of the core with no extra but [test], in an environment of their own: for interpreters that not every extra has packages for.
test-plain:
	test -x .venv-plain/bin/python || $(PYTHON) -m venv .venv-plain
	.venv-plain/bin/pip install --quiet --disable-pip-version-check -e '.[test]'
	.venv-plain/bin/python -m pytest -n 2 --dist worksteal -q tests/data tests/format tests/playback tests/recording

# The tests with all that takes long: every byte flipped, a thousand crashes, ten times the examples, and not the same ones each time.
test-long: $(VENV)/.dev
	GYM_TRACE_LONG=1 HYPOTHESIS_PROFILE=hunt $(BIN)/python -m pytest -n 4 --dist worksteal -q
	date -u '+%F %R UTC' > $(VENV)/.test-long

check: lint test test-page

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/mypy
	$(BIN)/python tests/lint_english.py

setup: $(VENV)/.dev

# The site, in build/site: open build/site/index.html. Broken links and warnings are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

drawings: $(VENV)/.dev
	$(BIN)/python docs/drawings.py

$(VENV)/.installed: pyproject.toml hatch_build.py $(C_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

$(VENV)/.release: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[release]'
	touch $@

# The files of .github/workflows/ by their schema, and for what makes them insecure.
workflows: $(VENV)/.release
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github

# Every minor version of Gymnasium that we claim, on the oldest and the newest Python at hand; ONLY="1.2 1.3" for some.
compat:
	PYTHON=$(PYTHON) bash tests/compat.sh

# Other people's environments, recorded, compared with a log kept beside, and verified. STRANGERS="-k minigrid" chooses; SOURCES=DIR
# with checkouts of Gymnasium and Minari in it runs their own tests as well.
strangers:
	PYTHON=$(PYTHON) SOURCES=$(SOURCES) bash tests/strangers.sh $(STRANGERS)

# Golden traces of other people's environments, in golden/. WITH="mujoco==3.3.5" verifies them with other versions;
# PACKAGES="gymnasium minigrid" chooses.
corpus:
	PYTHON=$(PYTHON) WITH="$(WITH)" PACKAGES="$(PACKAGES)" bash tests/corpus.sh

# What export writes, loaded by the packages that people train with, and what import reads, in environments of their own (12 GB).
# ONLY="main lerobot" for some of main, lerobot and tfds; TESTS="-k minari" chooses tests.
test-interop:
	PYTHON=$(PYTHON) ONLY="$(ONLY)" bash tests/interop.sh $(TESTS)

# Object stores: two S3 servers behind a proxy that fails, and KILLS kills of a recording to them (1 GB). TESTS="-k kills" chooses tests.
test-remote:
	PYTHON=$(PYTHON) bash tests/remote.sh $(TESTS)

# The C core with AddressSanitizer and UndefinedBehaviorSanitizer: the tests that use it, then FUZZ seconds of odd objects.
sanitize: $(VENV)/.dev
	PYTHON=$(BIN)/python FUZZ=$(or $(FUZZ),60) bash tests/sanitize.sh

# Whether the memory of the C core stays as it is over STEPS steps.
flat: $(VENV)/.dev
	GYM_TRACE_STEPS=$(or $(STEPS),10000000) $(BIN)/python -m pytest -q -s tests/recording/test_core.py tests/recording/test_core_lanes.py -k grow

samples: $(VENV)/.dev
	$(BIN)/python sample_traces/make_samples.py

# The page of gym-trace view, from viewer/ into gym_trace/tools/viewer/static; needs Node 20 or newer with npm.
viewer: viewer/node_modules/.installed
	cd viewer && npm run --silent build

viewer/node_modules/.installed: viewer/package-lock.json
	cd viewer && npm ci --silent --no-audit --no-fund
	touch $@

# The pictures and the animation of the viewer in the documents, from recordings; needs Chromium and chromedriver.
pictures: $(VENV)/.dev
	$(BIN)/python docs/pictures/make_pictures.py

# The paper as build/paper.pdf.
paper:
	test -x .venv-paper/bin/python || $(PYTHON) -m venv .venv-paper
	.venv-paper/bin/pip install --quiet --disable-pip-version-check pypandoc_binary typst
	.venv-paper/bin/python paper/make_paper.py

# What a release uploads, in dist/: sdist, wheel in pure Python, and manylinux wheels for every Python at hand, built twice and compared,
# checked, and tried in fresh environments. PYTHONS="python3.12 …" chooses interpreters.
wheels: $(VENV)/.release
	PYTHON=$(PYTHON) PYTHONS="$(PYTHONS)" BIN=$(abspath $(BIN)) bash tests/wheels.sh

# The sdist and the wheel in pure Python alone.
sdist: PYTHONS = none
sdist: wheels

# Wheels with the C core for this system: manylinux and musllinux (needs Docker), or macOS. CIBW=--print-build-identifiers lists them.
wheels-ci: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check 'cibuildwheel>=3.1'
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/cibuildwheel --output-dir dist $(CIBW)

# What a release still lacks: addresses, an entry in CHANGELOG.md, equal versions. TAG=v0.1.0 is compared with them.
release-ready:
	TAG=$(TAG) bash tests/release.sh

# Everything that can be checked before a release. Uploads nothing.
release: release-ready wheels

# The fragments of changes/ become the entry of this version in CHANGELOG.md; DRAFT=--draft prints it.
changelog: $(VENV)/.release
	$(BIN)/towncrier build --yes $(DRAFT)

# Side by side with every peer, in environments of their own (7 GB), in less than 30 minutes. BENCH="--quick" is a look at whether it works;
# BENCH="--gym-recording PATH" names a checkout of openai/gym-recording.
bench: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/run.py $(BENCH)

# This checkout and the commit REV in turns: what a change costs.
bench-against: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/against.py $(REV) $(BENCH)

# Batches for training beside np.memmap, and beside the libraries that are installed: of TRACE, or of CartPole at random.
bench-batches: .venv-bench/.installed
	test -n "$(TRACE)" || test -d .venv-bench/trace || .venv-bench/bin/gym-trace record CartPole-v1 -o .venv-bench/trace --num-envs 16 --steps 1000000 --seed 0
	.venv-bench/bin/python benchmarks/sampling.py $(or $(TRACE),.venv-bench/trace) $(BENCH)

# Reading from an object store beside Lance, zarr and Parquet (1 GB, half an hour; 5 minutes with BENCH=--quick). BENCH=--write puts the tables into
# docs/reference/benchmarks.md.
bench-remote:
	test -x .venv-bench-remote/bin/python || $(PYTHON) -m venv .venv-bench-remote
	.venv-bench-remote/bin/pip install --quiet --disable-pip-version-check -e '.[remote]' pylance zarr pyarrow
	.venv-bench-remote/bin/python benchmarks/remote.py $(BENCH)

# Recording from a GPU, beside plain copies to the host. PYTHON has PyTorch or JAX for the GPU, and gets gym-trace.
# BENCH="--device cpu" tries the script without a GPU.
bench-device:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e .
	$(PYTHON) benchmarks/device.py $(BENCH)

# Training beside CleanRL's algorithm, Stable-Baselines3 and Sample Factory, as far as they are installed.
bench-training: .venv-bench/.installed
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -e '.[bench,train]'
	.venv-bench/bin/python benchmarks/training.py $(or $(BENCH),speed)

.venv-bench/.installed: pyproject.toml
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -e '.[bench]'
	touch $@

clean:
	rm -f gym_trace/*/_*.so
	rm -rf $(VENV) .venv-* $(DEMO) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
