/* JSON documents: cJSON behind exact integers, case-sensitive unique keys and bounded depth.
 * This is the only header that shows cJSON's node type; only json.c includes cJSON.h. */
#ifndef CKPT_JSON_H
#define CKPT_JSON_H

#include "arena.h"

typedef struct cJSON ckpt_json;

/* Parse n bytes. Errors (CKPT_E_FORMAT): syntax (with byte offset), trailing text, invalid UTF-8,
 * duplicate keys, depth over 128, integer literals that a double cannot hold exactly, \u0000, lone
 * surrogates, numbers out of range or longer than 63 characters. Accepts NaN/Infinity nowhere. */
ckpt_status ckpt_json_parse(const char *text, size_t n, ckpt_json **out,
                            ckpt_err *err) CKPT_MUST_USE;
void ckpt_json_free(ckpt_json *json); /* NULL is fine */
ckpt_json *ckpt_json_dup(const ckpt_json *json);

/* Kinds. All accept NULL (false). */
bool ckpt_json_is_object(const ckpt_json *j);
bool ckpt_json_is_array(const ckpt_json *j);
bool ckpt_json_is_string(const ckpt_json *j);
bool ckpt_json_is_number(const ckpt_json *j);
/* A number written with a fraction or exponent, or made by ckpt_json_new_double. */
bool ckpt_json_is_float(const ckpt_json *j);
bool ckpt_json_is_bool(const ckpt_json *j);
bool ckpt_json_is_null(const ckpt_json *j);

/* Lookup. get: exact case, NULL if absent or not an object. path: "a.b.c" through objects. */
ckpt_json *ckpt_json_get(const ckpt_json *object, const char *key);
ckpt_json *ckpt_json_path(const ckpt_json *object, const char *dotted);
/* Iterate children of an object or array: first = child(j), then next(c). key(c) in objects. */
ckpt_json *ckpt_json_child(const ckpt_json *j);
ckpt_json *ckpt_json_next(const ckpt_json *j);
const char *ckpt_json_key(const ckpt_json *j);
int ckpt_json_size(const ckpt_json *j); /* linear */

/* Values; false if of another kind (int: also when not integral, or beyond 2^53 unless made by
 * ckpt_json_new_int, which is exact everywhere). */
bool ckpt_json_int(const ckpt_json *j, int64_t *out);
bool ckpt_json_double(const ckpt_json *j, double *out);
bool ckpt_json_bool(const ckpt_json *j, bool *out);
const char *ckpt_json_string(const ckpt_json *j); /* NULL if not a string */

/* Build. Every constructor returns NULL only on exhausted memory; set/push take ownership of
 * `value` (also on failure), replace an existing key, and return false on exhausted memory. */
ckpt_json *ckpt_json_new_object(void);
ckpt_json *ckpt_json_new_array(void);
ckpt_json *ckpt_json_new_string(const char *s);
ckpt_json *ckpt_json_new_int(int64_t v);
ckpt_json *ckpt_json_new_double(double v);
ckpt_json *ckpt_json_new_bool(bool v);
ckpt_json *ckpt_json_new_null(void);
bool ckpt_json_set(ckpt_json *object, const char *key, ckpt_json *value);
/* As set for a key that the caller knows to be absent: constant time. (set is constant time only
 * for a new object filled in ascending key order, else linear.) */
bool ckpt_json_add(ckpt_json *object, const char *key, ckpt_json *value);
bool ckpt_json_push(ckpt_json *array, ckpt_json *value);
void ckpt_json_delete(ckpt_json *object, const char *key);
bool ckpt_json_equal(const ckpt_json *a, const ckpt_json *b); /* object order ignored */

/* Print. indent 0: compact, no white space. Numbers print as the shortest text that reads back to
 * the same double, integers without a point; floats (ckpt_json_is_float) keep a point or exponent,
 * so 10000.0 in a config stays 10000.0; not-finite doubles print as null. sorted: keys in byte
 * order at every level. False on exhausted memory. */
bool ckpt_json_print(const ckpt_json *j, int indent, bool sorted, ckpt_buf *out);
/* Append s as a JSON string with quotes. Invalid UTF-8 bytes become \ufffd. */
void ckpt_json_quote(ckpt_buf *out, const char *s, size_t n);

#endif
