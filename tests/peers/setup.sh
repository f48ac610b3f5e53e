#!/usr/bin/env bash
# Make the Python environment of the peer tests, outside the repository, and print its interpreter.
# Reused when it already satisfies the pins. PEERS=DIR picks another place.
set -euo pipefail

dir=${PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/ckpt/peers}
pins=(torch==2.11.0 numpy safetensors==0.8.0 megatron-core==0.16.1 transformers==5.24.0 h5py
    model-signing==1.1.1 blake3 pyOpenSSL check-jsonschema==0.39.0)

satisfied() {
    [ -x "$dir/bin/python" ] && "$dir/bin/python" - "${pins[@]}" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

for pin in sys.argv[1:]:
    name, _, want = pin.partition("==")
    try:
        have = version(name)
    except PackageNotFoundError:
        sys.exit(1)
    if want and have.split("+")[0] != want:
        sys.exit(1)
PY
}

if ! satisfied; then
    echo "peers: installing ${pins[*]} into $dir" >&2
    mkdir -p "$(dirname "$dir")"
    [ -x "$dir/bin/python" ] || python3 -m venv "$dir"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "${pins[@]}" </dev/null >&2
    if ! satisfied; then
        echo "peers: $dir does not satisfy ${pins[*]}" >&2
        exit 1
    fi
fi
echo "$dir/bin/python"
