/* The cases that `ckpt bench` has of its own: the target table of the performance specification, section 7,
 * as far as it needs no other language. Words: cmd_bench.c; operations ('@'): bench_memory.c, bench_disk.c,
 * bench_engine.c. Comparisons with Python are in tests/bench/cases.json. */
#include "bench.h"

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define CONVERT(...) WORDS("ckpt", "convert", "--quiet", "{src}", __VA_ARGS__)
#define VERIFY(...) WORDS("ckpt", "verify", "--quiet", "--hash", __VA_ARGS__)
#define MANIFEST VERIFY("--write", "--force", "{src}")
#define MANIFEST_PART VERIFY("--write", "--force", "{part}")
#define SHARDED "{out}/x", "--max-shard-size", "64MiB"
#define CP_SYNC WORDS("sh", "-c", "cp \"$1\" \"$2\" && sync -f \"$2\"", "sh", "{src}", "{out}/x")
#define SHA_CP_SYNC                                                                                \
    WORDS("sh", "-c", "sha256sum \"$1\" && cp \"$1\" \"$2\" && sync -f \"$2\"", "sh", "{part}",    \
          "{out}/x")
/* Several files and a manifest with both kinds of digests. */
#define SHARDS                                                                                     \
    WORDS("ckpt", "convert", "--quiet", "--force", "{src}", "{dir}/shards", "--max-shard-size",    \
          "32MiB")

