// The last norm and the logits of a few rows. Each logit is one chain over all of H, as in kernels.py. A warp has tiles
// of 8 rows of the table, CTAS * WARPS tiles apart, so that no multiprocessor ends much later than others; pieces of 128
// columns of them pass through its ring in shared memory.

#pragma once

#include "inputs.cuh"

template <int ROWS>
struct Logits : Inputs<ROWS, NORM, HIDDEN, UNIT> {
    using Base = Inputs<ROWS, NORM, HIDDEN, UNIT>;
    using Base::p;
    using Base::shared;
    using Base::warp;
    using Base::lane;
    using Base::inputs;
    using Base::SEGMENTS;

    static constexpr int PIECE = TILE * STRIDE, RING = Base::LEVELS;  // pieces of a warp in its ring
    static constexpr int BYTES = Base::WEIGHTS + RING * Base::LEVEL;
    __device__ int tile(int turn) const { return (turn * WARPS + warp) * CTAS + blockIdx.x; }
    __device__ uint32_t ring() const { return shared_address(shared) + Base::WEIGHTS + warp * (RING * PIECE); }

    // Copies a piece of a tile, if there is such a tile, two rows at once. Rows behind the last one repeat it.
    __device__ void copy_piece(int tile, int segment, int place, uint64_t policy) const {
        const int column = segment * SEGMENT + lane % 16 * 8;
        if (tile * TILE < p.columns && column < HIDDEN) {
#pragma unroll
            for (int i = 0; i < TILE; i += 2) {
                const int row = min(tile * TILE + i + lane / 16, p.columns - 1);
                const uint32_t to = ring() + place * PIECE + (i + lane / 16) * STRIDE + lane % 16 * 16;
                copy_16(to, p.weight + static_cast<size_t>(row) * HIDDEN + column, policy);
            }
        }
        close_group();
    }

    __device__ void multiply(float (&c)[4], int segment, int place) const {
        const uint32_t x = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0)) + lane / 8 * 16 + segment * (SEGMENT * 2);
        const uint32_t weights = ring() + place * PIECE + lane % 8 * STRIDE + lane / 8 * 16;
#pragma unroll
        for (int part = 0; part < PARTS && segment * SEGMENT + part * 32 < HIDDEN; ++part) {
            uint32_t a[4], b[4];
            load_matrices(a, x + 64 * part);
            load_matrices(b, weights + 64 * part);
            Pairs<T>::multiply(c, a[0], a[1], b[0], b[1]);
            Pairs<T>::multiply(c, a[2], a[3], b[2], b[3]);
        }
    }

    __device__ void store(const float (&c)[4], int tile) const {
        const int column = tile * TILE + lane % 4 * 2;
        float* const to = p.logits + static_cast<size_t>(lane / 4) * p.columns + column;
        if (lane / 4 < p.rows && column < p.columns) to[0] = c[0];
        if (lane / 4 < p.rows && column + 1 < p.columns) to[1] = c[1];
    }

    __device__ void run() const {
        launch_successor();
        const uint64_t policy = evict_first_policy();
        const typename Base::Chunks weight = this->load_vector(p.norm_weight);
        typename Base::Chunks bias{};
        if constexpr (!RMS) bias = this->load_vector(p.norm_bias);
#pragma unroll
        for (int piece = 0; piece < RING; ++piece) {
            copy_piece(tile(piece / SEGMENTS), piece % SEGMENTS, piece, policy);
            wait_for_groups<0>();
        }
        wait_for_predecessor();
        this->keep_normal(this->load_rows(), weight, bias);
        __syncthreads();
        int place = 0;
#pragma unroll 1
        for (int turn = 0; tile(turn) * TILE < p.columns; ++turn) {
            float c[4] = {};
#pragma unroll
            for (int segment = 0; segment < SEGMENTS; ++segment) {
                wait_for_groups<RING - 1>();
                __syncwarp();
                multiply(c, segment, place);
                __syncwarp();
                const int next = segment + RING;
                copy_piece(tile(turn + next / SEGMENTS), next % SEGMENTS, place, policy);
                place = place + 1 < RING ? place + 1 : 0;
            }
            store(c, tile(turn));
        }
    }
};

template <int ROWS>
__global__ void __launch_bounds__(THREADS, 2) compute_logits(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x;
    Logits<ROWS>{{{p, shared, thread, thread / WARP, thread % WARP, 0, 0}}}.run();
}

extern "C" const char* launch_logits(const Product* p, cudaStream_t stream) {
    const auto launch = [&](auto kernel, int bytes) { return launch_dependent(kernel, CTAS, bytes, *p, true, stream); };
    if (p->rows == 1) return launch(compute_logits<1>, Logits<1>::BYTES);
    if (p->rows == 2) return launch(compute_logits<2>, Logits<2>::BYTES);
    return launch(compute_logits<4>, Logits<4>::BYTES);
}
