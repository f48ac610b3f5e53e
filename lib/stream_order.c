/* The order of the executor's work (stream_convert.c): pieces of the files, and leaves as soon as their
 * bytes are there. */
#include "checked.h"
#include "stream_internal.h"

#include <stdlib.h>

#define LANES_MIN 8                       /* that advance side by side where processors are few */
#define WAVE_FILE_MIN ((uint64_t)1 << 20) /* smaller files have a lane of their own */
/* Bytes of files that are in step for their digests alone: a run that is killed has none of them. */
#define WAVE_TOTAL_MAX ((uint64_t)4 << 30)
#define WAVE_CORES 3 /* processors that a lane of sixteen files and its leaves keep busy */
#define WAVES_MAX 2  /* such lanes side by side; more would take more memory than they are worth */
#define BESIDE_MAX (2 * CKPT_PIECE_MAX) /* bytes of leaves beside one piece */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for work items");
}

uint64_t ckpt_stream_size(const ckpt_stream_job *c, size_t f)
{
    bool done = c->journal != NULL && c->journal->files[f].done;
    bool mine = c->owner == NULL || c->owner[f] == c->share->rank;
    return done || !mine ? 0 : c->plan->sink.files[f].size;
}

/* ---- lanes ------------------------------------------------------------------------------------- */

/* How many files from f on can share a lane: of those that this run writes, for a slot of the window
 * holds bytes of every file of its lane. */
static uint32_t lane_files(const ckpt_stream_job *c, size_t f)
{
    const ckpt_sink *sink = &c->plan->sink;
    uint32_t n = 0;
    for (uint64_t total = 0; n < CKPT_SHA256_LANES && f + n < sink->n_files; n++) {
        const ckpt_out_file *file = &sink->files[f + n];
        total += file->size;
        if (!file->is_data || file->size < WAVE_FILE_MIN || ckpt_stream_size(c, f + n) == 0 ||
            (!sink->together && !c->plan->in_place && total > WAVE_TOTAL_MAX))
            break;
    }
    return ckpt_sha256_stream_wide((int)n) ? n : 1;
}

/* A file of sixteen in a lane is digested for half the work of one by itself, but all of them by one
 * processor at a time: eight times the work of one file. Too few such lanes would keep too few
 * processors busy. */
static bool waves_pay(const ckpt_stream_job *c, int cores)
{
    const ckpt_sink *sink = &c->plan->sink;
    int waves = 0;
    for (size_t f = 0; f < sink->n_files && waves < WAVES_MAX;) {
        uint32_t n = lane_files(c, f);
        waves += n > 1;
        f += n;
    }
    return WAVE_CORES * waves >= cores;
}

ckpt_status ckpt_stream_lanes(ckpt_stream_job *c, int cores, bool *waves, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    bool wide = waves_pay(c, cores);
    c->side_by_side = cores > LANES_MIN ? (uint32_t)cores : LANES_MIN;
    c->lanes = calloc(sink->n_files + 1, sizeof *c->lanes);
    c->lane_of = calloc(sink->n_files + 1, sizeof *c->lane_of);
    if (c->lanes == NULL || c->lane_of == NULL)
        return no_memory(err);
    for (size_t f = 0; f < sink->n_files; f += c->lanes[c->n_lanes - 1].n) {
        ckpt_lane *l = &c->lanes[c->n_lanes++];
        l->first = (uint32_t)f;
        l->n = wide ? lane_files(c, f) : 1;
        for (uint32_t i = 0; i < l->n; i++) {
            l->size = ckpt_max_u64(l->size, ckpt_stream_size(c, f + i));
            c->lane_of[f + i] = (uint32_t)(l - c->lanes);
        }
        *waves = *waves || l->n > 1;
        pthread_mutex_init(&l->lock, NULL);
        pthread_cond_init(&l->turn, NULL);
    }
    return CKPT_OK;
}

/* Steps of all lanes, and room for the numbers of their pieces. */
static ckpt_status count_pieces(ckpt_stream_job *c, uint64_t slot, ckpt_err *err)
{
    uint64_t n = 0;
    for (size_t i = 0; i < c->n_lanes; i++) {
        ckpt_lane *l = &c->lanes[i];
        l->step =
            l->n == 1 ? ckpt_min_u64(slot, CKPT_PIECE_MAX) : slot / l->n / CKPT_PAGE * CKPT_PAGE;
        l->first_seq = (uint32_t)n;
        n += (l->size + l->step - 1) / l->step;
        if (n >= CKPT_NO_ITEM)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is too large",
                             c->plan->sink.files[l->first].name);
    }
    c->n_pieces = (size_t)n;
    c->seqs = calloc(c->n_pieces + 1, sizeof *c->seqs);
    c->offers = calloc(c->n_pieces + 1, sizeof *c->offers);
    return c->seqs != NULL && c->offers != NULL ? CKPT_OK : no_memory(err);
}

