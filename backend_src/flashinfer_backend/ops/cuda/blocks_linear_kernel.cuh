// SPDX-License-Identifier: Apache-2.0
// out[T, N] = x @ weight^T of e4m3 on Hopper, for up to 32 tokens: x[T, K] has a scale for each group of 128 columns,
// weight[N, K] one for each block of 128x128. Gated, with weight[2 I, K], it is silu(x @ gate^T) * (x @ up^T).
//
// Few tokens take as long as reading the weights does, so memory should always be busy. One thread loads weights into a
// ring of stages, and begins before the previous kernel has ended; whole tiles leave nothing to add up behind the
// loop. Where there are fewer tiles than SMs, the blocks of a cluster share a tile's columns and send each other their
// sums, which are added in a fixed order. The weights are the left operand of the tensor cores, whose 64 rows so few
// tokens would not fill.
#pragma once

#include "hopper.cuh"

namespace {

constexpr int kInner = 128;          // columns of a turn: a row of the swizzle, a group of x, a block of weight
constexpr int kShared = 215 * 1024;  // bytes of a block at most: the next kernel's blocks also need some
constexpr int kMostStages = 12;

template <int kTokens> struct Product;
#define PRODUCT(N) \
  template <> struct Product<N> { using type = gmma::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>; };
PRODUCT(8) PRODUCT(16) PRODUCT(32)
#undef PRODUCT

struct Params {
  CUtensorMap weight, x;
  int turns, tiles;       // K / 128, tiles of rows
  int split, stages;      // blocks of a cluster, stages of the ring
  int tokens, rows;       // T, columns of out
  int x_rows, scale_row;  // of x_scales[K / 128, x_rows] and of scales[N / 128, scale_row]
  float const *x_scales, *scales;
  nv_bfloat16 const *bias, *residual;
  nv_bfloat16* out;
};

// kGroups: of four warps; each multiplies 64 rows of a tile. In shared memory, from 1024 on: stages of weights
// and x, sums from the other blocks of the cluster, stages' scales of x, barriers.
template <int kTokens, int kGroups> struct Layout {
  static constexpr int kWeightBytes = kGroups * 64 * kInner, kStageBytes = kWeightBytes + kTokens * kInner;
  static constexpr int kThreads = kGroups * 128 + 32;
  static constexpr int kPieces = kTokens / 8;     // of a thread's sums: 4 each, of 8 tokens
  static constexpr int kPieceBytes = 128 * 4 * 4;  // of a group
  static constexpr int places(int split) { return (kPieces + split - 1) / split; }
  static constexpr int area(int split) { return (split - 1) * places(split) * kPieceBytes; }
  static constexpr int bytes(int stages, int split) {
    return 2048 + stages * (kStageBytes + kTokens * 4) + kGroups * area(split);
  }
  static constexpr int stages(int split) {
    int fit = (kShared - bytes(0, split)) / (kStageBytes + kTokens * 4);
    return fit < kMostStages ? fit : kMostStages;
  }
};

struct Ring {
  uint32_t stages, x_scales, full, empty;  // addresses in shared memory
};

// A block's place in its cluster, and its work: the same turns of each of its tiles.
struct Work {
  int part, begin, turns, own, first, apart;
  __device__ __forceinline__ Work(Params const& p) {
    first = blockIdx.x / p.split, apart = gridDim.x / p.split;  // this cluster, clusters
    part = blockIdx.x % p.split;
    begin = p.turns * part / p.split, turns = p.turns * (part + 1) / p.split - begin;
    own = (p.tiles - first + apart - 1) / apart;
  }
  __device__ __forceinline__ int tile(int index) const { return first + index * apart; }
};

template <int kTokens, int kGroups, bool kGated>
__device__ __forceinline__ void load_all(Params const& p, Ring const& ring, Work const& work) {
  using L = Layout<kTokens, kGroups>;
  int units = work.own * work.turns, early = min(p.stages, units), slot = 0, phase = 0;
  int scale_bytes = 4 * min(kTokens, p.x_rows);
  uint64_t policy = read_once();
  auto weight = [&](int slot, int unit) {
    uint32_t to = ring.stages + slot * L::kStageBytes, barrier = ring.full + 8 * slot;
    int column = (work.begin + unit % work.turns) * kInner, tile = work.tile(unit / work.turns);
    barrier_expect(barrier, L::kStageBytes + scale_bytes);
    if constexpr (kGated)
      load_pairs(to, &p.weight, barrier, column, tile * 4 * kGroups, policy);
    else
      load(to, &p.weight, barrier, column, tile * 64 * kGroups, policy);
  };
  // Weights do not depend on the previous kernel: the first ones are on their way before it ends.
  for (int s = 0; s < early; ++s) weight(s, s);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int unit = 0, turn = 0; unit < units; ++unit) {
    uint32_t to = ring.stages + slot * L::kStageBytes + L::kWeightBytes, barrier = ring.full + 8 * slot;
    if (unit >= early) {
      barrier_wait(ring.empty + 8 * slot, phase ^ 1);
      weight(slot, unit);
    }
    int group = work.begin + turn;
    load(to, &p.x, barrier, group * kInner, 0);
    load_bytes(ring.x_scales + slot * kTokens * 4, p.x_scales + int64_t(group) * p.x_rows, barrier, scale_bytes);
    if (++slot == p.stages) slot = 0, phase ^= 1;
    if (++turn == work.turns) turn = 0;
  }
}

