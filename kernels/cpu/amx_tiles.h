/* Matrix tiles of up to 16 rows by 64 bytes: Intel's AMX, or an emulation in plain C.

   With -DEMULATE_TILES, the emulation is used everywhere, so that code built on tiles can be tested
   on any processor. Without this flag, code for tiles is compiled if the target has AMX with
   bfloat16 and int8, and used if tiles_work() returns true. If tiles_work() returns false,
   attention_bf16_pairs.inc computes attention over the same pool, so the target must have
   AVX512BF16 too. Tile numbers must be compile-time constants. */

#ifndef BATCHINFER_AMX_TILES_H
#define BATCHINFER_AMX_TILES_H

#include <stdint.h>

#define TILE_ROW_BYTES 64
#define MAX_TILE_ROWS 16

#if defined(EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) \
                               && defined(__AMX_INT8__) && defined(__AVX512BF16__))
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* Returns 1 if this process may use tiles, else 0. The answer never changes. */
int tiles_work(void);

/* The operand of LDTILECFG. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#if defined(EMULATE_TILES)
void tile_configure(const tile_shapes *); /* sets all tiles to 0 */
void tile_release(void);
void tile_zero(int tile);
void tile_load(int tile, const void *from, int64_t stride); /* strides in bytes */
void tile_store(int tile, void *to, int64_t stride);
void tile_dot_bf16(int sum, int left, int right);
void tile_dot_int8(int sum, int left, int right);
#elif HAS_TILES
#include <immintrin.h>
/* Keeps the compiler from moving loads and stores across tile intrinsics, which read and write
   memory although their definitions do not say so. */
#define TILE_READS_MEMORY __asm__ volatile("" ::: "memory")
#define tile_configure(shapes) do { TILE_READS_MEMORY; _tile_loadconfig(shapes); } while (0)
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) \
    do { TILE_READS_MEMORY; _tile_loadd(tile, from, stride); } while (0)
#define tile_store(tile, to, stride) \
    do { _tile_stored(tile, to, stride); TILE_READS_MEMORY; } while (0)
#define tile_dot_bf16(sum, left, right) _tile_dpbf16ps(sum, left, right)
#define tile_dot_int8(sum, left, right) _tile_dpbssd(sum, left, right)
#endif

#if HAS_TILES
/* Configures the tiles for up to 32 rows: tiles 0 to 3 hold a 2 x 2 grid of sums, tiles 4 and 5
   hold the rows, and tiles 6 and 7 hold the matrix that the rows are multiplied by. */
static inline void tile_configure_pairs(int rows) {
    tile_shapes shapes = {.palette = 1};
    const int low = rows < MAX_TILE_ROWS ? rows : MAX_TILE_ROWS, high = rows > low ? rows - low : 1;
    for (int tile = 0; tile < 8; tile++)
        shapes.row_bytes[tile] = TILE_ROW_BYTES, shapes.rows[tile] = MAX_TILE_ROWS;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = (uint8_t)low;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = (uint8_t)high;
    tile_configure(&shapes);
}
#endif

#endif
