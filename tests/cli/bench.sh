# bench: cases run in turns, results kept as lines, a ratio that became worse is told and fails.
s=(bench --size 5MB --pairs 1 --only start-up)
rc 0 "${s[@]}" --history h.jsonl; silent; out '^start-up .* ratio [0-9.]+$'; out '^one thread: memcpy .* 1.00 of memcpy'
rc 0 "${s[@]}" --history h.jsonl --json; out '"worse":\[\]'; out '"name":"start-up","beside":"sh","skipped":null,"ratio":'
[ "$(wc -l <h.jsonl)" -eq 2 ] || fail "not two lines: $(cat h.jsonl)"
sed -E '$s/"ratio":[^,]*/"ratio":1e9/' h.jsonl >fast.jsonl
rc 1 "${s[@]}" --against fast.jsonl; out '^WORSE start-up: ratio .*, was 1000000000.00 beside sh$'
sed -E '$s/"ratio":[^,]*/"ratio":1e-9/' h.jsonl >slow.jsonl
rc 0 "${s[@]}" --against slow.jsonl; no_out WORSE
rc 0 bench --size 5MB --pairs 1 --only 'convert*shards*'; out ' cp \+ sync .* ratio .*aimed at 1.15' # and it is compared

# Cases of a file; what is not there is named; what fails is an error.
cat >cases.json <<'EOF'
[{"name": "mine", "beside": "true", "target": 1e9, "subject": ["ckpt", "inspect", "{src}"], "baseline": ["true"]},
 {"name": "absent", "beside": "x", "subject": ["ckpt", "--version"], "baseline": ["no-such-program"]},
 {"name": "unready", "beside": "x", "probe": ["false"], "subject": ["ckpt", "--version"], "baseline": ["true"]},
 {"name": "fails", "beside": "x", "subject": ["ckpt", "inspect", "{out}/none"], "baseline": ["true"]}]
EOF
c=(bench --size 5MB --pairs 1 --cases cases.json)
rc 0 "${c[@]}" --only mine --only absent --only unready
out '^mine .*aimed at 1e\+09: below$'; out '^absent +skipped, no-such-program not found$'; out '^unready +skipped, false: exit 1'
rc 1 "${c[@]}" --only fails; one_line; err "case 'fails': ckpt inspect: exit 5: ckpt: inspect: .*none"
rc 2 "${c[@]}" --only nothing; one_line; err "matches no case"
rc 2 bench --slack 100; one_line
rc 5 bench --dir nowhere; one_line; err nowhere
rc 3 "${s[@]}" --against cases.json; one_line; err 'last line'
echo '[{"name": "x", "beside": "y", "subject": ["true"], "baseline": ["true"], "typo": 1}]' >typo.json
rc 3 bench --cases typo.json; one_line; err "unknown member 'typo'"
echo '[{"name": "x", "beside": "y", "subject": "true", "baseline": ["true"]}]' >word.json
rc 3 bench --cases word.json; one_line; err "'subject': expected an array"
mkdir here; rc 0 "${s[@]}" --dir here; [ -z "$(ls -A here)" ] || fail "left behind: $(ls -A here)"
