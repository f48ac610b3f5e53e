/* JSON (RFC 8259) over cJSON.
 *
 * cJSON accepts much that is not JSON (leading zeros, raw control characters, trailing text, "1."),
 * truncates strings at \u0000, keeps duplicate keys and turns any integer into a double. A scan of
 * our own therefore decides what is valid, with byte offsets; cJSON then only builds the tree. */
#include "json.h"

#include "json_scan.h"
#include "source.h"

#include <cjson/cJSON.h>

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_EXACT 9007199254740992.0 /* 2^53 */
/* Node type bit of our own above cJSON's (which ends at 512); cJSON_Duplicate keeps it. */
#define TYPE_FLOAT 1024
/* cJSON leaves valueint of an object unused: 1 while its keys are known to ascend. */
#define KEYS_ASCEND 1

/* ---- tree ----------------------------------------------------------------------------------- */

static int compare_keys(const void *a, const void *b)
{
    const cJSON *const *x = a, *const *y = b;
    return strcmp((*x)->string, (*y)->string);
}

/* Children of an object sorted by key, in a malloc'd array; NULL on exhausted memory. */
static const cJSON **sorted_children(const cJSON *object, size_t *n)
{
    size_t count = 0;
    for (const cJSON *c = object->child; c != NULL; c = c->next)
        count++;
    const cJSON **list = malloc((count + 1) * sizeof *list);
    if (list == NULL)
        return NULL;
    count = 0;
    for (const cJSON *c = object->child; c != NULL; c = c->next)
        list[count++] = c;
    qsort(list, count, sizeof *list, compare_keys);
    *n = count;
    return list;
}

