/* Names of stored optimizer state: see optim_names.h. */
#include "optim_names.h"

#include <string.h>

typedef struct state_form {
    const char *tag;
    const char *before; /* of the key, or of S where S comes first */
    bool state_first;
    bool chained;              /* before it "chained_C." */
    const char *master;        /* how the master copy is spelled */
    const char *sharding_type; /* in Megatron's content_metadata */
} state_form;

/* The first is the default. Prefix forms of one outer name go before suffix forms. */
static const state_form forms[] = {
    {"optim=reshardable", "optimizer.state.",            true,  false, "param",      "fully_reshardable"},
    {"optim=model_space", "optimizer.state.",            true,  false, "fp32_param",
     "fully_sharded_model_space"                                                                        },
    {"optim=chained",     "optimizer.state.",            true,  true,  "fp32_param", NULL               },
    {"optim=optim",       "optim.state.",                false, false, "master",     NULL               },
    {"optim=optimizer",   "optimizer.state.",            false, false, "master",     NULL               },
    {"optim=opt",         "opt.state.",                  false, false, "master",     NULL               },
    {"optim=state_dict",  "optimizer_state_dict.state.", false, false, "master",     NULL               },
    {"optim=state",       "state.",                      false, false, "master",     NULL               },
};
#define N_FORMS (sizeof forms / sizeof forms[0])

static const struct {
    const char *stored, *word;
} words[] = {
    {"param",           "master"    },
    {"fp32_param",      "master"    },
    {"master",          "master"    },
    {"exp_avg",         "exp_avg"   },
    {"exp_avg_sq",      "exp_avg_sq"},
    {"momentum_buffer", "momentum"  },
    {"momentum",        "momentum"  },
    {"step",            "step"      },
};
#define N_WORDS (sizeof words / sizeof words[0])

static bool starts(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

/* Keys under which training loops put an optimizer's state dict; a number may follow (a list). */
static const char *const outer_words[] = {
    "opt",   "optim",           "optimizer",        "optimizers",
    "osd",   "optimizer_state", "optimizer_states", "optimizer_state_dict",
    "optims"};

static bool known_word(const char *s, size_t n)
{
    for (size_t i = 0; i < N_WORDS; i++)
        if (strlen(words[i].stored) == n && memcmp(words[i].stored, s, n) == 0)
            return true;
    return false;
}

static bool digits(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] < '0' || s[i] > '9')
            return false;
    return n > 0;
}

/* strcmp(name, outer + key[0..n)) */
static int compare(const char *name, const char *outer, const char *key, size_t n)
{
    size_t m = strlen(outer);
    int c = strncmp(name, outer, m);
    if (c == 0)
        c = strncmp(name + m, key, n);
    return c != 0 ? c : name[m + n] != '\0';
}

static int64_t find(const ckpt_source *src, const char *outer, const char *key, size_t n)
{
    size_t lo = 0, hi = src->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = compare(src->tensors[mid].name, outer, key, n);
        if (c == 0)
            return (int64_t)mid;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return -1;
}

static int64_t find_param(const ckpt_source *src, const char *key, size_t n)
{
    int64_t at = n > 0 ? find(src, "", key, n) : -1;
    return at >= 0 || n == 0 ? at : find(src, "model.", key, n);
}

/* "chained_3." before the rest; its length, or 0. */
static size_t chained_length(const char *name)
{
    if (!starts(name, "chained_"))
        return 0;
    size_t n = strspn(name + 8, "0123456789");
    return n > 0 && name[8 + n] == '.' ? 8 + n + 1 : 0;
}

/* S first: "S.KEY" at `at`. */
static bool parse_first(const ckpt_source *src, const char *name, size_t at, ckpt_state_ref *out)
{
    out->state = at;
    out->state_len = strcspn(name + at, ".");
    out->key = at + out->state_len + 1;
    if (name[at + out->state_len] != '.')
        return false;
    out->key_len = strlen(name + out->key);
    out->param = find_param(src, name + out->key, out->key_len);
    return out->param >= 0;
}

