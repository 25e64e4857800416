// What the parts of a product share: its arguments, its constants and the shared memory of a CTA.

#pragma once

#include "attention.cuh"
#include "exchange.cuh"

constexpr int TILE = 8;                   // rows of a weight that a tensor-core step takes
constexpr int SEGMENT = 128;              // columns of a chain
constexpr int GROUP = 4;                  // segments of a group
constexpr int STRIDE = SEGMENT * 2 + 16;  // bytes of a row of a segment: 16 more, so that 8 rows lie in different banks
constexpr int PARTS = SEGMENT / 32;       // of a segment: 32 columns are one load of four matrices
constexpr int MOST_KEPT = 4;              // chains of a warp whose weights fit into its registers
constexpr int MOST_BYTES = 110 * 1024;    // of shared memory of a CTA, so that two fit on a multiprocessor
// Copies of a warp, 512 bytes each, that are under way: more would delay what the kernel before this one loads.
constexpr int COPIES = 4;

enum Prologue { NORM, JOIN, MERGE, PLAIN };  // JOIN: the sum of a branch over ranks onto the residual, then NORM
// PACK: queries, keys and values as they are. SEND: this rank's part of a branch, to all ranks.
enum Epilogue { CACHE, PACK, ACTIVATION, RESIDUAL, SEND };

struct Product {
    const T* weight;            // [columns, size]
    const T* bias;              // [columns], or null
    const T* x;                 // NORM, JOIN, PLAIN: [rows, size]
    const T* norm_weight;       // NORM, JOIN: [size]
    const T* norm_bias;         // null where norms are RMSNorms
    const float* partial;       // MERGE: [rows, heads, SPLITS, HEAD]
    const float2* state;        // MERGE: [rows, heads, SPLITS], the maximum and the sum of each split
    const T* residual;          // RESIDUAL: [rows, columns]
    T* out;                     // [rows, columns], half of these after SwiGLU; CACHE: queries alone are written there
    T* keys;                    // CACHE: [slots, KV_HEADS, LENGTH, HEAD]
    T* values;
    const int64_t* slots;       // [rows]
    const int64_t* positions;   // [rows]
    const T* branch_bias;       // JOIN: [size], or null
    T* stream;                  // JOIN: [rows, size], x with the branch
    int rows, dependent;        // dependent: whether it may start before the kernel before it has ended
    float eps;
    int index;                  // JOIN, SEND: of the exchange, of those since the first kernel of a call
    Exchange exchange;
};

// Whether a product or a branch has this bias: a constant but where some have one and others have none.
__device__ inline bool is_there(const T* bias) {
    return BIASES == ALL_BIASES || (BIASES == SOME_BIASES && bias != nullptr);
}

// A thread's place in a product, and the shared memory of its CTA.
template <int ROWS, int SIZE, int COLUMNS>
struct Place {
    const Product& p;
    char* const shared;
    const int thread, warp, lane;
    const int first, count;  // this CTA's rows of the weight

    static constexpr int MOST_ROWS = (COLUMNS / UNIT + CTAS - 1) / CTAS * UNIT;
    static constexpr int TILES = (MOST_ROWS + TILE - 1) / TILE;
    static constexpr int SEGMENTS = (SIZE + SEGMENT - 1) / SEGMENT, SETS = (SEGMENTS + WARPS - 1) / WARPS;
    static_assert(SIZE % (SEGMENT / 2) == 0, "the last segment is whole or a half");
    __device__ bool exists(int set) const { return (set + 1) * WARPS <= SEGMENTS || warp + WARPS * set < SEGMENTS; }

    // Shared memory: sums of the norm | partial sums | inputs | weights
    static constexpr int PARTIALS = WARPS * 16, INPUTS = PARTIALS + SEGMENTS * ROWS * TILES * TILE * 4;
    static constexpr int INPUT_STRIDE = SIZE * 2 + 16, WEIGHTS = INPUTS + ROWS * INPUT_STRIDE;

    // Weights: all of a CTA's, [warp][set][row], where those of a warp fit into its registers. Else they pass through a
    // ring of pieces, a tile of a segment each: [warp][piece][row].
    static constexpr bool KEPT = TILES * SETS <= MOST_KEPT && SIZE % SEGMENT == 0;
    static constexpr int LEVEL = WARPS * TILE * STRIDE, LEVELS = (MOST_BYTES - WEIGHTS) / LEVEL;
    static constexpr int RING = LEVELS < TILES * SETS ? LEVELS : TILES * SETS;
    static_assert(KEPT || LEVELS >= 2, "the ring has room");
    static constexpr int BYTES = WEIGHTS + (KEPT ? WARPS * SETS * MOST_ROWS * STRIDE : RING * LEVEL);
    __device__ double2* sums() const { return reinterpret_cast<double2*>(shared); }
    __device__ float* partials(int segment, int row) const {
        return reinterpret_cast<float*>(shared + PARTIALS) + (segment * ROWS + row) * TILES * TILE;
    }
    __device__ char* inputs(int row) const { return shared + INPUTS + row * INPUT_STRIDE; }
};
