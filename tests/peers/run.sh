#!/usr/bin/env bash
# What ckpt writes, loaded by the systems it is written for: PyTorch, Megatron-Core, transformers,
# safetensors. CKPT names the program. Prints one line per test and the totals.
#
#   tests/peers/run.sh [NAME-PATTERN]
set -euo pipefail
cd "$(dirname "$0")/../.."

ckpt=${CKPT:-build/ckpt}
pattern=${1:-*}
python=$(tests/peers/setup.sh)
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-peers.XXXXXX")
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

passed=0
failed=0

# One test: a name and a command; its output is shown only when it fails, its last line otherwise.
t() {
    local name=$1 start=$SECONDS
    shift
    # shellcheck disable=SC2254 # a pattern is meant
    case $name in
    $pattern) ;;
    *) return 0 ;;
    esac
    # Not in a condition, which would switch -e off inside the test.
    set +e
    (
        set -e
        "$@"
    ) >"$work/log" 2>&1 </dev/null
    local rc=$?
    set -e
    if [ "$rc" -eq 0 ]; then
        echo "ok   $name ($((SECONDS - start)) s): $(tail -n 1 "$work/log")"
        passed=$((passed + 1))
    else
        echo "FAIL $name"
        sed 's/^/     /' "$work/log" | tail -n 25
        failed=$((failed + 1))
    fi
}

py() {
    local script=$1
    shift
    "$python" "tests/peers/$script" "$@"
}

convert() {
    "$ckpt" convert --quiet "$@"
}

# The iteration directory below a save root, or the directory itself.
iteration() {
    local dir
    for dir in "$1"/iter_* "$1"/release; do
        if [ -d "$dir" ]; then
            echo "$dir"
            return
        fi
    done
    echo "$1"
}

hf=fixtures/hf/kimi_linear_tiny
dense='mlp.=block_sparse_moe.'

# ---- Hugging Face -------------------------------------------------------------------------------

hf_same_layout() {
    convert "$hf" "$work/hf1" --to safetensors --layout hf --max-shard-size 200KB
    py st_equal.py "$work/hf1" "$hf" "$dense"
    py hf_logits.py "$work/hf1" "$hf.reference.safetensors"
}
hf_through_megatron() {
    convert "$hf" "$work/hf2.dist" --to torch_dist --layout megatron --tp 2 --ep 2
    convert "$work/hf2.dist" "$work/hf2.dist4" --to torch_dist --layout megatron --tp 4 --etp 4
    convert "$work/hf2.dist4" "$work/hf2" --to safetensors --layout hf
    py st_equal.py "$work/hf2" "$hf" "$dense"
    py hf_logits.py "$work/hf2" "$hf.reference.safetensors"
}
quantised() {
    mkdir "$work/quantised"
    "$python" tests/peers/wquant.py "$ckpt" fixtures/hf/deepseek_v3_tiny "$work/quantised"
}
t quantised_weights_are_those_of_torch_and_transformers quantised
with_policy() {
    local to=$work/policy
    echo '{"linear_attention":[{"module_name":"*","cfg":{"backend":"matmul","elementwise":{"output_add":"float32"}}}]}' \
        >"$to.json"
    "$ckpt" train --resume "$hf" --policy "$to.json" --data fixtures/fla/corpus.txt --batch 1 --seq-len 16 \
        --lr 1e-3 --steps 1 --save "$to.run"
    convert "$to.run" "$to.st" --to safetensors --layout hf --optimizer drop
    convert "$to.st" "$to.torch" --to torch --max-shard-size 400KB
    convert "$to.st" "$to.dcp" --to torch_dist --layout hf
    convert "$to.st" "$to.ranks" --to ranks --layout hf --tp 2
    py policy.py "$to.torch" "$to.dcp" "$to.ranks" "$to.st/model.safetensors"
}
t policies_are_left_alone_by_torch with_policy
t hf_same_layout_loads_in_transformers hf_same_layout
t hf_through_megatron_tp2_tp4_loads_in_transformers hf_through_megatron