// How the blocks of a cluster send each other pieces of their sums: piece i to block i % split, which adds them in the
// blocks' order, so the sum never depends on timing. A group of a block has to do with the same group of the others.
template <typename L> struct Exchange {
  int split, part, places, tiles = 0;
  uint32_t sums, ready, freed;  // of this group: where others' sums go; barriers: they are there, they were read

  __device__ __forceinline__ Exchange(Params const& p, Work const& work, uint32_t others, uint32_t barriers, int group)
      : split(p.split), part(work.part), places(L::places(split)), sums(others + group * L::area(split)),
        ready(barriers + 16 * group), freed(ready + 8) {}
  __device__ __forceinline__ bool mine(int piece) const { return piece % split == part; }
  __device__ __forceinline__ uint32_t place(int from, int to, int piece) const {
    return sums + ((from - (from > to)) * places + piece / split) * L::kPieceBytes + threadIdx.x % 128 * 16;
  }

  __device__ __forceinline__ void send(float const* own) {
    if (split == 1) return;
    if (tiles > 0) barrier_wait(freed, (tiles - 1) & 1);
#pragma unroll
    for (int piece = 0; piece < L::kPieces; ++piece) {
      int to = piece % split;
      if (to != part) remote_store(remote(place(part, to, piece), to), own + 4 * piece);
    }
    int other = threadIdx.x % 32;
    __syncwarp();
    if (other < split && other != part) remote_release(remote(ready, other));
    cluster_wait(ready, tiles & 1);
    __syncwarp();
  }
  __device__ __forceinline__ void add(float* own, int piece) const {
    if (split == 1) return;
    float4 total = {};
    for (int other = 0; other < split; ++other) {
      float4 v = make_float4(own[0], own[1], own[2], own[3]);
      if (other != part) v = load_shared_floats(place(other, part, piece));
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    own[0] = total.x, own[1] = total.y, own[2] = total.z, own[3] = total.w;
  }
  __device__ __forceinline__ void end(bool more) {
    int other = threadIdx.x % 32;
    ++tiles;
    __syncwarp();
    if (more && other < split && other != part) remote_arrive(remote(freed, other));  // behind the last tile they may have ended
    __syncwarp();
  }
};

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ __forceinline__ uint32_t pair(float a, float b) {
  nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ float2 floats(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<nv_bfloat162*>(&pair));
}
template <typename T> __device__ __forceinline__ uint32_t* pairs(T* cells) {
  return reinterpret_cast<uint32_t*>(const_cast<nv_bfloat16*>(cells));
}

// Of a product of weights and x, a thread has rows lane / 4 and lane / 4 + 8 of its warp's 16 (gated: of gate and of up),
// and of each 8 tokens two.
template <int kTokens, int kGroups, bool kGated>
__device__ __forceinline__ void multiply_all(Params const& p, Ring const& ring, Work const& work,
                                             Exchange<Layout<kTokens, kGroups>> exchange, int group) {
  using L = Layout<kTokens, kGroups>;
  constexpr int kSums = kTokens / 2;  // of a thread
  constexpr int kHalves = kGated ? 1 : 2, kWarpRows = 8 * kHalves, kTileRows = 4 * kGroups * kWarpRows;  // of out
  int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, slot = 0, phase = 0;
  float sums[kSums], products[kSums];
  for (int index = 0; index < work.own; ++index) {
    // The warp's first column of out, and what scales its weights.
    int row = work.tile(index) * kTileRows + group * 4 * kWarpRows;
    float const* scale = p.scales + row / kInner * p.scale_row + work.begin;
    float const* up_scale = kGated ? p.scales + (p.rows + row) / kInner * p.scale_row + work.begin : scale;
    row += warp * kWarpRows;
    float next = scale[0], next_up = kGated ? up_scale[0] : 0.0f;
    int64_t cell = int64_t(lane / 4) * p.rows + row + 2 * (lane % 4);  // of transposed results
    uint32_t given[L::kPieces][kHalves];
    float bias[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bias[half] = p.bias ? __bfloat162float(p.bias[row + 8 * half + lane / 4]) : 0.0f;
#pragma unroll
      for (int j = 0; j < L::kPieces; ++j) {
        bool needed = p.residual && exchange.mine(j) && 8 * j + lane / 4 < p.tokens;
        given[j][half] = needed ? *pairs(p.residual + cell + int64_t(8 * j) * p.rows + 8 * half) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    for (int turn = 0; turn < work.turns; ++turn) {
      float of_weight = next, of_up = kGated ? next_up : next;
      if (turn + 1 < work.turns) {
        next = scale[turn + 1];
        if constexpr (kGated) next_up = up_scale[turn + 1];
      }
      barrier_wait(ring.full + 8 * slot, phase);
      uint64_t a = operand(ring.stages + slot * L::kStageBytes + group * 64 * kInner);
      uint64_t b = operand(ring.stages + slot * L::kStageBytes + L::kWeightBytes);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kInner / 32; ++k)  // a product takes 32 bytes of a row; addresses count 16
        multiply<typename Product<kTokens>::type>(a + 2 * k, b + 2 * k, products, k > 0,
                                                  std::make_index_sequence<kSums>());
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      float2 of_x[L::kPieces];
#pragma unroll
      for (int j = 0; j < L::kPieces; ++j)
        of_x[j] = load_shared_pair(ring.x_scales + (slot * kTokens + 8 * j + 2 * (lane % 4)) * 4);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + 8 * slot);
#pragma unroll
      for (int j = 0; j < L::kPieces; ++j) {
        sums[4 * j] += products[4 * j] * (of_x[j].x * of_weight);
        sums[4 * j + 1] += products[4 * j + 1] * (of_x[j].y * of_weight);
        sums[4 * j + 2] += products[4 * j + 2] * (of_x[j].x * of_up);
        sums[4 * j + 3] += products[4 * j + 3] * (of_x[j].y * of_up);
      }
      if (++slot == p.stages) slot = 0, phase ^= 1;
    }
    exchange.send(sums);
#pragma unroll
    for (int j = 0; j < L::kPieces; ++j) {
      if (!exchange.mine(j)) continue;
      float* d = sums + 4 * j;
      exchange.add(d, j);
      bool inside = 8 * j + lane / 4 < p.tokens;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float a = d[2 * half], b = d[2 * half + 1];
        if constexpr (kGated) a = silu(a) * d[2], b = silu(b) * d[3];
        float2 added = floats(transposed(given[j][half]));
        uint32_t result = transposed(pair(a + bias[half] + added.x, b + bias[half] + added.y));
        if (inside) *pairs(p.out + cell + int64_t(8 * j) * p.rows + 8 * half) = result;
      }
    }
    exchange.end(index + 1 < work.own);
  }
}

