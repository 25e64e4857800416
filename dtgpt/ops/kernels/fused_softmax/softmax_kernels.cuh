// Kernels of the scaled masked softmax and its gradient; softmax.py says what they compute.
//
// One warp holds a row of up to 1024 columns in registers, several warps a longer one. A thread owns octets: eight
// neighbouring columns, in 16 bits one access of 16 bytes, and under dropout one evaluation of Philox. Octets that
// causality hides are never read. They are written as zeros, because the matrix product that follows reads whole rows,
// and before any arithmetic, so that these stores overlap with the loads.

#pragma once

#include "octets.cuh"

constexpr int WARP = 32;
constexpr int MOST_OCTETS = 4;                 // of a thread: eight bits for each fit into a word
constexpr int MOST_THREADS = 512;              // of a row
constexpr unsigned SHARING = 128;              // rows this far apart share low digits of dropout, as in sliced.py
constexpr float LOG2_E = 1.4426950408889634f;  // exponentials are taken to the base 2, which the hardware has

struct Problem {          // as in softmax_kernels.py
    const void* input;    // [rows, columns]: scores; for the gradient without dropout: probabilities
    const void* grad;     // [rows, columns], for the gradient alone
    const uint8_t* mask;  // null, or bytes: 1 where a column may not be attended
    const int64_t* key;   // null (no dropout), or [batch, 2]
    void* result;         // [rows, columns]
    float* log_sums;      // [rows]: binary logarithm of the sum of exponentials, for dropout alone
    int64_t mask_batch, mask_query;  // strides of the mask
    int rows, heads, queries, columns;
    int causal;
    int aligned;           // rows are whole octets, and every tensor begins at a multiple of 16 bytes
    int type;              // 0: float, 1: half, 2: bfloat16
    float scale;           // above 0
    float keep_scale;      // factor of kept probabilities
    unsigned drop;         // how many of 2^16 equally likely values drop an element
    unsigned first_head, first_query, first_octet;  // of this shard, in the index within a sample
    int threads;           // of a block whose rows have one warp each
    int most_octets;       // of a thread, in rows that several warps can share
};

// The row of this thread. Columns from `visible` on are hidden by causality.
struct Row {
    int index, batch, head, query, visible;
    int64_t offset;

    __device__ explicit Row(const Problem& p) {
        index = blockIdx.x * blockDim.y + threadIdx.y;
        const int matrix = index / p.queries;
        query = index - matrix * p.queries;
        batch = matrix / p.heads;
        head = matrix - batch * p.heads;
        visible = p.causal ? min(max(query + p.columns - p.queries + 1, 0), p.columns) : p.columns;
        offset = int64_t(index) * p.columns;
    }
};

// The first column of a thread's octet j.
__device__ int column_of(int j) { return OCTET * (threadIdx.x + j * blockDim.x); }

// All octets of a row that causality does not hide, before the first of them is used.
template <bool ALIGNED, typename T, int OCTETS>
__device__ void load(const Row& row, const void* tensor, Octet<T> (&octets)[OCTETS]) {
    const T* source = static_cast<const T*>(tensor) + row.offset;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        octets[j] = Octet<T>();
        if (ALIGNED && column_of(j) < row.visible) {
            octets[j] = *reinterpret_cast<const Octet<T>*>(source + column_of(j));
        }
        for (int i = 0; !ALIGNED && i < OCTET; ++i) {
            if (column_of(j) + i < row.visible) reinterpret_cast<T*>(octets[j].word)[i] = source[column_of(j) + i];
        }
    }
}

template <bool ALIGNED, typename T>
__device__ void store(const Problem& p, const Row& row, int column, const Octet<T>& octet) {
    T* target = static_cast<T*>(p.result) + row.offset + column;
    if (ALIGNED) *reinterpret_cast<Octet<T>*>(target) = octet;
    for (int i = 0; !ALIGNED && i < OCTET; ++i) {
        if (column + i < p.columns) target[i] = reinterpret_cast<const T*>(octet.word)[i];
    }
}

