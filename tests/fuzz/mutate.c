/* Changes of fuzz inputs: random bytes, and where the structure is known, plausible ones. */
#include "mutate.h"

#include <string.h>

static uint64_t random_state;

void mutate_seed(uint64_t seed)
{
    random_state = seed;
}

uint32_t mutate_draw(uint32_t below) /* splitmix64 */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return below > 0 ? (uint32_t)((z ^ (z >> 31)) % below) : 0;
}

static size_t insert(uint8_t *p, size_t n, size_t max, size_t at, const void *bytes, size_t k)
{
    if (k > max - n)
        return n;
    memmove(p + at + k, p + at, n - at);
    memcpy(p + at, bytes, k);
    return n + k;
}

/* Opcodes with plausible arguments, so that the stack machine goes on. */
static size_t mutate_pickle(uint8_t *p, size_t n, size_t max)
{
#define OP(text)                                                                                   \
    {                                                                                              \
        text, sizeof(text) - 1                                                                     \
    }
    static const struct {
        const char *bytes;
        uint8_t n;
    } ops[] = {
        OP("K\1"),
        OP("N"),
        OP("("),
        OP("t"),
        OP("\x85"),
        OP("\x86"),
        OP("\x87"),
        OP("}"),
        OP("]"),
        OP("s"),
        OP("u"),
        OP("a"),
        OP("e"),
        OP("q\0"),
        OP("h\0"),
        OP("\x94"),
        OP("R"),
        OP("\x81"),
        OP("b"),
        OP("Q"),
        OP("2"),
        OP("0"),
        OP("1"),
        OP("\x8a\1\1"),
        OP("\x8b\xff\xff\xff\x7f"),
        OP("X\1\0\0\0a"),
        OP("\x8c\1a"),
        OP("cos\nsystem\n"),
        OP("ctorch._utils\n_rebuild_tensor_v2\n"),
        OP("J\xff\xff\xff\xff"),
        OP("\x95\4\0\0\0\0\0\0\0"),
        OP("."),
    };
#undef OP
    size_t k = mutate_draw(sizeof ops / sizeof ops[0]), at = mutate_draw((uint32_t)n + 1);
    return insert(p, n, max, at, ops[k].bytes, ops[k].n);
}

/* A 16-, 32- or 64-bit field of a zip record becomes an extreme, or a neighbour of what it was. */
static size_t mutate_zip(uint8_t *p, size_t n)
{
    static const uint64_t extremes[] = {0, 1, 0xffff, 0xffffffff, 0x7fffffff, UINT64_MAX};
    size_t found = 0, at = 0;
    for (size_t i = 0; i + 4 < n; i++)
        if (p[i] == 'P' && p[i + 1] == 'K' && mutate_draw((uint32_t)++found) == 0)
            at = i;
    size_t width = (size_t)2 << mutate_draw(3), offset = at + 4 + mutate_draw(44);
    if (found == 0 || offset + width > n)
        return n;
    uint64_t v = extremes[mutate_draw(sizeof extremes / sizeof extremes[0])];
    if (mutate_draw(2) == 0) {
        memcpy(&v, p + offset, width);
        v += mutate_draw(2) == 0 ? 1 : (uint64_t)-1;
    }
    memcpy(p + offset, &v, width);
    return n;
}

static size_t mutate_bytes(uint8_t *p, size_t n, size_t max)
{
    if (n == 0)
        return insert(p, n, max, 0, "\0", 1);
    size_t at = mutate_draw((uint32_t)n);
    switch (mutate_draw(5)) {
    case 0:
        p[at] ^= (uint8_t)(1u << mutate_draw(8));
        return n;
    case 1:
        p[at] = (uint8_t)mutate_draw(256);
        return n;
    case 2: /* cut out */
        memmove(p + at, p + at + 1, n - at - 1);
        return n - 1;
    case 3: /* cut off */
        return mutate_draw(8) == 0 ? at : n;
    default: {
        uint8_t b = (uint8_t)mutate_draw(256);
        return insert(p, n, max, at, &b, 1);
    }
    }
}

/* A number or a word becomes another one, or a bracket or a member appears. */
static size_t mutate_json(uint8_t *p, size_t n, size_t max)
{
    static const char *const words[] = {
        "0",
        "-1",
        "1",
        "4294967296",
        "9007199254740993",
        "18446744073709551615",
        "1e309",
        "NaN",
        "{}",
        "[]",
        "null",
        "true",
        "\"\"",
        "[[",
        "{",
        "}",
        "\"a\":1,",
        "\"\\u0000\"",
        "\"../x\"",
        ",",
    };
    const char *word = words[mutate_draw(sizeof words / sizeof words[0])];
    size_t at = n > 0 ? mutate_draw((uint32_t)n) : 0, end = at;
    while (at < n && p[at] != ':' && p[at] != ',' && p[at] != '[')
        at++;
    at += at < n;
    for (end = at; end < n && strchr(",]}", p[end]) == NULL;)
        end++;
    if (mutate_draw(3) > 0) { /* replaced */
        memmove(p + at, p + end, n - end);
        n -= end - at;
    }
    return insert(p, n, max, at, word, strlen(word));
}

static mutate_kind kind_of(const uint8_t *p, size_t n)
{
    if (n > 1 && p[0] == 'P' && p[1] == 'K')
        return MUTATE_ZIP;
    if (n > 0 && p[0] == 0x80)
        return MUTATE_PICKLE;
    return n > 0 && (p[0] == '{' || p[n - 1] == '}') ? MUTATE_JSON : MUTATE_BYTES;
}

/* The contents of one file change and its length with them; or a file is doubled, or lost. */
static size_t mutate_tree(uint8_t *p, size_t n, size_t max)
{
    static uint8_t inside[1 << 16];
    tree_frame f = {0}, chosen = {0};
    uint32_t frames = 0;
    while (tree_next(p, n, &f))
        if (mutate_draw(++frames) == 0)
            chosen = f;
    if (frames == 0)
        return mutate(MUTATE_BYTES, p, n, max);
    size_t end = chosen.at + chosen.head + chosen.len, whole = chosen.head + chosen.len;
    switch (mutate_draw(24)) {
    case 0:
        memmove(p + chosen.at, p + end, n - end);
        return n - whole;
    case 1:
        memcpy(inside, p + chosen.at, whole);
        inside[0] = (uint8_t)mutate_draw(16);
        return insert(p, n, max, end, inside, whole);
    case 2:
        p[chosen.at] = (uint8_t)mutate_draw(16);
        return n;
    default:
        break;
    }
    size_t room = max - (n - chosen.len);
    room = room < 0xffff ? room : 0xffff;
    memcpy(inside, p + end - chosen.len, chosen.len);
    size_t len = mutate(kind_of(inside, chosen.len), inside, chosen.len, room);
    memmove(p + end - chosen.len + len, p + end, n - end);
    memcpy(p + end - chosen.len, inside, len);
    p[chosen.at + 1] = (uint8_t)(len & 0xff);
    p[chosen.at + 2] = (uint8_t)(len >> 8);
    return n - chosen.len + len;
}

size_t mutate(mutate_kind kind, uint8_t *p, size_t n, size_t max)
{
    if (kind == MUTATE_TREE)
        return mutate_tree(p, n, max);
    if (kind == MUTATE_PICKLE && mutate_draw(2) == 0)
        return mutate_pickle(p, n, max);
    if (kind == MUTATE_ZIP && mutate_draw(2) == 0)
        return mutate_zip(p, n);
    if (kind == MUTATE_JSON && mutate_draw(2) == 0)
        return mutate_json(p, n, max);
    return mutate_bytes(p, n, max);
}
