# Megatron's per-rank files: read as torch_dist would store them, written at any mesh.
m=$FIXTURES/mcore
for c in gpt_vpp mla_moe_tp2_ep2 gpt_tp2_pp2 gpt_bf16; do rc 0 diff $m/mp_$c $m/mp_$c.plain; done
rc 0 inspect $m/mp_gpt_vpp; out '^container +mp_rank'; out '^mesh .*pp 2'; out '^iteration +20'
rc 0 verify $m/mp_gpt_vpp

# hybrid KDA, through rank files and back
rc 0 convert $m/legacy_tp2 mp --to mp_rank --verify; out 'root equals source'; r=$(root_of)
present mp/iter_0000100/mp_rank_01/model_optim_rng.pt; absent mp/iter_0000100/mp_rank_02
rc 0 verify mp --hash; out "$r"
rc 0 convert mp back --to torch_dist; out 'root equals source'
rc 0 diff back $m/legacy_tp2
for mesh in '1 1 1' '2 2 1' '4 1 2' '1 4 4' '2 1 2'; do
    set -- $mesh
    rc 0 convert mp m$1$2$3 --to mp_rank --tp $1 --pp $2 --ep $3 --verify; [ "$(root_of)" = "$r" ] || fail "root at $mesh"
    rc 0 verify m$1$2$3 --hash; rc 0 diff m$1$2$3 $m/legacy.plain.safetensors
    rc 0 convert m$1$2$3 again$1$2$3 --tp 2
    for i in 0 1; do same {mp,again$1$2$3}/iter_0000100/mp_rank_0$i/model_optim_rng.pt; done
done
for v in f fg; do # low rank: every rank keeps the beta projection whole
    rc 0 convert $m/lowrank_${v}_tp2 low$v --to mp_rank --tp 2 --pp 2 --verify; out 'root equals source'
    rc 0 diff low$v $m/lowrank_$v\_tp2.plain.safetensors
done

# the only number after TT is the stage or the expert rank: args decide
present m412/iter_0000100/mp_rank_03_001/model_optim_rng.pt
present m221/iter_0000100/mp_rank_01_001/model_optim_rng.pt
present m144/iter_0000100/mp_rank_00_003_003/model_optim_rng.pt

# missing, superfluous, differing ranks
cp -r mp hole; rm -r hole/iter_0000100/mp_rank_01
rc 3 inspect hole; err "rank directory 'mp_rank_01' is missing"; one_line
cp -r mp more; cp -r more/iter_0000100/mp_rank_01 more/iter_0000100/mp_rank_02
rc 3 inspect more; err "'mp_rank_02' is beyond TP 2"; one_line
cp -r mp mixed; cp m221/iter_0000100/mp_rank_01_000/model_optim_rng.pt mixed/iter_0000100/mp_rank_01/
rc 3 inspect mixed; err 'mp_rank_01: args: pipeline_model_parallel_size differs'; one_line
cp -r mp lfs; printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n' >lfs/iter_0000100/mp_rank_01/model_optim_rng.pt
rc 3 inspect lfs; err 'Git LFS pointer'
cp -r mp torn; truncate -s -200 torn/iter_0000100/mp_rank_00/model_optim_rng.pt; rc 3 inspect torn; one_line

# a replicated tensor that is not the same everywhere: record 0 is decoder.final_norm.weight
f=mp/iter_0000100/mp_rank_01/model_optim_rng.pt
at=$(grep -abo 'archive/data/0' $f | head -1 | cut -d: -f1)
flip $f $(((at + 18 + 63) / 64 * 64 + 5))
rc 1 verify mp; out "decoder.final_norm.weight': the copy in mp_rank_01/model_optim_rng.pt differs"
rc 1 verify mp --hash; out 'mp_rank_01/model_optim_rng.pt'
rc 0 diff mp m221 # rank 0 counts
rc 1 convert mp no --to torch_dist; one_line; err "tensor 'decoder.final_norm.weight': the copy in mp_rank_01/model_optim_rng.pt differs"; absent no
rc 0 convert mp forced --to torch_dist --force; rm -r forced

# optimizer state in a form that is not read, and what needs the names of Megatron
mkdir -p m111/iter_0000100/mp_rank_00; : >m111/iter_0000100/mp_rank_00/distrib_optim.pt
rc 4 convert m111 x; err 'distrib_optim.pt'; err '--optimizer drop'; absent x
rc 0 convert m111 x --optimizer drop --to torch_dist
rc 4 convert $FIXTURES/hf/kimi_linear_tiny y --to mp_rank; err 'layout megatron'; absent y
rc 0 convert $FIXTURES/hf/kimi_linear_tiny y --to mp_rank --layout megatron --tp 2 --ep 2 --verify; out 'root equals source'
rc 0 convert y z --to safetensors --layout hf; out 'root equals source'
rc 0 diff z $FIXTURES/hf/kimi_linear_tiny
rc 2 convert $m/legacy_tp1 y3 --to mp_rank --tp 3; absent y3
rc 4 convert $m/legacy_tp1 y3 --to mp_rank --tp 1 --etp 2; err 'share a directory'; absent y3

# optimizer state follows the parameters, whose numbers are matched by groups and shapes
rc 0 convert $m/mp_gpt_bf16 opt --to torch_dist --tp 1; out 'root equals source'; out '36 of optimizer state'
rc 0 diff opt $m/mp_gpt_bf16.plain
rc 4 convert $m/mp_gpt_bf16 no --tp 1; err 'optimizer state is not written'; absent no
for c in gpt_vpp mla_moe_tp2_ep2 gpt_tp2_pp2 gpt_bf16; do
    for mesh in '1 1 1' '2 1 2' '2 2 1'; do
        set -- $mesh
        case $c$2$3 in gpt_*2 | mla*21 | gpt_bf1621) continue ;; esac # no experts, or too few layers
        rc 0 convert $m/mp_$c c.$c.$1$2$3 --tp $1 --pp $2 --ep $3 --optimizer drop --verify
        rc 0 diff c.$c.$1$2$3 $m/mp_$c.plain --exclude 'optimizer.*'
    done
done
