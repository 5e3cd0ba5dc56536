# Each line is one call of bootstrap.py, which also works without make (and on Windows).
# Arguments are passed on: make test ARGS="-k flat"; another Python: make learn PYTHON=python3.12

PYTHON ?= python3
ARGS ?=

.PHONY: help learn demo test quick lock

help:
	@$(PYTHON) bootstrap.py --help

learn demo test lock:
	@$(PYTHON) bootstrap.py $@ $(ARGS)

quick:
	@$(PYTHON) bootstrap.py test --quick $(ARGS)