hf_families_through_megatron() {
    local name args=() ep
    for name in llama_tiny_tied llama3_tiny qwen2_tiny qwen3_tiny qwen3_5_tiny qwen3_moe_tiny \
        qwen3_next_tiny moonlight_tiny kimi_k2_tiny kimi_k2_fp8_tiny bailing_hybrid_tiny; do
        ep=(--ep 2)
        grep -q 'experts' "fixtures/hf/$name/config.json" || ep=() # refused without effect
        convert "fixtures/hf/$name" "$work/fam.dist" --to torch_dist --layout megatron --tp 2 \
            "${ep[@]}" --force
        convert "$work/fam.dist" "$work/fam.$name" --to safetensors --layout hf
        args+=("$work/fam.$name" "fixtures/hf/$name.reference.safetensors")
    done
    # Megatron would choose other experts of these two: there and back as an approximation
    for name in deepseek_v3_tiny deepseek_v3_tiny_noq; do
        convert "fixtures/hf/$name" "$work/fam.dist" --to torch_dist --layout megatron --tp 2 --ep 2 \
            --approximate --force
        convert "$work/fam.dist" "$work/fam.$name" --to safetensors --layout hf --approximate
        args+=("$work/fam.$name" "fixtures/hf/$name.reference.safetensors")
    done
    # A model that Megatron-Core made and ran.
    convert fixtures/mcore/gpt_gdn_tp2 "$work/fam.gdn" --to safetensors --layout hf
    args+=("$work/fam.gdn" fixtures/mcore/gpt_gdn_tp2.reference.safetensors)
    py hf_logits.py "${args[@]}"
}
# Written without the earlier configuration: every field of it is new.
hf_families_new_configuration() {
    local name args=()
    for name in llama3_tiny qwen2_tiny qwen3_tiny qwen3_moe_tiny qwen3_next_tiny moonlight_tiny kimi_k2_tiny; do
        convert "fixtures/hf/$name" "$work/new.dist" --to torch_dist --layout megatron --tp 2 --force
        find "$work/new.dist" -name ckpt.manifest.json -delete
        convert "$work/new.dist" "$work/new.$name" --to safetensors --layout hf
        args+=("$work/new.$name" "fixtures/hf/$name.reference.safetensors")
    done
    py hf_logits.py "${args[@]}"
}
t hf_families_through_megatron_load_in_transformers hf_families_through_megatron
t hf_families_with_new_configuration_load_in_transformers hf_families_new_configuration

# ---- Megatron torch_dist ------------------------------------------------------------------------

mcore_from_hf() {
    convert "$hf" "$work/m.dist" --to torch_dist --layout megatron --tp 2 --ep 2
    # The expected tensors, with the vocabulary padded as it is there; their values are checked
    # against the source by hf_through_megatron above.
    convert "$work/m.dist" "$work/m.safetensors" --to safetensors --layout keep
    py dcp_load.py "$(iteration "$work/m.dist")" "$work/m.safetensors"
}
mcore_relayout() { # FIXTURE PLAIN ARGS...
    local fixture=$1 plain=$2
    shift 2
    rm -rf "$work/r.dist"
    convert "fixtures/mcore/$fixture" "$work/r.dist" --to torch_dist "$@"
    py dcp_load.py "$(iteration "$work/r.dist")" "fixtures/mcore/$plain.plain.safetensors"
}
mcore_through_safetensors() { # FIXTURE PLAIN
    rm -rf "$work/s.keep" "$work/s.dist"
    convert "fixtures/mcore/$1" "$work/s.keep" --to safetensors --layout keep
    py st_equal.py "$work/s.keep" "fixtures/mcore/$2.plain.safetensors"
    convert "$work/s.keep" "$work/s.dist" --to torch_dist --layout megatron --tp 4
    py dcp_load.py "$(iteration "$work/s.dist")" "fixtures/mcore/$2.plain.safetensors"
}
t mcore_loads_hf_tp2_ep2 mcore_from_hf
t mcore_loads_legacy_tp1_as_tp4 mcore_relayout legacy_tp1 legacy --tp 4
t mcore_loads_legacy_tp2_as_tp2_pp4_ep2 mcore_relayout legacy_tp2 legacy --tp 2 --pp 4 --ep 2
t mcore_loads_legacy_tp2_as_etp2_ep4 mcore_relayout legacy_tp2 legacy --tp 1 --etp 2 --ep 4
for variant in f fg; do
    t "mcore_loads_lowrank_${variant}_tp1" \
        mcore_relayout "lowrank_${variant}_tp2" "lowrank_${variant}_tp2" --tp 1
    t "mcore_loads_lowrank_${variant}_tp4" \
        mcore_relayout "lowrank_${variant}_tp2" "lowrank_${variant}_tp2" --tp 4
    t "mcore_loads_lowrank_${variant}_through_safetensors" \
        mcore_through_safetensors "lowrank_${variant}_tp2" "lowrank_${variant}_tp2"
