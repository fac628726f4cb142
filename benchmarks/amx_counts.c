/* Counts the instructions of the C kernels for AMX, on a processor without AMX.

   The kernels are compiled for AMX and run instruction by instruction (trap flag). A tile
   instruction is invalid on this processor; the handler of SIGILL lets amx_tiles.c emulate it.
   Compile with -no-pie and without OpenMP, link amx_tiles.c compiled with -DEMULATE_TILES, and run

       amx_counts gemm KIND KERNEL ROWS IN OUT GROUP    KIND: bf16, int8 or int4; KERNEL: 0 or 1
       amx_counts attention KERNEL SEQUENCES CONTEXT HEADS KV_HEADS WIDTH BLOCK

   Prints the hash of the result, the cache lines that hold weights or keys and values, the rows of
   tiles that were loaded, stored and multiplied, and how often each address of code ran. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "amx_tiles.h"
#include "arguments.h"
#include "element_types.h"

void pack_bf16(const pack_args *);
void pack_int8(const pack_args *);
void pack_groups(const pack_args *);
int64_t packed_bytes_bf16(const pack_args *);
int64_t packed_bytes_int8(const pack_args *);
int64_t packed_bytes_groups(const pack_args *);

extern char __executable_start, etext;
static uint32_t *runs; /* by offset from __executable_start */
static int64_t loaded, stored, multiplied;
static tile_shapes shapes;
static volatile int counting;

static void count(uint64_t address) {
    const char *at = (const char *)address;
    if (counting && at >= &__executable_start && at < &etext) runs[at - &__executable_start]++;
}

static void on_trap(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    ucontext_t *c = context;
    count((uint64_t)c->uc_mcontext.gregs[REG_RIP]);
    if (!counting) c->uc_mcontext.gregs[REG_EFL] &= ~0x100L;
}

static uint64_t reg(const ucontext_t *c, int number) {
    static const int at[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)c->uc_mcontext.gregs[at[number]];
}

typedef struct {
    uint64_t start, stride;
    int bytes; /* of ModRM, SIB and displacement */
} operand;

static operand operand_at(const ucontext_t *c, const uint8_t *modrm, int high_base, int high_index) {
    const int mode = *modrm >> 6, base = *modrm & 7, has_sib = base == 4;
    operand o = {.bytes = 1 + has_sib};
    int number = (has_sib ? modrm[1] & 7 : base) + 8 * high_base;
    if (has_sib) {
        const int index = (modrm[1] >> 3 & 7) + 8 * high_index;
        o.stride = index == 4 ? 0 : reg(c, index) << (modrm[1] >> 6);
    }
    if (mode == 0 && number % 8 == 5) abort(); /* no base: compilers do not use it here */
    o.start = reg(c, number);
    if (mode == 1) o.start += (int64_t)(int8_t)modrm[o.bytes], o.bytes += 1;
    if (mode == 2) {
        int32_t more;
        memcpy(&more, modrm + o.bytes, 4);
        o.start += (int64_t)more, o.bytes += 4;
    }
    return o;
}

/* Emulates one VEX-encoded tile instruction of Intel's manual, volume 2. */
static void on_illegal(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    ucontext_t *c = context;
    const uint8_t *at = (const uint8_t *)c->uc_mcontext.gregs[REG_RIP], *modrm = at + 4;
    if (at[0] != 0xc4 || (at[1] & 31) != 2) abort();
    const int prefix = at[2] & 3, third = ~(at[2] >> 3) & 7, first = *modrm >> 3 & 7;
    const int in_register = *modrm >> 6 == 3, second = *modrm & 7;
    operand o = {.bytes = 1};
    if (!in_register) o = operand_at(c, modrm, !(at[1] & 0x20), !(at[1] & 0x40));
    void *start = (void *)o.start;
    switch (at[3]) {
        case 0x49:
            if (in_register && prefix == 3) tile_zero(first);
            else if (in_register) tile_release();
            else tile_configure(start), memcpy(&shapes, start, sizeof(shapes));
            break;
        case 0x4b:
            if (prefix == 3) tile_load(first, start, (int64_t)o.stride), loaded += shapes.rows[first];
            else tile_store(first, start, (int64_t)o.stride), stored += shapes.rows[first];
            break;
        case 0x5c: tile_dot_bf16(first, second, third), multiplied += shapes.rows[first]; break;
        case 0x5e: tile_dot_int8(first, second, third), multiplied += shapes.rows[first]; break;
        default: abort();
    }
    c->uc_mcontext.gregs[REG_RIP] += 4 + o.bytes;
    count((uint64_t)c->uc_mcontext.gregs[REG_RIP]); /* no trap follows this instruction */
}

static void start(void) {
    counting = 1;
    __asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
}

static void stop(void) { counting = 0; }

static uint64_t hash_of(const void *bytes, size_t count) { /* FNV-1a */
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3ull;
    return hash;
}

