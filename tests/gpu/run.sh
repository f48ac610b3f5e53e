#!/usr/bin/env bash
# The KDA kernels on a card: parity, sanitizers, times, FLA beside them where Python has it.
#
#   tests/gpu/run.sh PROGRAM [PART...]     PROGRAM: build/kda_gpu of `make kda_gpu`
#   tests/gpu/run.sh build/ops_gpu ops     the pointwise and row operations, of `make ops_gpu`
#   tests/gpu/run.sh build/attn_gpu attn kernels torch   products and attention, of `make attn_gpu`
#
# Parts: parity memcheck racecheck initcheck times profile fla; all by default. FLA's wheels are looked for in the directory $WHEELS. Exit 1 when a part failed; a
# part that cannot run says so.
set -uo pipefail
program=$(readlink -f "$1")
here=$(cd "$(dirname "$0")" && pwd)
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(parity memcheck racecheck initcheck times profile fla)
failed=()

sanitizer() {
    local set=small
    [ "$1" != racecheck ] || set=tiny # a hundred times slower
    compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 5 "$program" check $set |
        grep -vE '^(f32|bf16)' | tail -n 25
}
times() {
    "$program" time 8192 32 128 && "$program" time 8192 32 128 general &&
        "$program" time 1024 4 64 && "$program" time 8192 8 128 && "$program" time 65536 4 128 &&
        "$program" time 2048 4 128 f32
}
profile() {
    ncu --clock-control none --launch-skip 118 --launch-count 5 --metrics \
        "gpu__time_duration.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,\
l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed,\
dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active" \
        "$program" time 8192 32 128 2>&1 | grep -E 'kda|duration|throughput|warps_active|issued|wavefronts'
}
# One call of each kernel: time, tensor pipe, memory, shared memory conflicts, occupancy.
kernels() {
    ncu --clock-control none --csv --page raw --metrics \
        "gpu__time_duration.sum,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active,\
sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,\
dram__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct,\
l1tex__data_bank_conflicts_pipe_lsu.sum,smsp__issue_active.avg.pct_of_peak_sustained_active,\
sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread" \
        "$program" once 2>&1 | python3 -c '
import csv, sys
rows = list(csv.reader(line for line in sys.stdin if line.startswith("\"")))
at = rows[0].index("Kernel Name")
keep = [i for i, n in enumerate(rows[0]) if "__" in n]
print("kernel | " + " | ".join(rows[0][i] for i in keep))
for row in rows[1:]:
    if len(row) > max(keep):
        print(row[at][:70] + " | " + " | ".join(row[i] for i in keep))'
}
attn() {
    local bad=0 what tool
    for what in check group times; do "$program" "$what" || bad=1; done
    command -v compute-sanitizer >/dev/null || { echo "SKIP no compute-sanitizer"; return $bad; }
    for what in check group; do
        for tool in memcheck racecheck; do
            compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 5 "$program" "$what" small || bad=1
        done
    done
    return $bad
}
wheels() {
    [ -n "${WHEELS:-}" ] || return 0
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$1" "$WHEELS"/*.whl
    export PYTHONPATH=$1
}
# warm SCRIPT ARGS...: all kernels that it tunes, compiled by as many processes as there are cores.
warm() {
    local i n
    n=$(nproc)
    for ((i = 0; i < n; i++)); do FLA_PART=$i/$n python3 "$@" --warm >/dev/null 2>&1 & done
    wait
}
fla() {
    local dir
    dir=$(mktemp -d)
    mkdir "$dir/plain" "$dir/weak"
    "$program" dump "$dir/plain" && "$program" dump "$dir/weak" weak || return 1
    wheels "$dir/site"
    warm "$here/fla_kda.py"
    python3 "$here/fla_kda.py" "$dir/plain" "$dir/weak"
}
# FLA's line of the table that quant.sh prints.
fla_table() {
    wheels "$(mktemp -d)"
    warm "$here/fla_kda.py" --table
    python3 "$here/fla_kda.py" --table
}
# The block of model.sh by PyTorch and FLA.
fla_block() {
    wheels "$(mktemp -d)"
    warm "$here/fla_block.py"
    python3 "$here/fla_block.py"
}

for part in "${parts[@]}"; do
    echo "==== $part"
    start=$SECONDS
    case $part in
    parity) "$program" check ;;
    memcheck | racecheck | initcheck)
        if command -v compute-sanitizer >/dev/null; then sanitizer "$part"; else echo "SKIP no compute-sanitizer"; fi
        ;;
    times) times ;;
    profile) if command -v ncu >/dev/null; then profile; else echo "SKIP no ncu"; fi ;;
    ops)
        "$program" check && "$program" time &&
            if command -v compute-sanitizer >/dev/null; then
                compute-sanitizer --tool memcheck --error-exitcode 1 --print-limit 5 "$program" check
            else echo "SKIP no compute-sanitizer"; fi
        ;;
    attn) attn ;;
    kernels) if command -v ncu >/dev/null; then kernels; else echo "SKIP no ncu"; fi ;;
    torch) if python3 -c 'import torch' 2>/dev/null; then python3 "$here/torch_ops.py"; else echo "SKIP no torch"; fi ;;
    fla) if python3 -c 'import torch, triton' 2>/dev/null; then fla; else echo "SKIP no torch"; fi ;;
    fla_table) if python3 -c 'import torch, triton' 2>/dev/null; then fla_table; else echo "SKIP no torch"; fi ;;
    fla_block) if python3 -c 'import torch, triton' 2>/dev/null; then fla_block; else echo "SKIP no torch"; fi ;;
    *)
        echo "unknown part $part"
        false
        ;;
    esac || failed+=("$part")
    echo "---- $part: $((SECONDS - start)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
