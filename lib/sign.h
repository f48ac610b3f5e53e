/* Signatures of statements about files: keys in PEM, the DSSE envelope's bytes.
 *
 * What is signed is the pre-authentication encoding of DSSE v1,
 *     "DSSEv1" SP len(type) SP type SP len(payload) SP payload
 * with ECDSA over SHA-256, -384 or -512 (P-256, P-384, P-521, as in OpenSSF model signing) or
 * Ed25519. A key is known by its hint: SHA-256 of its public half as PEM text, in hex. */
#ifndef CKPT_SIGN_H
#define CKPT_SIGN_H

#include "hash.h"

#define CKPT_HINT_LEN (2 * CKPT_SHA256_LEN + 1)

/* Sign with the private key in the PEM file `key_path`. sig: appended, raw bytes (DER for ECDSA).
 * Errors: CKPT_E_IO the file; CKPT_E_FORMAT no private key in it, or an encrypted one;
 * CKPT_E_UNSUPPORTED another kind of key; CKPT_E_NOMEM. */
ckpt_status ckpt_sign(const char *key_path, const char *type, const void *payload, size_t n,
                      ckpt_buf *sig, char hint[CKPT_HINT_LEN], ckpt_err *err) CKPT_MUST_USE;
/* Check with the public key in the PEM file `key_path`. *good tells; hint is that of this key.
 * Errors: as ckpt_sign. */
ckpt_status ckpt_sign_check(const char *key_path, const char *type, const void *payload, size_t n,
                            const uint8_t *sig, size_t sig_n, bool *good, char hint[CKPT_HINT_LEN],
                            ckpt_err *err) CKPT_MUST_USE;

/* Standard base64 (RFC 4648 section 4) with padding. decode: false for anything else. */
void ckpt_base64(ckpt_buf *out, const void *p, size_t n);
bool ckpt_unbase64(const char *text, ckpt_buf *out);

#endif
