#!/usr/bin/env bash
# Figures against what a user would run instead: convert against cp+sync, verify against sha256sum,
# header parsing against Python, start-up in milliseconds, peak memory.
#
#   tests/bench/bench.sh [--size 2G] [--dir DIR] [--pairs 5]
#
# Protocol: the result is verified first; then subject and baseline run alternately, at least five
# pairs, with the page cache warm; median, min, max and the ratio of medians are printed. Ratios
# above 1 mean that ckpt is faster. Absent baselines are named. CKPT and GEN name the programs.
set -euo pipefail
cd "$(dirname "$0")/../.."

ckpt=${CKPT:-build/ckpt}
gen=${GEN:-build/gen}
size=2G
pairs=5
base=${TMPDIR:-/tmp}
while [ $# -gt 0 ]; do
    case $1 in
    --size) size=$2 ;;
    --dir) base=$2 ;;
    --pairs) pairs=$2 ;;
    *)
        echo "usage: bench.sh [--size 2G] [--dir DIR] [--pairs 5]" >&2
        exit 2
        ;;
    esac
    shift 2
done
work=$(mktemp -d "$base/ckpt-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT

# Seconds of one command by the shell's own clock; its output is dropped.
seconds() {
    local begin=$EPOCHREALTIME
    "$@" >/dev/null
    awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.6f\n", b - a }'
}

# median min max of the numbers in a file
stats() {
    sort -n "$1" | awk '{ v[NR] = $1 }
        END { m = NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2
              printf "%.6f %.6f %.6f", m, v[1], v[NR] }'
}

# Alternate two commands (shell functions); `reset` runs untimed before each.
compare() { # NAME SUBJECT BASELINE BASELINE-NAME RESET [PAIRS]
    local name=$1 subject=$2 baseline=$3 baseline_name=$4 reset=$5 n=${6:-$pairs} i
    : >"$work/subject" && : >"$work/baseline"
    for ((i = 0; i < n; i++)); do
        "$reset" && seconds "$subject" >>"$work/subject"
        "$reset" && seconds "$baseline" >>"$work/baseline"
    done
    local s b
    s=$(stats "$work/subject")
    b=$(stats "$work/baseline")
    echo "$name|$s|$baseline_name|$b" | awk -F'|' '{
        split($2, s, " "); split($4, b, " ")
        unit = s[1] < 0.1 ? "ms" : "s"; k = s[1] < 0.1 ? 1000 : 1
        printf "%-40s %8.3f %s (%.3f..%.3f)   %s %.3f %s (%.3f..%.3f)   ratio %.2f\n",
            $1, k * s[1], unit, k * s[2], k * s[3],
            $3, k * b[1], unit, k * b[2], k * b[3], b[1] / s[1] }'
}

peak() { # NAME COMMAND...: peak resident memory of one run
    local name=$1
    shift
    if [ ! -x /usr/bin/time ]; then
        echo "$name: skipped, /usr/bin/time not found (tools/deps.sh ci)"
        return
    fi
    /usr/bin/time -f '%M %U %S' -o "$work/time" "$@" >/dev/null
    awk -v n="$name" '{ printf "%-40s %8.1f MiB peak RSS, %.2f s user, %.2f s system\n", n, $1 / 1024, $2, $3 }' \
        "$work/time"
}

# Touch and free 3 GiB so that the host has backed the guest's pages before anything is timed.
settle() {
    dd if=/dev/zero of=/dev/null bs=3G count=1 iflag=fullblock status=none
    sync
}
nothing() { :; }

echo "machine: $(nproc) cores, $(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo)"
echo "date: $(date -u +%Y-%m-%d), ckpt: $("$ckpt" --version)"
grep -qw sha_ni /proc/cpuinfo && echo "cpu: has SHA-NI" || echo "cpu: no SHA-NI"

src=$work/src
"$gen" kimi "$src" --size "$size"
sync

# ---- verify results first -----------------------------------------------------------------------

"$ckpt" convert --quiet "$src" "$work/dist" --to torch_dist --layout megatron --tp 4
"$ckpt" verify --quiet --hash "$work/dist"
"$ckpt" diff --quiet "$src" "$work/dist"
echo "verified: HF -> torch_dist TP 4 has equal values"
rm -rf "$work/dist"

settle

# ---- convert ------------------------------------------------------------------------------------

convert_tp4() { "$ckpt" convert --quiet "$src" "$work/out" --to torch_dist --layout megatron --tp 4; }
cp_sync() { cp -r "$src" "$work/out" && sync -f "$work/out"; }
clean() {
    rm -rf "$work/out"
    sync -f "$work"
}
sha_all() { sha256sum "$src"/*.safetensors; }
sha_cp_sync() { sha_all && cp_sync; }
compare 'convert HF -> torch_dist TP 4, durable' convert_tp4 cp_sync cp+sync clean
compare 'convert, the same' convert_tp4 sha_cp_sync sha256sum+cp+sync clean
clean
peak 'convert --memory 64MiB' "$ckpt" convert --quiet --memory 64MiB "$src" "$work/out" \
    --to torch_dist --layout megatron --tp 4
clean
peak 'convert, default memory' "$ckpt" convert --quiet "$src" "$work/out" --to torch_dist \
    --layout megatron --tp 4
clean

# ---- verify -------------------------------------------------------------------------------------

"$ckpt" verify --quiet --hash --write "$src"
cat "$src"/*.safetensors >/dev/null
verify_hash() { "$ckpt" verify --quiet --hash "$src"; }
verify_files() { "$ckpt" verify --quiet --hash --files "$src"; }
compare 'verify --hash, warm' verify_hash sha_all sha256sum nothing
compare 'verify --hash --files, warm' verify_files sha_all sha256sum nothing
peak 'verify --hash --memory 64MiB' "$ckpt" verify --quiet --hash --memory 64MiB "$src"

# ---- header -------------------------------------------------------------------------------------

"$gen" header "$work/many.safetensors" --tensors 1000000
inspect_many() { "$ckpt" inspect --quiet "$work/many.safetensors"; }
if command -v python3 >/dev/null; then
    json_loads() {
        python3 -c 'import json, struct, sys
f = open(sys.argv[1], "rb")
n, = struct.unpack("<Q", f.read(8))
assert len(json.loads(f.read(n))) == 1000000' "$work/many.safetensors"
    }
    compare 'inspect, 1,000,000 tensors' inspect_many json_loads 'python3 json.loads' nothing
else
    echo "inspect, 1,000,000 tensors: skipped, python3 not found"
fi

peak 'inspect, 1,000,000 tensors' "$ckpt" inspect --quiet "$work/many.safetensors"

# ---- start-up -----------------------------------------------------------------------------------

bin_true() { /bin/true; }
version_only() { "$ckpt" --version; }
inspect_small() { "$ckpt" inspect fixtures/hf/kimi_linear_tiny; }
compare 'start-up: --version' version_only bin_true /bin/true nothing 20
compare 'start-up: inspect kimi_linear_tiny' inspect_small bin_true /bin/true nothing 20
