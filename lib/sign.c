/* DSSE signatures with OpenSSL's EVP (DSSE v1.0.0 protocol.md; keys RFC 7468, 5915, 8410). */
#include "sign.h"

#include "io.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <string.h>

#define KEY_MAX (64 << 10) /* bytes of a PEM file */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- base64 ------------------------------------------------------------------------------------ */

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void ckpt_base64(ckpt_buf *out, const void *p, size_t n)
{
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i += 3) {
        size_t left = n - i < 3 ? n - i : 3;
        uint32_t v = (uint32_t)b[i] << 16;
        v |= left > 1 ? (uint32_t)b[i + 1] << 8 : 0;
        v |= left > 2 ? b[i + 2] : 0;
        for (size_t k = 0; k < 4; k++)
            ckpt_buf_putc(out, k <= left ? digits[v >> (18 - 6 * k) & 63] : '=');
    }
}

static int digit_of(char c)
{
    const char *at = c != '\0' ? strchr(digits, c) : NULL;
    return at != NULL ? (int)(at - digits) : -1;
}

bool ckpt_unbase64(const char *text, ckpt_buf *out)
{
    size_t n = strlen(text);
    if (n % 4 != 0)
        return false;
    for (size_t i = 0; i < n; i += 4) {
        size_t pad = i + 4 < n ? 0 : (size_t)(text[i + 3] == '=') + (size_t)(text[i + 2] == '=');
        uint32_t v = 0;
        for (size_t k = 0; k < 4; k++) {
            int d = k < 4 - pad ? digit_of(text[i + k]) : text[i + k] == '=' ? 0 : -1;
            if (d < 0)
                return false;
            v = v << 6 | (uint32_t)d;
        }
        /* bits that no byte takes must be zero: one text for one value */
        if ((pad == 1 && (v & 0xff) != 0) || (pad == 2 && (v & 0xffff) != 0))
            return false;
        for (size_t k = 0; k < 3 - pad; k++)
            ckpt_buf_putc(out, (char)(v >> (16 - 8 * k) & 0xff));
    }
    return !out->failed;
}

/* ---- keys -------------------------------------------------------------------------------------- */

/* OpenSSL would ask on the terminal. */
static int no_passphrase(char *buf, int size, int writing, void *self)
{
    (void)buf;
    (void)size;
    (void)writing;
    (void)self;
    return -1;
}

static ckpt_status check_kind(const EVP_PKEY *key, const char *path, ckpt_err *err)
{
    char curve[64] = "";
    size_t n = 0;
    if (EVP_PKEY_is_a(key, "ED25519"))
        return CKPT_OK;
    if (EVP_PKEY_is_a(key, "EC") && EVP_PKEY_get_group_name(key, curve, sizeof curve, &n) == 1 &&
        (strcmp(curve, "prime256v1") == 0 || strcmp(curve, "secp384r1") == 0 ||
         strcmp(curve, "secp521r1") == 0))
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "%s: expected a key for Ed25519 or ECDSA (P-256, P-384, P-521), found %s %s",
                     path, EVP_PKEY_get0_type_name(key), curve);
}

static ckpt_status read_key(const char *path, bool private, EVP_PKEY **key, ckpt_err *err)
{
    ckpt_buf text = {0};
    BIO *bio = NULL;
    *key = NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_read_file(path, KEY_MAX, &text, err));
    bio = BIO_new_mem_buf(text.len > 0 ? (const void *)text.data : "", (int)text.len);
    if (bio == NULL) {
        status = no_memory(err);
        goto done;
    }
    *key = private ? PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL)
                   : PEM_read_bio_PUBKEY(bio, NULL, no_passphrase, NULL);
    ERR_clear_error();
    if (*key == NULL)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: expected a %s key in PEM%s", path,
                           private ? "private" : "public", private ? ", not encrypted" : "");
    else
        status = check_kind(*key, path, err);
