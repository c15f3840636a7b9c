# `make demo` and `make test` do everything on a fresh machine. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# some machines set it, and each of the thousand processes of the tests would compile every module anew
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-fast test-nightly torture lint types docs dist clean

demo: $(VENV)/installed  ## Train a small model on real text, interrupt it, resume it, sample from it.
	rm -rf runs/demo
	@echo "== training; it will be interrupted after its first checkpoint"
	@$(BIN)/forge run configs/demo.toml & run=$$!; \
	while kill -0 $$run 2>/dev/null && [ ! -e runs/demo/checkpoints/latest ]; do sleep 0.2; done; \
	kill -INT $$run 2>/dev/null; wait $$run; code=$$?; \
	echo "== it ended with exit code $$code"; [ $$code -eq 3 ] || [ $$code -eq 0 ]
	@echo "== the same command continues"
	$(BIN)/forge run configs/demo.toml
	@echo "== a sample"
	$(BIN)/forge generate runs/demo --prompt "def " --max-new-tokens 400

# Files in their order, and not those with few tests last: some of these take minutes, and would be waited for alone.
test: $(VENV)/installed-dev  ## The whole suite, in three processes, as some of it waits; tests of one file share their launches.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=50 --durations-min=1

test-fast: $(VENV)/installed-dev  ## Without the tests that take more than ten seconds each.
	$(BIN)/python -m pytest -q -m "not slow and not nightly and not torture"

test-nightly: $(VENV)/installed-dev  ## What takes minutes each: every way in which a cluster can end a job.
	FORGE_REQUIRE_SLURM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m nightly -n 2 --dist loadfile

torture: $(VENV)/installed-dev  ## A run under random faults, and a thousand kills. FORGE_TORTURE_SECONDS shortens the run.
	$(BIN)/python -m pytest -q -s -m torture

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

docs: $(VENV)/installed-dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

dist: $(VENV)/installed-dev  ## Wheels and source distributions of every package, and what they are made of.
	$(BIN)/python release/distributions.py
	$(BIN)/python release/bill_of_materials.py dist

clean:
	rm -rf $(VENV) dist runs docs/_build docs/generated

$(VENV)/installed: requirements.txt constraints.txt pyproject.toml $(wildcard plugins/*/pyproject.toml forge_plugins_*/pyproject.toml) forge_testing/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -r requirements.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/pip install -q -c constraints.txt -r requirements-dev.txt
	touch $@
