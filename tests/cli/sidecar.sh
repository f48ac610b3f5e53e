# Tokenizer and other small files follow the model, through Megatron and back.
cp -r $FIXTURES/hf/kimi_linear_tiny m; chmod -R u+w m
echo '{"t":1}' >m/tokenizer.json; echo '{"u":2}' >m/tokenizer_config.json; printf 'L\n' >m/LICENSE
printf '\xff\x00\x01' >m/x.tiktoken; printf 'print("caf\xc3\xa9")\n' >m/modeling_x.py; echo no >m/notes.txt
rc 0 convert m h; for f in tokenizer.json tokenizer_config.json LICENSE x.tiktoken modeling_x.py generation_config.json; do same m/$f h/$f; done
absent h/notes.txt
rc 0 verify h --hash --strict
rc 0 convert m g --to torch_dist --layout megatron --tp 2
for f in tokenizer.json tokenizer_config.json x.tiktoken; do same m/$f g/release/tokenizer/$f; done
absent g/release/LICENSE
rc 0 convert g g4 --tp 4; same m/x.tiktoken g4/release/tokenizer/x.tiktoken
rc 0 convert g4 b --to safetensors --layout hf
for f in tokenizer.json tokenizer_config.json LICENSE x.tiktoken modeling_x.py generation_config.json config.json; do same m/$f b/$f; done
echo x >>g/release/tokenizer/tokenizer.json; rc 1 verify g --hash; out 'tokenizer/tokenizer.json'