/* The lane of [begin, end) that is least far; NULL if all are through. */
static ckpt_lane *least_far(const ckpt_stream_job *c, size_t begin, size_t end)
{
    ckpt_lane *next = NULL;
    for (size_t i = begin; i < end; i++) {
        ckpt_lane *l = &c->lanes[i];
        if (l->passed < l->size && (next == NULL || l->passed < next->passed))
            next = l;
    }
    return next;
}

/* Number the pieces: in groups of lanes, the lane that is least far first. Groups are no larger than
 * what the workers hash side by side: a run that is killed has finished the groups before. */
static void number_pieces(ckpt_stream_job *c, int workers, int cores)
{
    uint32_t seq = 0, most = 2 * (uint32_t)workers;
    if (cores >= WAVE_CORES && most < WAVES_MAX * CKPT_SHA256_LANES)
        most = WAVES_MAX * CKPT_SHA256_LANES;
    for (size_t group = 0, end; group < c->n_lanes; group = end) {
        uint32_t files = 0;
        for (end = group; end < c->n_lanes && end - group < c->side_by_side; end++)
            if ((files += c->lanes[end].n) > most && end > group)
                break;
        for (ckpt_lane *l; (l = least_far(c, group, end)) != NULL; l->passed += l->step)
            c->seqs[l->first_seq + l->passed / l->step] = seq++;
    }
    for (size_t i = 0; i < c->n_lanes; i++)
        c->lanes[i].passed = 0; /* from here on it counts what was done */
}

/* ---- leaves ------------------------------------------------------------------------------------ */

#define LATE (-1)
#define NOBODY (-2)

/* The leaves of one gather, and who hashes them. */
typedef struct gather_leaves {
    const ckpt_stream_job *c;
    ckpt_leaf *leaf;
    int *owner; /* NULL: this process is alone */
    uint64_t n;
} gather_leaves;

static void need(void *self, uint64_t index, uint32_t file, uint64_t lo, uint64_t hi)
{
    gather_leaves *g = self;
    if (index >= g->n || lo >= hi)
        return;
    ckpt_leaf *leaf = &g->leaf[index];
    if (g->owner != NULL) {
        int rank = g->c->owner[file];
        g->owner[index] = g->owner[index] == NOBODY || g->owner[index] == rank ? rank : LATE;
    }
    uint64_t size = ckpt_stream_size(g->c, file);
    if (size == 0) /* another process's, or written by an earlier run */
        return;
    const ckpt_lane *l = &g->c->lanes[g->c->lane_of[file]];
    uint64_t last = (ckpt_min_u64(hi, size) - 1) / l->step;
    for (uint64_t k = ckpt_min_u64(lo / l->step, last); k <= last; k++) {
        uint32_t seq = g->c->seqs[l->first_seq + k];
        if (leaf->first == CKPT_NO_ITEM || seq < leaf->first)
            leaf->first = seq;
        if (seq > leaf->due)
            leaf->due = seq;
    }
}

/* first, due and owner of every leaf. */
static void look_at_leaves(ckpt_stream_job *c, int *owner)
{
    ckpt_leaf_list *list = &c->leaves;
    for (size_t i = 0, next; i < list->n; i = next) {
        for (next = i + 1; next < list->n && list->leaves[next].gather == list->leaves[i].gather;)
            next++;
        gather_leaves g = {c, list->leaves + i, owner != NULL ? owner + i : NULL, next - i};
        if (list->leaves[i].written != NULL)
            ckpt_written_needs(&c->written, list->leaves[i].gather, need, &g);
    }
    ckpt_pace_originals(list);
}