done
t mcore_loads_legacy_through_safetensors mcore_through_safetensors legacy_tp2 legacy

# The model that saved it loads what came back from another layout, container and mesh.
mcore_model_loads() { # NAME ARGS...
    local name=$1
    shift
    rm -rf "$work/g".*
    case $name in
    # No Hugging Face layout has Mamba-2, or softmax scores beside a shared expert without a gate.
    hybrid_attn | gpt_moe) convert "fixtures/mcore/$name" "$work/g.other" --to safetensors ;;
    *) convert "fixtures/mcore/$name" "$work/g.other" --to safetensors --layout hf ;;
    esac
    convert "$work/g.other" "$work/g.dist" --to torch_dist --layout megatron "$@"
    py dcp_load.py "$(iteration "$work/g.dist")" "fixtures/mcore/$name.plain.safetensors"
    py gen_mcore_gpt.py --load "$(iteration "$work/g.dist")" "$name"
}
t mcore_gpt_dense_loads mcore_model_loads gpt_dense --tp 2
t mcore_gpt_moe_loads mcore_model_loads gpt_moe --tp 2 --ep 2
t mcore_gpt_mla_mtp_loads mcore_model_loads gpt_mla_mtp --tp 2
t mcore_hybrid_attn_loads mcore_model_loads hybrid_attn --tp 2

# Gated delta net and gated attention: Megatron-Core loads Qwen3-Next at every mesh and gives
# transformers' logits; four ranks load their parts.
mcore_gdn() {
    local tp pp dirs=()
    for tp in 1 2; do
        for pp in 1 2; do
            convert fixtures/hf/qwen3_next_tiny "$work/next.$tp$pp" --to torch_dist --layout megatron \
                --tp $tp --pp $pp --ep $tp
            dirs+=("$(iteration "$work/next.$tp$pp")")
        done
    done
    py gen_mcore_gdn.py load qwen3_next fixtures/hf/qwen3_next_tiny.reference.safetensors "${dirs[@]}"
}
mcore_gdn_ranks() {
    convert fixtures/mcore/gpt_gdn_tp2 "$work/gdn.hf" --to safetensors --layout hf
    convert "$work/gdn.hf" "$work/gdn.dist" --to torch_dist --layout megatron --tp 2 --pp 2
    py gen_mcore_gdn.py load-mesh gpt_gdn 2 2 fixtures/mcore/gpt_gdn_tp2.plain.safetensors \
        "$(iteration "$work/gdn.dist")"
}
t mcore_gdn_runs_qwen3_next mcore_gdn
t mcore_gdn_loads_on_four_ranks mcore_gdn_ranks

# ---- optimizer state ----------------------------------------------------------------------------

t optimizer_of_torch_trains_on py optim.py "$ckpt" "$work/optim" torch
t training_of_torch_goes_on py train.py "$ckpt" "$work/train" torch
t training_of_mcore_goes_on py train.py "$ckpt" "$work/train" megatron
t optimizer_of_mcore_trains_on py optim.py "$ckpt" "$work/optim" megatron
t optimizer_mixed_and_chained_of_mcore_trains_on py optim.py "$ckpt" "$work/optim" mixed

# ---- plain torch.distributed.checkpoint -----------------------------------------------------------

