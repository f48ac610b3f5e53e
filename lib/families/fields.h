/* Declarative configuration dialects: a table says which stored field is which canonical key, small
 * functions add what is derived from several fields.
 *
 * Writing starts from a copy of the earlier configuration and touches only fields whose canonical
 * value differs from what that configuration says, so an unchanged model gives back the same
 * content. The result is read again and must give exactly the canonical configuration asked for;
 * otherwise the dialect cannot say it and the field is named. */
#ifndef CKPT_FAMILIES_FIELDS_H
#define CKPT_FAMILIES_FIELDS_H

#include "config.h"

enum {
    CKPT_FIELD_NULLABLE = 1, /* canonical absence is meaningful and is stored as null */
    CKPT_FIELD_NOT = 2,      /* bool, stored inverted */
    CKPT_FIELD_READ = 4,     /* follows from fields that other rows write */
    CKPT_FIELD_OPTIONAL = 8  /* may stay unknown when writing */
};

typedef enum ckpt_field_type {
    CKPT_FIELD_SIZE,   /* integer > 0 */
    CKPT_FIELD_REAL,   /* number, stored as a float */
    CKPT_FIELD_NUMBER, /* number, stored as an integer when it is one */
    CKPT_FIELD_BOOL,
    CKPT_FIELD_STRING
} ckpt_field_type;

typedef struct ckpt_field {
    const char *key;  /* canonical */
    const char *path; /* stored, dotted; spellings separated by '|': the first is written. NULL:
                           the dialect has no such field and means `absent` */
    ckpt_field_type type;
    const char *absent; /* JSON text that a missing or null field means; NULL: unknown */
    const char *kinds;  /* pattern letters it belongs to; NULL = every model */
    unsigned flags;
} ckpt_field;

/* A stored field that the canonical configuration has no key for because one meaning is supported. */
typedef struct ckpt_constant {
    const char *path;
    const char *allowed; /* JSON array; a present, non-null value must be one of these */
    const char *kinds;
    bool write; /* a new configuration gets the first allowed value */
    const char *why;
} ckpt_constant;

/* What a dialect's own write function sees. */
typedef struct ckpt_field_write {
    const char *name; /* of the dialect, for messages */
    const ckpt_json *canon;
    const ckpt_json *was;     /* canonical reading of the earlier configuration, or NULL */
    const ckpt_json *foreign; /* the earlier configuration itself, or NULL */
    ckpt_json *out;
    ckpt_mesh mesh; /* resolved */
    bool has_mesh;  /* false: parallel sizes stay as they are */
} ckpt_field_write;

typedef struct ckpt_dialect {
    const char *name;
    const ckpt_field *fields;
    size_t n_fields;
    const ckpt_constant *constants;
    size_t n_constants;
    int (*claims)(const ckpt_json *config);
    /* Set canon's "pattern". */
    ckpt_status (*read_pattern)(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err);
    /* After the table: derived keys. */
    ckpt_status (*read_rest)(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err);
    ckpt_status (*write_rest)(const ckpt_field_write *w, ckpt_err *err);
} ckpt_dialect;

ckpt_status ckpt_dialect_read(const ckpt_dialect *d, const ckpt_json *stored, ckpt_json *canon,
                              ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dialect_write(const ckpt_dialect *d, const ckpt_json *canon,
                               const ckpt_json *foreign, const ckpt_mesh *mesh, ckpt_json **out,
                               ckpt_err *err) CKPT_MUST_USE;

/* ---- helpers for the derived part ----------------------------------------------------------- */

/* Value of the first spelling that is present and not null; several must agree (CKPT_E_FORMAT). */
ckpt_status ckpt_field_find(const ckpt_json *stored, const char *path, const ckpt_json **value,
                            ckpt_err *err) CKPT_MUST_USE;
/* Set a dotted path, creating objects on the way. Takes ownership of value. */
ckpt_status ckpt_field_put(ckpt_json *object, const char *path, ckpt_json *value,
                           ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_field_put_text(ckpt_json *object, const char *path, const char *json,
                                ckpt_err *err) CKPT_MUST_USE;
/* True if any of the comma-separated canonical keys must be written. */
bool ckpt_field_changed(const ckpt_field_write *w, const char *keys);
/* True if the pattern has one of the letters; a NULL set is every pattern. */
bool ckpt_field_applies(const ckpt_json *canon, const char *kinds);
/* Integers of a canonical configuration; 0 when absent. */
int64_t ckpt_canon_int(const ckpt_json *canon, const char *key);
/* Booleans; false when absent. */
bool ckpt_canon_bool(const ckpt_json *canon, const char *key);
/* A stored boolean, `absent` when missing or null. */
ckpt_status ckpt_field_bool(const ckpt_json *stored, const char *path, bool absent, bool *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* A stored integer > 0, 0 when missing or null; `zero` also accepts 0. */
ckpt_status ckpt_field_size(const ckpt_json *stored, const char *path, bool zero, int64_t *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* A new JSON number, an integer when the value is one. Canonical numbers are always made so. */
ckpt_json *ckpt_field_number(double v);
/* Append one line of JSON to a message. */
void ckpt_field_text(const ckpt_json *j, char *out, size_t cap);

#endif
