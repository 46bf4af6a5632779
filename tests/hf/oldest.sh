#!/bin/sh
# Run the connector's tests against the oldest supported transformers, in an environment of its own.
set -eu
python=${1:-python3}
venv=.venv-transformers-5.19
if ! [ -e "$venv/.ready" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
    # The project's other dependencies at the versions of constraints.txt, but for transformers itself.
    grep -v -i '^\(transformers\|huggingface\|tokenizers\|hf-xet\)' constraints.txt > "$venv/constraints.txt"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" \
        transformers==5.19.0 'safetensors>=0.5' 'numpy>=2' pytest pytest-trio pytest-timeout hypothesis
    "$venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" --editable .
    touch "$venv/.ready"
fi
"$venv/bin/python" -m pytest tests/hf -p no:cacheprovider -m 'not slow'
