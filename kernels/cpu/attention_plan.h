/* Cuts a step's attention into tasks, and allocates the workspace of tasks. */

typedef struct {
    int32_t sequence, first, count; /* tokens [first, first + count) of a sequence's new tokens */
    int32_t position;               /* position of the first token */
    int32_t prompt; /* leading positions that the tokens see even outside their windows */
    int32_t end;                    /* one past the last position that any of the tokens sees */
    int32_t shared; /* number of leading positions whose blocks the previous tile reads too */
    int32_t row;    /* index of the tile's first row among the rows of all tiles */
} tile;

struct attention_plan {
    tile *tiles;     /* all tiles, then an empty tile whose `row` is the total number of rows */
    int64_t *starts; /* [num_tasks + 1] first tile of each task */
    int64_t num_tasks;
    int32_t max_tiles, max_rows; /* largest numbers of tiles and rows that a task has */
};

typedef struct {
    int32_t low, high, from; /* tiles [low, high) of a task continue at position `from` */
} part;

/* The positions to read after the current piece: the positions of `tile` from `from` up to
   `piece_end`. `tile` is NULL if nothing follows. */
typedef struct {
    const tile *tile;
    int32_t from, kv_head;
} next_tile;

/* Keys or values of one KV head at positions [from, to), which are prefetched line by line while
   another piece is computed. The hardware prefetcher cannot help, because blocks are scattered over
   memory pages. Prefetching all lines at once would delay the loads of the computation (measured:
   1.5 times as slow). */
typedef struct {
    const char *base, *at, *end;
    const int32_t *table;
    int64_t slot_bytes, token_bytes;
    int32_t from, to, block_size;
} prefetch_stream;

#define LINE 64 /* size of a cache line, in bytes */

/* Points the stream to its next block. Returns 0 if there is none. */
static int next_block(prefetch_stream *s) {
    if (s->from >= s->to) return 0;
    const int32_t offset = s->from % s->block_size, left = s->block_size - offset;
    const int32_t count = left < s->to - s->from ? left : s->to - s->from;
    s->at = s->base + s->table[s->from / s->block_size] * s->slot_bytes + offset * s->token_bytes;
    s->end = s->at + count * s->token_bytes;
    s->from += count;
    return 1;
}

#define BURST 8 /* lines that are prefetched without a test between them */

INLINE void prefetch_lines(prefetch_stream *s, int lines) {
    while (lines > 0 && (s->at < s->end || next_block(s))) {
        const char *at = s->at;
        if (lines >= BURST && s->end - at >= BURST * LINE) {
#pragma GCC unroll 8
            for (int line = 0; line < BURST; line++) __builtin_prefetch(at + line * LINE, 0, 2);
            s->at = at + BURST * LINE, lines -= BURST;
        } else {
            __builtin_prefetch(at, 0, 2);
            s->at = at + LINE, lines--;
        }
    }
}

#if HAS_TILES
#define ACC_LANES 16
#define HALF_ROWS (PIECE / 2)
#else
#define ACC_LANES LANES
#define HALF_ROWS 1
#endif

typedef struct {
    const tile *tiles;
    int32_t num_tiles, num_rows, kv_head;
    next_tile after; /* first piece of the thread's next task */
    part *parts; /* [tiles] */
    float *keys, *values;          /* copies of a piece: [width][PIECE], [PIECE][width] */
    float *q, *s, *acc;            /* [rows][...] */
    float *half;                   /* [HALF_ROWS][acc_stride] values; 0 at positions not seen */
    int32_t *configured;           /* [2] last arguments of configure (attention_amx.inc) */
    int32_t acc_stride;            /* elements between rows of acc: a multiple of ACC_LANES */
    float *m, *l, *top, *keep;     /* [rows], with space for 16 more */
    int32_t *from, *to;            /* [rows] row r sees positions [from[r], to[r]) of the piece */
} task;

/* Returns 1 if a position's value is the first part of its key (latents) instead of being stored
   separately; else 0. */
