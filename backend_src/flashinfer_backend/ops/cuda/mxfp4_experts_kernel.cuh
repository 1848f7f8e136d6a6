// SPDX-License-Identifier: Apache-2.0
// One product of a mixture of experts in MXFP4 on Hopper, for tiles of up to 16 pairs of a token and an expert:
// out[p] = x[row of p] @ weight[expert of p]^T, for each pair p of a tile (ops/triton_experts.py makes the tiles).
//
// Few pairs take as long as reading the weights does. A block of threads has its share of all tiles' rows, and one
// thread loads their weights into a ring of stages. The others turn them into bfloat16 in registers, in the order in
// which mma.sync has its left operand, so no element goes from lane to lane; x lies in shared memory in the same order.
#pragma once

#include "hopper.cuh"

namespace {

constexpr int kPairs = 16;           // of a tile
constexpr int kColumns = 256;        // of a line of a stage: its weights are 128 bytes, a row of the swizzle
constexpr int kLines = 128;          // of a stage
constexpr int kStageBytes = kLines * kColumns / 2;
constexpr int kRows = 64;            // of out in a unit: of gate and of up, or of down with two halves of columns
constexpr int kShared = 218 * 1024;  // bytes of a block at most: the next kernel's blocks also need some
constexpr int kMostStages = 12;

struct Params {
  CUtensorMap weight, scales;
  int inner, rows, pairs_a_row;       // K, columns of out, pairs that share a row of x
  int most, blocks, stages;           // tiles at most, units of a tile, stages of the ring
  int x_bytes, scale_bytes;           // of a row of x, and of a row's scales, in shared memory
  float alpha, limit;                 // of a clipped SwiGLU; limit 0: silu(gate) * up
  nv_bfloat16 const *x, *bias;
  float const* factors;               // of pairs, by which results are multiplied, or none
  int const *experts, *filled, *order;
  nv_bfloat16* out;
};

// Warps: kTeams * 8 that multiply, and one that loads. A team has every kTeams-th stage, and so always the same slots of the
// ring: who waits for a slot's next stage has seen the one before, and a phase cannot be taken for the one after the next.
template <bool kGated, int kTeams> struct Layout {
  static constexpr int kWarps = 8 * kTeams, kThreads = 32 * kWarps + 32;
  static constexpr int kBands = kGated ? 8 : 4;           // of 16 lines: 8 of gate and of up, or 16 of down
  static constexpr int kParts = kWarps / kBands;          // that share a band's columns
  static constexpr int kSumBytes = 32 * 8 * 4;            // of a warp
  static constexpr int kArea = (kParts - 1) * kBands * kSumBytes;
  static constexpr int kScaleLines = kGated ? 128 : 64;   // of a unit
  static constexpr int x_bytes(int inner) { return (inner + 127) / 128 * 256 + 64; }  // banks: rows are 64 bytes apart
  static constexpr int bytes(int inner, int scale_bytes, int stages) {
    return 2048 + stages * (kStageBytes + 16) + kPairs * x_bytes(inner) + 2 * kScaleLines * scale_bytes + 2 * kArea;
  }
  static constexpr int stages(int inner, int scale_bytes) {
    int fit = (kShared - bytes(inner, scale_bytes, 0)) / (kStageBytes + 16);
    return (fit < kMostStages ? fit : kMostStages) / kTeams * kTeams;
  }
};

struct Shared {
  uint32_t ring, x, scales, sums, full, empty, scales_full, scales_empty;  // addresses
};

__device__ __forceinline__ uint4 load_shared_quad(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ __forceinline__ uint2 load_shared_two(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_quad(uint32_t to, float const* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
// One column of each of the two words that ops/mxfp4.py packs, times `power`: its scale times 2 ** 126.
template <int kColumn> __device__ __forceinline__ uint32_t number(uint32_t words, uint32_t power) {
  uint32_t bits, result;
  if constexpr (kColumn == 3)
    bits = (words << 1 & 0x80008000) | (words >> 5 & 0x01000100) | (words >> 4 & 0x00C000C0);
  else
    bits = words << 3 * kColumn & 0x81C081C0;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(bits), "r"(power), "r"(0x80008000));
  return result;
}
// Two powers of two by the byte of `scales` that `place` names, an exponent in e8m0, times 2 ** 126.
__device__ __forceinline__ uint32_t power(uint32_t scales, uint32_t place) {
  uint32_t exponents;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(exponents) : "r"(scales), "r"(place));
  return exponents * 128 + 0x3F003F00;
}
// Kept in a register: the compiler would rather compute it again in each turn of a loop.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ void multiply(float* sums, uint32_t const* a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void workers_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds the tiles with pairs, which come before the others, to a sum in shared memory. For all threads of a block.
template <int kThreads> __device__ __forceinline__ void count_tiles(int const* filled, int most, int* sum) {
  int own = 0;
  for (int t = threadIdx.x; t < most; t += kThreads) own += filled[t] > 0;
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x % 32 == 0 && own > 0) atomicAdd(sum, own);
  __syncthreads();
}

// A block's units: neighbours of one tile follow each other.
struct Work {
  int first, units;
  __device__ __forceinline__ Work(Params const& p, int tiles) {
    int64_t all = int64_t(tiles) * p.blocks;
    first = all * blockIdx.x / gridDim.x, units = all * (blockIdx.x + 1) / gridDim.x - first;
  }
};

// Where a stage is in the ring, and the parity of its barriers' phase.
struct Place {
  int slot = 0, phase = 0;
  __device__ __forceinline__ void advance(int by, int stages) {  // by at most `stages`
    slot += by;
    if (slot >= stages) slot -= stages, phase ^= 1;
  }
};

template <bool kGated>
__device__ __forceinline__ void load_all(Params const& p, Shared const& shared, Work const& work) {
  constexpr int kScaleLines = kGated ? 128 : 64;
  int lines = (p.inner + kColumns - 1) / kColumns, turns = kGated ? lines : (lines + 1) / 2;
  int tile = -1, expert = 0;
  Place place;
  uint64_t policy = read_once();
  for (int index = 0; index < work.units; ++index) {
    int unit = work.first + index, block = unit % p.blocks, of = index % 2;
    if (unit / p.blocks != tile) tile = unit / p.blocks, expert = p.experts[tile];
    int row = expert * p.rows * (kGated ? 2 : 1) + block * kRows;
    uint32_t barrier = shared.scales_full + 8 * of, to = shared.scales + of * kScaleLines * p.scale_bytes;
    if (index > 1) barrier_wait(shared.scales_empty + 8 * of, (index / 2 - 1) & 1);
    barrier_expect(barrier, kScaleLines * p.scale_bytes);
    load(to, &p.scales, barrier, 0, row, policy);
    if constexpr (kGated) load(to + kRows * p.scale_bytes, &p.scales, barrier, 0, row + p.rows, policy);
    for (int turn = 0; turn < turns; ++turn) {
      uint32_t stage = shared.ring + place.slot * kStageBytes, ready = shared.full + 8 * place.slot;
      barrier_wait(shared.empty + 8 * place.slot, place.phase ^ 1);
      barrier_expect(ready, kStageBytes);
      int byte = turn * (kGated ? 1 : 2) * kColumns / 2;
      load(stage, &p.weight, ready, byte, row, policy);
      load(stage + kStageBytes / 2, &p.weight, ready, kGated ? byte : byte + kColumns / 2, kGated ? row + p.rows : row,
           policy);
      place.advance(1, p.stages);
    }
  }
}

// x of a tile's pairs to shared memory. Of 256 columns a row has 512 bytes there; lane q of four multiplies 64 of the
// columns: those that are in 16 neighbouring bytes of packed weights. For each of these bytes' words of 32 bits (8
// columns) it has 16 bytes of x, which lie next to those of the other three.
template <int kThreads> __device__ __forceinline__ void load_x(Params const& p, uint32_t x, int const* order, int present) {
  int pieces = (p.inner + 127) / 128 * 16;  // of 8 columns
  for (int at = threadIdx.x; at < present * pieces; at += kThreads) {
    int t = at / pieces, piece = at % pieces;
    uint4 v = {};
    if (8 * piece < p.inner) {
      int64_t row = order[t] / p.pairs_a_row;
      v = *reinterpret_cast<uint4 const*>(p.x + row * p.inner + 8 * piece);
    }
    int pack = piece / 8, quarter = piece / 2 % 4, lane = pack % 2 * 2 + piece % 2;
    uint32_t to = x + t * p.x_bytes + pack / 2 * 256 + lane * 16 + quarter * 4;
    store_shared(to, v.x), store_shared(to + 64, v.y), store_shared(to + 128, v.z), store_shared(to + 192, v.w);
  }
}

// The sums of 16 lines and 8 (kEights: 1) or 16 pairs, over this warp's part of the columns. place: of the unit's first
// stage; begin: the first one of this warp's team.
template <bool kGated, int kTeams, int kEights>
__device__ __forceinline__ void multiply_unit(Params const& p, Shared const& shared, float (&total)[8], Place place,
                                              int begin, int turns, uint32_t scales, int line, int part) {
  int lane = threadIdx.x % 32, q = lane % 4;
  int upper = kGated ? kRows : 8;  // from the first 8 lines to the others
  int half = kGated ? 0 : part % 2;
  int first = kGated ? begin : 2 * begin + half;  // of this warp's lines
  uint32_t of_scales = kept(scales + line * p.scale_bytes + first * (kColumns / 32));
  uint32_t of_others = kept(of_scales + upper * p.scale_bytes);
  uint32_t of_x = kept(shared.x + lane / 4 * p.x_bytes + q * 16 + first * kColumns * 2), other_x = 8 * p.x_bytes;
  uint32_t weights = shared.ring + half * (kStageBytes / 2) + line * 128, swizzle = (line & 7) * 16;
  uint32_t halves[2] = {kept(weights + (q * 16 ^ swizzle)), kept(weights + ((q * 16 + 64) ^ swizzle))};
  uint32_t of_group = kept(0x4040 + q / 2 * 0x0202), of_next = kept(0x4141 + q / 2 * 0x0202);
  int left = p.inner - first * kColumns;
  float sums[kEights][2][4] = {};
  place.advance(begin, p.stages);
  for (int turn = begin; turn < turns; turn += kTeams) {
    barrier_wait(shared.full + 8 * place.slot, place.phase);
    uint32_t packed[2][2][4];
    uint2 exponents[2] = {load_shared_two(of_scales), load_shared_two(of_others)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (left <= 128 * i) continue;
      uint32_t from = halves[i] + place.slot * kStageBytes;
      *reinterpret_cast<uint4*>(packed[i][0]) = load_shared_quad(from);
      *reinterpret_cast<uint4*>(packed[i][1]) = load_shared_quad(from + upper * 128);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (left <= 128 * i) continue;
      uint32_t powers[2][2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t word = i == 0 ? exponents[row].x : exponents[row].y;
        powers[row][0] = power(word, of_group), powers[row][1] = power(word, of_next);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint4 b[kEights];
#pragma unroll
        for (int e = 0; e < kEights; ++e) b[e] = load_shared_quad(of_x + i * 256 + j * 64 + e * other_x);
        uint32_t low = packed[i][0][j], high = packed[i][1][j];
        uint32_t a[2][4] = {{number<0>(low, powers[0][0]), number<0>(high, powers[1][0]), number<1>(low, powers[0][0]),
                             number<1>(high, powers[1][0])},
                            {number<2>(low, powers[0][1]), number<2>(high, powers[1][1]), number<3>(low, powers[0][1]),
                             number<3>(high, powers[1][1])}};
#pragma unroll
        for (int e = 0; e < kEights; ++e) {
          multiply(sums[e][0], a[0], b[e].x, b[e].y);
          multiply(sums[e][1], a[1], b[e].z, b[e].w);
        }
      }
    }
    constexpr int kNext = kTeams * (kGated ? 1 : 2) * kColumns;
    of_scales += kNext / 32, of_others += kNext / 32, of_x += kNext * 2, left -= kNext;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty + 8 * place.slot);
    place.advance(kTeams, p.stages);
  }
#pragma unroll
  for (int i = 0; i < 4 * kEights; ++i) total[i] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
}

