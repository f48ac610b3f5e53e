/* What a compiled client has baked in: sizes and offsets of the structures of ckpt.h, and the numbers of
 * its enumerators. Compared with abi.txt. */
#include <ckpt.h>

#include <stdio.h>

#define SIZE(type) printf("sizeof %s %zu\n", #type, sizeof(type))
#define AT(type, member) printf("offset %s.%s %zu\n", #type, #member, offsetof(type, member))

int main(void)
{
    printf("abi %d\n", CKPT_ABI);
    SIZE(ckpt_err);
    AT(ckpt_err, text);
    SIZE(ckpt_mesh);
    AT(ckpt_mesh, dp);
    SIZE(ckpt_open_options);
    AT(ckpt_open_options, memory);
    SIZE(ckpt_tensor_info);
    AT(ckpt_tensor_info, shape);
    AT(ckpt_tensor_info, rank);
    SIZE(ckpt_shard_info);
    AT(ckpt_shard_info, owner);
#define STATUS(name, exit_code, text) printf("status CKPT_%s %d\n", #name, CKPT_##name);
    CKPT_STATUS_LIST(STATUS)
    return 0;
}
