# Quantisation policies: forward with rules, what a disabled one changes (nothing), refusals by name;
# training with one, saving it in every container, going on from there bit for bit.
export OMP_NUM_THREADS=1
model=$FIXTURES/hf/kimi_linear_tiny
data=$FIXTURES/fla/corpus.txt
seq 2 4 140 | tr '\n' ' ' >ids.txt
fp8='{"num_bits":[4,3],"type":"dynamic","axis":[0,1,2]}'
nvfp4='{"num_bits":[2,1],"type":"dynamic","block_sizes":{"-1":16,"type":"dynamic","scale_bits":[4,3]}}'
rules() { # HANDLE-PATTERN CFG
    echo "{\"quant_cfg\":[{\"quantizer_name\":\"*\",\"enable\":false},
        {\"quantizer_name\":\"$1\",\"cfg\":$2}],
        \"linear_attention\":[{\"module_name\":\"model.layers.*.self_attn\",\"cfg\":{\"backend\":\"matmul\"}}]}"
}
rules '*linear_attn_sites.*' "$fp8" >fp8.json
rules '*_w_quantizer' "$nvfp4" >nvfp4.json
echo '{"quant_cfg":[{"quantizer_name":"*","enable":false}]}' >off.json
echo '{"linear_attention":[{"module_name":"*","cfg":{"backend":"matmul","elementwise":{"output_add":"float32"}}}]}' >exact.json

# Disabled: the ordinary path, bit for bit. Exact: another order of sums. FP8: another model.
rc 0 verify --forward "$model" --tokens ids.txt --policy off.json --against "$model"
out 'bit-identical'
no_out 'quantisation policy'
rc 0 verify --forward "$model" --tokens ids.txt --policy exact.json --against "$model" --rtol 1e-5 --grad-rtol 1e-3
out 'quantisation policy [0-9a-f]{12}… on 3 of 3 KDA modules'
no_out 'bit-identical'
rc 1 verify --forward "$model" --tokens ids.txt --policy fp8.json --against "$model" --rtol 1e-5 --grad-rtol 1e-3
rc 0 verify --forward "$model" --tokens ids.txt --policy exact.json --approximate-solve 6
out 'approximate inverse, 6 factors: largest error [0-9.]+e-0'
rc 0 verify --forward "$model" --tokens ids.txt --policy exact.json --approximate-solve 1 --json
out '"inverse_error":0\.[0-9]+,"inverse_residual":0'

# Refused, by name.
rc 2 verify "$model" --policy off.json
err '--policy needs --forward'
rc 2 verify --forward "$model" --tokens ids.txt --policy off.json --approximate-solve 2
err 'without a quantisation policy'
rc 5 verify --forward "$model" --tokens ids.txt --policy absent.json
err 'absent.json: No such file'
echo '{' >broken.json
rc 3 verify --forward "$model" --tokens ids.txt --policy broken.json
err 'broken.json'
one_line
rules '*kda_u_quantizer' "$fp8" >handle.json
rc 4 verify --forward "$model" --tokens ids.txt --policy handle.json
err "handle.json: quant_cfg\[1\]: no handle '\*kda_u_quantizer'"
rc 4 verify --forward "$FIXTURES/hf/llama_tiny_tied" --policy exact.json
err "no KDA module '\*'"
rc 4 train --resume "$model" --policy fp8.json --data "$data" --batch 2 --seq-len 32 --steps 1 --launch 2 --cp 2
err 'a quantisation policy with context parallelism \(cp 2\)'
rc 4 train --resume "$model" --policy nvfp4.json --data "$data" --batch 2 --seq-len 32 --steps 1 --launch 2 --tp 2
err 'with NVFP4 and tensor parallelism \(tp 2\)'

# Saved, converted, resumed: the next loss is the same number, whatever held the policy meanwhile.
loss() { grep -o '"loss":[0-9.]*' "$1/metrics.jsonl" | tail -1; }
rc 0 train --resume "$model" --policy fp8.json --data "$data" --batch 1 --seq-len 70 --lr 1e-3 --steps 1 --save a
err 'quantisation policy'
rc 0 train --resume a --data "$data" --steps 2 --save next
want=$(loss next)
[ -n "$want" ] || fail "no loss"
rc 0 convert a b --to torch_dist --layout megatron --tp 2
rc 0 convert b c.h5
rc 0 convert c.h5 d --to safetensors --layout hf
rc 0 convert a e --to torch --layout keep
for x in b c.h5 d e; do
    rc 0 train --resume $x --data "$data" --steps 2 --save from.$x
    err 'quantisation policy'
    [ "$(loss from.$x)" = "$want" ] || fail "from $x: $(loss from.$x), not $want"
done
# Without any manifest the containers themselves say so.
rc 0 convert a m --to mp_rank --layout megatron --optimizer drop
rc 0 convert m n --to torch_dist
rm -f b/iter_*/ckpt.manifest.json n/iter_*/ckpt.manifest.json
rc 0 convert b f --to safetensors --layout hf
rc 0 convert n g --to safetensors --layout hf
rc 0 convert a shards --to torch --layout hf --optimizer drop --max-shard-size 400KB
rc 0 convert a plain --to torch_dist --layout hf --optimizer drop
rc 0 convert a ranks --to ranks --layout hf --tp 2 --optimizer drop
rm -f {e,f,g,shards,plain,ranks}/ckpt.manifest.json
for x in b e f g shards plain ranks; do
    rc 0 verify --forward $x --tokens ids.txt
    out 'quantisation policy [0-9a-f]{12}… on 3 of 3'
    rc 0 inspect $x
    out '^policy +quantisation, sha256 [0-9a-f]{64}$'
done
# A model without a policy is written as ever: no word of one. Files that disagree are refused.
rc 0 convert "$model" none --to torch
! grep -q kda_quant none/pytorch_model.bin || fail 'a policy where there is none'
sed -i 's/"kda_quant_policy_sha256":"./"kda_quant_policy_sha256":"x/' ranks/model-rank-1-part-0.safetensors
rc 3 inspect ranks; one_line
err "model-rank-1-part-0.safetensors: 'kda_quant_policy_sha256' is another than that of a file before it"

# The digest beside a text in a pickle counts as much: one digit of it in plain DCP.
flip plain/.metadata $(($(LC_ALL=C grep -abo kda_quant_policy_sha256 plain/.metadata | cut -d: -f1) + 40))
rc 3 verify --forward plain --tokens ids.txt; one_line
err "plain: 'kda_quant_policy': its SHA-256 is"

# Other rules are a change of the run; a text that was touched is no policy.
rc 2 train --resume a --policy off.json --data "$data" --steps 2
err '--policy is not what it was; --change'
rc 0 train --resume a --policy fp8.json --data "$data" --steps 2
rc 0 train --resume a --policy off.json --data "$data" --steps 2 --change --save off
no_err 'quantisation policy'
rc 0 verify --forward off --tokens ids.txt
no_out 'quantisation policy'
rc 2 train --resume off --policy fp8.json --data "$data" --steps 3
sed -i 's/"kda_quant_policy_sha256":"./"kda_quant_policy_sha256":"x/' g/*.safetensors
rc 3 verify --forward g
err "'kda_quant_policy': its SHA-256 is"
rc 3 convert g h --to safetensors --layout hf
absent h
rc 0 inspect g
out '^policy +quantisation, damaged'
# A policy that enables nothing is not taken for one that does.
echo '{}' >empty.json
rc 0 verify $FIXTURES/hf/kimi_linear_tiny --forward --policy empty.json; err '^ckpt: verify: warning: empty.json: enables no quantiser of this model: nothing is emulated$'