static ckpt_status check_keys(cJSON *object, ckpt_err *err)
{
    /* Most objects are small or sorted; neither needs memory. */
    bool ascend = true;
    for (const cJSON *c = object->child; c != NULL && c->next != NULL && ascend; c = c->next)
        ascend = strcmp(c->string, c->next->string) < 0;
    object->valueint = ascend ? KEYS_ASCEND : 0;
    if (ascend)
        return CKPT_OK;
    size_t n;
    const cJSON **list = sorted_children(object, &n);
    if (list == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for JSON keys");
    ckpt_status status = CKPT_OK;
    for (size_t i = 1; i < n && status == CKPT_OK; i++)
        if (strcmp(list[i - 1]->string, list[i]->string) == 0)
            status = ckpt_fail(err, CKPT_E_FORMAT, "JSON: duplicate key '%s'", list[i]->string);
    free(list);
    return status;
}

/* Walk in document order: check keys and mark floats. The parser bounds the depth. */
static ckpt_status finish_tree(cJSON *root, const ckpt_buf *floats, ckpt_err *err)
{
    cJSON *stack[CKPT_JSON_DEPTH + 1];
    int depth = 0;
    size_t number = 0;
    cJSON *node = root;
    for (;;) {
        if (cJSON_IsNumber(node) && number < floats->len && floats->data[number++])
            node->type |= TYPE_FLOAT;
        if (cJSON_IsObject(node)) {
            ckpt_status status = check_keys(node, err);
            if (status != CKPT_OK)
                return status;
        }
        if (node->child != NULL && depth <= CKPT_JSON_DEPTH) {
            stack[depth++] = node;
            node = node->child;
            continue;
        }
        while (depth > 0 && node->next == NULL)
            node = stack[--depth];
        if (depth == 0)
            return CKPT_OK;
        node = node->next;
    }
}

ckpt_status ckpt_json_parse(const char *text, size_t n, ckpt_json **out, ckpt_err *err)
{
    ckpt_buf floats = {0};
    cJSON *root = NULL;
    *out = NULL;
    ckpt_status status = ckpt_json_scan(text, n, &floats, err);
    /* what lies there instead says more than its first byte */
    if (status == CKPT_E_FORMAT && n > 0 &&
        ckpt_refuse_stand_in((const uint8_t *)text, n, n, err) != CKPT_OK)
        status = CKPT_E_FORMAT;
    if (status == CKPT_OK) {
        root = cJSON_ParseWithLength(text, n);
        status = root == NULL
                     ? ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu bytes of JSON", n)
                     : finish_tree(root, &floats, err);
    }
    ckpt_buf_release(&floats);
    if (status != CKPT_OK)
        cJSON_Delete(root);
    else
        *out = root;
    return status;
}

void ckpt_json_free(ckpt_json *json)
{
    cJSON_Delete(json);
}

ckpt_json *ckpt_json_dup(const ckpt_json *json)
{
    return cJSON_Duplicate(json, true);
}

/* ---- reading -------------------------------------------------------------------------------- */

bool ckpt_json_is_object(const ckpt_json *j)
{
    return cJSON_IsObject(j);
}

bool ckpt_json_is_array(const ckpt_json *j)
{
    return cJSON_IsArray(j);
}

bool ckpt_json_is_string(const ckpt_json *j)
{
    return cJSON_IsString(j);
}

/* Raw nodes are integers beyond 2^53 (ckpt_json_new_int); nothing else makes them. */
bool ckpt_json_is_number(const ckpt_json *j)
{
    return cJSON_IsNumber(j) || cJSON_IsRaw(j);
}

bool ckpt_json_is_float(const ckpt_json *j)
{
    return cJSON_IsNumber(j) && (j->type & TYPE_FLOAT) != 0;
}

bool ckpt_json_is_bool(const ckpt_json *j)
{
    return cJSON_IsBool(j);
}

bool ckpt_json_is_null(const ckpt_json *j)
{
    return cJSON_IsNull(j);
}

static ckpt_json *get_n(const ckpt_json *object, const char *key, size_t n)
{
    if (!cJSON_IsObject(object))
        return NULL;
    for (cJSON *c = object->child; c != NULL; c = c->next)
        if (strncmp(c->string, key, n) == 0 && c->string[n] == '\0')
            return c;
    return NULL;
}

ckpt_json *ckpt_json_get(const ckpt_json *object, const char *key)
{
    return get_n(object, key, strlen(key));
}

ckpt_json *ckpt_json_path(const ckpt_json *object, const char *dotted)
{
    for (;;) {
        size_t n = strcspn(dotted, ".");
        ckpt_json *member = get_n(object, dotted, n);
        if (member == NULL || dotted[n] == '\0')
            return member;
        object = member;
        dotted += n + 1;
    }
}

ckpt_json *ckpt_json_child(const ckpt_json *j)
{
    return cJSON_IsObject(j) || cJSON_IsArray(j) ? j->child : NULL;
}

ckpt_json *ckpt_json_next(const ckpt_json *j)
{
    return j == NULL ? NULL : j->next;
}

const char *ckpt_json_key(const ckpt_json *j)
{
    return j == NULL ? NULL : j->string;
}

int ckpt_json_size(const ckpt_json *j)
{
    return ckpt_json_child(j) == NULL ? 0 : cJSON_GetArraySize(j);
}

bool ckpt_json_int(const ckpt_json *j, int64_t *out)
{
    if (cJSON_IsRaw(j)) {
        *out = strtoll(j->valuestring, NULL, 10);
        return true;
    }
    if (!cJSON_IsNumber(j))
        return false;
    double d = j->valuedouble;
    if (!(fabs(d) <= MAX_EXACT) || d != floor(d))
        return false;
    *out = (int64_t)d;
    return true;
}

bool ckpt_json_double(const ckpt_json *j, double *out)
{
    if (cJSON_IsRaw(j))
        *out = (double)strtoll(j->valuestring, NULL, 10);
    else if (cJSON_IsNumber(j))
        *out = j->valuedouble;
    else
        return false;
    return true;
}

bool ckpt_json_bool(const ckpt_json *j, bool *out)
{
    if (!cJSON_IsBool(j))
        return false;
    *out = cJSON_IsTrue(j);
    return true;
}

const char *ckpt_json_string(const ckpt_json *j)
{
    return cJSON_IsString(j) ? j->valuestring : NULL;
}

/* ---- building ------------------------------------------------------------------------------- */

ckpt_json *ckpt_json_new_object(void)
{
    cJSON *j = cJSON_CreateObject();
    if (j != NULL)
        j->valueint = KEYS_ASCEND;
    return j;
}

ckpt_json *ckpt_json_new_array(void)
{
    return cJSON_CreateArray();
}

ckpt_json *ckpt_json_new_string(const char *s)
{
    return cJSON_CreateString(s);
}

ckpt_json *ckpt_json_new_int(int64_t v)
{
    if (v >= -(INT64_C(1) << 53) && v <= INT64_C(1) << 53)
        return cJSON_CreateNumber((double)v);
    char text[24];
    (void)snprintf(text, sizeof text, "%" PRId64, v);
    return cJSON_CreateRaw(text);
}

ckpt_json *ckpt_json_new_double(double v)
{
    cJSON *j = cJSON_CreateNumber(v);
    if (j != NULL)
        j->type |= TYPE_FLOAT;
    return j;
}

ckpt_json *ckpt_json_new_bool(bool v)
{
    return cJSON_CreateBool(v);
}

ckpt_json *ckpt_json_new_null(void)
{
    return cJSON_CreateNull();
}

bool ckpt_json_add(ckpt_json *object, const char *key, ckpt_json *value)
{
    if (value == NULL)
        return false;
    bool ok = cJSON_IsObject(object);
    const char *last = ok && object->child != NULL ? object->child->prev->string : NULL;
    bool ascend = last == NULL || strcmp(last, key) < 0;
    if (!ok || !cJSON_AddItemToObject(object, key, value)) {
        cJSON_Delete(value);
        return false;
    }
    if (!ascend)
        object->valueint = 0;
    return true;
}

bool ckpt_json_set(ckpt_json *object, const char *key, ckpt_json *value)
{
    if (value == NULL)
        return false;
    bool known_new = cJSON_IsObject(object) && object->valueint == KEYS_ASCEND &&
                     (object->child == NULL || strcmp(object->child->prev->string, key) < 0);
    cJSON *old = known_new ? NULL : ckpt_json_get(object, key);
    if (old == NULL)
        return ckpt_json_add(object, key, value);
    if (!cJSON_ReplaceItemInObjectCaseSensitive(object, key, value)) {
        cJSON_Delete(value);
        return false;
    }
    return true;
}

bool ckpt_json_push(ckpt_json *array, ckpt_json *value)
{
    if (value == NULL)
        return false;
    if (cJSON_IsArray(array) && cJSON_AddItemToArray(array, value))
        return true;
    cJSON_Delete(value);
    return false;
}

void ckpt_json_delete(ckpt_json *object, const char *key)
{
    cJSON *old = ckpt_json_get(object, key);
    if (old != NULL)
        cJSON_Delete(cJSON_DetachItemViaPointer(object, old));
}

/* ---- comparing and printing ----------------------------------------------------------------- */

/* cJSON_Compare is quadratic in members and compares doubles within an epsilon. Recursion: trees
 * are bounded by the parser or built by us; cJSON's own limit guards the rest. */
static bool equal_at(const cJSON *a, const cJSON *b, int depth);

static bool equal_objects(const cJSON *a, const cJSON *b, int depth)
{
    size_t na, nb;
    const cJSON **la = sorted_children(a, &na), **lb = sorted_children(b, &nb);
    bool same = la != NULL && lb != NULL && na == nb;
    for (size_t i = 0; same && i < na; i++)
        same = strcmp(la[i]->string, lb[i]->string) == 0 && equal_at(la[i], lb[i], depth + 1);
    free(la);
    free(lb);
    return same;
}

static bool equal_numbers(const cJSON *a, const cJSON *b)
{
    if (cJSON_IsRaw(a) || cJSON_IsRaw(b))
        return a->type == b->type && strcmp(a->valuestring, b->valuestring) == 0;
    return a->valuedouble == b->valuedouble;
}

static bool equal_at(const cJSON *a, const cJSON *b, int depth)
{
    if (a == b)
        return true;
    if (a == NULL || b == NULL || depth > CJSON_NESTING_LIMIT)
        return false;
    if (ckpt_json_is_number(a) && ckpt_json_is_number(b))
        return equal_numbers(a, b);
    if ((a->type & 0xff) != (b->type & 0xff))
        return false;
    if (cJSON_IsString(a))
        return strcmp(a->valuestring, b->valuestring) == 0;
    if (cJSON_IsObject(a))
        return equal_objects(a, b, depth);
    if (!cJSON_IsArray(a))
        return true;
    const cJSON *x = a->child, *y = b->child;
    for (; x != NULL && y != NULL; x = x->next, y = y->next)
        if (!equal_at(x, y, depth + 1))
            return false;
    return x == NULL && y == NULL;
}

bool ckpt_json_equal(const ckpt_json *a, const ckpt_json *b)
{
    return equal_at(a, b, 0);
}

void ckpt_json_quote(ckpt_buf *out, const char *s, size_t n)
{
    static const char short_escapes[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    ckpt_buf_putc(out, '"');
    for (size_t i = 0; i < n;) {
        size_t run = i;
        while (run < n && (uint8_t)s[run] >= 0x20 && s[run] != '"' && s[run] != '\\') {
            size_t len = ckpt_utf8_len(s + run, n - run);
            if (len == 0)
                break;
            run += len;
        }
        ckpt_buf_append(out, s + i, run - i);
        i = run;
        if (i == n)
            break;
        uint8_t c = (uint8_t)s[i++];
        const char *known = NULL;
        for (size_t k = 0; k + 1 < sizeof short_escapes && known == NULL; k += 2)
            if ((uint8_t)short_escapes[k] == c)
                known = &short_escapes[k + 1];
        if (known != NULL)
            ckpt_buf_printf(out, "\\%c", *known);
        else if (c < 0x20)
            ckpt_buf_printf(out, "\\u%04x", c);
        else
            ckpt_buf_puts(out, "\\ufffd");
    }
    ckpt_buf_putc(out, '"');
}

static void print_number(const cJSON *j, ckpt_buf *out)
{
    char text[DBL_MAX_10_EXP + 8];
    double d = j->valuedouble;
    if (!isfinite(d)) {
        ckpt_buf_puts(out, "null");
        return;
    }
    if ((j->type & TYPE_FLOAT) == 0 && d == floor(d)) {
        (void)snprintf(text, sizeof text, "%.0f", d);
        ckpt_buf_puts(out, text);
        return;
    }
    /* Every decimal of up to 15 digits survives a normal double, so shorter text cannot exist;
     * subnormals have less precision. */
    int digits = fabs(d) < DBL_MIN ? 1 : 15;
    do
        (void)snprintf(text, sizeof text, "%.*g", digits, d);
    while (digits++ < 17 && strtod(text, NULL) != d);
    bool integer = true;
    for (char *c = text; *c != '\0'; c++) {
        if (strchr("0123456789+-e", *c) == NULL)
            *c = '.'; /* a locale's decimal separator */
        if (*c == '.' || *c == 'e')
            integer = false;
    }
    ckpt_buf_puts(out, text);
    if (integer)
        ckpt_buf_puts(out, ".0");
}

typedef struct printer {
    ckpt_buf *out;
    int indent;
    bool sorted;
} printer;

static void new_line(const printer *p, int depth)
{
    if (p->indent <= 0)
        return;
    ckpt_buf_putc(p->out, '\n');
    for (int i = 0; i < depth * p->indent; i++)
        ckpt_buf_putc(p->out, ' ');
}

static void print_at(const printer *p, const cJSON *j, int depth);

static void print_member(const printer *p, const cJSON *c, bool first, bool keyed, int depth)
{
    if (!first)
        ckpt_buf_putc(p->out, ',');
    new_line(p, depth + 1);
    if (keyed) {
        ckpt_json_quote(p->out, c->string, strlen(c->string));
        ckpt_buf_puts(p->out, p->indent > 0 ? ": " : ":");
    }
    print_at(p, c, depth + 1);
}

static void print_container(const printer *p, const cJSON *j, int depth)
{
    bool object = cJSON_IsObject(j);
    ckpt_buf_putc(p->out, object ? '{' : '[');
    if (object && p->sorted && j->child != NULL) {
        size_t n;
        const cJSON **list = sorted_children(j, &n);
        if (list == NULL) {
            p->out->failed = true;
            return;
        }
        for (size_t i = 0; i < n; i++)
            print_member(p, list[i], i == 0, true, depth);
        free(list);
    } else {
        for (const cJSON *c = j->child; c != NULL; c = c->next)
            print_member(p, c, c == j->child, object, depth);
    }
    if (j->child != NULL)
        new_line(p, depth);
    ckpt_buf_putc(p->out, object ? '}' : ']');
}

static void print_at(const printer *p, const cJSON *j, int depth)
{
    if (depth > CJSON_NESTING_LIMIT)
        p->out->failed = true;
    else if (cJSON_IsObject(j) || cJSON_IsArray(j))
        print_container(p, j, depth);
    else if (cJSON_IsString(j))
        ckpt_json_quote(p->out, j->valuestring, strlen(j->valuestring));
    else if (cJSON_IsNumber(j))
        print_number(j, p->out);
    else if (cJSON_IsRaw(j))
        ckpt_buf_puts(p->out, j->valuestring);
    else
        ckpt_buf_puts(p->out, cJSON_IsTrue(j) ? "true" : cJSON_IsFalse(j) ? "false" : "null");
}

bool ckpt_json_print(const ckpt_json *j, int indent, bool sorted, ckpt_buf *out)
{
    printer p = {out, indent, sorted};
    print_at(&p, j, 0);
    return !out->failed;
}