template <bool ALIGNED, typename T, int OCTETS>
__device__ void store_hidden_zeros(const Problem& p, const Row& row) {
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        const int column = column_of(j);
        if (column >= row.visible && column < p.columns) store<ALIGNED>(p, row, column, Octet<T>());
    }
}

// Which columns of an octet causality shows.
__device__ unsigned shown(const Row& row, int column) { return ALL >> (OCTET - min(row.visible - column, OCTET)); }

// Which columns of an octet causality shows and the mask does not hide.
template <bool ALIGNED>
__device__ unsigned attended(const Problem& p, const Row& row, int column) {
    unsigned bits = shown(row, column);
    if (p.mask == nullptr) return bits;
    const uint8_t* source = p.mask + row.batch * p.mask_batch + row.query * p.mask_query + column;
    uint2 bytes = make_uint2(0, 0);
    if (ALIGNED) bytes = *reinterpret_cast<const uint2*>(source);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        const unsigned word = i < 4 ? bytes.x : bytes.y;
        const unsigned hidden = ALIGNED ? word >> 8 * (i % 4) & 1 : column + i < p.columns ? source[i] : 1;
        bits &= ~(hidden << i);
    }
    return bits;
}

// Philox4x32-10 (Salmon et al., SC'11).
__device__ void philox(unsigned (&word)[4], unsigned k0, unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t(word[0]) * 0xD2511F53u, second = uint64_t(word[2]) * 0xCD9E8D57u;
        word[0] = unsigned(second >> 32) ^ word[1] ^ k0;
        word[1] = unsigned(second);
        word[2] = unsigned(first >> 32) ^ word[3] ^ k1;
        word[3] = unsigned(first);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// Which columns of an octet dropout keeps, by the rule of sliced.py. The four octets of a half of 32 columns belong to
// adjacent threads, of which each evaluates Philox once, for four of the 16 digits: the threads 0 and 1 for those that
// rows share, 2 and 3 for the row's own. Each finds what its digits decide for either decision by the digits below.
__device__ unsigned kept(const Problem& p, const Row& row, int column, unsigned k0, unsigned k1) {
    const unsigned octet = p.first_octet + column / OCTET, place = octet % 4, own = place / 2;
    const unsigned query = p.first_query + row.query, block = octet / 8 * 4 + place % 2;
    unsigned word[4] = {block + own * (octet / 4 % 2 * 2), own ? query : 0x80000000u + query % SHARING,
                        p.first_head + row.head, 0};
    philox(word, k0, k1);
    unsigned if_dropped = 0, if_kept = ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool both = p.drop >> (4 * place + i) & 1;  // the digit of the threshold is 1
        if_dropped = both ? if_dropped & word[i] : if_dropped | word[i];
        if_kept = both ? if_kept & word[i] : if_kept | word[i];
    }
    const unsigned first = threadIdx.x % WARP & ~3u, quad = 0xfu << first;
    unsigned bits = ~0u;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned zeros = __shfl_sync(quad, if_dropped, first + i), ones = __shfl_sync(quad, if_kept, first + i);
        bits = (bits & ones) | (~bits & zeros);
    }
    const unsigned shifted = bits >> ((place & 1) * 8 + (place & 2) * 2);  // even columns from bit 0, odd ones from 16
    unsigned result = 0;
#pragma unroll
    for (int i = 0; i < OCTET; ++i) result |= (shifted >> (i % 2 * 16 + i / 2) & 1) << i;
    return result;
}

// `kept` of all octets of a thread, eight bits each, for which no data need to have arrived.
template <int OCTETS>
__device__ unsigned all_kept(const Problem& p, const Row& row) {
    const unsigned k0 = unsigned(p.key[2 * row.batch]), k1 = unsigned(p.key[2 * row.batch + 1]);
    unsigned bits = 0;
#pragma unroll
    for (int j = OCTETS - 1; j >= 0; --j) {  // in this order nvcc 13.0 spills no register of `backward`
        const int half = column_of(j) / (4 * OCTET) * (4 * OCTET);  // its four threads must agree
        if (half < row.visible) bits |= kept(p, row, column_of(j), k0, k1) << OCTET * j;
    }
    return bits;
}

