// SPDX-License-Identifier: Apache-2.0
// out[T, N] = x @ weight^T on Hopper for few tokens, with weights of 4 bits as ops/int4.py packs them.
//
// The weights are the left operand of mma.sync, in registers; tokens are the right one. A sum does not depend on the
// order of its columns, so lane (g, c) of a warp, g = lane / 4, takes the words 8 c to 8 c + 7 of a block of 128 columns,
// and of x the columns 32 i + 8 c to 32 i + 8 c + 7 for nibble i: what a lane copies is what it multiplies, and nothing
// moves between lanes. The order of rows is free as well: lane group g has 2 * kTiles neighbouring ones, two of each
// tile of 16. An element begins as 128 + q in bfloat16, or 1024 + q in float16, from which that and its zero point are
// subtracted at once, exactly. Scales multiply the float32 sum of a group.
//
// Warps that share rows share the inner dimension block by block; those that share blocks (a team) share the copies of x
// in a ring of stages. Blocks of a cluster also share the inner dimension. All sums meet in shared memory, in an order
// that does not depend on timing.
//
// -DINT4_LINEAR_TYPE names the type of x, scales and out, -DINT4_LINEAR_PARTS says how many groups of columns a block has
// (1 also where groups are larger), -DINT4_LINEAR_ZERO whether there are zero points.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace {

using Element = INT4_LINEAR_TYPE;
constexpr bool kHalf = std::is_same_v<Element, nv_half>;
constexpr int kParts = INT4_LINEAR_PARTS;
constexpr bool kZero = INT4_LINEAR_ZERO;
static_assert(kParts == 1 || kParts == 2 || kParts == 4);

constexpr int kMostWarps = 8, kMostStages = 5;
constexpr int kFetched = 5;                          // stages of a team whose weights are fetched at the start
constexpr int kPad = 2;                              // floats between the sums of two tokens, for the banks
constexpr uint32_t kBase = kHalf ? 0x6400 : 0x4300;  // 1024 or 128, whose lowest bits of mantissa count ones
constexpr uint32_t kMiddle = 8;                      // the zero point where none is stored

struct Params {
  uint8_t const* weight;  // [N, K / 2] bytes; N = 2 * rows if gated
  Element const* scale;   // [groups, N]
  uint8_t const* zero;    // [groups, N], or null
  Element const *x, *bias, *residual;  // [T, K]; [rows] and [T, rows], or null
  Element* out;                        // [T, rows]
  int tokens, rows, blocks;            // T, of out, K / 128
  int groups_per_block;                // kParts, or 0 where a group is a whole row
  int split, stages;                   // blocks of a cluster; 2 to kMostStages
};

// Sizes in bytes. kTiles: tiles of 16 rows that a warp has; kRowWarps: warps of a team.
template <int kTokens, int kTiles, int kRowWarps> struct Layout {
  static constexpr int kRows = 16 * kTiles * kRowWarps;
  static constexpr int kWords = 1024 * kTiles;                     // of a warp's rows in a block of columns
  static constexpr int kGroup = (kZero ? 48 : 32) * kTiles;        // scales and zero points of one group
  static constexpr int kWarp = kWords + kParts * kGroup, kX = 256 * kTokens;
  static constexpr int kStage = kRowWarps * kWarp + kX;            // of a team
  static constexpr int kPitch = kRows + kPad, kSums = kTokens * kPitch;  // floats
  static constexpr int bytes(int teams, int stages) {
    return teams * (stages * kStage > 4 * kSums ? stages * kStage : 4 * kSums);
  }
};

