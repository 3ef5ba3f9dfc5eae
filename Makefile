# One virtual environment beside the sources; every target brings up what it needs.
VENV := .venv
PY := $(VENV)/bin/python

proto: ## Generate the Python code of the wire protocol.
	$(PY) -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/dart/v1/*.proto
	touch dart/v1/__init__.py
.PHONY: proto
