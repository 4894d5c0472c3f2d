# Two commands do all the set-up on a fresh machine: `make serve` and `make test`.
#   make serve [PORT=8000] [DTYPE=auto|fp32|bf16] [SPEC=5 | SPEC='{"method":"dspark",...}'] [TARGET=embedded]
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
DTYPE ?= auto
TARGET ?= embedded
JOBS ?= 2
SPEC ?= {"method":"dspark"}
# A bare number is the depth.
SPECULATIVE = $(if $(findstring {,$(SPEC)),$(SPEC),{"method":"dspark","num_speculative_tokens":$(SPEC)})
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: setup serve chat test check coverage bench prove clean

setup: $(READY)

# The CPU build of torch is a tenth of the CUDA one: it is chosen where no NVIDIA GPU is and torch is not there yet.
$(READY): pyproject.toml deploy/setup.sh $(wildcard dspark/native/*.[ch] proto/dspark_proto/*.[ch])
	PYTHON="$(PYTHON)" deploy/setup.sh "$(VENV)"
	@touch $(READY)

serve: setup
	$(BIN)/dspark serve --port $(PORT) --dtype $(DTYPE) --target $(TARGET) --speculative-config '$(SPECULATIVE)'

chat: setup
	$(BIN)/dspark chat --url http://127.0.0.1:$(PORT)

# Two processes share the test files; a file's tests stay together, because its servers are made once.
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy -p dspark_proto
	$(BIN)/mypy -p dspark -p dspark_workers -p dspark_spark

CORE_TESTS = $(addprefix tests/proto/test_wire_,auth.py dense.py frame.py hello.py placement.py rounds.py slots.py) \
	$(addprefix tests/proto/test_wire_,staging.py v1.py) \
	$(wildcard tests/proto/test_wire_coverage_*.py)

# Every line and branch of the protocol's core, with the compiled codec and without it.
coverage: setup
	$(BIN)/coverage run -m pytest $(CORE_TESTS)
	DSPARK_NATIVE=0 $(BIN)/coverage run --append -m pytest $(CORE_TESTS)
	$(BIN)/coverage report

bench: setup
	$(BIN)/dspark bench spec

# Minutes: greedy identity over 50 prompts and the two-token chi-square, through HTTP.
prove: setup
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV)