static uint64_t state = 1;
static uint32_t bits(void) { /* xorshift64*: Vigna 2016, https://doi.org/10.1145/2845077 */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 0x2545F4914F6CDD1Dull) >> 40);
}

static void *memory(size_t bytes) { return aligned_alloc(64, (bytes + 127) / 64 * 64); }

static uint16_t *halves_of(size_t count) { /* in [-1, 1) */
    uint16_t *to = memory(2 * count);
    for (size_t i = 0; i < count; i++) to[i] = to_bf16((float)bits() / 8388608.0f - 1.0f);
    return to;
}

static void report(const void *out, size_t bytes, int64_t lines) {
    printf("hash %016llx\nlines %lld\nloaded %lld\nstored %lld\nmultiplied %lld\n",
           (unsigned long long)hash_of(out, bytes), (long long)lines, (long long)loaded,
           (long long)stored, (long long)multiplied);
    for (int64_t i = 0; i < &etext - &__executable_start; i++)
        if (runs[i]) printf("%llx %u\n", (unsigned long long)(i + &__executable_start), runs[i]);
}

static void gemm(char **from) {
    const int int8 = !strcmp(from[0], "int8"), int4 = !strcmp(from[0], "int4");
    const int64_t rows = atoi(from[2]), in = atoi(from[3]), outs = atoi(from[4]);
    const int64_t group = atoi(from[5]), groups = (in + group - 1) / group;
    uint8_t *codes = memory(outs * in), *zeros = memory(outs * groups);
    float *scales = memory(4 * outs * groups);
    for (int64_t i = 0; i < outs * in; i++) codes[i] = int4 ? bits() & 15 : bits() % 255 - 127;
    for (int64_t i = 0; i < outs * groups; i++) scales[i] = 0.01f + bits() * 1e-9f, zeros[i] = bits() & 15;
    pack_args p = {.weight = int8 || int4 ? (void *)codes : halves_of(outs * in), .scales = scales,
                   .zeros = zeros, .in_features = in, .out_features = outs, .group = group,
                   .num_threads = 1, .kernel = atoi(from[1]), .bits = 4};
    const int64_t size =
        (int4 ? packed_bytes_groups : int8 ? packed_bytes_int8 : packed_bytes_bf16)(&p);
    p.packed = memory(size);
    (int4 ? pack_groups : int8 ? pack_int8 : pack_bf16)(&p);
    uint16_t *out = memory(2 * rows * outs);
    const gemm_args a = {.x = halves_of(rows * in), .packed = p.packed, .out = out,
                         .num_rows = rows, .row_stride = in, .in_features = in,
                         .out_features = outs, .num_threads = 1};
    start();
    gemm_bf16(&a);
    stop();
    report(out, 2 * rows * outs, size / 64);
}

static void attention(char **from) {
    const int sequences = atoi(from[1]), context = atoi(from[2]), heads = atoi(from[3]);
    const int kv_heads = atoi(from[4]), width = atoi(from[5]), block = atoi(from[6]);
    const int each = (context + block - 1) / block; /* blocks of a sequence */
    const int64_t slot = (int64_t)kv_heads * block * width;
    int32_t *tables = memory(4 * sequences * each), *starts = memory(4 * (sequences + 1));
    int32_t *contexts = memory(4 * sequences);
    for (int i = 0; i < sequences * each; i++) tables[i] = (i * 37) % (sequences * each);
    for (int i = 0; i <= sequences; i++) starts[i] = i;
    for (int i = 0; i < sequences; i++) contexts[i] = context;
    uint16_t *out = memory(2 * sequences * heads * width);
    const attention_args a = {
        .query = halves_of(sequences * heads * width), .out = out,
        .keys = halves_of(sequences * each * slot), .values = halves_of(sequences * each * slot),
        .block_tables = tables, .query_starts = starts, .context_lens = contexts,
        .query_token_stride = heads * width, .query_head_stride = width,
        .out_token_stride = heads * width, .key_slot_stride = slot, .key_head_stride = block * width,
        .value_slot_stride = slot, .value_head_stride = block * width, .table_width = each,
        .num_sequences = sequences, .num_heads = heads, .num_kv_heads = kv_heads,
        .key_width = width, .value_width = width, .block_size = block, .num_threads = 1,
        .kernel = atoi(from[0]), .scale = 0.125f};
    start();
    attend_bf16(&a);
    stop();
    report(out, 2 * sequences * heads * width, (int64_t)sequences * each * 2 * 2 * slot / 64);
}

int main(int count_of_arguments, char **arguments) {
    if (count_of_arguments < 2) return 2;
    runs = calloc(&etext - &__executable_start, sizeof(*runs));
    struct sigaction trap = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    struct sigaction illegal = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &trap, NULL);
    sigaction(SIGILL, &illegal, NULL);
    if (!strcmp(arguments[1], "gemm") && count_of_arguments == 8) gemm(arguments + 2);
    else if (!strcmp(arguments[1], "attention") && count_of_arguments == 9) attention(arguments + 2);
    else return 2;
    return 0;
}
