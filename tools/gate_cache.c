/* Results that `ckpt gate --cache DIR` keeps (gate.h): the file DIR/KEY.json holds the check that
 * passed and when. KEY = SHA-256 over lines of text, each ended by NUL: the form of the key, the
 * digest of this program, the digest of all bytes of the source, and what the check was asked. */
#include "gate.h"
#include "io.h"
#include "shard.h"

#include <string.h>
#include <sys/stat.h>
#include <time.h>

typedef struct key {
    ckpt_sha256 sha;
    bool sound; /* everything that counts is known */
} key;

static void put(key *k, const char *s)
{
    ckpt_sha256_update(&k->sha, s != NULL ? s : "-", s != NULL ? strlen(s) + 1 : 2);
}

static void put_real(key *k, double v)
{
    char text[32];
    ckpt_real_text(v, text);
    put(k, text);
}

static void put_int(key *k, int64_t v)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)v);
    put(k, text);
}

static void put_strings(key *k, const ckpt_strings *list)
{
    put_int(k, (int64_t)list->n);
    for (size_t i = 0; i < list->n; i++)
        put(k, list->items[i]);
}

/* The bytes of a file; a key over one that cannot be read finds and keeps nothing. */
static void put_file(key *k, const char *path)
{
    uint8_t digest[CKPT_SHA256_LEN];
    uint64_t size;
    if (path == NULL)
        return;
    if (ckpt_tool_file_digest(path, digest, &size, NULL) != CKPT_OK)
        k->sound = false;
    else
        ckpt_sha256_update(&k->sha, digest, sizeof digest);
}

static void put_target(key *k, const gate_unit *u)
{
    if (u->target == NULL) {
        put(k, "source");
        return;
    }
    put(k, u->target->to);
    put(k, u->target->layout);
    ckpt_mesh mesh = *u->mesh;
    for (int i = 0; i < CKPT_MESH_STORED; i++)
        put_int(k, *ckpt_mesh_size(&mesh, i));
    put_strings(k, &u->target->options);
}

/* NULL: this check is never kept. A command that loads depends on what it runs; that a thing is
 * refused costs nothing to see again. */
static const char *key_path(gate *g, gate_unit *u, const gate_result *r)
{
    const gate_row *row = u->row;
    uint8_t digest[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1];
    key k = {.sound = true};
    if (g->cache == NULL || u->source->key == NULL || r->check == GATE_LOAD ||
        r->check == GATE_REFUSE || r->check == GATE_CONVERT ||
        ckpt_sha256_init(&k.sha, NULL) != CKPT_OK)
        return NULL;
    put(&k, "ckpt gate 1");
    put(&k, g->build);
    put(&k, u->source->key);
    put(&k, u->source->root);
    put(&k, ckpt_gate_check_names[r->check]);
    put_int(&k, u->source->iteration);
    put_int(&k, u->source->allow_unknown);
    put_real(&k, u->source->latent_eps);
    put_target(&k, u);
    put(&k, row->root);
    put_int(&k, row->strict);
    put_real(&k, row->rtol);
    put_real(&k, row->grad_rtol);
    if (r->check == GATE_FORWARD || r->check == GATE_GRADIENTS)
        put_file(&k, u->target == NULL ? u->source->reference : NULL);
    if (r->check == GATE_RESUME) {
        put_file(&k, row->data);
        put_int(&k, row->steps[0]);
        put_int(&k, row->steps[1]);
        put_int(&k, row->start);
        put_strings(&k, &row->train);
    }
    ckpt_sha256_final(&k.sha, digest);
    ckpt_sha256_release(&k.sha);
    ckpt_hex(digest, hex);
    return k.sound ? ckpt_arena_printf(&u->arena, "%s/%s.json", g->cache, hex) : NULL;
}

bool ckpt_gate_cached(gate *g, gate_unit *u, gate_result *r)
{
    ckpt_buf text = {0};
    ckpt_json *doc = NULL;
    bool passed = false;
    r->kept = key_path(g, u, r);
    if (r->kept != NULL && ckpt_read_file(r->kept, 65536, &text, NULL) == CKPT_OK &&
        ckpt_json_parse((const char *)text.data, text.len, &doc, NULL) == CKPT_OK) {
        const char *check = ckpt_json_string(ckpt_json_get(doc, "check"));
        passed = check != NULL && strcmp(check, ckpt_gate_check_names[r->check]) == 0;
    }
    ckpt_json_free(doc);
    ckpt_buf_release(&text);
    return passed;
}

ckpt_status ckpt_gate_remember(const gate *g, const gate_unit *u, const gate_result *r,
                               ckpt_err *err)
{
    ckpt_jw w = {0};
    if (r->kept == NULL)
        return CKPT_OK;
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_string(&w, "check", ckpt_gate_check_names[r->check]);
    ckpt_jw_string(&w, "case", u->name);
    ckpt_jw_string(&w, "root", u->source->found_root);
    ckpt_jw_string(&w, "version", CKPT_VERSION);
    ckpt_jw_string(&w, "program", g->build);
    ckpt_jw_real(&w, "seconds", r->seconds);
    ckpt_jw_close(&w, '}');
    ckpt_buf_putc(&w.buf, '\n');
    ckpt_status status = w.buf.failed ? ckpt_tool_no_memory(err)
                                      : ckpt_tool_write_file(r->kept, w.buf.data, w.buf.len, err);
    ckpt_buf_release(&w.buf);
    return status;
}
