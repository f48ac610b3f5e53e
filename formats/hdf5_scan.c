/* Describing an HDF5 file: which datasets it has, of which type, and where their bytes lie.
 *
 * The file is walked along hard links with an own stack; every group is entered once, so neither
 * cycles nor groups linked a thousand times matter. Nothing outside the file is opened: external
 * links and files, virtual datasets and filters that would be plugins are refused, and plugins are
 * not loaded. No dataset is read by libhdf5: hdf5_chunks.c does that from the offsets found here. */
#include "hdf5_file.h"

#include "checked.h"
#include "hdf5_scan.h"

#include <hdf5.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64
#define MAX_LINKS ((size_t)4 << 20)
#define MAX_ATTRS 10000
#define MAX_NAME ((size_t)1 << 16)
#define MANIFEST_MAX ((uint64_t)1 << 30)
#define TEXT_MAX ((uint64_t)64 << 20)
#define TEXTS_MAX ((uint64_t)128 << 20) /* all attributes but the manifest */

typedef struct entry {
    char *name; /* of the link, malloc'd */
    H5L_type_t type;
} entry;

typedef struct group {
    hid_t id;
    size_t path; /* length of the path of this group, with its final '/' */
    entry *entries;
    size_t n, cap, next;
} group;

typedef struct scan {
    ckpt_hdf5_describe d;
    hid_t file;
    group stack[MAX_DEPTH];
    int depth;
    char *path; /* of what is looked at, NUL-terminated */
    size_t path_cap;
    uint64_t *groups; /* addresses of groups entered, open addressing, 0 empty */
    size_t n_groups, groups_cap;
    size_t links;
    uint64_t texts;
} scan;

static bool fail(scan *s, ckpt_status code, const char *fmt, ...) CKPT_PRINTF(3, 4);
static bool fail(scan *s, ckpt_status code, const char *fmt, ...)
{
    ckpt_buf text = {0};
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&text, fmt, ap);
    va_end(ap);
    ckpt_hdf5_put_fail(&s->d, code, text.data != NULL ? (const char *)text.data : "");
    ckpt_buf_release(&text);
    return false;
}

static bool damaged(scan *s, const char *what)
{
    return fail(s, CKPT_E_FORMAT,
                "'%.300s': %s cannot be read: damaged, or of a newer HDF5 version",
                s->depth > 0 && s->path != NULL ? s->path : "/", what);
}

/* ---- attributes -------------------------------------------------------------------------------- */

/* Scalar string attribute as malloc'd text, or NULL if it is none. */
static char *read_string(scan *s, hid_t attr, uint64_t max, size_t *n)
{
    char *text = NULL;
    hid_t type = H5Aget_type(attr), space = H5Aget_space(attr), mem = -1;
    bool scalar = space >= 0 && H5Sget_simple_extent_npoints(space) == 1;
    if (type < 0 || !scalar || H5Tget_class(type) != H5T_STRING)
        goto done;
    if (H5Tis_variable_str(type) > 0) {
        char *own = NULL;
        mem = H5Tcopy(type);
        if (mem < 0 || H5Aread(attr, mem, &own) < 0 || own == NULL)
            goto done;
        *n = strlen(own);
        if (*n <= max)
            text = strdup(own);
        (void)H5free_memory(own);
        goto done;
    }
    size_t size = H5Tget_size(type);
    if (size == 0 || size > max || H5Aget_storage_size(attr) != size)
        goto done;
    text = calloc(1, size + 1);
    if (text != NULL && H5Aread(attr, type, text) < 0) {
        free(text);
        text = NULL;
    }
    if (text != NULL)
        *n = strlen(text);
done:
    if (mem >= 0)
        H5Tclose(mem);
    if (type >= 0)
        H5Tclose(type);
    if (space >= 0)
        H5Sclose(space);
    (void)s;
    return text;
}

static bool read_integer(hid_t attr, int64_t *out)
{
    hid_t type = H5Aget_type(attr), space = H5Aget_space(attr);
    bool ok = type >= 0 && space >= 0 && H5Tget_class(type) == H5T_INTEGER &&
              H5Sget_simple_extent_npoints(space) == 1 && H5Tget_size(type) <= 8 &&
              H5Aread(attr, H5T_NATIVE_INT64, out) >= 0;
    if (type >= 0)
        H5Tclose(type);
    if (space >= 0)
        H5Sclose(space);
    return ok;
}

/* One attribute of the root group. */
static herr_t root_attr(hid_t root, const char *name, const H5A_info_t *info, void *self)
{
    scan *s = self;
    size_t n = 0;
    int64_t number;
    (void)info;
    hid_t attr = H5Aopen(root, name, H5P_DEFAULT);
    if (attr < 0)
        return -1;
    bool manifest = strcmp(name, CKPT_HDF5_MANIFEST) == 0;
    char *text = read_string(s, attr, manifest ? MANIFEST_MAX : TEXT_MAX, &n);
    if (text != NULL && (manifest || s->texts + n <= TEXTS_MAX)) {
        s->texts += manifest ? 0 : n;
        ckpt_hdf5_put_text(&s->d, CKPT_HDF5_R_ATTR, name, text, n);
    } else if (text == NULL && read_integer(attr, &number)) {
        ckpt_hdf5_put_number(&s->d, name, number);
    }
    free(text);
    H5Aclose(attr);
    return 0;
}