template <int kTokens, int kGroups, bool kGated>
__global__ void __launch_bounds__(kGroups * 128 + 32, 1) blocks_linear_kernel(__grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kTokens, kGroups>;
  extern __shared__ uint8_t raw[];
  Ring ring;
  ring.stages = (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
  uint32_t others = ring.stages + p.stages * L::kStageBytes;
  ring.x_scales = others + kGroups * L::area(p.split), ring.full = ring.x_scales + p.stages * kTokens * 4;
  ring.empty = ring.full + 8 * p.stages;
  uint32_t barriers = ring.empty + 8 * p.stages;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(ring.full + 8 * s, 1);
      barrier_init(ring.empty + 8 * s, 4 * kGroups);
    }
    for (int b = 0; b < 2 * kGroups; ++b) barrier_init(barriers + 8 * b, max(4 * (p.split - 1), 1));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (p.split > 1) cluster_barrier();  // blocks that others write to have begun
  asm volatile("griddepcontrol.launch_dependents;");
  Work work(p);
  if (group == kGroups) {
    if (threadIdx.x % 32 == 0) load_all<kTokens, kGroups, kGated>(p, ring, work);
    return;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Exchange<L> exchange(p, work, others, barriers, group);
  multiply_all<kTokens, kGroups, kGated>(p, ring, work, exchange, group);
#endif
}

}  // namespace
