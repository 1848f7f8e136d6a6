// SPDX-License-Identifier: Apache-2.0
// out[T, I] = silu(x @ gate^T) * (x @ up^T) on Hopper; weight[2 I, K] holds the rows of gate, then those of up.
// In e4m3 each token of x and each row of weight has a scale, and out is in bfloat16.
//
// The weights are the left operand of the tensor cores (their rows fill its 64), the tokens the right one, so
// that a tile has any multiple of 16 tokens and tiles can be chosen to fill whole waves of SMs. The copy engine
// interleaves 8 rows of gate with 8 of up, which puts both values of an output into one thread. One thread
// loads tiles into a ring of stages, two warpgroups multiply them, and the copy engine stores the results
// while the next tile is multiplied. -DGATED_LINEAR_TYPE names the element type of x and weight.
#pragma once

#include "hopper.cuh"

namespace {

using Element = GATED_LINEAR_TYPE;
constexpr bool kFp8 = std::is_same_v<Element, __nv_fp8_e4m3>;
constexpr bool kHalf = std::is_same_v<Element, nv_half>;

constexpr int kStep = 128;      // bytes of a row in a stage: a row of the swizzle
constexpr int kInner = kStep / sizeof(Element);
constexpr int kRows = 128;      // rows of gate and up in a tile: 64 a warpgroup
constexpr int kThreads = 384;   // two warpgroups that multiply, one that loads
constexpr int kShared = 232448; // bytes of shared memory that a block may have
constexpr int kGroup = 8;       // token tiles that pass over the weights together, for the L2 cache

template <int kTokens> struct Product;
#define PRODUCT(N)                                                                                          \
  template <> struct Product<N> {                                                                           \
    using of16 = std::conditional_t<kHalf, gmma::MMA_64x##N##x16_F32F16F16_SS<gmma::Major::K, gmma::Major::K>, \
                                    gmma::MMA_64x##N##x16_F32BF16BF16_SS<gmma::Major::K, gmma::Major::K>>;  \
    using type = std::conditional_t<kFp8, gmma::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>, of16>;                 \
  };
PRODUCT(64) PRODUCT(80) PRODUCT(96) PRODUCT(112) PRODUCT(128) PRODUCT(144) PRODUCT(160)
PRODUCT(176) PRODUCT(192) PRODUCT(208) PRODUCT(224) PRODUCT(240) PRODUCT(256)

// silu(g) * u. float16 rounds finer than silu is, so it takes two special-function instructions.
__device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (!kHalf) {
    return silu(gate) * up;
  } else {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  }
}
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (!kHalf) {
    auto v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&v);
  } else {
    auto v = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&v);
  }
}

struct Params {
  CUtensorMap weight, x, out;
  int steps, row_tiles, token_tiles;  // K / kInner, I / 64, tiles over T
  float const *x_scales, *scales;     // of T tokens, of 2 I rows of weight; not for 16 bits
  int tokens;                         // T
};

__device__ __forceinline__ void position(Params const& p, int index, int& row, int& token) {
  int group = index / (kGroup * p.row_tiles), rest = index % (kGroup * p.row_tiles);
  int width = min(kGroup, p.token_tiles - group * kGroup);
  row = rest / width;
  token = group * kGroup + rest % width;
}

template <int kTokens> struct Layout {
  static constexpr int kWeightBytes = kRows * kStep, kStageBytes = kWeightBytes + kTokens * kStep;
  static constexpr int kOutBytes = kTokens * 64;  // of a warpgroup: 32 outputs of each token
  static constexpr int kFit = (kShared - 2048 - 2 * kOutBytes) / kStageBytes;
  static constexpr int kStages = kFit < 10 ? kFit : 10;
  static constexpr int kBytes = 2048 + 2 * kOutBytes + kStages * kStageBytes;  // 1024 to align, 1024 of barriers
};