// limit 0: not clipped.
__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit) {
  if (limit <= 0.0f) return silu(gate) * up;
  // NaN stays: a row that went wrong must show.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

template <bool kGated, int kTeams>
__device__ __forceinline__ void multiply_all(Params const& p, Shared const& shared, Work const& work) {
  using L = Layout<kGated, kTeams>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % L::kBands, part = warp / L::kBands;
  // Rows of the weights that a lane group has: neighbouring groups' are 4 apart, so that their bytes lie in other banks.
  int row_of_band = lane / 4 % 2 * 4 + lane / 8;
  int line = band * (kGated ? 8 : 16) + row_of_band;
  int tile = -1, expert = 0, present = 0;
  int const* order = nullptr;
  Place place;
  int lines = (p.inner + kColumns - 1) / kColumns, turns = kGated ? lines : (lines + 1) / 2;
  int whole = turns / p.stages, rest = turns % p.stages;  // of the ring, in a unit
  int team = kGated ? part : part / 2;
  for (int index = 0; index < work.units; ++index) {
    int unit = work.first + index, of = index % 2;
    if (unit / p.blocks != tile) {
      tile = unit / p.blocks;
      order = p.order + tile * kPairs, expert = p.experts[tile], present = p.filled[tile];
      workers_barrier(1, 32 * L::kWarps);  // the last tile's x is no longer read
      load_x<32 * L::kWarps>(p, shared.x, order, present);
      workers_barrier(1, 32 * L::kWarps);
    }
    int column = unit % p.blocks * kRows + line;
    int64_t own = int64_t(expert) * p.rows * (kGated ? 2 : 1) + column;
    int second = kGated ? 0 : 8;  // column of a thread's other rows
    bool inside[2] = {column < p.rows, column + second < p.rows};
    float bias[2] = {};
    if (p.bias && part == 0) {
      if (inside[0]) bias[0] = __bfloat162float(p.bias[own]);
      if (inside[1]) bias[1] = __bfloat162float(p.bias[own + (kGated ? p.rows : 8)]);
    }
    barrier_wait(shared.scales_full + 8 * of, index / 2 & 1);
    uint32_t scales = shared.scales + of * L::kScaleLines * p.scale_bytes;
    float total[8];
    int begin = (team + kTeams - place.slot % kTeams) % kTeams;  // slots and stages have the same remainders
    if (present > 8)
      multiply_unit<kGated, kTeams, 2>(p, shared, total, place, begin, turns, scales, line, part);
    else
      multiply_unit<kGated, kTeams, 1>(p, shared, total, place, begin, turns, scales, line, part);
    place.advance(rest, p.stages), place.phase ^= whole & 1;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.scales_empty + 8 * of);
    int eights = present > 8 ? 2 : 1;
    if constexpr (L::kParts > 1) {
      // Two areas in turn: who writes to one has passed the barrier behind the reads of it.
      uint32_t sums = shared.sums + of * L::kArea + band * L::kSumBytes + lane * 16;
      if (part > 0)
        for (int e = 0; e < eights; ++e)
          store_shared_quad(sums + (part - 1) * L::kBands * L::kSumBytes + e * 512, total + 4 * e);
      workers_barrier(2 + band, 32 * L::kParts);
      if (part > 0) continue;
      for (int e = 0; e < eights; ++e) {
        float others[3][4] = {};
#pragma unroll
        for (int other = 0; other < L::kParts - 1; ++other) {
          float4 v = load_shared_floats(sums + other * L::kBands * L::kSumBytes + e * 512);
          others[other][0] = v.x, others[other][1] = v.y, others[other][2] = v.z, others[other][3] = v.w;
        }
        // Of down a team's two halves first: which team has the even stages, and which the odd ones, may depend on the
        // units before, and must not show in a sum.
#pragma unroll
        for (int k = 0; k < 4; ++k) total[4 * e + k] = (total[4 * e + k] + others[0][k]) + (others[1][k] + others[2][k]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        int t = 8 * e + lane % 4 * 2 + k;
        if (t >= present) continue;
        int pair = order[t];
        float first = total[4 * e + k] + bias[0], other = total[4 * e + 2 + k] + bias[1];
        nv_bfloat16* cell = p.out + int64_t(pair) * p.rows + column;
        if constexpr (kGated) {
          if (inside[0]) *cell = __float2bfloat16_rn(activated(first, other, p.alpha, p.limit));
        } else {
          float factor = p.factors ? p.factors[pair] : 1.0f;
          if (inside[0]) *cell = __float2bfloat16_rn(first * factor);
          if (inside[1]) cell[8] = __float2bfloat16_rn(other * factor);
        }
      }
  }
}

template <bool kGated, int kTeams>
__global__ void __launch_bounds__(256 * kTeams + 32, 1) mxfp4_experts_kernel(__grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kGated, kTeams>;
  extern __shared__ uint8_t raw[];
  __shared__ int tiles;
  Shared shared;
  shared.ring = (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
  shared.x = shared.ring + p.stages * kStageBytes;
  shared.sums = shared.x + kPairs * p.x_bytes;
  shared.scales = (shared.sums + 2 * L::kArea + 127) & ~127u;
  shared.full = shared.scales + 2 * L::kScaleLines * p.scale_bytes;
  shared.empty = shared.full + 8 * p.stages;
  shared.scales_full = shared.empty + 8 * p.stages, shared.scales_empty = shared.scales_full + 16;
  if (threadIdx.x == 0) {
    tiles = 0;
    for (int s = 0; s < p.stages; ++s) barrier_init(shared.full + 8 * s, 1), barrier_init(shared.empty + 8 * s, 8);
    for (int s = 0; s < 2; ++s)
      barrier_init(shared.scales_full + 8 * s, 1), barrier_init(shared.scales_empty + 8 * s, L::kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  count_tiles<L::kThreads>(p.filled, p.most, &tiles);
  Work work(p, tiles);
  if (threadIdx.x / 32 == L::kWarps) {
    if (threadIdx.x % 32 == 0) load_all<kGated>(p, shared, work);
    return;
  }
  multiply_all<kGated, kTeams>(p, shared, work);
#endif
}

}  // namespace