dcp_plain() {
    "$python" - "$hf" "$work/whole.safetensors" <<'PY'
import glob, sys
from safetensors.torch import load_file, save_file

whole = {}
for file in glob.glob(sys.argv[1] + "/*.safetensors"):
    whole.update(load_file(file))
save_file(whole, sys.argv[2])
PY
    convert "$hf" "$work/dcp.hf" --to torch_dist --layout hf
    py dcp_load.py "$work/dcp.hf" "$work/whole.safetensors"
}
dcp_general() { # every dtype, objects, nested optimizer state: read and written again
    convert fixtures/torch/dcp_2rank "$work/dcp.g" --to torch_dist --allow-unknown \
        --allow-unknown-objects
    py dcp_load.py "$work/dcp.g" fixtures/torch/dcp_full_expected.safetensors --subset
}
dcp_back() {
    convert "$hf" "$work/dcp.b" --to torch_dist --layout hf
    convert "$work/dcp.b" "$work/dcp.hf2" --to safetensors --layout hf
    py st_equal.py "$work/dcp.hf2" "$hf" "$dense"
}
t dcp_loads_hf_names dcp_plain
t dcp_loads_general_checkpoint dcp_general
t dcp_back_to_safetensors dcp_back

# ---- torch.save -----------------------------------------------------------------------------------

torch_every_dtype() {
    py torch_equal.py --make "$work/every.safetensors"
    convert "$work/every.safetensors" "$work/every.pt"
    py torch_equal.py "$work/every.pt" "$work/every.safetensors"
    convert "$work/every.pt" "$work/every2.safetensors"
    py st_equal.py "$work/every2.safetensors" "$work/every.safetensors"
    convert "$work/every.safetensors" "$work/every.dir" --to torch --max-shard-size 500
    py torch_equal.py "$work/every.dir" "$work/every.safetensors"
}
torch_hf_directory() { # ARGS...
    rm -rf "$work/hf.torch"
    convert "$hf" "$work/hf.torch" --to torch "$@"
    py torch_equal.py "$work/hf.torch" "$hf"
    py hf_logits.py "$work/hf.torch" "$hf.reference.safetensors"
}
t torch_loads_every_dtype torch_every_dtype
t torch_loads_pytorch_model_bin torch_hf_directory
t torch_loads_pytorch_model_shards torch_hf_directory --max-shard-size 200KB

# ---- ranks --------------------------------------------------------------------------------------

svd_tails() { # RANK
    "$ckpt" convert fixtures/mcore/legacy_tp2 "$work/svd.$1" --to safetensors --layout megatron \
        --kda-f-lora-rank "$1" --kda-gate-lora-rank "$1" --approximate --json --quiet \
        >"$work/svd.$1.json"
    [ -d "$work/svd.full" ] ||
        convert fixtures/mcore/legacy_tp2 "$work/svd.full" --to safetensors --layout keep
    py svd_tail.py "$work/svd.full/model.safetensors" "$work/svd.$1/model.safetensors" \
        "$work/svd.$1.json" "$1"
}
t svd_error_is_numpys_tail_at_rank_1 svd_tails 1
t svd_error_is_numpys_tail_at_rank_12 svd_tails 12

# ---- FLA ----------------------------------------------------------------------------------------

fla_roundtrip() {
    convert fixtures/fla/kda_trained "$work/fla.dist" --to torch_dist --layout megatron --tp 2 \
        --allow-unknown
    convert "$work/fla.dist" "$work/fla" --to safetensors --layout fla --allow-unknown
    py st_equal.py "$work/fla" fixtures/fla/kda_trained
}
fla_same_layout() {
    convert fixtures/fla/kda_trained "$work/fla2" --to safetensors --layout fla
    py st_equal.py "$work/fla2" fixtures/fla/kda_trained
    "$python" - "$work/fla2/config.json" fixtures/fla/kda_trained/config.json <<'PY'
import json, sys

got, want = (json.load(open(path)) for path in sys.argv[1:])
wrong = {k: (got.get(k), v) for k, v in want.items() if got.get(k) != v}
sys.exit(f"config.json: {wrong}" if wrong else 0)
PY
    echo "tensors and configuration equal"
}
t fla_through_megatron_is_identical fla_roundtrip
t fla_same_layout_is_identical fla_same_layout

# ---- per-rank Megatron files --------------------------------------------------------------------