/* S last: "KEY.S" at `at`. */
static bool parse_last(const ckpt_source *src, const char *name, size_t at, ckpt_state_ref *out)
{
    const char *dot = strrchr(name + at, '.');
    if (dot == NULL || dot == name + at || dot[1] == '\0')
        return false;
    out->key = at;
    out->key_len = (size_t)(dot - name) - at;
    out->state = (size_t)(dot + 1 - name);
    out->state_len = strlen(dot + 1);
    out->param = find_param(src, name + out->key, out->key_len);
    /* Megatron-FSDP names the parameter as its wrapper does */
    while (out->param < 0 && out->key_len > 7 && starts(name + out->key, "module.")) {
        out->key += 7;
        out->key_len -= 7;
        out->param = find_param(src, name + out->key, out->key_len);
    }
    return out->param >= 0;
}

/* Of a form with S first: the master's spelling tells fully_reshardable from the others. */
static const char *first_tag(const char *name, const ckpt_state_ref *r, bool chained)
{
    if (chained)
        return "optim=chained";
    bool fp32 = r->state_len == 10 && memcmp(name + r->state, "fp32_param", 10) == 0;
    bool momentum = r->state_len == 15 && memcmp(name + r->state, "momentum_buffer", 15) == 0;
    return fp32 || momentum ? "optim=model_space" : "optim=reshardable";
}

/* Whether an object "OUTER.param_groups..." says that OUTER, n characters with the dot, is the state
 * dict of an optimizer. */
static bool has_groups(const ckpt_source *src, const char *outer, size_t n)
{
    static const char groups[] = "param_groups";
    size_t lo = 0, hi = src->n_objects;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strncmp(src->objects[mid].name, outer, n);
        if (c == 0)
            c = strncmp(src->objects[mid].name + n, groups, sizeof groups - 1);
        if (c == 0)
            return true;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return false;
}

/* outer[0..n) ends in one of the words, or in one and ".3"; with the dot behind it. */
static bool is_outer(const char *outer, size_t n)
{
    size_t end = n > 0 ? n - 1 : 0, digit = end;
    while (digit > 0 && outer[digit - 1] >= '0' && outer[digit - 1] <= '9')
        digit--;
    if (digit < end && digit > 0 && outer[digit - 1] == '.')
        end = digit - 1;
    for (size_t i = 0; i < sizeof outer_words / sizeof outer_words[0]; i++) {
        size_t m = strlen(outer_words[i]);
        if (m <= end && memcmp(outer + end - m, outer_words[i], m) == 0 &&
            (m == end || outer[end - m - 1] == '.'))
            return true;
    }
    return false;
}

/* Length of OUTER, its dot included, of a name "OUTER.state.…" or "OUTER.param_groups…" (both keys of
 * torch.optim's state dicts); SIZE_MAX: it is none. */
static size_t outer_length(const ckpt_source *src, const char *name)
{
    static const char *const keys[] = {"state.", "param_groups"};
    for (int k = 0; k < 2; k++)
        for (const char *at = name; (at = strstr(at, keys[k])) != NULL; at++) {
            size_t n = (size_t)(at - name), m = strlen(keys[k]);
            bool whole = k == 0 || at[m] == '\0' || at[m] == '.';
            if ((n == 0 || at[-1] == '.') && whole &&
                (is_outer(name, n) || has_groups(src, name, n)))
                return n;
        }
    return SIZE_MAX;
}

/* No parameter fits: say why, if the name is an optimizer's at all. */
static void classify_rest(const ckpt_source *src, const char *name, size_t skip,
                          ckpt_state_ref *out)
{
    const char *rest = name + skip;
    size_t outer = outer_length(src, name);
    out->param = -1;
    if (starts(rest, "optimizer.distributed.dp_group_idx_"))
        out->kind = CKPT_STATE_BUCKET;
    else if (outer != SIZE_MAX && starts(name + outer, "state.")) {
        size_t at = outer + 6;
        size_t word = strcspn(name + at, ".");
        const char *last = strrchr(name + at, '.');
        if (digits(name + at, word) && strchr(name + at + word + 1, '.') == NULL)
            out->kind = CKPT_STATE_NUMBERED;
        else if (known_word(name + at, word) ||
                 (last != NULL && known_word(last + 1, strlen(last + 1))))
            out->kind = CKPT_STATE_ORPHAN;
        else
            out->kind = CKPT_STATE_OTHER;
    } else if (starts(rest, "optimizer.") || outer != SIZE_MAX) {
        out->kind = CKPT_STATE_OTHER;
    }
}

void ckpt_state_parse(const ckpt_source *src, const char *name, ckpt_state_ref *out)
{
    size_t skip = chained_length(name);
    *out = (ckpt_state_ref){.kind = CKPT_STATE_NONE, .param = -1};
    for (size_t f = 0; f < N_FORMS; f++) {
        const state_form *form = &forms[f];
        size_t n = strlen(form->before);
        if (form->chained != (skip > 0) || !starts(name + skip, form->before))
            continue;
        bool found = form->state_first ? parse_first(src, name, skip + n, out)
                                       : parse_last(src, name, skip + n, out);
        if (!found)
            continue;
        out->kind = CKPT_STATE_OF;
        out->tag = form->state_first ? first_tag(name, out, form->chained) : form->tag;
        return;
    }
    classify_rest(src, name, skip, out);
}

bool ckpt_is_optimizer(const ckpt_source *src, const char *name)
{
    ckpt_state_ref ref;
    ckpt_state_parse(src, name, &ref);
    return ref.kind != CKPT_STATE_NONE;
}

const char *ckpt_state_word(ckpt_arena *arena, const char *s, size_t n)
{
    for (size_t i = 0; i < N_WORDS; i++)
        if (strlen(words[i].stored) == n && memcmp(words[i].stored, s, n) == 0)
            return words[i].word;
    return ckpt_arena_strndup(arena, s, n);
}

bool ckpt_state_make(ckpt_arena *arena, const char *name, const ckpt_state_ref *ref,
                     ckpt_state *out)
{
    out->name = ckpt_state_word(arena, name + ref->state, ref->state_len);
    out->before = ckpt_arena_strndup(arena, name, ref->key);
    out->after = ckpt_arena_strdup(arena, name + ref->key + ref->key_len);
    out->tag = ref->tag;
    return out->name != NULL && out->before != NULL && out->after != NULL;
}

/* ---- writing ----------------------------------------------------------------------------------- */

static const state_form *chosen_form(const char *tags)
{
    for (const char *t = tags; t != NULL && *t != '\0';) {
        size_t n = strcspn(t, ",");
        for (size_t f = 0; f < N_FORMS; f++)
            if (strlen(forms[f].tag) == n && memcmp(forms[f].tag, t, n) == 0)
                return &forms[f];
        t += n + (t[n] == ',');
    }
    return &forms[0];
}

const char *ckpt_state_spell(ckpt_arena *arena, const char *tags, const char *state,
                             const char *key, bool expert)
{
    const state_form *form = chosen_form(tags);
    const char *s = state;
    if (strcmp(state, "master") == 0)
        s = form->master;
    else if (strcmp(state, "momentum") == 0)
        s = "momentum_buffer";
    if (!form->state_first)
        return ckpt_arena_printf(arena, "%s%s.%s", form->before, key, s);
    if (form->chained)
        return ckpt_arena_printf(arena, "chained_%d.%s%s.%s", expert ? 1 : 0, form->before, s, key);
    return ckpt_arena_printf(arena, "%s%s.%s", form->before, s, key);
}

const char *ckpt_state_sharding_type(const char *tag)
{
    for (size_t f = 0; tag != NULL && f < N_FORMS; f++)
        if (strcmp(forms[f].tag, tag) == 0)
            return forms[f].sharding_type;
    return NULL;
}
