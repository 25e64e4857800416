// The weights of a CTA that are too many for registers, and their products with the inputs: each warp has a ring of pieces
// in shared memory, a tile of a segment each, and multiplies one while the next ones arrive.

#pragma once

#include "product.cuh"

template <int ROWS, int SIZE, int COLUMNS>
struct Ring : Place<ROWS, SIZE, COLUMNS> {
    using Base = Place<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::shared;
    using Base::warp;
    using Base::lane;
    using Base::first;
    using Base::count;
    using Base::partials;
    using Base::inputs;
    using Base::TILES;
    using Base::SEGMENTS;
    using Base::WEIGHTS;
    using Base::RING;

    struct Fragments {};  // nothing is kept in registers

    __device__ uint32_t piece(int index) const {
        return shared_address(shared) + WEIGHTS + (warp * RING + index % RING) * (TILE * STRIDE);
    }
    __device__ int pieces() const { return (SEGMENTS - warp + WARPS - 1) / WARPS * TILES; }  // of this warp: [set][tile]

    __device__ void copy_piece(int index) const {
        if (index < pieces()) {
            const int column = (warp + WARPS * (index / TILES)) * SEGMENT + lane % 16 * 8, tile = index % TILES;
            const uint64_t policy = evict_first_policy();
            const T* const from = p.weight + static_cast<size_t>(first) * SIZE + column;
            const uint32_t to = piece(index) + lane % 16 * 16;
#pragma unroll
            for (int i = 0; i < TILE / 2; ++i) {
                const int own = 2 * i + lane / 16, row = tile * TILE + own;
                if (row < count && column < SIZE) copy_16(to + own * STRIDE, from + static_cast<size_t>(row) * SIZE, policy);
            }
        }
        close_group();  // a group for each piece, empty ones too: groups are counted
    }

    __device__ void copy_weights() const {
#pragma unroll 1
        for (int index = 0; index < RING; ++index) {
            copy_piece(index);
            wait_for_groups<1>();
        }
    }

    __device__ Fragments load_weights() const { return {}; }

    __device__ void multiply(const Fragments&) const {
        const uint32_t x = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0)) + lane / 8 * 16;
        uint32_t a[PARTS][4];
#pragma unroll 1
        for (int index = 0; index < pieces(); ++index) {
            const int segment = warp + WARPS * (index / TILES), tile = index % TILES;
            const bool whole = SIZE % SEGMENT == 0 || (segment + 1) * SEGMENT <= SIZE;
            if (tile == 0) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    if (part < PARTS / 2 || whole) load_matrices(a[part], x + segment * SEGMENT * 2 + 64 * part);
                }
            }
            wait_for_groups<RING - 1>();
            __syncwarp();
            const int row = max(min(lane % 8, count - 1 - tile * TILE), 0);  // the results of others are not used
            uint32_t b[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                load_matrices(b[part], piece(index) + row * STRIDE + lane / 8 * 16 + 64 * part);
            }
            __syncwarp();
            copy_piece(index + RING);
            float c[4] = {};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (part >= PARTS / 2 && !whole) continue;
                Pairs<T>::multiply(c, a[part][0], a[part][1], b[part][0], b[part][1]);
                Pairs<T>::multiply(c, a[part][2], a[part][3], b[part][2], b[part][3]);
            }
            if (lane / 4 < ROWS) {
                float* const to = partials(segment, lane / 4) + tile * TILE + lane % 4 * 2;
                *reinterpret_cast<float2*>(to) = make_float2(c[0], c[1]);
            }
        }
    }
};
