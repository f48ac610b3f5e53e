#include "pickle_policy.h"

#include <string.h>

#include "policy.h"

static const char *const keys[] = {CKPT_POLICY_KEY, CKPT_POLICY_DIGEST_KEY};
enum { N_KEYS = sizeof keys / sizeof *keys };

bool ckpt_pkl_has_policy(const ckpt_json *metadata)
{
    return ckpt_json_string(ckpt_json_get(metadata, CKPT_POLICY_KEY)) != NULL;
}

void ckpt_pkl_put_policy(ckpt_buf *b, const ckpt_json *metadata)
{
    for (int i = 0; i < N_KEYS; i++) {
        const char *value = ckpt_json_string(ckpt_json_get(metadata, keys[i]));
        if (value == NULL)
            continue;
        ckpt_pkl_put_str(b, keys[i]);
        ckpt_pkl_put_str(b, value);
    }
}

ckpt_status ckpt_pkl_take_policy(const ckpt_pkl *root, ckpt_json **metadata, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (int i = 0; i < N_KEYS && status == CKPT_OK; i++) {
        const ckpt_pkl *at = ckpt_pkl_get(root, keys[i]);
        if (ckpt_pkl_str(at) == NULL)
            continue;
        ckpt_json *value = ckpt_pkl_to_json(at);
        status = ckpt_policy_note(metadata, keys[i], value, err);
        ckpt_json_free(value);
    }
    return status;
}