// A warp's 8 outputs of each token, transposed into rows of 32 outputs in 64-byte swizzle. A thread has those of
// column lane / 4 and, of each 8 tokens, two. column and first: the warpgroup's first output, the tile's first token.
template <int kTokens>
__device__ __forceinline__ void stage_out(Params const& p, float const* sums, uint32_t out, int column, int first) {
  int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  float gate_scale = 1, up_scale = 1;
  if constexpr (kFp8) {
    float const* scale = p.scales + column + warp * 8 + lane / 4;
    gate_scale = scale[0], up_scale = scale[p.row_tiles * (kRows / 2)];
  }
#pragma unroll
  for (int token = 0; token < kTokens; token += 32) {
    uint32_t v[4] = {0, 0, 0, 0};
    float x_scale = 0;
    if constexpr (kFp8)
      if (first + token + lane < p.tokens) x_scale = p.x_scales[first + token + lane];
#pragma unroll
    for (int j = 0; j < 4 && token + 8 * j < kTokens; ++j) {
      float const* d = sums + (token / 8 + j) * 4;
      if constexpr (kFp8) {
        int from = 8 * j + 2 * (lane % 4);
        float a = __shfl_sync(~0u, x_scale, from), b = __shfl_sync(~0u, x_scale, from + 1);
        v[j] = pack(gated(d[0] * (a * gate_scale), d[2] * (a * up_scale)),
                    gated(d[1] * (b * gate_scale), d[3] * (b * up_scale)));
      } else {
        v[j] = pack(gated(d[0], d[2]), gated(d[1], d[3]));
      }
    }
    int row = token + lane;
    uint32_t to = out + row * 64 + ((warp ^ (row >> 1 & 3)) * 16);
    if (token + 16 < kTokens)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(to), "r"(v[0]), "r"(v[1])
                   : "memory");
  }
}

template <int kTokens>
__global__ void __launch_bounds__(kThreads, 1) gated_linear_kernel(__grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kTokens>;
  extern __shared__ uint8_t raw[];
  uint32_t stages = (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
  uint32_t staging = stages + L::kStages * L::kStageBytes;
  uint32_t full = staging + 2 * L::kOutBytes, empty = full + 8 * L::kStages;
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  int tiles = p.row_tiles * p.token_tiles, slot = 0, phase = 0;

  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != 256) return;
    // Weights do not depend on the previous kernel: the first stages' are on their way before it ends.
    int early = min(L::kStages, p.steps), row, token;
    auto weight = [&](int step) {
      barrier_expect(full + 8 * slot, L::kStageBytes);
      load_pairs(stages + slot * L::kStageBytes, &p.weight, full + 8 * slot, step * kInner, row * (kRows / 16));
    };
    position(p, blockIdx.x, row, token);
    for (slot = 0; slot < early; ++slot) weight(slot);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    slot = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      position(p, index, row, token);
      for (int step = 0; step < p.steps; ++step) {
        if (index != blockIdx.x || step >= early) {
          barrier_wait(empty + 8 * slot, phase ^ 1);
          weight(step);
        }
        load(stages + slot * L::kStageBytes + L::kWeightBytes, &p.x, full + 8 * slot, step * kInner, token * kTokens);
        if (++slot == L::kStages) slot = 0, phase ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float sums[kTokens / 2];
    int thread = threadIdx.x % 128;
    uint32_t out = staging + warpgroup * L::kOutBytes;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      int previous = -1;
      for (int step = 0; step < p.steps; ++step) {
        barrier_wait(full + 8 * slot, phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        uint64_t weight = operand(stages + slot * L::kStageBytes + warpgroup * 64 * kStep);
        uint64_t x = operand(stages + slot * L::kStageBytes + L::kWeightBytes);
#pragma unroll
        for (int k = 0; k < kStep / 32; ++k)  // a product takes 32 bytes of a row; addresses count 16
          multiply<typename Product<kTokens>::type>(weight + 2 * k, x + 2 * k, sums, step > 0 || k > 0,
                                                    std::make_index_sequence<kTokens / 2>());
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The previous stage's products are done once only this one's are pending.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (previous >= 0 && thread == 0) barrier_arrive(empty + 8 * previous);
        previous = slot;
        if (++slot == L::kStages) slot = 0, phase ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread == 0) {
        barrier_arrive(empty + 8 * previous);
        // Before the last tile's results are overwritten, the copy engine has read them.
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      int row, token;
      position(p, index, row, token);
      int column = row * (kRows / 2) + warpgroup * 32;
      group_barrier(warpgroup);
      stage_out<kTokens>(p, sums, out, column, token * kTokens);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      group_barrier(warpgroup);
      if (thread == 0) {
        store(&p.out, out, column, token * kTokens);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#endif
}

}  // namespace
