#!/usr/bin/env bash
# Executor on a machine of many processors: seconds of verify, by files and by threads, and of convert, on
# a source in shared memory so that no disk hides them. CKPT=program GEN=build/gen [SIZE=8G]
# [DIR=/dev/shm] [TARGETS=directories to convert to, default DIR and TMPDIR]
set -euo pipefail
: "${CKPT:?} ${GEN:?}"
size=${SIZE:-8G} root=${DIR:-/dev/shm}
dir=$(mktemp -d "$root/ckpt-cores.XXXXXX")
trap 'rm -rf "$dir" ${made:-}' EXIT
TIMEFORMAT='%R %U %S'
median() { # N COMMAND...: the run of median wall time, with its seconds of processors
    local n=$1
    shift
    for ((i = 0; i < n; i++)); do { time "$@" >/dev/null; } 2>&1; done | sort -n | sed -n "$(((n + 1) / 2))p"
}
echo "$(nproc) processors; wall, user and system seconds"
"$GEN" kimi "$dir/model" --size "$size" >/dev/null
for shard in 64MiB 256MiB 1GiB 64GiB; do
    "$CKPT" convert --quiet "$dir/model" "$dir/$shard" --to safetensors --max-shard-size $shard
    echo "verify --hash --files, $shard: $(median 5 "$CKPT" verify --hash --files "$dir/$shard")"
done
rm -rf "$dir/model" "$dir/64GiB"
for ((threads = 1; threads <= $(nproc); threads *= 2)); do
    echo "verify --hash, $threads threads: $(median 3 "$CKPT" verify --hash "$dir/256MiB" --threads $threads)"
done
for out in ${TARGETS:-$root ${TMPDIR:-/tmp}}; do
    made=$(mktemp -d "$out/ckpt-cores.XXXXXX")
    for to in '--to safetensors --max-shard-size 64MiB' '--to torch_dist --layout megatron --tp 8'; do
        # shellcheck disable=SC2086
        echo "convert to $out $to: $(median 3 "$CKPT" convert --quiet --force "$dir/1GiB" "$made/x" $to)"
    done
    rm -rf "$made"
done
