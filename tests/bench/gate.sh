#!/bin/bash
# The gate of CI on speed: ratios against those of ratios.jsonl, 25 % slack, small sizes, a few seconds.
#
#   tests/bench/gate.sh            fail if one became worse
#   tests/bench/gate.sh record     measure them anew, on an idle machine, and replace the file
#
# CKPT names the program (default build/ckpt).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
ckpt=${CKPT:-$here/../../build/ckpt}
gate=(bench --size 64MiB --pairs 3 --only 'convert*durable' --only 'convert, the same' --only 'verify, tensor digests, cached*'
    --only 'verify, both*' --only 'cast*')
case ${1:-} in
'') "$ckpt" "${gate[@]}" --against "$here/ratios.jsonl" --slack 25 ;;
record)
    rm -f "$here/ratios.jsonl"
    "$ckpt" "${gate[@]}" --history "$here/ratios.jsonl"
    ;;
*)
    echo "usage: gate.sh [record]" >&2
    exit 2
    ;;
esac