// Instructions.
__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void copy16(uint32_t to, void const* from, bool wanted = true) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(to), "l"(from), "r"(int(wanted))
      : "memory");
}
__device__ __forceinline__ void fetch_to_l2(void const* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most this number of groups of the thread's copies is pending.
__device__ __forceinline__ void wait_copies(int pending) {
  switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory");  // kMostStages - 2
  }
}
__device__ __forceinline__ uint4 load16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
// Two floats at an address of shared memory, in block `rank` of the cluster.
__device__ __forceinline__ float2 load_peer(uint32_t from, int rank) {
  float2 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [there];\n}"
      : "=f"(v.x), "=f"(v.y) : "r"(from), "r"(rank) : "memory");
  return v;
}
__device__ __forceinline__ void store_sums(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// As cluster_sync where no writes must be seen: without its fence of the whole device.
__device__ __forceinline__ void cluster_leave() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
template <int kWarps> __device__ __forceinline__ void team_sync(int team) {
  if constexpr (kWarps == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * kWarps) : "memory");
}
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// sums[16 rows, 8 tokens] += a[16 rows, 16 columns] * b[16 columns, 8 tokens]
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The nibbles at bit `shift` of both halves of `words`, as numbers, less `less`: q - zero.
__device__ __forceinline__ uint32_t numbers(uint32_t words, int shift, uint32_t less) {
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(v) : "r"(words >> shift), "n"(kBase << 16 | kBase));  // (a & b) | c
  if constexpr (kHalf)
    asm("sub.f16x2 %0, %0, %1;" : "+r"(v) : "r"(less));
  else
    asm("sub.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(less));
  return v;
}
__device__ __forceinline__ float2 floats(uint32_t pair) {
  if constexpr (kHalf)
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}
__device__ __forceinline__ uint32_t pair(float a, float b) {
  if constexpr (kHalf) {
    auto v = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&v);
  } else {
    auto v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&v);
  }
}
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
// End of the instructions.

// A lane's part of the copies of one block of columns: the words of its rows, scales and zero points, x.
template <int kTokens, int kTiles, int kRowWarps, bool kGated> struct Copies {
  using L = Layout<kTokens, kTiles, kRowWarps>;
  static constexpr int kHalfRows = kGated ? 8 * kTiles : 16 * kTiles;  // rows of a warp beside each other
  static constexpr int kOwn = kHalfRows / 8;                           // a lane's of them
  static_assert(4 % kRowWarps == 0);

  uint8_t const *words, *other_words, *group;  // other: the rows of up
  int row_bytes;
  int64_t group_bytes;
  Element const* x;  // the lane's first piece in the first block of columns
  int64_t x_octet;   // elements between token t and token t + 8
  int tokens;        // of the tile, less the lane's first one
  int row_warp, lane;

  // row: the tile's first one; token: likewise.
  __device__ __forceinline__ Copies(Params const& p, int row, int token, int row_warp, int lane)
      : row_bytes(p.blocks * 64), x_octet(int64_t(8) * p.blocks * 128), row_warp(row_warp), lane(lane) {
    int g = lane / 4, c = lane % 4, first = row + row_warp * kHalfRows;
    words = p.weight + int64_t(first + g * kOwn) * row_bytes + c * 16;
    other_words = words + int64_t(p.rows) * row_bytes;
    // 16 bytes each: lane l takes scales of the warp's rows 8 l on; behind them, zero points of 16 rows.
    bool is_zero = lane >= 2 * kTiles;
    int piece = is_zero ? 16 * (lane - 2 * kTiles) : 8 * lane, columns = kGated ? 2 * p.rows : p.rows;
    int column = first + piece % kHalfRows + (piece >= kHalfRows ? p.rows : 0);
    group = is_zero ? p.zero + column : reinterpret_cast<uint8_t const*>(p.scale + column);
    group_bytes = int64_t(columns) * (is_zero ? 1 : sizeof(Element));
    x = p.x + int64_t(token + g) * p.blocks * 128 + row_warp * 32 + c * 8;
    tokens = p.tokens - token - g;
  }

  // Of the lane's row j.
  __device__ __forceinline__ uint8_t const* words_at(int j, int block) const {
    return (j < kOwn ? words : other_words) + (j % kOwn) * row_bytes + block * 64;
  }

  __device__ __forceinline__ void fetch_weights(int block) const {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) fetch_to_l2(words_at(j, block));
  }

  // to: the warp's place in a stage.
  __device__ __forceinline__ void weights(Params const& p, uint32_t to, int block) const {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) copy16(to + j * 512 + lane * 16, words_at(j, block));
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      copy16(to + L::kWords + part * L::kGroup + lane * 16, group + (block * p.groups_per_block + part) * group_bytes,
             lane < (kZero ? 3 : 2) * kTiles);
  }

  // to: the team's place for x in a stage. Warps take turns at its pieces, of eight tokens and a quarter of the columns.
  // Tokens that are not there keep what lies there: a product's column for one token has no part in another's.
  __device__ __forceinline__ void inputs(uint32_t to, int block) const {
#pragma unroll
    for (int piece = 0; piece < kTokens / 2; piece += kRowWarps) {
      int octet = piece / 4, quarter = piece % 4;  // beyond the lane's first
      copy16(to + (piece + row_warp) * 512 + lane * 16, x + octet * x_octet + block * 128 + quarter * 32,
             octet * 8 < tokens);
    }
  }
};

