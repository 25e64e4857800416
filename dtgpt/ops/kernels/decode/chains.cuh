// The weights of a CTA that a warp keeps in registers, and their products with the inputs. The chains of a warp are
// segments `warp` + WARPS * set of each tile.

#pragma once

#include "product.cuh"

template <int ROWS, int SIZE, int COLUMNS>
struct Chains : Place<ROWS, SIZE, COLUMNS> {
    using Base = Place<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::warp;
    using Base::lane;
    using Base::first;
    using Base::count;
    using Base::exists;
    using Base::partials;
    using Base::inputs;
    using Base::shared;
    using Base::WEIGHTS;
    using Base::MOST_ROWS;
    using Base::TILES;
    using Base::SETS;

    __device__ uint32_t weights(int set) const {
        return shared_address(shared) + WEIGHTS + (warp * SETS + set) * MOST_ROWS * STRIDE;
    }

    // A warp copies the segments that it will multiply, two rows at once.
    __device__ void copy_weights() const {
        const uint64_t policy = evict_first_policy();
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
            const T* const from = p.weight + static_cast<size_t>(first) * SIZE + (warp + WARPS * set) * SEGMENT + lane % 16 * 8;
            const uint32_t to = weights(set) + lane % 16 * 16;
#pragma unroll
            for (int i = 0; i < TILES * TILE / 2; ++i) {
                const int row = 2 * i + lane / 16;
                if (row < count) copy_16(to + row * STRIDE, from + static_cast<size_t>(row) * SIZE, policy);
                if ((i + 1) % (COPIES / 2) == 0) {
                    close_group();
                    wait_for_groups<1>();
                }
            }
        }
    }

    struct Fragments {
        uint32_t b[SETS][TILES][PARTS][4];
    };

    __device__ Fragments load_weights() const {
        Fragments f;
        wait_for_copies();
        __syncwarp();
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int row = min(tile * TILE + lane % 8, count - 1);  // the results of others are not used
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    load_matrices(f.b[set][tile][part], weights(set) + row * STRIDE + lane / 8 * 16 + 64 * part);
                }
            }
        }
        return f;
    }

    __device__ void multiply(const Fragments& f) const {
        float c[SETS][TILES][4] = {};
        const uint32_t x = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0)) + lane / 8 * 16;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            uint32_t a[SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                if (exists(set)) load_matrices(a[set], x + (warp + WARPS * set) * SEGMENT * 2 + 64 * part);
            }
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
#pragma unroll
                for (int set = 0; set < SETS; ++set) {
                    if (!exists(set)) continue;
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const uint32_t(&b)[4] = f.b[set][tile][part];
                        Pairs<T>::multiply(c[set][tile], a[set][half], a[set][half + 1], b[half], b[half + 1]);
                    }
                }
            }
        }
        if (lane / 4 >= ROWS) return;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float* const to = partials(warp + WARPS * set, lane / 4) + tile * TILE + lane % 4 * 2;
                *reinterpret_cast<float2*>(to) = make_float2(c[set][tile][0], c[set][tile][1]);
            }
        }
    }
};
