/* How the keys and values of one KV head lie in a block of the pool.

   Keys [width][size] and values [size][width]: attention loads a vector of neighbouring positions,
   or of neighbours in width, and transposes nothing. Where the processor multiplies pairs of 16
   bits, or tiles of them, those that are multiplied and added in one instruction stand together: neighbours in width
   of keys, neighbours in position of values, [width / 2][size][2] and [size / 2][width][2]. An odd
   width, or size, has no pairs.

   Keys and values of float8 are never in pairs: they are widened to floats first. */

#ifndef BATCHINFER_BLOCKS_H
#define BATCHINFER_BLOCKS_H

#include "elements.h"
#include "tiles.h"

#define PAIRED(element) ((HAS_PAIRS || HAS_TILES) && sizeof(element) == 2)

/* Where element `d` of the key at position `p` of its block is. */
static inline int64_t key_at(const int paired, int width, int size, int d, int p) {
    return paired && width % 2 == 0 ? 2 * ((int64_t)d / 2 * size + p) + d % 2
                                    : (int64_t)d * size + p;
}

/* Where element `d` of the value at position `p` of its block is. */
static inline int64_t value_at(const int paired, int width, int size, int d, int p) {
    return paired && size % 2 == 0 ? 2 * ((int64_t)p / 2 * width + d) + p % 2
                                   : (int64_t)p * width + d;
}

#endif
