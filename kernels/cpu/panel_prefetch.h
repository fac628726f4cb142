/* Prefetches the next panel of a packed weight in shares, spread over the multiplication by the
   current panel. */

#ifndef BATCHINFER_PANEL_PREFETCH_H
#define BATCHINFER_PANEL_PREFETCH_H

#include "simd.h"

#define LINE 64 /* size of a cache line, in bytes */

typedef struct {
    const char *at, *end;
    int lines; /* cache lines per share */
} ahead;

/* Returns the panel after `panel`, to be prefetched in `times` shares. Each panel has `bytes`
   bytes. Nothing is prefetched after the last panel. */
INLINE ahead ahead_of(const void *panel, int64_t bytes, int is_last, int64_t times) {
    const char *after = (const char *)panel + bytes;
    return (ahead){after, is_last ? after : after + bytes,
                   times ? (int)((bytes / LINE + times - 1) / times) : 0};
}

INLINE void prefetch_share(ahead *next) {
    for (int line = 0; line < next->lines && next->at < next->end; line++, next->at += LINE)
        __builtin_prefetch(next->at, 0, 2);
}

#endif