/* clang-format off */
const bench_case bench_cases[] = {
    {.name = "convert to one file, both digests, durable", .target = 1.15, .limit = 200, .beside = "cp + sync",
     .subject = CONVERT("{out}/x.safetensors"), .baseline = CP_SYNC,
     .check = WORDS("ckpt", "diff", "--quiet", "{src}", "{out}/x.safetensors")},
    {.name = "convert into shards, both digests, durable", .target = 1.15, .limit = 200, .beside = "cp + sync",
     .subject = CONVERT(SHARDED), .baseline = CP_SYNC, .check = WORDS("ckpt", "diff", "--quiet", "{src}", "{out}/x")},
    {.name = "convert, the same", .target = 5, .beside = "sha256sum + cp + sync",
     .subject = WORDS("ckpt", "convert", "--quiet", "{part}", SHARDED), .baseline = SHA_CP_SYNC},
    {.name = "convert into shards, cold", .target = 1.05, .cold = true, .beside = "cp + sync",
     .subject = CONVERT(SHARDED), .baseline = CP_SYNC},
    {.name = "convert into shards, cold (direct)", .target = 0.8, .cold = true, .beside = "direct read and write",
     .subject = CONVERT(SHARDED), .baseline = WORDS("@direct-copy", "{src}", "{out}/x")},
    {.name = "convert many small tensors", .limit = 200, .beside = "cp + sync",
     .subject = WORDS("ckpt", "convert", "--quiet", "{small}", "{out}/x.safetensors"),
     .baseline = WORDS("sh", "-c", "cp \"$1\" \"$2\" && sync -f \"$2\"", "sh", "{small}", "{out}/x"),
     .check = WORDS("ckpt", "diff", "--quiet", "{small}", "{out}/x.safetensors")},

    {.name = "verify, tensor digests, cached", .target = 10, .limit = 200, .needs = "sha256sum", .beside = "sha256sum",
     .prepare = MANIFEST_PART, .subject = VERIFY("{part}"), .baseline = WORDS("sha256sum", "{part}")},
    {.name = "verify, tensor digests, cached (memcpy)", .target = 0.25, .beside = "memcpy, one thread",
     .prepare = MANIFEST, .subject = VERIFY("{src}"), .baseline = WORDS("@memcpy", "{src}")},
    {.name = "verify, tensor digests, cached (openssl)", .target = 2.7, .needs = "openssl", .beside = "openssl dgst",
     .prepare = MANIFEST_PART, .subject = VERIFY("{part}"), .baseline = WORDS("openssl", "dgst", "-sha256", "{part}")},
    {.name = "verify, tensor digests, cached (b3sum)", .needs = "b3sum", .beside = "b3sum",
     .prepare = MANIFEST_PART, .subject = VERIFY("{part}"), .baseline = WORDS("b3sum", "{part}")},
    {.name = "verify, both digests, cached (memcpy)", .target = 0.16, .beside = "memcpy, one thread",
     .prepare = SHARDS, .subject = VERIFY("--files", "{dir}/shards"), .baseline = WORDS("@memcpy", "{src}")},
    {.name = "verify, tensor digests, cold", .target = 0.65, .cold = true, .beside = "direct read",
     .prepare = MANIFEST, .subject = VERIFY("{src}"), .baseline = WORDS("@direct-read", "{src}")},
    {.name = "verify, many small tensors", .limit = 200, .needs = "openssl", .beside = "openssl dgst",
     .prepare = VERIFY("--write", "--force", "{small}"), .subject = VERIFY("{small}"),
     .baseline = WORDS("openssl", "dgst", "-sha256", "{small}")},

    {.name = "start-up", .target = 1, .beside = "10 ms", .subject = WORDS("ckpt", "--version"),
     .baseline = WORDS("@aim", "0.010")},
    {.name = "start-up, inspect of a small file", .target = 1, .beside = "10 ms",
     .subject = WORDS("ckpt", "inspect", "{tiny}"), .baseline = WORDS("@aim", "0.010")},

    {.name = "gather of 512 bytes, one thread", .target = 0.9, .beside = "memcpy",
     .subject = WORDS("@gather", "{dir}", "512", "128MiB"), .baseline = WORDS("@memcpy", "128MiB")},
    {.name = "gather of 1152 bytes, one thread", .target = 0.9, .beside = "memcpy",
     .subject = WORDS("@gather", "{dir}", "1152", "128MiB"), .baseline = WORDS("@memcpy", "128MiB")},
    {.name = "gather of 4 KiB, one thread", .target = 0.9, .beside = "memcpy",
     .subject = WORDS("@gather", "{dir}", "4KiB", "128MiB"), .baseline = WORDS("@memcpy", "128MiB")},
    {.name = "gather of 16 KiB, one thread", .target = 0.9, .beside = "memcpy",
     .subject = WORDS("@gather", "{dir}", "16KiB", "128MiB"), .baseline = WORDS("@memcpy", "128MiB")},
    {.name = "cast of f32 to bf16, one thread", .target = 1.1, .beside = "memcpy",
     .subject = WORDS("@cast", "128MiB"), .baseline = WORDS("@memcpy", "128MiB")},

    {.name = "sgemm 2048, one thread", .target = 0.9, .beside = "FMA peak",
     .subject = WORDS("@sgemm", "2048", "1"), .baseline = WORDS("@fma", "17179869184", "1")},
    {.name = "sgemm 2048, all threads", .target = 0.9, .beside = "FMA peak",
     .subject = WORDS("@sgemm", "2048", "all"), .baseline = WORDS("@fma", "17179869184", "all")},
    {.name = "sgemm 2048, one thread (OpenBLAS)", .target = 1, .beside = "OpenBLAS",
     .subject = WORDS("@sgemm", "2048", "1"), .baseline = WORDS("@openblas", "2048", "1")},
    {.name = "sgemm 2048, all threads (OpenBLAS)", .target = 1, .beside = "OpenBLAS",
     .subject = WORDS("@sgemm", "2048", "all"), .baseline = WORDS("@openblas", "2048", "all")},
    {.name = "KDA forward 1024 x 4 x 128, one thread", .target = 1, .beside = "0.8 us a token-head",
     .subject = WORDS("@kda", "1024", "4", "128", "1"), .baseline = WORDS("@aim", "0.0032768")},
    {.name = "KDA forward 1024 x 4 x 128, all threads", .target = 1, .beside = "0.8 us a token-head and core",
     .subject = WORDS("@kda", "1024", "4", "128", "all"), .baseline = WORDS("@aim", "0.0032768")},
    {.name = "training steps, a TFLOP of them, all threads", .target = 0.5, .beside = "FMA peak",
     .subject = WORDS("@step", "{dir}", "1024", "all"), .baseline = WORDS("@fma", "1000000000000", "all")},
};
/* clang-format on */
const size_t bench_n_cases = sizeof bench_cases / sizeof *bench_cases;