static bool scan_root_attrs(scan *s, hid_t root)
{
    H5O_info_t info;
    hsize_t at = 0;
    if (H5Oget_info2(root, &info, H5O_INFO_NUM_ATTRS) < 0)
        return damaged(s, "the root group");
    if (info.num_attrs > MAX_ATTRS)
        return fail(s, CKPT_E_FORMAT, "%llu attributes on the root group, at most %d are read",
                    (unsigned long long)info.num_attrs, MAX_ATTRS);
    if (H5Aiterate2(root, H5_INDEX_NAME, H5_ITER_INC, &at, root_attr, s) < 0)
        return damaged(s, "an attribute of the root group");
    return true;
}

/* ---- groups ------------------------------------------------------------------------------------ */

/* Remember a group's address; false if it was there before. */
static bool enter_once(scan *s, uint64_t address, bool *again)
{
    *again = false;
    if (2 * (s->n_groups + 1) > s->groups_cap) {
        size_t cap = s->groups_cap > 0 ? 2 * s->groups_cap : 64;
        uint64_t *table = calloc(cap, sizeof *table);
        if (table == NULL)
            return fail(s, CKPT_E_NOMEM, "out of memory");
        for (size_t i = 0; i < s->groups_cap; i++) {
            if (s->groups[i] == 0)
                continue;
            size_t k = (size_t)(s->groups[i] * 0x9e3779b97f4a7c15u) & (cap - 1);
            while (table[k] != 0)
                k = (k + 1) & (cap - 1);
            table[k] = s->groups[i];
        }
        free(s->groups);
        s->groups = table;
        s->groups_cap = cap;
    }
    address++; /* 0 means empty */
    size_t k = (size_t)(address * 0x9e3779b97f4a7c15u) & (s->groups_cap - 1);
    while (s->groups[k] != 0 && s->groups[k] != address)
        k = (k + 1) & (s->groups_cap - 1);
    *again = s->groups[k] == address;
    s->n_groups += !*again;
    s->groups[k] = address;
    return true;
}

static herr_t list_link(hid_t id, const char *name, const H5L_info_t *info, void *self)
{
    scan *s = self;
    group *g = &s->stack[s->depth - 1];
    (void)id;
    void *entries = g->entries;
    if (++s->links > MAX_LINKS || strlen(name) > MAX_NAME) {
        (void)fail(s, CKPT_E_FORMAT, "more than %zu links, or a name over %zu bytes", MAX_LINKS,
                   MAX_NAME);
        return -1;
    }
    if (ckpt_grow(&entries, &g->cap, g->n + 1, sizeof *g->entries, NULL) != CKPT_OK)
        return -1;
    g->entries = entries;
    char *copy = strdup(name);
    if (copy == NULL)
        return -1;
    g->entries[g->n++] = (entry){copy, info->type};
    return 0;
}

static void leave_group(scan *s)
{
    group *g = &s->stack[--s->depth];
    for (size_t i = g->next; i < g->n; i++)
        free(g->entries[i].name);
    free(g->entries);
    H5Gclose(g->id);
    *g = (group){0};
}

/* Takes id. path: bytes of s->path that name the group, with a final '/' unless it is the root. */
static bool enter_group(scan *s, hid_t id, size_t path)
{
    H5O_info_t info;
    hsize_t at = 0;
    bool again = false, ok = false;
    if (s->depth == MAX_DEPTH)
        ok = fail(s, CKPT_E_FORMAT, "groups nested deeper than %d", MAX_DEPTH);
    else if (H5Oget_info2(id, &info, H5O_INFO_BASIC) < 0)
        ok = damaged(s, "a group");
    else
        ok = enter_once(s, (uint64_t)info.addr, &again);
    if (ok && again)
        ok = fail(s, CKPT_E_FORMAT, "group '%.300s' is linked more than once, or to itself",
                  s->path);
    if (!ok) {
        H5Gclose(id);
        return false;
    }
    s->stack[s->depth++] = (group){.id = id, .path = path};
    if (H5Literate(id, H5_INDEX_NAME, H5_ITER_INC, &at, list_link, s) < 0)
        return s->d.failed ? false : damaged(s, "a group");
    return true;
}

/* s->path = path of the group, name. */
static bool set_path(scan *s, size_t prefix, const char *name)
{
    size_t n = strlen(name);
    void *path = s->path;
    if (ckpt_grow(&path, &s->path_cap, prefix + n + 2, 1, NULL) != CKPT_OK)
        return fail(s, CKPT_E_NOMEM, "out of memory");
    s->path = path;
    memcpy(s->path + prefix, name, n + 1);
    return true;
}