done:
    BIO_free(bio);
    if (text.len > 0)
        OPENSSL_cleanse(text.data, text.len);
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status hint_of(EVP_PKEY *key, char hint[CKPT_HINT_LEN], ckpt_err *err)
{
    ckpt_sha256 sha;
    uint8_t digest[CKPT_SHA256_LEN];
    char *pem = NULL;
    BIO *bio = BIO_new(BIO_s_mem());
    ckpt_status status = ckpt_sha256_init(&sha, err);
    if (bio == NULL || PEM_write_bio_PUBKEY(bio, key) != 1) {
        status = no_memory(err);
        goto done;
    }
    long n = BIO_get_mem_data(bio, &pem);
    ckpt_sha256_update(&sha, pem, (size_t)n);
    ckpt_sha256_final(&sha, digest);
    ckpt_hex(digest, hint);
done:
    BIO_free(bio);
    return status;
}

/* NULL for Ed25519, which hashes by itself. */
static const EVP_MD *digest_of(const EVP_PKEY *key)
{
    if (EVP_PKEY_is_a(key, "ED25519"))
        return NULL;
    int bits = EVP_PKEY_get_bits(key);
    return bits == 256 ? EVP_sha256() : bits == 384 ? EVP_sha384() : EVP_sha512();
}

static void encode(ckpt_buf *out, const char *type, const void *payload, size_t n)
{
    ckpt_buf_printf(out, "DSSEv1 %zu %s %zu ", strlen(type), type, n);
    ckpt_buf_append(out, payload, n);
}

/* ---- sign and check ---------------------------------------------------------------------------- */

ckpt_status ckpt_sign(const char *key_path, const char *type, const void *payload, size_t n,
                      ckpt_buf *sig, char hint[CKPT_HINT_LEN], ckpt_err *err)
{
    EVP_PKEY *key = NULL;
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    ckpt_buf message = {0};
    size_t sig_n = 0;
    ckpt_status status;
    CKPT_CHECK(read_key(key_path, true, &key, err));
    CKPT_CHECK(hint_of(key, hint, err));
    encode(&message, type, payload, n);
    bool ok = ctx != NULL && !message.failed &&
              EVP_DigestSignInit(ctx, NULL, digest_of(key), NULL, key) == 1 &&
              EVP_DigestSign(ctx, NULL, &sig_n, message.data, message.len) == 1;
    uint8_t *room = ok ? ckpt_buf_extend(sig, sig_n) : NULL;
    size_t most = sig_n;
    if (room == NULL || EVP_DigestSign(ctx, room, &sig_n, message.data, message.len) != 1) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "%s: OpenSSL cannot sign", key_path);
        goto done;
    }
    sig->len -= most - sig_n; /* DER is as long as its numbers */
done:
    ERR_clear_error();
    EVP_MD_CTX_free(ctx);
    EVP_PKEY_free(key);
    ckpt_buf_release(&message);
    return status;
}

ckpt_status ckpt_sign_check(const char *key_path, const char *type, const void *payload, size_t n,
                            const uint8_t *sig, size_t sig_n, bool *good, char hint[CKPT_HINT_LEN],
                            ckpt_err *err)
{
    EVP_PKEY *key = NULL;
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    ckpt_buf message = {0};
    ckpt_status status;
    *good = false;
    CKPT_CHECK(read_key(key_path, false, &key, err));
    CKPT_CHECK(hint_of(key, hint, err));
    encode(&message, type, payload, n);
    if (ctx == NULL || message.failed ||
        EVP_DigestVerifyInit(ctx, NULL, digest_of(key), NULL, key) != 1) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "%s: OpenSSL cannot check signatures", key_path);
        goto done;
    }
    *good = EVP_DigestVerify(ctx, sig, sig_n, message.data, message.len) == 1;
done:
    ERR_clear_error();
    EVP_MD_CTX_free(ctx);
    EVP_PKEY_free(key);
    ckpt_buf_release(&message);
    return status;
}
