# Wrong command lines: exit 2, one line, a suggestion where one is near.
rc 2; err 'usage: ckpt COMMAND'
rc 2 inspekt x; one_line; err "did you mean 'inspect'"
rc 2 frobnicate; one_line; err "unknown command 'frobnicate'"
rc 2 --json inspect x; one_line; err 'options follow the command'
rc 2 convert --laoyut hf a b; one_line; err "did you mean '--layout'"
rc 2 convert --layuot=hf a b; one_line; err "did you mean '--layout'"
rc 2 verify --xyzzy a; one_line; err "unknown option '--xyzzy'"
rc 2 verify -q a; one_line; err 'two dashes'
rc 2 inspect; one_line; err 'missing operand'
rc 2 inspect a b c; one_line; err "unexpected operand 'c'"
rc 2 convert a; one_line
rc 2 inspect ''; one_line; err 'empty operand'
rc 2 convert --tp; one_line; err 'needs a value'
rc 2 convert --tp=x a b; one_line; err 'whole number'
rc 2 convert --tp 0 a b; one_line; err 'outside'
rc 2 convert --layout=huggingface a b; one_line; err 'not one of keep\|hf\|megatron\|fla'
rc 2 convert --max-shard-size 5XB a b; one_line; err 'not a size'
rc 2 convert --max-shard-size -1 a b; one_line; err 'not a size'
rc 2 inspect --memory 99999999999999999TB a; one_line; err 'too large'
rc 2 inspect --json=yes a; one_line; err 'takes no value'
rc 2 inspect --quiet --verbose a; one_line
rc 2 convert --rename nothing a b; one_line; err 'not FROM=TO'
rc 2 diff --atol=-1 a b; one_line
rc 2 diff --rtol=nan a b; one_line
rc 2 inspect --threads 5000 a; one_line
# after --, everything is an operand
rc 5 inspect -- --help; one_line; err '^ckpt: inspect: --help: '

# --rename rules that cannot be meant
for r in foo = a= =b 'a*b*=c' 'a*=b*c*' 'a=b*'; do rc 2 convert $FIXTURES/hf/llama3_tiny o --rename "$r"; one_line; err "rename '"; absent o; done
# ranks of mpirun: only commands that divide their work
for command in "inspect x" "diff x y" "sign x --key y" formats bench; do
    OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 rc 2 $command; one_line; err 'started by mpirun on 2 ranks, .*those that divide it: convert, verify, train$'
done
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 rc 0 inspect --help; OMPI_COMM_WORLD_SIZE=1 rc 0 formats
