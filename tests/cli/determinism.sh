# Byte-identical output at any --threads and --memory, and again.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k a --to torch_dist --layout megatron --tp 2 --ep 2 --threads 1
rc 0 convert $k b --to torch_dist --layout megatron --tp 2 --ep 2 --threads 2
rc 0 convert $k c --to torch_dist --layout megatron --tp 2 --ep 2 --memory 8MiB --threads 4
rc 0 convert $k d --to torch_dist --layout megatron --tp=2 --ep=2 --memory=1MiB
same_tree a b; same_tree a c; same_tree a d
rc 0 convert a h --to safetensors --layout hf --threads 1; rc 0 convert a i --to safetensors --layout hf --memory 8MiB
same_tree h i