/* Several processes: who hashes what. Those that lie in files of several are read back from them. */
static ckpt_status divide_leaves(ckpt_stream_job *c, int *owner, ckpt_err *err)
{
    ckpt_leaf_list *list = &c->leaves;
    uint64_t total = 0, at = 0;
    size_t kept = 0;
    c->shares.n = list->n;
    c->shares.all = malloc((list->n + 1) * sizeof *c->shares.all);
    c->late.leaves = malloc((list->n + 1) * sizeof *c->late.leaves);
    if (c->shares.all == NULL || c->late.leaves == NULL)
        return no_memory(err);
    for (size_t i = 0; i < list->n; i++)
        total += list->leaves[i].bytes;
    for (size_t i = 0; i < list->n; at += c->shares.all[i++].bytes) {
        const ckpt_leaf leaf = c->shares.all[i] = list->leaves[i];
        bool late = owner[i] == LATE;
        if (owner[i] < 0)
            owner[i] = ckpt_share_of(c->share, at, leaf.bytes, total);
        if (owner[i] != c->share->rank)
            continue;
        if (late)
            c->late.leaves[c->late.n++] = leaf;
        else
            list->leaves[kept++] = leaf;
    }
    list->n = kept;
    return CKPT_OK;
}

static ckpt_status settle_leaves(ckpt_stream_job *c, ckpt_err *err)
{
    int *owner = NULL;
    if (!ckpt_share_alone(c->share)) {
        owner = c->shares.owner = malloc((c->leaves.n + 1) * sizeof *owner);
        if (owner == NULL)
            return no_memory(err);
        for (size_t i = 0; i < c->leaves.n; i++)
            owner[i] = NOBODY;
    }
    look_at_leaves(c, owner);
    ckpt_status status = owner != NULL ? divide_leaves(c, owner, err) : CKPT_OK;
    return status == CKPT_OK ? ckpt_leaves_by_due(&c->leaves, (uint32_t)c->n_pieces + 1, err)
                             : status;
}

/* ---- items ------------------------------------------------------------------------------------- */

/* Leaves that are due beside this piece. */
static void add_beside(const ckpt_leaf_list *list, size_t *next, ckpt_item_of_work *it)
{
    uint64_t bytes = 0;
    it->first_leaf = *next;
    while (*next < list->n && list->leaves[*next].due <= it->seq &&
           bytes + list->leaves[*next].bytes <= BESIDE_MAX) {
        bytes += list->leaves[(*next)++].bytes;
        it->n_leaves++;
    }
}

/* Whole groups of the leaves that are due after piece `seq`. */
static void add_groups(ckpt_stream_job *c, size_t *next, uint32_t seq, size_t least)
{
    const ckpt_leaf_list *list = &c->leaves;
    for (;;) {
        size_t n = 0;
        while (n < CKPT_LEAF_GROUP && *next + n < list->n && list->leaves[*next + n].due <= seq)
            n++;
        if (n == 0 || n < least)
            return;
        c->items[c->n_items++] =
            (ckpt_item_of_work){.lane = CKPT_NO_LANE, .first_leaf = *next, .n_leaves = (uint32_t)n};
        *next += n;
    }
}

ckpt_status ckpt_stream_order(ckpt_stream_job *c, uint64_t slot, int workers, int cores,
                              ckpt_err *err)
{
    ckpt_status status = count_pieces(c, slot, err);
    size_t next = 0;
    if (status != CKPT_OK)
        return status;
    number_pieces(c, workers, cores);
    status = settle_leaves(c, err);
    if (status != CKPT_OK)
        return status;
    size_t n = c->n_pieces + c->leaves.n;
    ckpt_item_of_work *pieces = calloc(c->n_pieces + 1, sizeof *pieces);
    c->items = malloc((n + 1) * sizeof *c->items);
    if (c->items == NULL || pieces == NULL) {
        free(pieces);
        return no_memory(err);
    }
    for (size_t i = 0; i < c->n_lanes; i++) {
        const ckpt_lane *l = &c->lanes[i];
        for (uint64_t at = 0; at < l->size; at += l->step) {
            uint32_t seq = c->seqs[l->first_seq + at / l->step];
            pieces[seq] = (ckpt_item_of_work){.offset = at, .lane = (uint32_t)i, .seq = seq};
        }
    }
    for (size_t i = 0; i < c->n_pieces; i++) {
        ckpt_item_of_work *it = &c->items[c->n_items++];
        *it = pieces[i];
        if (c->beside && c->lanes[it->lane].n == 1)
            add_beside(&c->leaves, &next, it);
        else
            add_groups(c, &next, it->seq, CKPT_LEAF_GROUP);
    }
    add_groups(c, &next, CKPT_NO_ITEM, 1);
    free(pieces);
    return CKPT_OK;
}
