# The one door. Needs Python 3.11 or newer, make, and on the first run a network.
PYTHON ?= python3
ARGS ?=
# More requirements of the environment, such as WITH='jax==0.11.2' or WITH='--constraint constraints-oldest.txt'.
WITH ?=
PORT ?= 8000
PYTEST_ARGS ?=

BIN := .venv/bin
comma := ,
READY := .venv/.ready
PEERS := .venv/.peers
MINDSPORE := .venv-mindspore
BENCHMARKS := $(filter-out benchmarks/_% benchmarks/render.py benchmarks/accelerators.py,$(wildcard benchmarks/*.py))
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadgroup
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo examples guides test test-all smoke-newest smoke-oldest lint types docs serve accelerators bench bench-mindspore bench-smoke fuzz fuzz-files release clean

help:
	@echo "make demo         train an ensemble on the digits         (ARGS=...)"
	@echo "make examples     run all into the pages that show them   (ARGS=\"maxwell laplacian\")"
	@echo "make test         the tests, in some minutes               (PYTEST_ARGS=...)"
	@echo "make test-all     every test"
	@echo "make smoke-newest tests on Python 3.13 with the newest libraries; smoke-oldest: Python 3.11, the oldest ones"
	@echo "make lint         style and formatting, nothing is changed"
	@echo "make types        types of an installed copy and of the tests"
	@echo "make guides       run the guides' code, and show its output in them (ARGS=\"start sparse\")"
	@echo "make docs         the site, in build/site; make serve shows it at http://localhost:8000 (PORT=8000)"
	@echo "make bench        every benchmark, peers installed; bench-mindspore: MindSpore's; bench-smoke: small sizes"
	@echo "make accelerators clipped gradients compiled for an H200 and for TPUs, with a test: ten minutes, 3 GB"
	@echo "make fuzz         the property tests with many examples   (PYTEST_ARGS=...)"
	@echo "make fuzz-files   damage all files that are read: ten minutes (ARGS=\"--seed 1 export committee\")"
	@echo "make release      wheel and sdist in dist/, tried with each extra in new environments: minutes"
	@echo "make clean        what the others made; remove .venv yourself to start over"

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here; try: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plurax needs Python 3.11 or newer, \
	but $(PYTHON) is %d.%d; try: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@echo "installing plurax and its tools into .venv (minutes the first time)"
	@$(INSTALL) --editable '.[dev,examples,plot]' $(WITH)
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/ensemble_digits.py $(ARGS)

examples: $(READY)
	@$(BIN)/python examples/_capture.py $(ARGS)
	@$(BIN)/python docs/_gallery.py $(ARGS)

guides: $(READY)
	@$(BIN)/python docs/_render.py $(ARGS)
	@$(BIN)/python docs/_notebook.py

# Most of the time goes into compiling programs that run once. `make test-all` compiles as users do. `make test`, and CI
# with QUICK=1, turn the compiler's optimizations off (conftest.py), which takes half the time, except for tests that
# depend on them. Pytest exits with 5 if it selects no test.
QUICK ?=
test: FEW := --cases 1
test: AND := not slow and
test: QUICK := 1
OPTIMIZED = $(if $(PYTEST_ARGS),,$(shell grep -rlw optimized --include='test_*.py' tests))
test test-all: $(READY)
	@$(if $(QUICK),,XLA_FLAGS=) $(PYTEST) $(FEW) $(if $(QUICK),-m "$(AND) not optimized") $(PYTEST_ARGS) || test $$? = 5
	@$(if $(QUICK),XLA_FLAGS= $(PYTEST) $(FEW) -m "$(AND) optimized" $(PYTEST_ARGS) $(OPTIMIZED) || test $$? = 5)

smoke-newest smoke-oldest: smoke-%: $(READY)
	@$(PYTHON) tests/smoke.py $*

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(READY)
	@rm -rf build
	@$(INSTALL) --no-deps --no-build-isolation --target build/types .
	@$(BIN)/mypy
	@$(BIN)/python tests/seed_type_errors.py

# Pages keep the places that they have in the checkout, so that links are the same here and there.
docs: $(READY)
	@$(BIN)/zensical --version >/dev/null 2>&1 || $(INSTALL) --editable '.[docs]'
	@$(BIN)/pytest --quiet tests/test_links.py
	@rm -rf build/docs build/types build/site && mkdir -p build/docs
	@cp -r README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md docs examples benchmarks tests build/docs
	@cp -r pyproject.toml transforms ensemble build/docs  # CONTRIBUTING.md links to them
	@rm -r build/docs/docs/_theme  # a template, no page
	@find build/docs -name __pycache__ -prune -exec rm -r {} +
	@$(INSTALL) --no-deps --no-build-isolation --target build/types .
	@$(BIN)/zensical build --strict >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@echo "build/site/index.html"

serve: docs
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

$(PEERS): $(READY)
	@echo "installing the peers of the benchmarks into .venv"
	@$(BIN)/python benchmarks/_peers.py
	@touch $@

$(MINDSPORE)/.ready:
	@echo "installing MindSpore into $(MINDSPORE)"
	@$(PYTHON) -m venv $(MINDSPORE) && $(MINDSPORE)/bin/python -m pip install --quiet --disable-pip-version-check \
	'mindspore==2.10.0' 'numpy<2' 'scipy<1.14' || { rm -rf $(MINDSPORE); \
	echo "no MindSpore for '$(PYTHON)'; try: make bench-mindspore PYTHON=/path/to/python3.11"; exit 1; }
	@touch $@

bench-mindspore: $(PEERS) $(MINDSPORE)/.ready
	@$(BIN)/python benchmarks/ensemble.py --mindspore $(MINDSPORE)/bin/python $(ARGS)

.venv-tpu/.ready .venv-cuda/.ready: .venv-%/.ready: pyproject.toml
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[privacy$(if $(filter tpu,$*),$(comma)tpu)]' pytest
	@test $* = tpu || .venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	"jax-cuda12-plugin==$$(.venv-cuda/bin/python -c 'import jax; print(jax.__version__)')" \
	"jax-cuda12-pjrt==$$(.venv-cuda/bin/python -c 'import jax; print(jax.__version__)')"
	@touch $@

# A process can load one of the plugins, so each has an environment.
accelerators: $(READY) .venv-tpu/.ready .venv-cuda/.ready
	@JAX_PLATFORMS=cpu .venv-tpu/bin/python -m pytest --quiet --noconftest -p no:cacheprovider -o addopts= \
	tests/transforms/program/test_compile_for.py
	@.venv-tpu/bin/python benchmarks/accelerators.py tpu
	@.venv-cuda/bin/python benchmarks/accelerators.py cuda
	@$(BIN)/python benchmarks/render.py

bench: $(PEERS)
bench bench-smoke: $(READY)
	@set -e; for script in $(BENCHMARKS); do \
	  echo "== $$script"; $(BIN)/python $$script $(if $(filter bench-smoke,$@),--smoke) $(ARGS); done

fuzz: $(READY)
	@HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -m hypothesis $(PYTEST_ARGS)

fuzz-files: $(READY)
	@$(BIN)/python tests/fuzz_files.py $(ARGS)

release: $(READY)
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python tests/try_release.py $(ARGS) dist

clean:
	@rm -rf build dist plurax.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo
