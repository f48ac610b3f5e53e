# Every --json document has command, version, ok and path, also when the command fails.
k=$FIXTURES/hf/kimi_linear_tiny
document() {
    [ "$(wc -l <$OUT)" -eq 1 ] || fail "not one line of JSON: $(head -c 300 $OUT)"
    out "^\{\"command\":\"$1\",\"version\":\"[0-9.]+\",\"path\":"; out '"ok":(true|false)[,}]'
    if command -v python3 >/dev/null; then
        python3 -c 'import json,sys; json.load(open(sys.argv[1]))' $OUT || fail 'invalid JSON'
    fi
}
rc 0 inspect $k --json; document inspect; out '"layout":"hf:kimi_linear"'; out '"canonical":\[\{"name":"head.weight"'
rc 0 inspect $k --json --stats --head 2 --common; document inspect; out '"std":'
rc 0 inspect $FIXTURES/mcore/legacy_tp1 --json --common; document inspect; out '"iteration":100'
rc 0 convert $k a --json --to torch_dist --layout megatron --tp 2; document convert
out '"source_root":"[0-9a-f]{64}"'; out '"peak_memory":[0-9]'; out '"lossy":\[\]'; out '"seconds":'
rc 0 convert $k b --json --dry-run; document convert; out '"dry_run":true'; absent b
rc 0 verify a --hash --json; document verify; out '"tensors":\[\{"name":'; out '"ok":true\}$'; out '"files":\[\{'
rc 0 diff a $k --json; document diff; out '"differences":\[\]'
rc 2 convert $k a --json; document convert; out '"ok":false'; out '"exit":2'
rc 5 inspect nowhere --json; document inspect; out '"ok":false'
rc 2 bench --json --slack 100; document bench; out '"ok":false'; out '"message":"--slack 100'; one_line
rc 2 trian --json; document trian; out '"kind":"usage"'; one_line
rc 2 inspect --json --bogus x; document inspect; out '"kind":"usage"'
st x.safetensors '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' 4
cp x.safetensors y.safetensors; flip y.safetensors 65
rc 1 diff x.safetensors y.safetensors --json; document diff; out '"kind":"value"'; out '"max_ulp":'
