# A study: the same weights, tokens and seed for every policy, and records that say so.
export OMP_NUM_THREADS=1
model=$FIXTURES/fla/kda_trained
small=(--data "$FIXTURES/fla/corpus.txt" --seq-len 64 --blocks 2 --threads 1)
echo '{"linear_attention":[{"module_name":"model.layers.0.attn","cfg":{"backend":"matmul","elementwise":{"state_add":"bfloat16"}}}]}' >mine.json
rc 0 study "$model" "${small[@]}" --only fp8_operands --policy mine.json
silent
out '^2 evaluated blocks of 64 tokens, 1 step of 1, lr 1e-05, seed 2026$'
out '^tokens: evaluated sha256 [0-9a-f]{64}, trained sha256 [0-9a-f]{64}$'
out '^plain +- +[0-9.]+ +[0-9.]+ +\+0\.00000 +\+0\.00000 '
out '^fp8_operands +e8f80a76b66b '
out '^mine\.json +[0-9a-f]{12} '
out '^fp8_operands: 95 % of 5000 draws .* (within|not within) 0\.02$'
no_out '^nvfp4'

# Every column of the record, for each of the usual variants.
rc 0 study "$model" "${small[@]}" --seq-len 16 --json
python3 - $OUT <<'PY' || fail "the record of a study"
import json, sys
d = json.load(open(sys.argv[1]))
digests = [d[k] for k in ("root", "tokens_evaluated", "tokens_trained")] + list(d["data"].values())
assert all(len(x) == 64 for x in digests) and len(set(digests)) == 4, digests
assert (d["device"], d["dtype"], d["seq_len"], d["version"] != "") == ("cpu", "F32", 16, True), d
names = [v["name"] for v in d["variants"]]
assert names == "plain exact_matmul fp8_operands fp8_with_state nvfp4_operands fp16_accumulation".split(), names
assert len({v["policy_digest"] for v in d["variants"]}) == 6
for v in d["variants"]:
    assert len(v["policy_digest"]) == len(v["weights_before"]) == len(v["weights_after"]) == 64, v
    assert min(v["ppl_before"], v["ppl_after"]) > 1 and len(v["nll_before"]) == len(v["nll_after"]) == 2, v
    assert min(v["forward_seconds"], v["step_seconds"], v["memory"], v["grad_norm"]) > 0, v
PY

# The same numbers again; exact only differs from plain by the order of sums.
numbers() { sed 's/"forward_seconds":[^,]*,"step_seconds":[^,]*,//g' $OUT; }
rc 0 study "$model" "${small[@]}" --only exact_matmul --json
numbers >one
out '"weights_before":"([0-9a-f]{64})","weights_after":"'
out '"within_margin":true'
rc 0 study "$model" "${small[@]}" --only exact_matmul --json
numbers >two
same one two
[ "$(grep -o '"weights_before":"[0-9a-f]*"' one | sort -u | wc -l)" -eq 1 ] || fail "other weights"
[ "$(grep -o '"weights_after":"[0-9a-f]*"' one | sort -u | wc -l)" -eq 2 ] || fail "the same steps"
rc 0 study "$model" "${small[@]}" --only plain --steps 0
out '^plain '

rc 2 study "$model"; one_line; err '--data FILE is missing'
rc 2 study "$model" "${small[@]}" --only fp9; one_line; err "--only 'fp9': expected plain, exact_matmul"
rc 2 study "$model" "${small[@]}" --blocks 60000 --quiet; one_line; err 'tokens of data, expected 60001 blocks of 65'
rc 0 study "$model" "${small[@]}" --blocks 1; out "^one block: no interval"; no_out "within"
rc 5 study "$model" "${small[@]}" --policy absent.json; one_line; err 'absent.json'
rc 4 study "$FIXTURES/hf/llama_tiny_tied" "${small[@]}"; one_line; err "exact_matmul: .*no KDA module"
