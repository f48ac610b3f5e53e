# To Megatron's torch_dist and back, every fixture that has a form outside Megatron, at every mesh: the
# same bytes, or a refusal that names the size which does not divide.

# round TP EP PP SOURCE LAYOUT: a refusal, or the same tensors, file and configuration again
round() {
    local tp=$1 ep=$2 pp=$3 d=$4 layout=$5
    rm -rf m h
    if [ $((units % pp)) -ne 0 ]; then
        rc 2 convert $d m --to torch_dist --layout megatron --tp $tp --ep $ep --pp $pp "${how[@]}"
        one_line; err "$units (layers|blocks) are not divisible by PP $pp"; absent m
        return
    fi
    rc 0 convert $d m --to torch_dist --layout megatron --tp $tp --ep $ep --pp $pp "${how[@]}"
    rc 0 convert m h --to safetensors --layout $layout --max-shard-size 100GB "${how[@]}"
    rc 0 diff $d h; no_out 'only in'; out '^[0-9]+ identical$'
    if [ -e $d/model.safetensors ]; then same h/model.safetensors $d/model.safetensors; fi
    [ -n "$new_config" ] || same h/config.json $d/config.json
}
# trip SOURCE LAYOUT UNITS EXPERTS CONVERT-ARGS...: UNITS are what stages are made of
trip() {
    local d=$1 layout=$2 units=$3 experts=$4 how=("${@:5}") tp ep pp eps='1 2'
    [ $experts -gt 0 ] || eps=1
    if [ -n "$sampled" ]; then
        round 2 "${eps: -1}" 2 $d $layout
        return
    fi
    for tp in 1 2 4; do
        for ep in $eps; do
            for pp in 1 2; do round $tp $ep $pp $d $layout; done
        done
    done
    rm -rf m
    rc 2 convert $d m --to torch_dist --layout megatron --tp 3 "${how[@]}"; one_line; absent m
    err "tensor '.*': [A-Za-z/ ]+ [0-9]+ is not divisible by E?TP 3"
    [ $experts -eq 0 ] ||
        { rc 2 convert $d m --to torch_dist --layout megatron --ep 3 "${how[@]}"; one_line; err "experts $experts is not divisible by EP 3"; absent m; }
}
# They wait for the disk most of the time, so all at once, each in a directory of its own.
# start NAME FUNCTION ARGS...
start() {
    local name=$1
    (
        failures=0
        mkdir "$name" && cd "$name" && "${@:2}"
        [ "${failures:-0}" -eq 0 ]
    ) >"$name.log" 2>&1 &
    started+=("$! $name")
}
finish() {
    local job
    for job in "${started[@]}"; do
        wait "${job% *}" || fail "${job#* }: $(cat "${job#* }.log")"
    done
    started=()
}
started=() new_config='' sampled=''
if sanitized any; then sampled=1; fi # one mesh instead of twelve
hf() { # NAME LAYERS EXPERTS ARGS...
    start $1 trip $FIXTURES/hf/$1 hf "${@:2}"
}
hf kimi_linear_tiny 8 8
hf moonlight_tiny 4 4
hf deepseek_mtp_tiny 2 4
hf kimi_k2_tiny 2 4
hf qwen3_next_tiny 4 8
hf qwen3_moe_tiny 4 4
hf qwen3_moe_joint_tiny 2 4
hf bailing_hybrid_tiny 4 4
hf bailing_moe_tiny 2 4
# 3 of 8 experts in the best 2 of 4 groups: Megatron scores a group by 3 / 2 = 1 expert
hf deepseek_v3_tiny 3 8 --approximate
hf deepseek_v3_tiny_noq 3 8 --approximate
finish
for name in llama3 qwen2 qwen3 qwen3_5; do hf ${name}_tiny 2 0; done
hf arcee_kda_tiny 8 0
hf llama_tiny_tied 2 0
start kda_trained trip $FIXTURES/fla/kda_trained fla 6 0 --allow-unknown
next_mtp() { # the depth gets a field that says so
    new_config=1
    trip $FIXTURES/hf/qwen3_next_mtp_tiny hf 2 4
    grep -q '"num_nextn_predict_layers": 1' h/config.json || fail "no depth in config.json"
}
start qwen3_next_mtp_tiny next_mtp
# Megatron's own files: first to Hugging Face, around from there, and the same tensors at the end
megatron() { # NAME LAYERS EXPERTS
    local m=$FIXTURES/mcore/$1
    rc 0 convert $m from --to safetensors --layout hf --optimizer drop
    trip "$PWD/from" hf $2 $3
    rm -rf m
    rc 0 convert from m --to torch_dist --layout megatron --tp 2
    rc 0 diff m $m --exclude 'optimizer.*'; no_out 'only in A'
}
start gpt_dense megatron gpt_dense 3 0
start gpt_mla_mtp megatron gpt_mla_mtp 3 4
start gpt_gdn_tp2 megatron gpt_gdn_tp2 2 4
start mp_gpt_tp2_pp2 megatron mp_gpt_tp2_pp2 4 0
start mp_gpt_vpp megatron mp_gpt_vpp 8 0
start mp_gpt_bf16 megatron mp_gpt_bf16 1 0
ranks() { # NAME LAYERS: per-rank files of Hugging Face weights, around from what they are joined to
    rc 0 convert $FIXTURES/hf/$1 from; err 'vocabulary padding of the ranks is left out'
    trip "$PWD/from" hf $2 0
    rm -rf m
    rc 0 convert from m --to ranks --tp 4; rc 0 diff m $FIXTURES/hf/$1; no_out 'only in'; out '^20 identical$'
}
start llama_tiny_tied_tp4 ranks llama_tiny_tied_tp4 2
start mp_mla_moe_tp2_ep2 megatron mp_mla_moe_tp2_ep2 2 4
finish

# what has no form outside Megatron says so
for name in gpt_relu2:activation gpt_moe:norm_zero_centered gpt_moe_all:norm_zero_centered \
    hybrid_attn:pattern legacy_tp2:mla_gate lowrank_fg_tp2:kda_f_rank; do
    rc 4 convert $FIXTURES/mcore/${name%:*} h --to safetensors --layout hf; one_line; err "${name#*:}"; absent h
done

# groups that Megatron would score by another number of experts: said both ways, and undone
d=$FIXTURES/hf/deepseek_v3_tiny
rm -rf m h
rc 4 convert $d m --to torch_dist --layout megatron; one_line; absent m
err "field 'moe_router_group_topk': megatron:gpt would score a group by its best 1 .* this model scores it by its best 2"
rc 0 convert $d m --to torch_dist --layout megatron --approximate --json
out '"lossy": *\["routing: a group of experts is scored by the sum of its best 1, in the source by its best 2'
grep -q 'lossy.*routing: a group' m/release/ckpt.manifest.json || fail 'the manifest does not say it'
rc 0 diff $d m; out "configuration: 'router_group_best' is only in B"; out '^91 identical$'
rc 0 verify m --hash; rc 0 verify m --forward
rc 4 convert m h --to safetensors --layout hf; one_line; absent h
err "field 'topk_group': hf:deepseek_v3 scores a group by its best 2 experts, this model by its best 1"
rc 0 convert m m2 --tp 2; no_err lossy; rc 0 diff m m2

# block FP8 comes back as BF16, with the values that torch gives; that goes around like any other
dequantised() {
    local f=$FIXTURES/hf/$1
    rc 0 convert $f m --to torch_dist --layout megatron --tp 2 --ep 2; err '22 F8_E4M3 tensors become BF16'
    rc 0 convert m plain --to safetensors --layout hf; rc 0 diff $f plain; rc 0 inspect plain; no_out F8_E4M3
    ! grep -q quantization_config plain/config.json || fail "quantization_config is still there"
    trip "$PWD/plain" hf 2 2
}
start deepseek_fp8_tiny dequantised deepseek_fp8_tiny
start kimi_k2_fp8_tiny dequantised kimi_k2_fp8_tiny
finish
rc 0 diff deepseek_fp8_tiny/plain $FIXTURES/hf/deepseek_fp8_tiny.dequantised.safetensors --include '*proj*'; out '22 identical'

# without the manifest the dialect follows from the model alone
for name in llama3 qwen2 qwen3 qwen3_moe qwen3_next moonlight kimi_k2 bailing_moe; do
    rm -rf m h
    rc 0 convert $FIXTURES/hf/${name}_tiny m --to torch_dist --layout megatron --tp 2
    find m -name ckpt.manifest.json -delete
    rc 0 convert m h --to safetensors --layout hf; rc 0 diff $FIXTURES/hf/${name}_tiny h; no_out 'only in'
    grep -q "$(grep ForCausalLM $FIXTURES/hf/${name}_tiny/config.json | tr -d ' ')" h/config.json ||
        fail "$name: another architecture in config.json"
done
