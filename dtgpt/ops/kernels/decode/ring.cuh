// The weights of a CTA that are too many for registers, and their products with the inputs: each warp has a ring of
// pieces in shared memory, a tile of a segment each, and multiplies two while the next ones arrive. A warp executes its
// instructions one after the other, so that these must be few: loops over pieces are unrolled, which makes constants of
// the offsets of copies and loads.

#pragma once

#include "product.cuh"

constexpr int MOST_UNROLLED = 32;  // pieces of a warp: with more, the loop over sets is not unrolled

template <int ROWS, int SIZE, int COLUMNS>
struct Ring : Place<ROWS, SIZE, COLUMNS> {
    using Base = Place<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::shared;
    using Base::warp;
    using Base::lane;
    using Base::first;
    using Base::count;
    using Base::exists;
    using Base::partials;
    using Base::inputs;
    using Base::MOST_ROWS;
    using Base::TILES;
    using Base::SETS;
    using Base::SEGMENTS;
    using Base::WEIGHTS;
    using Base::RING;

    struct Fragments {};  // nothing is kept in registers

    static constexpr int PIECES = SETS * TILES;  // of a warp: [set][tile]
    static constexpr int PIECE = TILE * STRIDE;  // bytes in the ring

    __device__ uint32_t ring() const { return shared_address(shared) + WEIGHTS + warp * (RING * PIECE); }

    // Where a lane copies from and to in piece 0. Two rows of a segment are copied at once.
    struct Copies {
        const T* from;
        uint32_t to;
        uint64_t policy;
    };

    __device__ Copies copies() const {
        const T* const from = p.weight + static_cast<size_t>(first + lane / 16) * SIZE + warp * SEGMENT + lane % 16 * 8;
        return {from, ring() + lane / 16 * STRIDE + lane % 16 * 16, evict_first_policy()};
    }

    // Copies a piece, if this warp has it. A CTA has MOST_ROWS rows or UNIT less.
    __device__ void copy_piece(const Copies& c, int index) const {
        const int set = index / TILES, tile = index % TILES;
        if (index < PIECES && exists(set)) {
            const int column = (warp + WARPS * set) * SEGMENT + lane % 16 * 8;
            const bool inside = SIZE % SEGMENT == 0 || set < SETS - 1 || column < SIZE;
#pragma unroll
            for (int i = 0; i < TILE; i += 2) {
                const int row = tile * TILE + i;
                if (row >= MOST_ROWS) continue;
                if (inside && (row + 1 < MOST_ROWS - UNIT || row + lane / 16 < count)) {
                    const T* const from = c.from + row * SIZE + set * (WARPS * SEGMENT);
                    copy_16(c.to + index % RING * PIECE + i * STRIDE, from, c.policy);
                }
            }
        }
        close_group();  // a group for each piece, empty ones too: groups are counted
    }

    // One piece of a warp is under way at a time: more would delay what the kernel before this one loads.
    __device__ void copy_weights() const {
        const Copies c = copies();
#pragma unroll
        for (int index = 0; index < RING; ++index) {
            copy_piece(c, index);
            wait_for_groups<0>();
        }
    }

    __device__ Fragments load_weights() const { return {}; }

    // Multiplies N tiles of a set, whose chains alternate. Rows behind the last one have results that are not used.
    // half: the segment has half of its columns.
    template <int N>
    __device__ void multiply_tiles(const Copies& copies, int set, int tile, const uint32_t (&a)[2 * PARTS][4],
                                   bool half) const {
        const int index = set * TILES + tile;
        wait_for_groups<RING - N>();
        __syncwarp();
        uint32_t b[N][PARTS][4];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint32_t at = ring() + (index + n) % RING * PIECE + lane % 8 * STRIDE + lane / 8 * 16;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) load_matrices(b[n][part], at + 64 * part);
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < N; ++n) copy_piece(copies, index + n + RING);
        float c[N][4] = {};
#pragma unroll
        for (int step = 0; step < 2 * PARTS; ++step) {
            if (step >= PARTS && half) continue;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const uint32_t(&pairs)[4] = b[n][step / 2];
                Pairs<T>::multiply(c[n], a[step], pairs[step % 2 * 2], pairs[step % 2 * 2 + 1]);
            }
        }
        if (lane / 4 < ROWS) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float* const to = partials(warp + WARPS * set, lane / 4) + (tile + n) * TILE + lane % 4 * 2;
                *reinterpret_cast<float2*>(to) = make_float2(c[n][0], c[n][1]);
            }
        }
    }

    __device__ void multiply(const Fragments&) const {
        constexpr int UNROLLED = PIECES <= MOST_UNROLLED ? SETS : 1;
        const Copies c = copies();
        // Rows 8 to 15 of the left matrix repeat rows 0 to 7: their results are not used.
        const uint32_t row = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0));
        const uint32_t x = row + lane / 16 * 16 + warp * (SEGMENT * 2);
#pragma unroll UNROLLED
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
            const bool half = SIZE % SEGMENT != 0 && set == SETS - 1 && warp + WARPS * set == SEGMENTS - 1;
            uint32_t a[2 * PARTS][4];
#pragma unroll
            for (int step = 0; step < 2 * PARTS; ++step) {
                if (step < PARTS || !half) load_matrices(a[step], x + set * (WARPS * SEGMENT * 2) + 32 * step);
            }
#pragma unroll
            for (int tile = 0; tile + 1 < TILES; tile += 2) multiply_tiles<2>(c, set, tile, a, half);
            if constexpr (TILES % 2 != 0) multiply_tiles<1>(c, set, TILES - 1, a, half);
        }
    }
};