/* A soft link is another name of something in this file: its text says of what. */
static bool scan_soft_link(scan *s, const group *g, const char *name)
{
    H5L_info_t info;
    char *target = NULL;
    if (H5Lget_info(g->id, name, &info, H5P_DEFAULT) < 0 || info.u.val_size == 0 ||
        info.u.val_size > MAX_NAME || (target = calloc(1, info.u.val_size + 1)) == NULL ||
        H5Lget_val(g->id, name, target, info.u.val_size, H5P_DEFAULT) < 0) {
        free(target);
        return damaged(s, "a soft link");
    }
    ckpt_buf full = {0};
    if (target[0] != '/')
        ckpt_buf_append(&full, s->path, g->path);
    ckpt_buf_puts(&full, target + strspn(target, "/"));
    ckpt_hdf5_put_text(&s->d, CKPT_HDF5_R_LINK, s->path,
                       full.data != NULL ? (const char *)full.data : "", full.len);
    ckpt_buf_release(&full);
    free(target);
    return true;
}

static bool scan_hard_link(scan *s, const group *g, const char *name)
{
    hid_t id = H5Oopen(g->id, name, H5P_DEFAULT);
    if (id < 0)
        return damaged(s, "the object");
    H5I_type_t type = H5Iget_type(id);
    if (type == H5I_GROUP) {
        size_t n = strlen(s->path);
        if (!set_path(s, n, "/")) {
            H5Gclose(id);
            return false;
        }
        return enter_group(s, id, n + 1);
    }
    bool ok = true;
    if (type == H5I_DATASET)
        ok = ckpt_hdf5_describe_dataset(&s->d, id, s->path);
    else
        ckpt_hdf5_put_text(&s->d, CKPT_HDF5_R_WARN, s->path, "is a named type: left out",
                           strlen("is a named type: left out"));
    H5Oclose(id);
    return ok;
}

static bool scan_link(scan *s, const group *g, const entry *e)
{
    if (!set_path(s, g->path, e->name))
        return false;
    /* Such a name would be taken for a path, which may lead anywhere. */
    if (e->name[0] == '\0' || strcmp(e->name, ".") == 0 || strchr(e->name, '/') != NULL)
        return fail(s, CKPT_E_FORMAT, "link with the name '%.300s'", e->name);
    switch (e->type) {
    case H5L_TYPE_HARD:
        return scan_hard_link(s, g, e->name);
    case H5L_TYPE_SOFT:
        return scan_soft_link(s, g, e->name);
    case H5L_TYPE_EXTERNAL:
        return fail(s, CKPT_E_UNSUPPORTED,
                    "'%.300s' is a link to another file, which is not followed", s->path);
    case H5L_TYPE_ERROR:
    case H5L_TYPE_MAX:
    default:
        return fail(s, CKPT_E_UNSUPPORTED, "'%.300s' is a user-defined link", s->path);
    }
}

static bool walk(scan *s)
{
    while (s->depth > 0) {
        group *g = &s->stack[s->depth - 1];
        if (g->next == g->n) {
            leave_group(s);
            continue;
        }
        entry e = g->entries[g->next++];
        bool ok = scan_link(s, g, &e);
        free(e.name);
        if (!ok || s->d.out->failed)
            return false;
    }
    return true;
}

/* ---- the file ---------------------------------------------------------------------------------- */

static hid_t open_file(const char *path)
{
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS), file;
    if (fapl < 0)
        return -1;
    (void)H5Pset_file_locking(fapl, false, true); /* nobody waits for a reader */
    (void)H5Pset_fclose_degree(fapl, H5F_CLOSE_STRONG);
    file = ckpt_hdf5_use_driver(fapl) ? H5Fopen(path, H5F_ACC_RDONLY, fapl) : -1;
    H5Pclose(fapl);
    return file;
}

static hsize_t user_block(hid_t file)
{
    hsize_t n = 0;
    hid_t fcpl = H5Fget_create_plist(file);
    if (fcpl < 0 || H5Pget_userblock(fcpl, &n) < 0)
        n = 0;
    if (fcpl >= 0)
        H5Pclose(fcpl);
    return n;
}

void ckpt_hdf5_scan(const char *path, ckpt_buf *out)
{
    scan *s = calloc(1, sizeof *s);
    if (s == NULL)
        return; /* an empty description is one that is not whole */
    s->d.out = out;
    (void)H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    (void)H5PLset_loading_state(0);
    hid_t root = -1;
    bool ok = false;
    s->file = open_file(path);
    if (s->file < 0) {
        (void)fail(s, CKPT_E_FORMAT,
                   "not an HDF5 file that can be read: damaged, cut short, or of a newer version");
        goto done;
    }
    s->d.file = s->file;
    s->d.user_block = user_block(s->file);
    root = H5Gopen2(s->file, "/", H5P_DEFAULT);
    if (root < 0)
        (void)fail(s, CKPT_E_FORMAT, "the root group cannot be read");
    else
        ok = scan_root_attrs(s, root) && set_path(s, 0, "");
    if (!ok)
        goto done;
    ok = enter_group(s, root, 0) && walk(s);
    root = -1;
    if (ok)
        ckpt_hdf5_put_end(&s->d);
done:
    if (root >= 0)
        H5Gclose(root);
    while (s->depth > 0)
        leave_group(s);
    if (s->file >= 0)
        H5Fclose(s->file);
    free(s->path);
    free(s->groups);
    free(s);
}