struct Largest {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Combines one value of each thread of a row. A block whose row has several warps has no other row.
template <typename Combine>
__device__ float over_row(float value, Combine combine) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
    }
    if (blockDim.x == WARP) return value;
    __shared__ float parts[MOST_THREADS / WARP];
    __syncthreads();  // the parts of the combination before this one have been read
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll 1
    for (int warp = 1; warp < int(blockDim.x) / WARP; ++warp) value = combine(value, parts[warp]);
    return value;
}

template <typename T, int OCTETS, bool DROPOUT, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, sizeof(T) == 2 && ALIGNED ? 2 : 1) forward(const Problem p) {
    const Row row(p);
    if (row.index >= p.rows) return;
    Octet<T> scores[OCTETS];
    load<ALIGNED>(row, p.input, scores);
    store_hidden_zeros<ALIGNED, T, OCTETS>(p, row);
    const unsigned keep = DROPOUT ? all_kept<OCTETS>(p, row) : ~0u;

    float largest = -INFINITY, values[OCTETS][OCTET], sum = 0;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (column_of(j) >= row.visible) continue;
        replace(scores[j], attended<ALIGNED>(p, row, column_of(j)), -INFINITY);
        largest = larger(largest, scores[j]);
    }
    largest = over_row(largest, Largest());
    const float slope = p.scale * LOG2_E;
    const float top = largest == -INFINITY ? 0 : slope * largest;  // nothing to attend to: every exponential is 0
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (column_of(j) >= row.visible) continue;
        widen(scores[j], values[j]);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) sum += values[j][i] = exp2f(fmaf(values[j][i], slope, -top));
    }
    sum = over_row(sum, Sum());
    if (DROPOUT && threadIdx.x == 0) p.log_sums[row.index] = sum == 0 ? INFINITY : top + log2f(sum);
    const float factor = sum == 0 ? 0 : p.keep_scale / sum;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (column_of(j) >= row.visible) continue;
#pragma unroll
        for (int i = 0; i < OCTET; ++i) values[j][i] = keep >> (OCTET * j + i) & 1 ? values[j][i] * factor : 0;
        store<ALIGNED>(p, row, column_of(j), narrow<T>(values[j]));
    }
}

// d scores = scale * probability * (grad - sum of probability * grad), grad being 0 where dropout dropped. Under
// dropout the probabilities are computed again from the scores.
template <typename T, int OCTETS, bool DROPOUT, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, sizeof(T) == 2 && ALIGNED ? 2 : 1) backward(const Problem p) {
    const Row row(p);
    if (row.index >= p.rows) return;
    Octet<T> inputs[OCTETS], grads[OCTETS];
    load<ALIGNED>(row, p.input, inputs);
    load<ALIGNED>(row, p.grad, grads);
    store_hidden_zeros<ALIGNED, T, OCTETS>(p, row);
    const unsigned keep = DROPOUT ? all_kept<OCTETS>(p, row) : ~0u;
    const float log_sum = DROPOUT ? p.log_sums[row.index] : 0;  // read after `keep`: a register less during Philox

    float probabilities[OCTET], gradients[OCTET], sum = 0;
    const auto widen_both = [&](int j) {
        widen(inputs[j], probabilities);
        widen(grads[j], gradients);
#pragma unroll
        for (int i = 0; DROPOUT && i < OCTET; ++i) {
            probabilities[i] = exp2f(fmaf(probabilities[i], p.scale * LOG2_E, -log_sum));
        }
    };
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (column_of(j) >= row.visible) continue;
        if (DROPOUT) replace(inputs[j], attended<ALIGNED>(p, row, column_of(j)), -INFINITY);
        replace(grads[j], keep >> OCTET * j & shown(row, column_of(j)), 0);
        widen_both(j);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) sum += probabilities[i] * gradients[i];
    }
    sum = over_row(sum, Sum());
    forget_floats(inputs);
    forget_floats(grads);
    const float factor = p.scale * p.keep_scale;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (column_of(j) >= row.visible) continue;
        widen_both(j);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) gradients[i] = probabilities[i] * factor * (gradients[i] - sum);
        store<ALIGNED>(p, row, column_of(j), narrow<T>(gradients));
    }
}
