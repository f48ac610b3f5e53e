# Hostile files: exit 3, one line naming the tensor or file, nothing written; every command.
bad() { # FILE PATTERN
    for c in 'inspect' 'verify' 'verify --hash'; do
        rc 3 $c $1; one_line; err "$2"; err "$1"
    done
    rc 3 convert $1 dst --to torch_dist; one_line; err "$2"; absent dst
    rc 3 convert $1 dst.safetensors; absent dst.safetensors
    rc 3 diff $1 $1; one_line
}
st big.safetensors '{"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}' 4; bad big.safetensors "'t'.*4000000"
st trunc.safetensors '{"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}' 15; bad trunc.safetensors trunc.safetensors
st tail.safetensors '{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' 5; bad tail.safetensors tail
st over.safetensors '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}' 4; bad over.safetensors over
st hole.safetensors '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}' 3; bad hole.safetensors hole
st dup.safetensors '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}' 2; bad dup.safetensors dup
for d in -1 1.5 1e19 9007199254740993; do
    st dim.safetensors "{\"t\":{\"dtype\":\"U8\",\"shape\":[$d],\"data_offsets\":[0,1]}}" 1; bad dim.safetensors dim
done
st type.safetensors '{"t":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}' 4; bad type.safetensors F33
st order.safetensors '{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 2
rc 0 verify order.safetensors
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n' >lfs.safetensors
bad lfs.safetensors 'Git LFS pointer'; rc 3 inspect lfs.safetensors; err 12345; err 4d7a2146
printf '<!DOCTYPE html><html><body>Not found</body></html>' >html.safetensors; bad html.safetensors HTML
: >empty.safetensors; bad empty.safetensors empty
mkdir emptydir; rc 3 inspect emptydir; one_line