template <int kTokens, int kTiles, int kRowWarps, bool kGated>
__global__ void __launch_bounds__(32 * kMostWarps) int4_linear_kernel(__grid_constant__ Params const p) {
  using L = Layout<kTokens, kTiles, kRowWarps>;
  using C = Copies<kTokens, kTiles, kRowWarps, kGated>;
  static_assert(kTiles % 2 == 0);
  constexpr int kOctets = kTokens / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t memory = shared_address(shared);
  int lane = threadIdx.x % 32, warp = warp_index(), g = lane / 4, c = lane % 4;
  int row_warp = warp % kRowWarps, team = warp / kRowWarps, teams = blockDim.x / (32 * kRowWarps);
  int rank = blockIdx.x % p.split, row = blockIdx.x / p.split * (kGated ? L::kRows / 2 : L::kRows);
  int token = blockIdx.y * kTokens;
  int first = p.blocks * rank / p.split + team, end = p.blocks * (rank + 1) / p.split;
  int steps = first < end ? (end - first - 1) / teams + 1 : 0;
  uint32_t ring = memory + team * p.stages * L::kStage;
  C const copies(p, row, token, row_warp, lane);

  let_next_kernel_start();
  // Weights do not depend on the previous kernel: the first are on their way before it ends. Of later stages only to
  // the L2 cache: copies count as done in order, and the first stage's x would have to wait for them.
  if (steps > 0) copies.weights(p, ring + row_warp * L::kWarp, first);
  for (int s = 1; s < min(kFetched, steps); ++s) copies.fetch_weights(first + s * teams);
  wait_for_previous_kernel();
  for (int s = 0; s < p.stages - 1; ++s) {
    uint32_t stage = ring + s * L::kStage;
    if (s > 0 && s < steps) copies.weights(p, stage + row_warp * L::kWarp, first + s * teams);
    if (s < steps) copies.inputs(stage + kRowWarps * L::kWarp, first + s * teams);
    commit_copies();
  }

  float sums[kTiles][kOctets][4] = {};
  int slot = 0, ahead_slot = p.stages - 1;
  for (int step = 0; step < steps; ++step) {
    wait_copies(p.stages - 2);
    team_sync<kRowWarps>(team);  // the copies of others are there, and all have read the slot that is filled next
    if (int ahead = step + p.stages - 1; ahead < steps) {
      uint32_t stage = ring + ahead_slot * L::kStage;
      copies.weights(p, stage + row_warp * L::kWarp, first + ahead * teams);
      copies.inputs(stage + kRowWarps * L::kWarp, first + ahead * teams);
    }
    commit_copies();
    uint32_t stage = ring + slot * L::kStage, own = stage + row_warp * L::kWarp;
    uint32_t x = stage + kRowWarps * L::kWarp + lane * 16;
    uint4 words[2 * kTiles];  // of the lane's row j
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) words[j] = load16(own + j * 512 + lane * 16);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t group = own + L::kWords + part * L::kGroup;
      uint32_t less[2 * kTiles];
#pragma unroll
      for (int j = 0; j < 2 * kTiles; j += 2) {
        less[j] = less[j + 1] = (kBase + kMiddle) * 0x10001;
        if constexpr (kZero) {
          uint32_t zeros = load2(group + 32 * kTiles + j / C::kOwn * C::kHalfRows + g * C::kOwn + j % C::kOwn);
          less[j] = __byte_perm(zeros, kBase >> 8, 0x4040), less[j + 1] = __byte_perm(zeros, kBase >> 8, 0x4141);
        }
      }
      float products[kTiles][kOctets][4] = {};
#pragma unroll
      for (int quarter = part * 4 / kParts; quarter < (part + 1) * 4 / kParts; ++quarter) {
        uint32_t a[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint4 const &upper = words[2 * m], &lower = words[2 * m + 1];
          uint32_t const u[4] = {upper.x, upper.y, upper.z, upper.w}, l[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            a[m][half][0] = numbers(u[2 * half], 4 * quarter, less[2 * m]);
            a[m][half][1] = numbers(l[2 * half], 4 * quarter, less[2 * m + 1]);
            a[m][half][2] = numbers(u[2 * half + 1], 4 * quarter, less[2 * m]);
            a[m][half][3] = numbers(l[2 * half + 1], 4 * quarter, less[2 * m + 1]);
          }
        }
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
          uint4 b = load16(x + (octet * 4 + quarter) * 512);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) multiply(products[m][octet], a[m][0], b.x, b.y);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) multiply(products[m][octet], a[m][1], b.z, b.w);
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        int j = 2 * m;
        float2 scale = floats(load4(group + 2 * (j / C::kOwn * C::kHalfRows + g * C::kOwn + j % C::kOwn)));
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][octet][i] += products[m][octet][i] * (i < 2 ? scale.x : scale.y);
      }
    }
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
  }

  // Sums of all teams, [token, row], where the stages were.
  wait_copies(0);
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    int j = 2 * m, place = row_warp * 16 * kTiles + j / C::kOwn * C::kHalfRows + g * C::kOwn + j % C::kOwn;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      uint32_t to = memory + 4 * (team * L::kSums + (octet * 8 + 2 * c) * L::kPitch + place);
      store_sums(to, sums[m][octet][0], sums[m][octet][2]);
      store_sums(to + 4 * L::kPitch, sums[m][octet][1], sums[m][octet][3]);
    }
  }
  if (p.split > 1)
    cluster_sync();
  else
    __syncthreads();
  auto total = [&](int place) {
    float2 sum = {0, 0};
    for (int r = 0; r < p.split; ++r)
      for (int t = 0; t < teams; ++t) {
        float2 v = load_peer(memory + 4 * (t * L::kSums + place), r);
        sum.x += v.x, sum.y += v.y;
      }
    return sum;
  };
  constexpr int kPairs = (kGated ? L::kRows / 2 : L::kRows) / 2;
  int count = min(kTokens, p.tokens - token) * kPairs;
  for (int i = rank * blockDim.x + threadIdx.x; i < count; i += p.split * blockDim.x) {
    int t = i / kPairs, n = i % kPairs * 2;
    int place = t * L::kPitch + (kGated ? n / C::kHalfRows * 16 * kTiles + n % C::kHalfRows : n);
    float2 v = total(place);
    if constexpr (kGated) {
      float2 up = total(place + C::kHalfRows);
      v = {silu(v.x) * up.x, silu(v.y) * up.y};
    }
    int64_t cell = int64_t(token + t) * p.rows + row + n;
    if (p.residual) {
      float2 more = floats(*reinterpret_cast<uint32_t const*>(p.residual + cell));
      v.x += more.x, v.y += more.y;
    }
    if (p.bias) {
      float2 more = floats(*reinterpret_cast<uint32_t const*>(p.bias + row + n));
      v.x += more.x, v.y += more.y;
    }
    *reinterpret_cast<uint32_t*>(p.out + cell) = pair(v.x, v.y);
  }
  if (p.split > 1) cluster_leave();  // no block ends while others read its sums
}

}  // namespace