static inline int values_in_keys(const attention_args *a) { return a->values == a->keys; }

/* Returns the first position in a token's window; 0 without a window. */
static inline int32_t window_from(int32_t window, int32_t position) {
    return window && position >= window ? position + 1 - window : 0;
}

/* Returns one past the last position that a tile's token sees. */
static inline int32_t seen_to(const attention_args *a, const tile *e, int32_t token) {
    if (!a->query_ends) return e->position + token + 1;
    return a->query_ends[a->query_starts[e->sequence] + e->first + token];
}

/* Returns the first position at or after `from` that a tile reads: a position of its prompt, or of
   its first token's window. */
static inline int32_t read_from(const attention_args *a, const tile *e, int32_t from) {
    const int32_t begin = from < e->prompt ? 0 : window_from(a->sliding_window, e->position);
    return from > begin ? from : begin;
}

/* Returns one past the last position that a tile reads in the same pass as `from`. A piece that
   contains the end of the prompt is read in two passes, because a token may see only some of the
   positions after the prompt. */
static inline int32_t piece_end(const tile *e, int32_t from) {
    const int32_t end = from / PIECE * PIECE + PIECE;
    const int32_t most = from < e->prompt && e->prompt < e->end ? e->prompt : e->end;
    return end < most ? end : most;
}

static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* Puts adjacent tiles that share their first piece into one task, as long as enough tasks remain
   for all threads. Returns NULL if out of memory. */
attention_plan *attention_plan_of(const attention_args *a) {
    const int32_t group = a->num_heads / a->num_kv_heads, num_sequences = a->num_sequences;
    const int64_t all_rows = (int64_t)a->query_starts[num_sequences] * a->num_heads;
    int64_t wanted = all_rows / (4 * a->num_threads);
    if (wanted > TASK_ROWS) wanted = TASK_ROWS;
    const int32_t most = wanted > 16 ? (int32_t)wanted : 16; /* largest number of rows of a task */
    const int32_t per_tile = group < most ? most / group : 1;
    int64_t num_tiles = 0;
    for (int32_t i = 0; i < num_sequences; i++)
        num_tiles += (a->query_starts[i + 1] - a->query_starts[i] + per_tile - 1) / per_tile;
    attention_plan *p = calloc(1, sizeof(*p));
    if (!p) return NULL;
    p->tiles = malloc((num_tiles + 1) * sizeof(tile));
    p->starts = malloc((num_tiles + 1) * sizeof(int64_t));
    if (!p->tiles || !p->starts) return free_attention_plan(p), NULL;
    p->num_tasks = 0;
    p->max_tiles = p->max_rows = 1;
    /* Tiles of one task must see the same part of a piece. With a window, this is certain only
       within prompts, or if no context is longer than the window. */
    int shares = a->order != NULL;
    for (int32_t i = 0; a->sliding_window && !a->prompt_lens && i < num_sequences; i++)
        shares &= a->context_lens[i] <= a->sliding_window;
    int64_t at = 0;
    int32_t row = 0, task_row = 0;
    for (int32_t i = 0; i < num_sequences; i++) {
        const int32_t sequence = a->order ? a->order[i] : i;
        const int32_t length = a->query_starts[sequence + 1] - a->query_starts[sequence];
        for (int32_t first = 0; first < length; first += per_tile) {
            const int32_t count = length - first < per_tile ? length - first : per_tile;
            int32_t shared = shares && !first ? a->shared_lens[i] : 0;
            if (shared && a->prompt_lens) {
                shared = least(shared, a->prompt_lens[sequence]);
                shared = least(shared, a->prompt_lens[a->order[i - 1]]);
            }
            tile *e = p->tiles + at;
            *e = (tile){.sequence = sequence, .first = first, .count = count, .shared = shared};
            e->position = a->context_lens[sequence] - length + first;
            e->end = seen_to(a, e, count - 1);
            e->prompt = a->prompt_lens ? a->prompt_lens[sequence] : 0;
            e->row = row;
            if (at == 0 || shared < PIECE || row + count * group - task_row > most) {
                p->starts[p->num_tasks++] = at;
                task_row = row;
            }
            row += count * group;
            at++;
            if (row - task_row > p->max_rows) p->max_rows = row - task_row;
            const int32_t tiles = (int32_t)(at - p->starts[p->num_tasks - 1]);
            if (tiles > p->max_tiles) p->max_tiles = tiles;
        }
    }
    p->tiles[at].row = row;
    p->starts[p->num_tasks] = at;
    return p;
}

