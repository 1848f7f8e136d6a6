// SPDX-License-Identifier: Apache-2.0
// The product of mxfp4_experts_kernel.cuh for tiles of up to 64 or 128 pairs: wgmma with the weights from registers.
//
// Two warpgroups have two products each: 64 rows of gate and the same of up, or two times 64 rows of down. The third one
// has the copy engine load weights, and gathers rows of x by cp.async, in the swizzle of the tensor cores' right operand.
// Weights of one product are unpacked in registers while the tensor cores multiply 64 columns of the other.
#pragma once

#include "mxfp4_experts_kernel.cuh"

namespace {
namespace tiles {

constexpr int kColumns = 128;   // of a stage
constexpr int kBoxBytes = 64 * kColumns / 2;  // 64 rows of weights
constexpr int kThreads = 3 * 128;  // two warpgroups that multiply, one that loads
constexpr int kLoaders = 128;
constexpr int kNeighbours = 8;  // tiles whose units follow each other for each block of rows, for L2

// Of tiles of kPairs.
template <int kPairs> struct Ring {
  static constexpr int kXBoxBytes = kPairs * 128;  // 64 columns of x
  static constexpr int kStageBytes = 4 * kBoxBytes + 2 * kXBoxBytes;
  static constexpr int kStages = kPairs == 64 ? 6 : 4;
  static constexpr int kBytes = 1024 + kStages * (kStageBytes + 16);
};

struct Params {
  CUtensorMap weight;
  int inner, rows, all_rows, pairs_a_row;  // K, columns of out, rows of the weight, pairs that share a row of x
  int most, blocks, apart;                 // tiles at most, units of a tile, bytes from one row's scales to the next's
  float alpha, limit;
  uint8_t const* scales;
  nv_bfloat16 const *x, *bias;
  float const* factors;
  int const *experts, *filled, *order;
  nv_bfloat16* out;
};

template <int kPairs>
using Product = std::conditional_t<kPairs == 64, gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>,
                                   gmma::MMA_64x128x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>>;

template <int kSums, size_t... I>
__device__ __forceinline__ void multiply(uint32_t const (&a)[4], uint64_t b, float (&sums)[kSums], bool add,
                                         std::index_sequence<I...>) {
  Product<2 * kSums>::fma(a[0], a[1], a[2], a[3], b, sums[I]..., add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}
// The compiler may neither move what touches these registers beyond here nor give them to others before.
template <typename T, int N> __device__ __forceinline__ void held(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4 && std::is_same_v<T, float>)
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
  }
}
__device__ __forceinline__ float wide(uint16_t bfloat16) { return __uint_as_float(uint32_t(bfloat16) << 16); }
__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}
__device__ __forceinline__ void copy_ahead(uint32_t to, void const* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Counts as an arrival once all that this thread copies ahead is there.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A unit: a block of rows of a tile. Those of neighbouring tiles, often of one expert, share the weights' reads from memory.
struct Unit {
  int tile, block;
  __device__ __forceinline__ Unit(int index, int tiles, int blocks) {
    int group = index / (kNeighbours * blocks), size = min(tiles - group * kNeighbours, kNeighbours);
    int within = index % (kNeighbours * blocks);
    tile = group * kNeighbours + within % size, block = within / size;
  }
};

template <bool kGated, int kPairs>
__device__ __forceinline__ void load_all(Params const& p, uint32_t ring, uint32_t full, uint32_t empty, int tiles) {
  int thread = threadIdx.x % kLoaders, turns = (p.inner + kColumns - 1) / kColumns;
  int height = p.rows * (kGated ? 2 : 1);
  using R = Ring<kPairs>;
  // Of eight lanes each has 16 bytes of a row's 64 columns, in the row's order of the swizzle.
  constexpr int kCopies = kPairs * 8 / kLoaders, kRowsApart = kLoaders / 8;
  int chunk = thread % 8, own = thread / 8;
  uint32_t to = own * 128 + ((chunk ^ (own & 7)) << 4);  // rows of a thread are 16 apart: the same part of the swizzle
  Place place;
  for (int index = blockIdx.x; index < tiles * p.blocks; index += gridDim.x) {
    Unit unit(index, tiles, p.blocks);
    int present = p.filled[unit.tile], first = p.experts[unit.tile] * height;
    int row[4] = {first + unit.block * 128, first + p.rows + unit.block * 128, first + unit.block * 128 + 64,
                  first + p.rows + unit.block * 128 + 64};
    if constexpr (!kGated)
      for (int i = 0; i < 4; ++i) row[i] = first + unit.block * 256 + 64 * i;
    int from[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i)  // all at once, so that none waits for another
      from[i] = p.order[unit.tile * kPairs + min(kRowsApart * i + own, present - 1)];
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      from[i] = kRowsApart * i + own < present ? from[i] / p.pairs_a_row * p.inner + 8 * chunk : -1;
    for (int turn = 0; turn < turns; ++turn) {
      uint32_t stage = ring + place.slot * R::kStageBytes, ready = full + 8 * place.slot;
      barrier_wait(empty + 8 * place.slot, place.phase ^ 1);
      if (thread == 0) {
        barrier_expect(ready, 4 * kBoxBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) load(stage + i * kBoxBytes, &p.weight, ready, turn * kColumns / 2, row[i]);
      }
      uint32_t x = stage + 4 * kBoxBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int column = turn * kColumns + 64 * half;
        bool there = column + 8 * chunk < p.inner;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          if (from[i] >= 0)
            copy_ahead(x + half * R::kXBoxBytes + i * kRowsApart * 128 + to, p.x + from[i] + (there ? column : 0), there);
      }
      arrive_with_copies(ready);
      place.advance(1, R::kStages);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <bool kGated, int kPairs>
__device__ __forceinline__ void multiply_all(Params const& p, uint32_t ring, uint32_t full, uint32_t empty, int tiles) {
  using R = Ring<kPairs>;
  int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, q = lane % 4;
  int line = 16 * warp + lane / 4;  // of 64, and the one 8 behind it
  int turns = (p.inner + kColumns - 1) / kColumns, height = p.rows * (kGated ? 2 : 1);
  // A row of a box is 64 bytes, 16 words of 8 numbers; the swizzle moves its four parts by bits 1 and 2 of the row.
  uint32_t own = ring + group * 2 * kBoxBytes + line * 64 + q * 4, swizzle = (line >> 1 & 3) * 16;
  Place place, before;
  bool pending = false;  // the stage at `before` has not been given back
  float sums[2][kPairs / 2];
  uint32_t a[2][4][4];  // of 64 columns: products, 16 columns each, registers
  auto release = [&] {
    if (pending && lane == 0) barrier_arrive(empty + 8 * before.slot);
    pending = false;
  };
  for (int index = blockIdx.x; index < tiles * p.blocks; index += gridDim.x) {
    Unit unit(index, tiles, p.blocks);
    int present = p.filled[unit.tile], first = p.experts[unit.tile] * height;
    int const* order = p.order + unit.tile * kPairs;
    int column = unit.block * (kGated ? 128 : 256) + group * (kGated ? 64 : 128) + line;
    int other = kGated ? p.rows : 64;  // from the first product's rows to the second's
    uint8_t const* scales[4];
    uint32_t next[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = first + column + i / 2 * other + i % 2 * 8;
      scales[i] = p.scales + int64_t(min(row, p.all_rows - 1)) * p.apart;
      next[i] = *reinterpret_cast<uint32_t const*>(scales[i]);
    }
    for (int turn = 0; turn < turns; ++turn) {
      barrier_wait(full + 8 * place.slot, place.phase);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      uint32_t exponents[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // behind the fence, which may wait for loads
        exponents[i] = next[i];
        next[i] = *reinterpret_cast<uint32_t const*>(scales[i] + 4 * min(turn + 1, turns - 1));
      }
      uint32_t stage = own + place.slot * R::kStageBytes;
      uint32_t x = ring + place.slot * R::kStageBytes + 4 * kBoxBytes;
      uint32_t words[2][2][2][2];  // times 64 columns, products, rows, halves
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        int part = i / 8, product = i / 4 % 2, row = i / 2 % 2, half = i % 2;
        words[part][product][row][half] =
            load_shared_word(stage + product * kBoxBytes + row * 512 + (((part * 2 + half) * 16) ^ swizzle));
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        int part = step / 2, product = step % 2;
        // What was multiplied with these registers two steps before has ended.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 4; ++s) held(a[product][s]);
        if (step == 1) release();
        uint32_t powers[2][2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          powers[row][0] = power(exponents[2 * product + row], 0x4040 + part * 0x0202);
          powers[row][1] = power(exponents[2 * product + row], 0x4141 + part * 0x0202);
        }
        uint32_t const(&own_words)[2][2] = words[part][product];
        auto unpack = [&](auto column, int s) {
          constexpr int kColumn = decltype(column)::value;
          a[product][s][0] = number<kColumn>(own_words[0][0], powers[0][kColumn / 2]);
          a[product][s][1] = number<kColumn>(own_words[1][0], powers[1][kColumn / 2]);
          a[product][s][2] = number<kColumn>(own_words[0][1], powers[0][kColumn / 2]);
          a[product][s][3] = number<kColumn>(own_words[1][1], powers[1][kColumn / 2]);
        };
        unpack(std::integral_constant<int, 0>(), 0), unpack(std::integral_constant<int, 1>(), 1);
        unpack(std::integral_constant<int, 2>(), 2), unpack(std::integral_constant<int, 3>(), 3);
        uint64_t b = operand(x + part * R::kXBoxBytes);
        held(sums[product]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 4; ++s)  // 16 columns of x take 32 bytes; addresses count 16
          multiply(a[product][s], b + 2 * s, sums[product], turn + part + s > 0, std::make_index_sequence<kPairs / 2>());
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
      before = place, pending = true;
      place.advance(1, R::kStages);
    }
    uint16_t bias[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = first + column + i / 2 * other + i % 2 * 8;
      bool inside = column + (kGated ? 0 : i / 2 * 64) + i % 2 * 8 < p.rows;
      if (p.bias && inside) bias[i] = reinterpret_cast<uint16_t const*>(p.bias)[row];
    }
    // A thread has of each 8 pairs two, and of each product two rows. Of 64 pairs it looks all up at once.
#pragma unroll
    for (int half = 0; half < kPairs / 64; ++half) {
      int pairs[16];
      float factors[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = order[min(64 * half + 8 * (i / 2) + 2 * q + i % 2, present - 1)];
#pragma unroll
      for (int i = 0; i < 16; ++i) factors[i] = kGated || !p.factors ? 1.0f : p.factors[pairs[i]];
      if (half == 0) {  // the last products were computed meanwhile
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        held(sums[0]), held(sums[1]);
        release();
      }
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          int t = 64 * half + 8 * j + 2 * q + k, at = 32 * half + 4 * j + k;
          if (t >= present) continue;
          nv_bfloat16* cell = p.out + int64_t(pairs[2 * j + k]) * p.rows + column;
          float factor = factors[2 * j + k];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float v[2] = {sums[0][at + 2 * row] + wide(bias[row]), sums[1][at + 2 * row] + wide(bias[2 + row])};
            if constexpr (kGated) {
              if (column + 8 * row < p.rows) cell[8 * row] = __float2bfloat16_rn(activated(v[0], v[1], p.alpha, p.limit));
            } else {
              if (column + 8 * row < p.rows) cell[8 * row] = __float2bfloat16_rn(v[0] * factor);
              if (column + 64 + 8 * row < p.rows) cell[64 + 8 * row] = __float2bfloat16_rn(v[1] * factor);
            }
          }
        }
    }
  }
}

template <bool kGated, int kPairs> __global__ void __launch_bounds__(kThreads, 1) kernel(__grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kPairs>;
  extern __shared__ uint8_t raw[];
  __shared__ int tiles;
  uint32_t ring = (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
  uint32_t full = ring + R::kStages * R::kStageBytes, empty = full + 8 * R::kStages;
  if (threadIdx.x == 0) {
    tiles = 0;
    for (int s = 0; s < R::kStages; ++s) barrier_init(full + 8 * s, 1 + kLoaders), barrier_init(empty + 8 * s, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  count_tiles<kThreads>(p.filled, p.most, &tiles);
  if (threadIdx.x / 128 == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    load_all<kGated, kPairs>(p, ring, full, empty, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_all<kGated, kPairs>(p, ring, full, empty, tiles);
  }
#endif
}

}  // namespace tiles
}  // namespace
