# make serve and make test set everything up from nothing. Overrides:
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=               empty: use what is installed for PYTHON, install nothing
#   TORCH=torch==2.13.0 the requirement torch is installed by (README: CUDA)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

ifeq ($(VENV),)
bin :=
python := $(PYTHON)
ready :=
else
bin := $(VENV)/bin/
python := $(VENV)/bin/python
ready := $(VENV)/.ready
endif

# mkdocs-material's notice about the next mkdocs, which pyproject.toml excludes
export NO_MKDOCS_2_WARNING := 1

.PHONY: help serve test site update-docs lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(ready) ## serve the site at http://127.0.0.1:8000, reloading on every edit
	$(python) -m mkdocs serve

test: $(ready) ## run every test, every snippet and the built site in a real browser
	$(python) -m pytest

site: $(ready) ## build the site into site/; any warning is an error
	$(python) -m mkdocs build --strict

update-docs: $(ready) ## rewrite the printed outputs and committed figures of the docs
	$(python) -m pytest tests/docs --update-examples

lint: $(ready) ## formatting, lint and types
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m pyright --pythonpath $(python)

clean: ## remove everything that was made here
	rm -rf $(VENV) site .cache .pytest_cache .ruff_cache

# The environment is made once, and again when pyproject.toml changes.
# torch first, and alone: with it installed no later requirement asks for another build.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --upgrade pip
	$(python) -m pip install --quiet "$(TORCH)"
	$(python) -m pip install --quiet --editable . --group dev
	touch $@
