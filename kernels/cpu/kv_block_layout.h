/* Layout of the keys and values of one KV head in a block of the pool.

   In a block of `size` positions, keys are stored as [width][size], and values as [size][width],
   where `width` is the number of elements of a position. Attention then loads vectors without
   transposing: a vector of keys holds the same element of adjacent positions, and a vector of
   values holds adjacent elements of one position. If the processor multiplies pairs of 16-bit
   elements, or tiles of such pairs, the two elements of a pair are adjacent in memory. Keys have
   pairs of elements, [width / 2][size][2], if the width is even; values have pairs of positions,
   [size / 2][width][2], if the size is even.

   float8 keys and values are never paired, because they are converted to floats first. */

#ifndef BATCHINFER_KV_BLOCK_LAYOUT_H
#define BATCHINFER_KV_BLOCK_LAYOUT_H

#include "element_types.h"
#include "amx_tiles.h"

#define PAIRED(element) ((HAS_PAIRS || HAS_TILES) && sizeof(element) == 2)

/* Returns the offset of element `d` of the key at position `p` of its block. */
static inline int64_t key_at(const int paired, int width, int size, int d, int p) {
    return paired && width % 2 == 0 ? 2 * ((int64_t)d / 2 * size + p) + d % 2
                                    : (int64_t)d * size + p;
}

/* Returns the offset of element `d` of the value at position `p` of its block. */
static inline int64_t value_at(const int paired, int width, int size, int d, int p) {
    return paired && size % 2 == 0 ? 2 * ((int64_t)p / 2 * width + d) + p % 2
                                   : (int64_t)p * width + d;
}

#endif
