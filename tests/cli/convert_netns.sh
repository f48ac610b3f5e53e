# Two ranks that share no network interface: each under a daemon of its own in a network namespace of
# its own, joined by a bridge, so that all that MPI sends between them goes over TCP as between hosts.
# Needs root (or its own user namespace), ip, unshare and mpirun with libckpt_mpi.so.
if sanitized asan || sanitized tsan || sanitized ubsan; then exit 0; fi
if ! command -v mpirun >/dev/null || [ ! -e "$(dirname "$CKPT")/libckpt_mpi.so" ]; then
    echo "SKIP convert_netns: no mpirun"
    exit 0
fi
cat >hosts.sh <<'END'
set -e
mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.254/24 dev br0
ip link set br0 up
for i in 1 2; do
    ip netns add "host$i"
    ip link add "v$i" type veth peer name e0 netns "host$i"
    ip link set "v$i" master br0 up
    ip netns exec "host$i" ip link set lo up
    ip netns exec "host$i" ip addr add "10.77.0.$i/24" dev e0
    ip netns exec "host$i" ip link set e0 up
done
[ $# -gt 0 ] || exit 0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec timeout -k 5 60 mpirun --mca plm_rsh_agent "$PWD/agent" --mca btl self,tcp \
    --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
    --bind-to none -H 10.77.0.1,10.77.0.2 -np 2 "$@"
END
cat >agent <<'END'
#!/bin/bash
host=$1
shift
exec ip netns exec "host${host##*.}" bash -c "$*"
END
chmod +x agent
if ! unshare -n -m bash hosts.sh >$OUT 2>&1; then
    echo "SKIP convert_netns: no network namespaces here"
    exit 0
fi
hosts() { unshare -n -m bash hosts.sh "$@" >$OUT 2>$ERR || fail "$*: exit $? $(head -c 800 $ERR $OUT)"; }

export SOURCE_DATE_EPOCH=1700000000 # the same manifests
src=$FIXTURES/hf/kimi_linear_tiny
hosts bash -c 'ip -o -4 address show dev e0'
[ "$(grep -o '10\.77\.0\.[12]/' $OUT | sort -u | wc -l)" -eq 2 ] || fail "not two networks: $(cat $OUT)"
hosts "$CKPT" convert "$src" two --to torch_dist --layout megatron --tp 2
rc 0 convert "$src" one --to torch_dist --layout megatron --tp 2
diff -r one two || fail "two hosts wrote other bytes than one process"
hosts "$CKPT" verify two --hash
out 'root 14f796d3'
rc 0 verify two --hash --files