mp_rank_real() { # CASE: what real Megatron saved, written again, is the same rank by rank
    rm -rf "$work/mp"
    convert "fixtures/mcore/mp_$1" "$work/mp" --optimizer drop
    py mp_rank_load.py "$work/mp" "fixtures/mcore/mp_$1"
}
mp_rank_loads() {
    rm -rf "$work/mp"
    convert fixtures/mcore/legacy_tp2 "$work/mp" --to mp_rank --tp 2 --pp 2 --ep 2
    py mp_rank_load.py "$work/mp"
}
for case in gpt_tp2_pp2 gpt_vpp gpt_bf16 mla_moe_tp2_ep2; do
    t "mp_rank_of_megatron_$case" mp_rank_real "$case"
done
t mp_rank_loads_with_weights_only mp_rank_loads

# ---- HDF5 ---------------------------------------------------------------------------------------

hdf5_written() { # ARGS...: h5py reads every dataset, with checksums and digests
    rm -f "$work"/w.h5*
    convert "$hf" "$work/w.h5" "$@"
    py hdf5_check.py "$work/w.h5" "$hf"
}
hdf5_foreign() { # VERSION: every form h5py can write, read equal, and written again
    rm -f "$work"/f.*
    py hdf5_make.py "$work/f.h5" "$work/f.safetensors" "$1"
    "$ckpt" diff --quiet "$work/f.h5" "$work/f.safetensors"
    convert "$work/f.h5" "$work/f.again.h5" --compress shuffle-deflate
    py hdf5_check.py "$work/f.again.h5" "$work/f.safetensors"
}
t hdf5_plain_loads_in_h5py hdf5_written
t hdf5_compressed_loads_in_h5py hdf5_written --compress shuffle-deflate:6
t hdf5_of_h5py_oldest_format hdf5_foreign earliest
t hdf5_of_h5py_format_1_10 hdf5_foreign v110

# ---- OpenSSF model signing ----------------------------------------------------------------------

model_signing() {
    "$(dirname "$python")/model_signing" "$@" 2>&1
}
signed_by_us() { # CURVE: model_signing accepts what ckpt signed, and nothing else
    rm -rf "$work"/sig*
    openssl ecparam -name "$1" -genkey -noout -out "$work/sig.pem"
    openssl ec -in "$work/sig.pem" -pubout -out "$work/sig.pub" 2>/dev/null
    convert fixtures/hf/llama_tiny_tied "$work/sig"
    mkdir "$work/sig/a" "$work/sig/.git"
    echo 1 >"$work/sig/a/b"
    echo 2 >"$work/sig/a.txt" # before or after a/b, as one compares
    echo 3 >"$work/sig/.git/HEAD"
    "$ckpt" sign "$work/sig" --key "$work/sig.pem"
    model_signing verify key "$work/sig" --public_key "$work/sig.pub" --signature "$work/sig/model.sig" |
        grep 'Verification succeeded'
    echo 4 >>"$work/sig/a/b"
    if model_signing verify key "$work/sig" --public_key "$work/sig.pub" \
        --signature "$work/sig/model.sig"; then
        return 1
    fi
    echo "accepted; refused after a change"
}
signed_by_peer() { # ckpt accepts what model_signing signed, and nothing else
    rm -f "$work"/sig/model.sig
    model_signing sign key "$work/sig" --private_key "$work/sig.pem" --signature "$work/sig/model.sig"
    "$ckpt" verify "$work/sig" --signature "$work/sig.pub" | grep ' 6 files as signed'
    echo 5 >>"$work/sig/a/b"
    if "$ckpt" verify "$work/sig" --signature "$work/sig.pub" >"$work/sig.out"; then return 1; fi
    grep '^failed: a/b: differs from the signed digest' "$work/sig.out"
}
t model_signing_verifies_p256 signed_by_us prime256v1
t model_signing_verifies_p384 signed_by_us secp384r1
t verify_of_model_signing signed_by_peer

ci_action() { py ci_action.py "$ckpt" "$work/ci"; }
t github_action_and_gitlab_file ci_action

# ---- quantisation -------------------------------------------------------------------------------

t codecs_agree_with_pytorch py quant_codec.py "$work"

# A sample; 100000 by hand.
t differential_of_mutated_files py differential.py "${VERDICTS:-$(dirname "$ckpt")/verdicts}" "$work/differential" 3000

echo "peers: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
