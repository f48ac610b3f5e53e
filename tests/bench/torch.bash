# shellcheck shell=bash disable=SC2034
# Sourced, with the script's arguments, by the comparisons with PyTorch eager.
threads=$(nproc)
repeats=5
while [ $# -gt 0 ]; do
    case $1 in
    --threads) threads=$2 ;;
    --repeats) repeats=$2 ;;
    *)
        echo "usage: ${0##*/} [--threads N] [--repeats 5]" >&2
        exit 2
        ;;
    esac
    shift 2
done
python=${PYTHON:-$HOME/.cache/ckpt/peers/bin/python}
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
machine="machine: $(nproc) cores, $(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo); $threads threads"
# engine_torch.py, whose warnings nobody asked for.
torch() { "$python" tests/bench/engine_torch.py "$@" 2>"$work/err" || { cat "$work/err" >&2; exit 1; }; }