void free_attention_plan(attention_plan *p) {
    if (!p) return;
    free(p->tiles);
    free(p->starts);
    free(p);
}

/* Returns how many KV heads of a task one thread interleaves: at most `most`, with at most 64 rows
   in total, and more than 1 only if enough tasks remain for all threads. */
static int heads_at_once(const attention_args *a, const attention_plan *p, int most) {
    int heads = 1;
    while (2 * heads <= most && a->num_kv_heads % (2 * heads) == 0 && 2 * heads * p->max_rows <= 64
           && p->num_tasks * (a->num_kv_heads / (2 * heads)) >= 8 * a->num_threads)
        heads *= 2;
    return heads;
}

/* Allocates the workspace of a thread's tasks, one task for each of `num_heads` heads. The caller
   must free the workspace. Returns NULL if out of memory. */
static float *make_scratch(
    const attention_args *a, const attention_plan *p, task *heads, int num_heads) {
    const size_t dk = (a->key_width + 1) / 2 * 2, rows = p->max_rows;
    const size_t dv = (a->value_width + ACC_LANES - 1) / ACC_LANES * ACC_LANES;
    const size_t of_head = (rows * (dk + dv + PIECE) + 4 * (rows + 16) + 15) / 16 * 16;
    const size_t of_all = PIECE * (dk + dv) + HALF_ROWS * dv + 2 * rows + 2;
    const size_t bytes =
        (num_heads * of_head + of_all) * sizeof(float) + p->max_tiles * sizeof(part);
    float *const scratch = aligned_alloc(64, (bytes + 63) / 64 * 64), *at = scratch;
    if (!scratch) return NULL;
    memset(scratch, 0, bytes); /* some parts are read, but not used, before they are written */
    task shared = {.acc_stride = (int32_t)dv};
    shared.keys = at, at += PIECE * dk;
    shared.values = at, at += PIECE * dv;
    shared.half = at, at += HALF_ROWS * dv;
    for (int h = 0; h < num_heads; h++, at += of_head) {
        task *t = heads + h;
        *t = shared;
        t->s = at;
        t->q = t->s + rows * PIECE;
        t->acc = t->q + rows * dk;
        t->m = t->acc + rows * dv;
        t->l = t->m + rows + 16;
        t->top = t->l + rows + 16;
        t->keep = t->top + rows + 16;
    }
    for (int h = 0; h < num_heads; h++) {
        heads[h].from = (int32_t *)at;
        heads[h].to = heads[h].from + rows;
        heads[h].configured = heads[h].to + rows;
        heads[h].parts = (part *)(heads[h].configured + 2);
    }
    return scratch;
}

/* Returns the largest of `start` and a row's scores for a piece, ignoring NaN. */
INLINE float largest(const float *s, float start) {
#if defined(__AVX512F__)
    __m512 top = _mm512_set1_ps(start); /* max returns its second operand if the first is NaN */
    for (int p = 0; p < PIECE; p += 16) top = _mm512_max_ps(_mm512_loadu_ps(s + p), top);
    return _mm512_reduce_max_ps(top);
#else
    float top[16];
    for (int i = 0; i < 16; i++) top[i] = start;
    for (int p = 0; p < PIECE; p += 16)
        for (int i = 0; i < 16; i++) top[i] = s[p + i] > top[i] ? s[p + i] : top[i];
    for (int i = 1; i < 16; i++) top[0] = top[i] > top[0] ? top[i] : top[0];
    return top[0];
#endif
}

