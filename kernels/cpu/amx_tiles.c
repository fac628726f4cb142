/* Requests permission to use AMX, or emulates its tiles in plain C as a reference.

   The reference follows the definitions of LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS and TDPBSSD
   in Intel's Software Developer's Manual, volume 2. */

#include "no_reassociation.h"

#include "amx_tiles.h"

#include <math.h>
#include <string.h>

#if defined(EMULATE_TILES)

int tiles_work(void) { return 1; }

static _Thread_local struct {
    tile_shapes shapes;
    _Alignas(64) uint8_t data[8][MAX_TILE_ROWS][TILE_ROW_BYTES];
} state;

void tile_configure(const tile_shapes *shapes) {
    memset(&state, 0, sizeof(state));
    state.shapes = *shapes;
}

void tile_release(void) { memset(&state, 0, sizeof(state)); }

void tile_zero(int tile) { memset(state.data[tile], 0, sizeof(state.data[tile])); }

void tile_load(int tile, const void *from, int64_t stride) {
    tile_zero(tile);
    for (int r = 0; r < state.shapes.rows[tile]; r++)
        memcpy(state.data[tile][r], (const char *)from + r * stride, state.shapes.row_bytes[tile]);
}

void tile_store(int tile, void *to, int64_t stride) {
    for (int r = 0; r < state.shapes.rows[tile]; r++)
        memcpy((char *)to + r * stride, state.data[tile][r], state.shapes.row_bytes[tile]);
}

static inline float from_bits(uint32_t bits) { /* denormals count as 0 */
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float without_denormals(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return from_bits(bits);
}

static inline float element(const uint8_t *row, int i) { /* the i-th bfloat16 */
    uint16_t half;
    memcpy(&half, row + 2 * i, 2);
    return from_bits((uint32_t)half << 16);
}

/* The products of the pairs' first elements are added in one chain of fused multiply-adds that
   begins at 0; the products of the second elements are added in another such chain. The results of
   both chains are added to each other, and then to the sum. Rounds to nearest even. Denormal inputs
   count as 0, and denormal results become 0. */
void tile_dot_bf16(int sum, int left, int right) {
    const int columns = state.shapes.row_bytes[sum] / 4, pairs = state.shapes.row_bytes[left] / 4;
    for (int m = 0; m < state.shapes.rows[sum]; m++) {
        float chains[2][TILE_ROW_BYTES / 4] = {{0}};
        for (int k = 0; k < pairs; k++)
            for (int i = 0; i < 2; i++) {
                const float x = element(state.data[left][m], 2 * k + i);
                for (int n = 0; n < columns; n++)
                    chains[i][n] = without_denormals(
                        fmaf(x, element(state.data[right][k], 2 * n + i), chains[i][n]));
            }
        for (int n = 0; n < columns; n++) {
            float *at = (float *)state.data[sum][m] + n;
            const float both = without_denormals(chains[0][n] + chains[1][n]);
            *at = without_denormals(without_denormals(*at) + both);
        }
    }
}

/* Multiplies groups of four signed bytes. Sums are exact unless they overflow; then they wrap
   around. */
void tile_dot_int8(int sum, int left, int right) {
    const int columns = state.shapes.row_bytes[sum] / 4, bytes = state.shapes.row_bytes[left];
    for (int m = 0; m < state.shapes.rows[sum]; m++)
        for (int k = 0; k < bytes; k++)
            for (int n = 0; n < columns; n++)
                ((uint32_t *)state.data[sum][m])[n] +=
                    (uint32_t)((int8_t)state.data[left][m][k]
                               * (int8_t)state.data[right][k / 4][4 * n + k % 4]);
}

#elif HAS_TILES

#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023 /* <asm/prctl.h> of Linux 5.16 and later */
#define XFEATURE_XTILEDATA 18

int tiles_work(void) {
    static atomic_int answer; /* 0: not requested yet; 1: granted; -1: refused */
    if (!answer) answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? -1 : 1;
    return answer > 0;
}

#else

int tiles_work(void) { return 0; }

#endif
