# bench: cases run in turns, results kept as lines, a ratio that became worse is told and fails.
s=(bench --size 5MB --pairs 1 --only start-up)
rc 0 "${s[@]}" --history h.jsonl; silent; out '^start-up  .*ratio [0-9.]+, aimed at 1'; out '^    10 ms  '; out '^    ckpt .* s of processors, [0-9]+ MiB$'; no_out machine
rc 0 "${s[@]}" --history h.jsonl --json; out '"worse":\[\]'; out '"name":"start-up","beside":"10 ms","skipped":null,"ratio":'
[ "$(wc -l <h.jsonl)" -eq 2 ] || fail "not two lines: $(cat h.jsonl)"
sed -E '$s/"ratio":[^,]*/"ratio":1e9/' h.jsonl >fast.jsonl
rc 1 "${s[@]}" --against fast.jsonl; out '^WORSE start-up: ratio .*, was 1000000000.00 beside 10 ms$'
sed -E '$s/"ratio":[^,]*/"ratio":1e-9/' h.jsonl >slow.jsonl
rc 0 "${s[@]}" --against slow.jsonl; no_out WORSE
rc 0 bench --size 5MB --pairs 1 --only 'convert*shards*' # and it is compared
out 'durable .* ratio [0-9.]+, aimed at 1.15'; out '^    cp \+ sync .* s of processors, [0-9]+ MiB$'; out 'cold .*(ratio|skipped, [0-9]+ % of a file stays)'
rc 0 bench --size 5MB --only 'machine: memcpy' --only 'machine: direct read'; out '^machine: memcpy .*1.00 of memcpy'; out '^0 cases: '

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

# Operations of this program: what each found is noted; one that is wrong is an error, one that cannot be here is skipped.
cat >ops.json <<'EOF'
[{"name": "twice", "beside": "x", "target": 2, "memory": 1e9, "limit": 1e-3, "subject": ["@aim", "1"], "baseline": ["@aim", "2"]},
 {"name": "gathered", "beside": "memcpy", "subject": ["@gather", "{dir}", "1000", "1MiB"], "baseline": ["@memcpy", "1MiB"]},
 {"name": "cast", "beside": "hash", "subject": ["@cast", "1MiB"], "baseline": ["@leaves", "{src}"]},
 {"name": "product", "beside": "peak", "subject": ["@sgemm", "65", "2"], "baseline": ["@fma", "549250", "2"]},
 {"name": "kda", "beside": "disk", "subject": ["@kda", "70", "2", "32", "2"], "baseline": ["@read", "{wide}"]},
 {"name": "cold", "beside": "disk", "cold": true, "subject": ["@direct-copy", "{src}", "{out}/x"], "baseline": ["@direct-read", "{src}"]},
 {"name": "unknown", "beside": "x", "subject": ["@nothing"], "baseline": ["true"]},
 {"name": "short", "beside": "x", "subject": ["@aim"], "baseline": ["true"]},
 {"name": "odd", "beside": "x", "subject": ["@gather", "{dir}", "7", "1MiB"], "baseline": ["true"]},
 {"name": "word", "beside": "x", "subject": ["@sgemm", "65", "some"], "baseline": ["true"]}]
EOF
o=(bench --size 5MB --pairs 1 --cases ops.json)
rc 0 "${o[@]}" --only twice --only gathered --only cast --only product --only kda --only cold
out '^twice .* ratio 2.00, aimed at 2; memory ratio [0-9.]+, aimed at 1e\+09: below; memory above 0.001 MiB$'
out '^gathered .* ratio [0-9.]+$'; out '^    ckpt .* [0-9.]+ GB/s$'; out '^    peak .*GFLOP/s, .* 2 threads$|^product .*skipped, @fma: no kernel'
out '^    ckpt .*us a token-head and core, 2 threads$'; out '^cold .*(ratio [0-9.]+$|skipped, )'; out '^6 cases: 0 of the 1 with aims'
rc 2 "${o[@]}" --only unknown; one_line; err "case 'unknown': there is no operation '@nothing'"
rc 2 "${o[@]}" --only short; one_line; err "'@aim': expected 1 words after it, found 0"
rc 2 "${o[@]}" --only odd; one_line; err 'expected an even number'
rc 2 "${o[@]}" --only word; one_line; err "'some': expected 1 to 4096"
sed 's/"cold": true/"cold": 1/' ops.json >cold.json
rc 3 bench --cases cold.json; one_line; err "case 'cold': 'cold' is neither true nor false"
