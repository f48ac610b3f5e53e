# A user's layout table, both ways, for a known family and for one of its own.
st s.safetensors '{"h.0.qkv":{"dtype":"F32","shape":[6,2],"data_offsets":[0,48]},"h.1.qkv":{"dtype":"F32","shape":[6,2],"data_offsets":[48,96]}}' 96
size=$(stat -c %s s.safetensors); flip s.safetensors $((size - 2)); flip s.safetensors $((size - 40))
cat >m.json <<'X'
{"name":"fused","side":"source","rows":[
 {"canon":"part.{l}.q","stored":"h.{l}.qkv","view":"3=0 D | H"},
 {"canon":"part.{l}.k","stored":"h.{l}.qkv","view":"3=1 D | H"},
 {"canon":"part.{l}.v","stored":"h.{l}.qkv","view":"3=2 D | H"}]}
X
rc 0 convert s.safetensors t.safetensors --map m.json
echo '{"name":"x","rows":[]}' >bad.json; rc 3 convert s.safetensors u --map bad.json; one_line; err 'rows'
echo '{"name":"x"' >bad.json; rc 3 convert s.safetensors u --map bad.json; one_line; err 'bad.json'
echo '{"name":"x","like":"hf:nope","rows":[{"canon":"a","stored":"b","view":"H"}]}' >bad.json
rc 3 convert s.safetensors u --map bad.json; one_line; err 'hf:nope'
rc 5 convert s.safetensors u --map none.json; one_line
absent u
