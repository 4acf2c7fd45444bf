# make serve and make test set everything up from scratch. Overrides:
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=               empty: use what is installed for PYTHON, and install nothing
#   TORCH=torch==2.13.0 the build of torch to install, as pip spells it (README: CUDA)
#   DEVICE=cuda         the device the benchmarks run on
#   ONLY="1.2.0 1.7.1"  the builds of torch that make versions checks

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
DEVICE ?= cpu
ONLY ?=

ifeq ($(VENV),)
python := $(PYTHON)
ready :=
export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
else
python := $(VENV)/bin/python
ready := $(VENV)/.ready
endif

# the tests of the library, which a GPU runs too
of_library := $(addprefix tests/,gpu hook_reports jacobian recorder recording \
	stand_in_cuda vjp) $(wildcard tests/test_*.py)

# no notice from mkdocs-material about mkdocs 2, which pyproject.toml excludes
export NO_MKDOCS_2_WARNING := 1

.PHONY: help serve test test-stand-in-cuda site update-docs bench versions lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

serve: $(ready) ## serve the site at http://127.0.0.1:8000, reloading on every edit
	$(python) -m mkdocs serve

# One process per core, with one thread each, and at most four, as many as a GPU's memory
# has room for. They start many more, so bytecode is written: each compiles only once.
test: $(ready) ## run every test, every snippet and the built site in a real browser
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(python) -m pytest \
		--numprocesses=logical --maxprocesses=4 --dist=worksteal

test-stand-in-cuda: $(ready) ## run the tests of a GPU without one, on a stand-in
	GRADLIB_STAND_IN_CUDA=1 GRADLIB_TEST_DEVICE=cuda OMP_NUM_THREADS=1 \
		$(python) -m pytest $(of_library) \
		--numprocesses=logical --maxprocesses=4 --dist=worksteal

site: $(ready) ## build the site into site/; any warning is an error
	$(python) -m mkdocs build --strict

update-docs: $(ready) ## rewrite the printed outputs and committed figures of the docs
	$(python) -m pytest tests/docs/test_snippets.py \
		tests/docs/test_readme_figure.py --update-examples

bench: $(ready) ## what recordings and Jacobians cost, against every other way
ifeq ($(DEVICE),cpu)
	$(python) -m benchmarks.recorder
	$(python) -m benchmarks.jacobian
else
	$(python) -m benchmarks.gpu --device $(DEVICE)
endif

versions: $(ready) ## record again in other builds of torch, and compare with docs/data
	$(python) tools/check_versions.py $(ONLY)

lint: $(ready) ## formatting, lint and types
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m pyright --pythonpath $$(command -v $(python))

clean: ## remove everything that was made here
	rm -rf $(VENV) site .cache .hypothesis .pytest_cache .ruff_cache

# The environment is made once, and again when pyproject.toml or TORCH changes; .ready
# holds the value of TORCH. torch comes first: the CPU build if pip offers one, and later
# installs are content with it. TORCH replaces an installed torch by force: to pip,
# 2.13.0+cpu would do for torch==2.13.0.
ifneq ($(shell cat $(VENV)/.ready 2>/dev/null),$(TORCH))
.PHONY: $(VENV)/.ready
endif
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --upgrade pip
ifeq ($(TORCH),)
	$(python) -m pip install --quiet torch==2.13.0+cpu 2>/dev/null \
	|| $(python) -m pip install --quiet torch==2.13.0
else
	$(python) -m pip install --quiet --force-reinstall $(TORCH)
endif
	$(python) -m pip install --quiet --editable . --group dev
	echo '$(TORCH)' >$@