/* Replaces the numbers of a row at positions outside [from, to), which may be NaN. */
INLINE void only_seen(float *row, int32_t from, int32_t to, float other) {
    for (int32_t p = 0; p < PIECE; p++) row[p] = (p >= from) & (p < to) ? row[p] : other;
}

/* Computes one piece of online softmax: turns scores into weights, and scales sums and outputs to
   the new maximum. Row r sees positions [from[r], to[r]) of the piece; other positions get weight
   0. Every row takes the same steps in the same order. */
static __attribute__((noinline)) void weigh(
    const task *t, int first, int rows, int partial, float softcap) {
    float *s = t->s, *m = t->m + first, *l = t->l + first;
    float *top = t->top, *keep = t->keep;
    const int32_t *from = t->from, *to = t->to;
    for (int r = 0; partial && r < rows; r++) only_seen(s + r * PIECE, from[r], to[r], -INFINITY);
    for (int r = 0; softcap > 0.0f && r < rows; r++)
        for (int p = partial ? from[r] : 0; p < (partial ? to[r] : PIECE); p++)
            s[r * PIECE + p] = softcap * tanhf(s[r * PIECE + p] / softcap);
    for (int r = 0; r < rows; r++) {
        top[r] = largest(s + r * PIECE, m[r]);
        if (top[r] == -INFINITY) top[r] = 0.0f; /* every score is -inf or NaN */
    }
    /* Always compute 16 rows at a time, because the code for leftover rows may round differently. */
    for (int r = 0; r < rows; r += 16)
        for (int i = r; i < r + 16; i++)
            keep[i] = m[i] == -INFINITY ? 0.0f : exp_negative(m[i] - top[i]);
    memcpy(m, top, rows * sizeof(float));
    for (int r = 0; r < rows; r++) {
        float *row = s + r * PIECE, sum = 0.0f;
        for (int p = 0; p < PIECE; p++) row[p] = exp_negative(row[p] - m[r]);
        if (partial) only_seen(row, from[r], to[r], 0.0f);
        for (int p = 0; p < PIECE; p++) sum += row[p];
        l[r] = l[r] * keep[r] + sum;
    }
    for (int r = 0; r < rows; r++)
        if (keep[r] != 1.0f)
            for (int d = 0; d < t->acc_stride; d++) t->acc[(first + r) * t->acc_stride + d] *= keep[r];
}

#if HAS_PAIRS || HAS_TILES
/* Rounds weights to bfloat16. The results overwrite the beginning of each row's scores. */
static void round_weights(const task *t, int rows) {
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PIECE; p += LANES)
            store_rounded((uint16_t *)(t->s + r * PIECE) + p, load(t->s + r * PIECE + p));
}

/* Copies the values at positions [from, to) from the keys of one block to
   values[PIECE / 2][stride][2]. */
static __attribute__((noinline)) void pairs_of_keys(
    const attention_args *a, const uint16_t *block, int32_t from, int32_t to, uint16_t *values,
    int stride) {
    const int width = a->value_width, size = a->block_size;
    const int in_pairs = width % 2 == 0 && a->key_width % 2 == 0 && size % 2 == 0;
    for (int32_t p = from / 2 * 2; in_pairs && p < to; p += 2) {
        uint16_t *row = values + p % PIECE * stride;
        for (int d = 0; d < width; d += 2) { /* transpose 2 x 2: width and position */
            uint64_t both;
            memcpy(&both, block + key_at(1, a->key_width, size, d, p % size), 8);
            both = (both & 0xffff00000000ffffu) | (both >> 16 & 0xffff0000u)
                   | (both & 0xffff0000u) << 16;
            memcpy(row + 2 * d, &both, 8);
        }
    }
    for (int32_t p = from; !in_pairs && p < to; p++)
        for (int d = 0; d < width; d++)
            values[p % PIECE / 2 * 2 * stride + 2 * d + p % 2]
                = block[key_at(1, a->key_width, size, d, p % size)];
}
#endif
